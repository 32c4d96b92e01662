"""What a caller asks of an engine, and what the engine answers: plain values, safe to send between processes.

    Grammar             what an answer must match
    SamplingParams      how to choose tokens; validated here, once, for every entrance
    Weighing            those of its numbers for which a model may have values of its own
    GenerationRequest   one choice of one request: ids in, ids out
    TokenEvent          what one engine step did for one GenerationRequest
    StepMessage         one message of the token stream: all events of one step for one subscriber, or a report

Torch-free and Ray-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from mneme.errors import InvalidRequest, MnemeError
from mneme.primitives import place_of_rounded
from mneme.replicas.documents import BlendOptions, BlendUsage, DocumentSpan
from mneme.replicas.report import ReplicaReport
from mneme.replicas.truncation import Truncation

SessionKey = tuple[str, str]  # (tenant salt, session id)
Pooling = Literal["mean", "last"]  # of the last layer's hidden states, behind its norm

WARM_UP_SALT = "warm-up"  # no tenant's: see `tenancy.kv_salt`

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
MAX_CHOICES = 128  # OpenAI's
MAX_STOPS = 16  # more than OpenAI's 4: clients of vLLM send such
MAX_STOP_BYTES = 256
MAX_ALL_STOP_BYTES = 1024  # of all together: each token of the text is compared with all of them
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_ALLOWED_TOKEN_IDS = 2**18  # a vocabulary
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_GRAMMAR_BYTES = 128 << 10
MAX_GRAMMAR_CHOICES = 1024

_SUFFIX = re.compile(r"(-\d+)?(~\d+)?\.\d+")  # prompt, attempt and choice of one HTTP request

GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Says what an answer must match, to its last character.

    kind   "grammar" is in Lark's notation, as llguidance has it
    text   JSON schema, regex or grammar; a JSON list of choices. A schema may be given as a mapping, choices as a list.
    field  what the client calls it, for messages
    after  a token: the answer is free until this is drawn, and matches behind it; None: it matches from its beginning

    Raises `InvalidRequest`. Whether it can be compiled is seen where there is a tokenizer.
    """

    kind: GrammarKind
    text: Any = ""
    field: str = field(default="grammar", compare=False)
    after: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidRequest(self.field, self.kind, f"must be one of {', '.join(get_args(GrammarKind))}")
        text = '{"type": "object"}' if self.kind == "json_object" else self.text
        if self.kind == "choice":
            text = self._checked_choices()
        elif self.kind == "json_schema" and isinstance(text, Mapping):
            text = self._as_json(text)
        if not isinstance(text, str):
            raise InvalidRequest(self.field, type(text).__name__, "must be text")
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(self.field, f"{size} bytes", f"may have {MAX_GRAMMAR_BYTES} bytes")
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidRequest(self.field, None, "must be valid Unicode: it has a lone surrogate")
        object.__setattr__(self, "text", text)

    def _checked_choices(self) -> str:
        try:
            choices = json.loads(self.text) if isinstance(self.text, str) else self.text
        except ValueError:
            choices = None
        if not isinstance(choices, list | tuple) or not all(isinstance(each, str) for each in choices):
            raise InvalidRequest(self.field, None, "must be a list of strings")
        if not 1 <= len(choices) <= MAX_GRAMMAR_CHOICES:
            raise InvalidRequest(self.field, len(choices), f"has from 1 to {MAX_GRAMMAR_CHOICES} choices")
        return self._as_json(list(choices))

    def _as_json(self, value: object) -> str:
        try:
            text, rounded = json.dumps(value, ensure_ascii=False, allow_nan=False), place_of_rounded(value)
        except (TypeError, ValueError, RecursionError):
            raise InvalidRequest(self.field, None, "must be JSON") from None
        if rounded is not None:
            raise InvalidRequest(self.field, None, f"{rounded} has more digits than a 64-bit float holds")
        return text


SamplingDefaults = Mapping[str, Any]  # a model's own values, by the names of `SamplingParams`: `card.sampling_defaults`


class Weighing(NamedTuple):
    """Says which tokens may be drawn, and how often; `SamplingParams` says what each is."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Says how output tokens are chosen; the names and meanings of OpenAI's and vLLM's APIs.

    n                   choices per prompt
    max_tokens          output tokens at most, 16 as in vLLM; None: the model's, else what the context window leaves
    min_tokens          output tokens before a stop string or an end token ends the answer
    temperature         0 is greedy; None, here and in the next four: the model's own, else as `Weighing` has it
    top_p               of the most likely tokens, those that have this probability together
    top_k               of the most likely tokens, so many; 0: all
    min_p               tokens that have at least this share of the most likely one's probability
    repetition_penalty  divides the logits of tokens that have occurred; 1: none
    presence_penalty    subtracted from the logits of tokens in the output
    frequency_penalty   subtracted from them, for each time
    weighing            those five with none left out; it is not given
    seed                None: one is drawn for each request
    logit_bias          added to the logits, by token id
    allowed_token_ids   all that may be drawn, end tokens too; None: all; not with a grammar
    bad_words           the output has none of these words, nor with a blank before; kept as a tuple
    stop                a string, or several: the text ends before the first that occurs; kept as a tuple
    stop_token_ids      end the answer, as the model's own end tokens do; kept as a tuple
    include_stop_str_in_output  the text ends behind the stop string
    ignore_eos          the model's end tokens do not end the answer
    skip_special_tokens  leave them out of the text; the ids have them
    logprobs            k: log-probabilities of the chosen token and of the k most likely; None: none
    prompt_logprobs     k: the same of the prompt's tokens, all of which are computed then; None: none
    grammar             the answer matches it, and ends with it whatever `min_tokens` and `ignore_eos` say, or earlier
                        by `max_tokens`, a stop string or a stop token; None: any text

    Raises `InvalidRequest` with the field, the value and the rule.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    weighing: Weighing = field(init=False, repr=False, compare=False)  # what is None in its place as a number

    @property
    def is_greedy(self) -> bool:
        """Return whether the best token is always drawn, and nothing else is said of the draw."""
        has_rules = self.min_tokens or self.logit_bias or self.allowed_token_ids is not None or self.bad_words
        has_penalties = self.weighing.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        is_told = self.logprobs is not None or self.grammar is not None
        return self.weighing.temperature < GREEDY_BELOW and not (has_rules or has_penalties or is_told)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in Weighing._fields if getattr(self, name) is not None}
        object.__setattr__(self, "weighing", Weighing(**given))
        _check_int("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_TOKENS_LIMIT)
        _check_float("temperature", self.weighing.temperature, 0.0, 2.0)
        _check_float("top_p", self.weighing.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.weighing.top_k, -1, MAX_TOKENS_LIMIT)
        _check_float("min_p", self.weighing.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.weighing.repetition_penalty, 0.01, 10.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest("grammar", type(self.grammar).__name__, "must be a Grammar")
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        stop_token_ids = _checked_ids("stop_token_ids", self.stop_token_ids, 0, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "bad_words", _checked_bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            allowed = _checked_ids("allowed_token_ids", self.allowed_token_ids, 1, MAX_ALLOWED_TOKEN_IDS)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if self.grammar is not None:
                raise InvalidRequest("allowed_token_ids", None, "cannot be combined with a grammar")
        _check_logit_bias(self.logit_bias)

    def with_defaults(self, defaults: SamplingDefaults) -> SamplingParams:
        """Take a model's own values where none was given; its `max_tokens` is for the engine, which knows the room."""
        names = [name for name in Weighing._fields if name in defaults and getattr(self, name) is None]
        missing = {name: defaults[name] for name in names}
        return replace(self, **missing) if missing else self


class Logprobs(NamedTuple):
    """Log-probabilities of one token, of the distribution before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens, of which the first of a prompt has none; arrays, as prompts are long.

    token_ids  int32 [P]
    logprobs   float32 [P]
    ranks      int32 [P]       1: no token was likelier
    top_ids    int32 [P, k]    the most likely first
    top        float32 [P, k]  parallel
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]

    @staticmethod
    def joined(pieces: Sequence[PromptLogprobs], num_top: int) -> PromptLogprobs:
        """Join what steps found, in order; a prompt of one token has none."""
        empty = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)
        none = PromptLogprobs(*empty, np.empty((0, num_top), np.int32), np.empty((0, num_top), np.float32))
        return PromptLogprobs(*(np.concatenate(arrays) for arrays in zip(none, *pieces, strict=True)))

    def each(self) -> Iterator[Logprobs]:
        """Yield those of each token."""
        for token_id, logprob, top_ids, top in zip(
            self.token_ids.tolist(), self.logprobs.tolist(), self.top_ids, self.top, strict=True
        ):
            yield Logprobs(token_id, logprob, tuple(zip(top_ids.tolist(), top.tolist(), strict=True)))


class History(NamedTuple):
    """Lets a session know a conversation again by what was said, where it is written otherwise than it was drawn.

    prompt              digest of all its messages
    said                digest of those up to its last answer; empty: there is none
    text                rendered text behind that answer, of which the first `num_closing_chars` close it
    drops_reasoning     the answer's reasoning may be in the log and not in the messages
    tools, ...          how the next answer is read: as `Dialect.parser` takes them, by a `Dialect` of these `parsers`
    """

    prompt: bytes
    said: bytes
    text: str
    num_closing_chars: int
    drops_reasoning: bool
    tools: Mapping[str, Mapping[str, Any]]
    is_forced: bool
    is_thinking: bool
    parsers: tuple[Any, Any]


class PinnedPrefix(NamedTuple):
    """Names the beginning of a prompt that stays resident for a time, if there is room."""

    num_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Asks for one choice of a request. One with n = 3 is three of these; the prefix forest shares their prompt."""

    request_id: str  # unique in the cluster
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams  # seed is set; n is not looked at
    choice_index: int = 0
    num_choices: int = 1  # of the HTTP request, all prompts together: they share what its grammar may cost
    salt: str = ""  # tenant salt: the root of the prefix forest it may share with
    session_id: str | None = None  # already namespaced by the ingress
    affinity: str | None = None  # requests that have the same belong together: only where they run depends on it
    prompt_text: str | None = None  # the rendered prompt, special tokens included; lets a session reuse its exact ids
    subscriber: str = ""  # whose token stream gets the events
    append: bool = False  # the prompt goes on where the session's token log ends
    num_closing_chars: int = 0  # of an appended `prompt_text`: what closes the answer before it
    session_ttl_s: float | None = None  # how long the session is kept unused; None: as before
    priority: int = 0  # lower is sooner, among what its tenant asks without a session: `schedule/queue.py`
    timeout_s: float | None = None  # seconds that are left to it; None: the engine's default, if it has one
    output_offset: int = 0  # how many of the last prompt ids are output of this request, emitted before it was resumed
    num_prompt: int | None = None  # of a resumed request, where it is known: tokens of its prompt, its session's too
    truncation: Truncation | None = None  # None: refused if it is too long
    num_system: int = 0  # prompt tokens that are the system prompt, where `truncation.keep` asks for it
    elsewhere_tokens: int = 0  # of its prompt, that another replica would find too, as far as the router knows
    taken_s: float = 0.0  # when the engine took it, by the engine's clock
    history: History | None = None  # of a request with a session that resends what was said
    pinned: tuple[PinnedPrefix, ...] = ()  # what is pinned of the prompt when it has ended
    documents: tuple[DocumentSpan, ...] = ()  # in order, apart; of the engine's sequence: of what that sees
    blend: BlendOptions = field(default_factory=BlendOptions)
    document_order: tuple[int, ...] = ()  # `BlendUsage.order`, from when an engine took it
    pooling: Pooling | None = None  # its prompt's embedding is wanted

    def in_order(self, order: Sequence[int]) -> GenerationRequest:
        """Put its documents in this order, for good; what stands between them stays in its place."""
        if not order:  # a turn behind others that had some
            return self
        spans, ids, text = self.documents, self.prompt_token_ids, self.prompt_text or ""
        new_ids, new_text, placed = list(ids[: spans[0].start]), text[: spans[0].char_start], []
        for slot, index in enumerate(order):
            span, start, char_start = spans[index], len(new_ids), len(new_text)
            new_ids += ids[span.start : span.end]
            new_text += text[span.char_start : span.char_end]
            placed.append(DocumentSpan(start, len(new_ids), span.name, char_start, len(new_text), span.group))
            follows = spans[slot + 1] if slot + 1 < len(spans) else None
            new_ids += ids[spans[slot].end : follows and follows.start]
            new_text += text[spans[slot].char_end : follows and follows.char_start]
        return replace(
            self,
            prompt_token_ids=tuple(new_ids),
            prompt_text=None if self.prompt_text is None else new_text,
            documents=tuple(placed),
            blend=replace(self.blend, order="given"),
            document_order=tuple(order),
        )

    @property
    def reads_prompt(self) -> bool:
        """Return whether the hidden states of its prompt are wanted: it computes all of them itself."""
        return self.pooling is not None or self.sampling.prompt_logprobs is not None

    @property
    def kv_salt(self) -> str:
        """The root of the forest under which its KV is: its own where it finds nothing and leaves nothing."""
        return f"{self.salt}:{self.request_id}" if self.reads_prompt else self.salt

    def check_prompt_logprobs(self, field: str = "prompt_logprobs") -> None:
        """Raise `InvalidRequest`, with that field, where tokens of the prompt would not be computed one by one."""
        others = {"a session": self.session_id, "truncation": self.truncation, "documents": self.documents}
        given = [name for name, value in others.items() if value]
        if self.sampling.prompt_logprobs is not None and given:
            raise InvalidRequest(field, None, f"log-probabilities of the prompt cannot be combined with {given[0]}")

    @property
    def is_warm_up(self) -> bool:
        """Return whether it runs as any other, and nothing is left of it: no KV, no count, no learned cost."""
        return self.salt == WARM_UP_SALT

    @property
    def leaves_nothing(self) -> bool:
        """Return whether its KV goes when it ends, and is not in the cache tier."""
        return self.is_warm_up or self.reads_prompt


def session_key(request: GenerationRequest) -> SessionKey | None:
    return None if request.session_id is None else (request.salt, request.session_id)


def is_of_request(request_id: str, http_id: str) -> bool:
    """Return whether a request to an engine is a choice, a prompt or an attempt of an HTTP request."""
    return request_id.startswith(http_id) and _SUFFIX.fullmatch(request_id, len(http_id)) is not None


# Where KV of a prompt came from: "recomputed" by this request; "dropped": that too, but it had been there before.
Source = Literal["device", "host", "disk", "peer", "recomputed", "dropped"]


class KvDetails(TypedDict):
    """Tokens of the prompt by where their KV came from; `truncated` ones are no longer part of it."""

    device: int
    host: int
    disk: int
    peer: int
    recomputed: int
    dropped: int
    truncated: int


class PromptUsage(NamedTuple):
    """Sent once per request, with its first event."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV was not computed by this request
    host_tokens: int = 0  # of them, those that came back from the host
    dropped_tokens: int = 0  # tokens that it computed although they had had KV before
    truncated_tokens: int = 0  # that were dropped so that the others fit; `prompt_tokens` does not count them
    disk_tokens: int = 0  # of the cached ones, those from the node's disk
    peer_tokens: int = 0  # and those from another node
    queue_s: float = 0.0  # from when the engine took the request to its first rows
    prefill_s: float = 0.0  # from then to its first token
    blend: BlendUsage | None = None  # None: it had no documents

    def kv_details(self) -> KvDetails:
        """Return where the prompt's KV came from, in tokens: the sum is `prompt_tokens`, less what was truncated."""
        return {
            "device": self.cached_tokens - self.host_tokens - self.disk_tokens - self.peer_tokens,
            "host": self.host_tokens,
            "disk": self.disk_tokens,
            "peer": self.peer_tokens,
            "recomputed": self.prompt_tokens - self.cached_tokens - self.dropped_tokens,
            "dropped": self.dropped_tokens,
            "truncated": self.truncated_tokens,
        }


class TokenEvent(NamedTuple):
    """Holds what one step did for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # None while it runs; "stop", "length", "abort" or "error"
    logprobs: tuple[Logprobs, ...] | None
    usage: PromptUsage | None  # only in the first event
    error: str | None = None  # only with finish_reason "error": what to tell the client
    # Where that is because of the request: it could not run when its session was free, or its deadline has passed.
    refusal: MnemeError | None = None
    embedding: tuple[float, ...] | None = None  # in the first event of a request with `pooling`
    prompt_logprobs: PromptLogprobs | None = None  # and of one that wants them: of all its prompt but the first


class StepMessage(NamedTuple):
    """One message of the token stream: all events of one step for one subscriber."""

    epoch: str  # of the engine's life: a restarted engine has another
    seq: int  # counts up by one per message and subscriber
    events: tuple[TokenEvent, ...]
    report: ReplicaReport | None = None  # where it has something new to say of itself


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, value, f"must be an integer from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison; an int of any size compares exactly.
    if not is_number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        rule = f"must be a number {'over' if open_low else 'from'} {low:g} {'up ' if open_low else ''}to {high:g}"
        raise InvalidRequest(name, value, rule)


def _checked_stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest("stop", stop, "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", len(stops), f"at most {MAX_STOPS} stop strings")
    sizes = [len(text.encode("utf-8", "surrogatepass")) for text in stops]
    for text, size in zip(stops, sizes, strict=True):
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidRequest("stop", text, f"each stop string has from 1 to {MAX_STOP_BYTES} bytes")
    if sum(sizes) > MAX_ALL_STOP_BYTES:
        raise InvalidRequest("stop", sum(sizes), f"all stop strings together have at most {MAX_ALL_STOP_BYTES} bytes")
    return tuple(stops)


def _checked_bad_words(words: object) -> tuple[str, ...]:
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise InvalidRequest("bad_words", words, "must be a list of strings")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", len(words), f"at most {MAX_BAD_WORDS} words")
    for word in words:
        if not word.strip() or len(word.encode("utf-8", "surrogatepass")) > MAX_BAD_WORD_BYTES:
            raise InvalidRequest(
                "bad_words", word, f"each word has from 1 to {MAX_BAD_WORD_BYTES} bytes, not all blank"
            )
    return tuple(words)


def _checked_ids(field: str, ids: object, low: int, high: int) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple):
        raise InvalidRequest(field, ids, "must be a list of token ids")
    if not low <= len(ids) <= high:
        raise InvalidRequest(field, len(ids), f"has from {low} to {high} ids")
    for token_id in ids:
        _check_int(field, token_id, 0, MAX_TOKENS_LIMIT)
    return tuple(ids)


def _check_logit_bias(logit_bias: Mapping[int, float]) -> None:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", len(logit_bias), f"at most {MAX_LOGIT_BIAS} entries")
    for token_id, bias in logit_bias.items():
        _check_int("logit_bias", token_id, 0, MAX_TOKENS_LIMIT)
        _check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
