"""Decides what of a sequence's documents is reused in place, and opens the path that reuses it (CacheBlend).

A document is computed once, alone behind the attention sink, as the prompt that it then is: found by content, exact,
evicted, saved and loaded like any other. A sequence that reuses documents waits until those that its engine lacks are
computed, and what stands before the first. Then it has a path of its own (`PrefixForest.blend`): documents where they
stand in it, and private slots for the text between them and for the tokens that the selector chose. What it computes
from there on is approximate, and nobody else's.

A selector that needs scores has a pass before, on a path that is opened with all that there is of the documents. For
`query` the rows of the text and the question, which are computed like any, tell what they look at; for `hkvd` rows of
the documents are computed as far as their keys can be compared with the cached ones, unless all will be computed anew
in the next layer anyway. Then the sequence goes back to the queue's front, and its path is opened again with what was
chosen.

Whatever of a document is gone again by then is computed with the text around it. Policy only: no tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from mneme.kernels.page_table import IntArray
from mneme.replicas.blend.auto import Controller, Work
from mneme.replicas.blend.selectors import (
    NEEDS_SCORES,
    FloatArray,
    ReusedSpan,
    choose,
    count,
    filter_counts,
    first_share,
    no_rows,
)
from mneme.replicas.documents import (
    ALL_ANEW,
    ASKED_AGAIN,
    EVICTED,
    EXACT,
    FIRST_ASKED,
    HISTORY,
    NO_ROOM,
    OFF,
    TOO_LONG,
    TOO_SHORT,
    BlendOptions,
    BlendUsage,
    Declined,
    DocumentSpan,
    DocumentUsage,
    Selector,
)
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.paths import DocumentUse, Path, divide_layers
from mneme.replicas.forest.tree import Root
from mneme.replicas.request import GenerationRequest, Source

DEFAULT_SELECTOR: Selector = "hkvd"
DEFAULT_RATIO = 0.15  # of a document's tokens; CacheBlend's

FoundRange = tuple[int, int, Source]  # positions [start, end) whose KV was found, and where


@dataclass(slots=True, eq=False, kw_only=True)
class Blend:
    """Says how one sequence uses its documents. Without `spans` it reuses none in place: so does a plain sequence.

    Scheduler and engine ask every sequence's what must be computed before that may start (`missing`), for its path
    (`open`), for rows beside those of its text (`num_to_compare`, `next_compared`), and what its usage says (`usage`).
    """

    options: BlendOptions = field(default_factory=BlendOptions)
    spans: tuple[DocumentSpan, ...] = ()  # in order, of what the sequence sees; without those that are too short
    salt: str = ""
    seed: int = 0
    sink_ids: tuple[int, ...] = ()  # what documents are computed behind
    declined: Declined = HISTORY  # why it reuses nothing in place
    is_history_approximate: bool = False  # earlier turns of its session reuse documents in place
    root: Root | None = field(default=None, repr=False)  # of its path
    base: Root | None = field(default=None, repr=False)  # of the path that it went on from, if that is its session's
    uses: list[tuple[int, int]] = field(default_factory=list, repr=False)  # positions of what its path reuses
    reused: IntArray = field(default_factory=no_rows, repr=False)  # positions, in order
    narrowed: IntArray = field(default_factory=no_rows, repr=False)  # those whose rows may leave a pass
    # Of each: the layer from which on its private slot holds what is cached, or the number of layers. 0: unknown.
    left: IntArray = field(default_factory=no_rows, repr=False)
    narrowed_from: list[FoundRange] = field(default_factory=list, repr=False)  # where the KV of some was found
    scores: FloatArray | None = field(default=None, repr=False)  # by position
    is_scored: bool = False  # they are complete
    is_probing: bool = False  # its next rows are for choosing what is computed anew, and sample nothing
    num_to_compare: int = 0  # rows of documents, the last of `reused`, which are computed to be compared
    num_layers: int = 2  # of the model
    num_chosen: int = 0  # document tokens that the selector chose
    num_exact: int = 0  # tokens that its path began with
    num_again: int = 0  # tokens, from the first on, that are computed exactly: they were asked for before
    num_asked: int = 0  # likewise, but when it has ended: their documents' KV is there, and this request need not wait
    first_asked: tuple[DocumentSpan, ...] = ()  # documents without KV here, which nobody asked for before
    is_forgotten: bool = False  # its session was deleted meanwhile: nothing of it is computed when it has ended
    why: str = "the request asks for it"
    is_measured: bool = False  # a quality report allows it
    predicted_s: float | None = None  # what its rows cost; None: nobody asks, or it cannot be compared
    took_s: float = 0.0  # its steps, which were its alone
    may_raise: Callable[[BlendOptions, Mapping[str, int]], BlendOptions] | None = None  # the ratio, under a load

    @property
    def selector(self) -> Selector:
        return "none" if self.options.mode == "full_reuse" else self.options.selector or DEFAULT_SELECTOR

    @property
    def ratio(self) -> float:
        """The share of a document's tokens that is computed anew."""
        given = DEFAULT_RATIO if self.options.ratio is None else self.options.ratio
        return {"none": 0.0, "all": 1.0}.get(self.selector, given)

    @property
    def num_recomputed(self) -> int:
        """The document tokens that were computed anew, in the mean over the layers behind the first."""
        return count(self.num_chosen + len(self.reused), self.ratio) if len(self.narrowed) else self.num_chosen

    def num_staying(self, num_narrowed: int) -> dict[int, int]:
        """Return how many of the rows that may leave a pass stay from some layers on."""
        return filter_counts(self.num_layers, num_narrowed, self.ratio)

    @property
    def narrowed_found(self) -> dict[str, int]:
        """Tokens of `narrowed` that were found, by source, in the mean over the layers behind the first."""
        kept = 1 - self.num_recomputed / max(self.num_chosen, 1)
        num_by_source = self._num_narrowed(0, self.spans[-1].end) if self.spans else {}
        return {source: int(kept * number) for source, number in num_by_source.items()}

    def _num_narrowed(self, start: int, end: int) -> Counter[Source]:
        """Count those within [start, end) whose KV was found, by source."""
        counts: Counter[Source] = Counter()
        for first, stop, source in self.narrowed_from:
            counts[source] += num_within(self.narrowed, max(first, start), min(stop, end))
        return counts

    def add_narrowed(self, spans: Iterable[tuple[int, int]], found: Sequence[FoundRange]) -> None:
        """Note where the KV of `narrowed` in `spans`, which a step computes in the first layers, was found."""
        for first, end in spans:
            ranges = ((max(start, first), min(stop, end), source) for start, stop, source in found)
            self.narrowed_from += [each for each in ranges if each[0] < each[1]]

    @property
    def effective_selector(self) -> Selector:
        """The selector, or what it comes to where scores would not matter."""
        ends: dict[float, Selector] = {0.0: "none", 1.0: "all"}
        return ends.get(self.ratio, self.selector)

    def apply_loading(self, num_loaded: Mapping[str, int]) -> None:
        """Note what of its documents is loaded in the step that its own rows are in, by where that comes from."""
        if self.may_raise is not None and not self.is_scored:
            self.options, self.predicted_s = self.may_raise(self.options, num_loaded), None

    def missing(self, context: Sequence[int], forest: PrefixForest, *, has_history: bool) -> list[list[int]]:
        """List the prompts to be computed before it can be opened: of documents, and what is before the first.

        has_history  whether that is a session's, which goes on from KV that is approximate
        """
        if not self.spans:
            return []
        num_exact = 0 if has_history else sum(forest.resident(self.salt, context))
        prompts = [self._alone(span, context) for span in self.spans if span.end > num_exact]
        if not has_history:
            prompts.insert(0, list(context[: self.spans[0].start]))
        distinct = {tuple(ids): ids for ids in prompts if ids}
        return [ids for ids in distinct.values() if sum(forest.resident(self.salt, ids)) < len(ids)]

    def open(self, path: Path, context: Sequence[int], forest: PrefixForest) -> Path:
        """Return a path that goes on from this one, which is given back, behind the documents; or the path itself.

        The last token is never a document's: it is drawn from.
        """
        if not self.spans:
            return path
        if self.root is not None and path.root is self.root:  # it goes on
            return path
        self.drop_path(forest)  # what it had computed there is gone, in part, or was to be seen once
        first, end = path.num_tokens, min(self.spans[-1].end, len(context) - 1)
        self.reused = self.narrowed = no_rows()
        self.num_chosen, self.is_probing, self.num_to_compare = 0, False, 0
        self.uses, self.num_exact = [], first
        self.declined = EXACT if first >= end else FIRST_ASKED if self.first_asked else EVICTED
        uses = [] if first >= end else self._uses(first, end, context, forest)
        if not uses:
            return path
        selector = self.effective_selector
        share = first_share(self.num_layers, self.ratio) if selector == "hkvd" else self.ratio
        is_probing = selector in NEEDS_SCORES and share < 1 and not self.is_scored
        wanted = [ReusedSpan(use.start, use.end) for use in uses]
        how = "none" if is_probing else "all" if share == 1 else selector
        chosen = choose(how, wanted, share, self.seed, self.scores)
        narrowed = chosen if selector == "hkvd" and not is_probing else chosen[:0]
        reused = {position for use in uses for position in range(use.start, use.end)}.difference(chosen.tolist())
        private = [position for position in range(first, end) if position not in reused]
        blended = forest.blend(path, uses, private, context, end, keeps_hidden=len(narrowed) > 0)
        for use in uses:
            forest.release(use.path)
        if blended is None:
            return path
        self.base = path.root if path.root.is_own else None
        forest.release(path)
        self.root, self.reused, self.num_chosen = blended.root, np.array(sorted(reused), np.int64), len(chosen)
        self.narrowed, self.is_probing = narrowed, is_probing
        self.left = np.zeros_like(narrowed)
        self.uses = [(use.start, use.end) for use in uses]
        if is_probing:
            self.num_to_compare = len(self.reused) if self.selector == "hkvd" else 0
            self.scores = np.zeros(self.spans[-1].end)
        return blended

    def drop_path(self, forest: PrefixForest) -> Root | None:
        """Drop what was computed on its path; returns the session's root which that went on from, if there is one."""
        if self.root is not None:
            forest.abandon(self.root, heir=self.root)
            self.root = None
        return self.base

    def without_room(self, forest: PrefixForest) -> Blend:
        """Return what is left of it where its pages did not fit."""
        self.drop_path(forest)
        return Blend(declined=NO_ROOM, is_history_approximate=self.is_history_approximate) if self.spans else self

    def next_compared(self, max_rows: int) -> IntArray:
        """Return the positions of the rows that are compared next."""
        first = len(self.reused) - self.num_to_compare
        return self.reused[first : first + max_rows]

    def add_scores(self, scores: FloatArray, *, is_last: bool) -> bool:
        """Take scores of rows: what they look at of each of `reused`, or how far the next of these are off.

        is_last  whether there are no more rows that look

        Returns whether the path is to be opened again, from `base`.
        """
        if self.scores is None:  # the sequence is truncated, and begins anew
            return False
        if self.num_to_compare:
            self.scores[self.next_compared(len(scores))] = scores
            self.num_to_compare -= len(scores)
            is_last = not self.num_to_compare
        else:
            self.scores[self.reused] += scores
        self.is_probing, self.is_scored = not is_last, is_last
        return is_last

    def add_departures(self, path: Path, positions: IntArray, left: IntArray) -> None:
        """Note the layers from which on a step's rows had cached KV; once all are known, these read shared pages."""
        self.left[np.searchsorted(self.narrowed, positions)] = left
        if path.root is self.root and self.left.all():
            divide_layers(path, self.narrowed, self.left)

    def _why_computed(self, span: DocumentSpan) -> str:
        if not self.spans:
            return self.declined.why
        if not self.options.is_long(span):
            return TOO_SHORT.why
        if span.end <= self.num_again:
            return ASKED_AGAIN.why
        if span in self.first_asked:
            return FIRST_ASKED.why
        if span not in self.spans:
            return TOO_LONG.why
        return "computed for this request, as part of its prefix" if span.end <= self.num_exact else EVICTED.why

    def place(self, ids: Sequence[int], context: Sequence[int]) -> tuple[int, int]:
        """Return where one of `missing` stands first in the sequence, and how far that is behind its own place."""
        for span in self.spans:
            if self._alone(span, context) == ids:
                return span.start, span.start - len(self.sink_ids)
        return 0, 0

    def usage(
        self, request: GenerationRequest, ids: Sequence[int], found: Sequence[FoundRange], *, has_history: bool
    ) -> BlendUsage | None:
        """Say how the documents were used of a prompt that has `ids`; None: there are none, and all is exact."""
        is_approximate = self.is_history_approximate and has_history
        if request.document_order:
            usage = self._usage(request.document_order, self._documents(request.documents, ids, found))
            is_measured = usage.is_measured and not is_approximate
            return usage._replace(is_measured=is_measured, is_history_approximate=is_approximate)
        why = "no document; its history reuses some behind other text"
        return BlendUsage("off", why, (), (), is_history_approximate=True) if is_approximate else None

    def _usage(self, order: tuple[int, ...], documents: tuple[DocumentUsage, ...]) -> BlendUsage:
        if not self.uses:
            return BlendUsage("off", self.declined.why, order, documents, declined=self.declined.reason)
        return BlendUsage(
            *(self.options.mode, self.why, order, documents, self.selector, self.ratio),
            reused=self.num_chosen + len(self.reused) - self.num_recomputed,
            recomputed=self.num_recomputed,
            is_measured=self.is_measured,
        )

    def _documents(
        self, spans: Sequence[DocumentSpan], ids: Sequence[int], found: Sequence[FoundRange]
    ) -> tuple[DocumentUsage, ...]:
        first_by_ids: dict[tuple[int, ...], DocumentSpan] = {}
        usages = []
        for span in spans:
            num_by_source: Counter[Source] = Counter()
            for start, end, source in found[bisect_right(found, span.start, key=lambda each: each[1]) :]:
                if start >= span.end:
                    break
                num_by_source[source] += min(end, span.end) - max(start, span.start)
            num_reused, num_exact = num_within(self.reused, span.start, span.end), num_by_source.total()
            if self.uses:
                num_exact = min(num_exact, max(self.num_exact - span.start, 0))
            first = first_by_ids.setdefault(tuple(ids[span.start : span.end]), span)
            size = span.end - span.start
            num_from = Counter[str](num_by_source)
            num_from.update(self._num_narrowed(span.start, span.end))
            num_from["computed"] = size - num_from.total()
            most = max(num_from, key=num_from.__getitem__)
            usage = DocumentUsage(span.name, span.start, size, num_exact, num_reused, most, "exact", EXACT.why)
            usages.append(self._with_outcome(usage, span, first, is_last=span.end == len(ids)))
        return tuple(usages)

    def _with_outcome(
        self, usage: DocumentUsage, span: DocumentSpan, first: DocumentSpan, *, is_last: bool
    ) -> DocumentUsage:
        index = bisect_right(self.uses, span.start, key=lambda use: use[1])
        if index < len(self.uses) and self.uses[index][0] < span.end:
            why = "its KV is reused behind other text" if usage.reused else "the selector chose all of its tokens"
            if len(self.narrowed) and not usage.reused:
                why = "computed anew in the first layers, and its KV is reused in the others but for the farthest off"
            if first is not span and usage.reused:
                why = f"it has the tokens of {first.name}, and the same KV is reused"
            return usage._replace(outcome="blended", why=why)
        # The prompt's last token is always computed, as the answer is drawn from it.
        if usage.exact >= usage.tokens - is_last:
            return usage
        return usage._replace(outcome="computed", why=self._why_computed(span))

    def _alone(self, span: DocumentSpan, context: Sequence[int]) -> list[int]:
        return [*self.sink_ids, *context[span.start : span.end]]

    def _uses(self, first: int, end: int, context: Sequence[int], forest: PrefixForest) -> list[DocumentUse]:
        """Open the documents, or parts of them, in [first, end) of which nothing is missing."""
        uses = []
        for span in self.spans:
            low, high = max(span.start, first), min(span.end, end)
            if low >= high:
                continue
            ids = self._alone(span, context)
            path = forest.open_path(self.salt, ids)
            path.extend(ids, len(ids))
            if path.num_pending(ids):
                forest.release(path)
            else:
                uses.append(DocumentUse(path, low, high, span.start - len(self.sink_ids)))
        return uses


def num_within(positions: IntArray, start: int, end: int) -> int:
    """Count those of ascending positions that lie in [start, end), which may be empty."""
    low, high = np.searchsorted(positions, (start, end))
    return max(int(high - low), 0)


def decide(
    request: GenerationRequest,
    sink_ids: tuple[int, ...],
    *,
    capacity: int,
    num_layers: int,
    controller: Controller,
    num_tokens: int,
    num_exact: int,
    num_again: int = 0,
    unknown: Collection[DocumentSpan] = (),
) -> Blend | Declined:
    """Return how a request's documents are reused in place, or why they are not.

    controller  decides where the request leaves it to the engine
    num_tokens  of the prompt, and of what its session had before
    num_exact   of them, those from the first on that are not computed
    num_again   and those that another prompt began with, which `auto` computes exactly
    unknown     documents of which no KV can be had: `auto` computes them with the text around them
    """
    options, why, predicted_s, may_raise = request.blend, "the request asks for it", None, None
    if options.mode == "off":
        return OFF
    whole = [span for span in request.documents if options.is_long(span)]
    spans = tuple(span for span in whole if span.end - span.start + len(sink_ids) < capacity)
    if not spans:
        return TOO_LONG if whole else TOO_SHORT
    if options.mode != "auto":
        num_again = 0
    else:
        is_exact = num_exact >= spans[-1].end
        num_exact = max(num_exact, num_again)
        spans = tuple(span for span in spans if span.end > num_again and span not in unknown)
        num_reused = sum(max(span.end - max(span.start, num_exact), 0) for span in spans)
        num_text = max(num_tokens - num_exact - num_reused, 1)
        work = Work(num_exact, num_reused, num_text, num_layers)
        decided = controller.decide(options, work)
        if isinstance(decided, Declined):
            return decided
        if not spans:
            return EXACT if is_exact else FIRST_ASKED if unknown else ASKED_AGAIN
        if options.ratio is None:
            may_raise = partial(controller.raised, work)
        options, why, predicted_s = decided
    blend = Blend(
        options=options,
        spans=spans,
        salt=request.salt,
        seed=request.sampling.seed or 0,
        sink_ids=sink_ids,
        declined=EVICTED,
        num_layers=num_layers,
        why=why,
        may_raise=may_raise,
        predicted_s=predicted_s,
        num_again=num_again,
    )
    if blend.effective_selector == "all":
        return ALL_ANEW
    blend.is_measured = controller.gate.is_measured(blend.selector, blend.ratio)
    return blend
