"""Documents of a prompt: texts that are tokenized on their own, so that their tokens are the same in every prompt.

Plain values, safe to send between processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NotRequired, cast, get_args

from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from mneme.errors import InvalidRequest

MAX_DOCUMENTS = 1024  # of one request
BESIDE = -1  # the group of documents that are given beside the messages
MIN_TOKENS_LIMIT = 2**31 - 1

Mode = Literal["auto", "off", "selective", "full_reuse"]
Selector = Literal["hkvd", "query", "query+first-k", "first-k", "random", "none", "all"]
Order = Literal["given", "any"]
# Why documents of a request were not reused in place: the labels of a metric.
Reason = Literal[
    "off",
    "not_allowed",
    "sooner_in_full",
    "asked_again",
    "first_asked",
    "sliding_window",
    "learned_positions",
    "not_shared",
    "too_short",
    "too_long",
    "no_room",
    "exact",
    "evicted",
    "truncated",
    "history",
]

SELECTORS: tuple[Selector, ...] = get_args(Selector)
_RULE = 'must be a text that is not empty, or {"text" or "contents": ..., "title"?: ..., "id"?: ...}'


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendOptions:
    """Holds what a request says about the KV of its documents.

    mode        "off": every token's KV is exact. "selective": that of documents is reused wherever they stand, but for
                some tokens; "full_reuse": for none. "auto": "selective" where the model's quality report allows it,
                else "off"
    selector    which tokens are recomputed; None: the engine chooses
    ratio       their share, from 0 to 1; None: the engine chooses
    min_tokens  shorter documents are computed as any text
    order       "any": documents of one message may change places, so that more of them are found as an exact prefix;
                None: those that are given beside the messages may, unless the mode is "off"

    Raises `InvalidRequest` with the option, the value and the rule.
    """

    mode: Mode = "auto"
    selector: Selector | None = None
    ratio: float | None = None
    min_tokens: int = 64
    order: Order | None = None

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("order", Order), ("selector", Selector)):
            value = getattr(self, name)
            if value not in get_args(kind) and not (name in ("order", "selector") and value is None):
                raise InvalidRequest(name, value, f"must be one of {', '.join(get_args(kind))}")
        is_number = isinstance(self.ratio, int | float) and not isinstance(self.ratio, bool)
        if self.ratio is not None and not (is_number and 0 <= self.ratio <= 1):  # NaN fails every comparison
            raise InvalidRequest("ratio", self.ratio, "must be a number from 0 to 1")
        if type(self.min_tokens) is not int or not 0 <= self.min_tokens <= MIN_TOKENS_LIMIT:
            raise InvalidRequest("min_tokens", self.min_tokens, f"must be an integer from 0 to {MIN_TOKENS_LIMIT}")

    def is_long(self, span: DocumentSpan) -> bool:
        """Return whether a document is long enough to be reused in place."""
        return span.end - span.start >= max(self.min_tokens, 1)

    def may_move(self, span: DocumentSpan) -> bool:
        """Return whether a document may change places with others of its group."""
        return self.order == "any" or (self.order is None and self.mode != "off" and span.group == BESIDE)

    def updated(self, given: Mapping[str, Any]) -> BlendOptions:
        """Replace the options that a request gives; raises `InvalidRequest` for names that are none, too."""
        if not isinstance(given, Mapping):
            raise InvalidRequest("blend", given, "must be a mapping of options")
        for name in given:
            if name not in BlendOptions.__dataclass_fields__:
                raise InvalidRequest(f"blend.{name}", given[name], "is not an option of blending")
        try:
            return replace(self, **given)
        except InvalidRequest as error:
            raise InvalidRequest(f"blend.{error.field}", error.value, error.rule) from None


class Document(NamedTuple):
    """A text that is tokenized on its own."""

    text: str  # its title is its first line
    name: str  # what usage and explanations call it
    group: int = 0  # documents of one group may change places

    @staticmethod
    def of(given: object, where: str, *, index: int, group: int = 0) -> Document:
        """Make a document of a text or a mapping; raises `InvalidRequest` that names it by `where`.

        index  in its request: the name of one that has no id
        """
        fields = {"text": given} if isinstance(given, str) else given
        if not isinstance(fields, Mapping):
            raise InvalidRequest(where, given, _RULE)
        text, contents, title, name = (fields.get(key) for key in ("text", "contents", "title", "id"))
        text = contents if text is None else text
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{where}.text" if fields is given else where, text, _RULE)
        for key, value in (("title", title), ("id", name)):
            if not isinstance(value, str | None):
                raise InvalidRequest(f"{where}.{key}", value, "must be a string")
        if index >= MAX_DOCUMENTS:
            raise InvalidRequest("documents", index + 1, f"a request has at most {MAX_DOCUMENTS} documents")
        return Document(f"{title}\n{text}" if title else text, name or f"document-{index}", group)


class DocumentSpan(NamedTuple):
    """Says where a document stands in a prompt: tokens [start, end), characters [char_start, char_end)."""

    start: int
    end: int
    name: str
    char_start: int
    char_end: int
    group: int = 0


class Declined(NamedTuple):
    """Says why no document of a request was reused in place."""

    reason: Reason  # a label of metrics
    why: str


OFF = Declined("off", "blend.mode is off")
FIRST_ASKED = Declined(
    "first_asked", "asked for the first time: computed with the text around it, and by itself behind the answer"
)
ASKED_AGAIN = Declined("asked_again", "asked for again behind the same text: computed exactly, to be found from now on")
SLIDING_WINDOW = Declined("sliding_window", "the model has sliding windows")
LEARNED_POSITIONS = Declined("learned_positions", "the model has learned positions")
NOT_SHARED = Declined("not_shared", "engine.prefix_sharing is false")
TOO_SHORT = Declined("too_short", "shorter than blend.min_tokens")
TOO_LONG = Declined("too_long", "longer than the model's context or the page pool allows")
NO_ROOM = Declined("no_room", "there were too few pages")
EXACT = Declined("exact", "part of the exact prefix")
ALL_ANEW = Declined("exact", "all of its tokens are to be computed anew")
EVICTED = Declined("evicted", "its KV was evicted meanwhile")
TRUNCATED = Declined("truncated", "the prompt was truncated")
HISTORY = Declined("history", "part of the session's history")


class DocumentUsage(NamedTuple):
    """Holds what one document of a prompt cost."""

    id: str
    start: int
    tokens: int
    exact: int  # of them, those whose KV was found: as a part of an exact prefix
    reused: int  # and those whose KV was computed behind other text
    source: str  # of most of its KV: a tier, or "computed"
    outcome: Literal["exact", "blended", "computed"]
    why: str


class ShownDocument(TypedDict):
    """A document's place in the prompt, in tokens.

    Of them `exact` were found as a part of an exact prefix, and for `reused` ones KV stands that was computed behind
    other text; `source` is the tier that most of its KV came from, or "computed".
    """

    id: str
    start: int
    tokens: int
    exact: int
    reused: int
    source: Literal["device", "host", "disk", "peer", "computed"]
    outcome: Literal["exact", "blended", "computed"]
    why: str


class ShownBlend(TypedDict):
    """Says how the KV of the prompt's documents was used, and why so; as they stand in the prompt.

    Where some was reused behind other text: by which selector and ratio, whether their quality was measured on this
    model, and document tokens that were reused and that the selector chose to recompute: the mean over the
    layers behind the first.
    """

    mode: Literal["off", "selective", "full_reuse"]
    why: str
    selector: NotRequired[str]
    ratio: NotRequired[float]
    measured: NotRequired[bool]
    reused: NotRequired[int]
    recomputed: NotRequired[int]
    recomputed_share: NotRequired[float]
    history: NotRequired[Literal["approximate"]]  # earlier turns of the session reuse documents behind other text
    documents: list[ShownDocument]


class BlendUsage(NamedTuple):
    """Says how the documents of a prompt were used."""

    mode: Mode  # "off": the KV of every token that this turn brings is exact
    why: str
    order: tuple[int, ...]  # of the documents as they were given, as they stand in the prompt
    documents: tuple[DocumentUsage, ...]  # as they stand; without those of a session's earlier turns
    selector: Selector | None = None
    ratio: float | None = None
    # Of the documents' tokens, in the mean over the layers behind the first, in which all are exact:
    reused: int = 0  # those whose KV was computed behind other text
    recomputed: int = 0  # those that the selector chose
    is_measured: bool = False  # the model's quality report allows it
    declined: Reason | None = None  # why the mode is "off"
    is_history_approximate: bool = False  # earlier turns of the session reuse documents behind other text

    def token_counts(self) -> dict[str, int]:
        """Count tokens of documents: reused behind other text, found as exact KV, and the rest, which were computed."""
        exact = sum(each.exact for each in self.documents)
        num_tokens = sum(each.tokens for each in self.documents)
        return {"reused": self.reused, "exact": exact, "recomputed": num_tokens - self.reused - exact}

    def as_json(self) -> ShownBlend:
        """Return what `usage.kv_details.blend` says."""
        told: dict[str, Any] = {"mode": self.mode, "why": self.why}
        if self.selector is not None:
            told |= {"selector": self.selector, "ratio": self.ratio, "measured": self.is_measured}
            told |= {"reused": self.reused, "recomputed": self.recomputed}
            told["recomputed_share"] = round(self.recomputed / max(self.reused + self.recomputed, 1), 4)
        if self.is_history_approximate:
            told["history"] = "approximate"
        return cast(ShownBlend, told | {"documents": [each._asdict() for each in self.documents]})


def check_spans(spans: Sequence[DocumentSpan], num_ids: int) -> None:
    """Raise `InvalidRequest` unless the spans lie in the prompt, in order, apart, none empty."""
    end = 0
    for span in spans:
        if not end <= span.start < span.end <= num_ids:
            raise InvalidRequest("documents", span.name, f"[{span.start}, {span.end}) must be behind {end}")
        end = span.end


def shifted(spans: Sequence[DocumentSpan], by: int) -> tuple[DocumentSpan, ...]:
    """Return the spans `by` tokens further behind."""
    return tuple(span._replace(start=span.start + by, end=span.end + by) for span in spans)
