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

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from mneme.replicas.documents import (
    ALL_ANEW,
    ASKED_AGAIN,
    EVICTED,
    EXACT,
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
from mneme.replicas.forest.pages import Root
from mneme.replicas.forest.paths import DocumentUse, Path
from mneme.replicas.fuse.controller import Controller, Work
from mneme.replicas.fuse.reuse import Found, Reuse, num_within
from mneme.replicas.fuse.selectors import NEEDS_SCORES, FloatArray, Wanted, choose, count, first_share
from mneme.replicas.request import GenerationRequest

DEFAULT_SELECTOR: Selector = "hkvd"
DEFAULT_RATIO = 0.15  # of a document's tokens; CacheBlend's


@dataclass(slots=True, eq=False, kw_only=True)
class Blend(Reuse):
    """Reuses documents in place."""

    gathers: ClassVar[bool] = True

    options: BlendOptions
    spans: tuple[DocumentSpan, ...]  # in order, of what the sequence sees; without those that are too short
    salt: str
    seed: int
    sink_ids: tuple[int, ...]  # what documents are computed behind
    root: Root | None = field(default=None, repr=False)  # of its path
    num_narrowed_from: Counter[str] = field(default_factory=Counter, repr=False)  # of `narrowed`, whose KV was there
    base: Root | None = field(default=None, repr=False)  # of the path that it went on from, if that is its session's
    scores: FloatArray | None = field(default=None, repr=False)  # by position
    is_scored: bool = False  # they are complete
    num_layers: int = 2  # of the model
    num_chosen: int = 0  # document tokens that the selector chose
    why: str = "the request asks for it"
    is_measured: bool = False  # a quality report allows it
    may_raise: Callable[[BlendOptions, Mapping[str, int]], BlendOptions] | None = None  # the ratio, under a load
    declined: Declined = EVICTED
    num_again: int = 0  # tokens, from the first on, that are computed exactly: they were asked for before

    @property
    def selector(self) -> Selector:
        return "none" if self.options.mode == "full_reuse" else self.options.selector or DEFAULT_SELECTOR

    @property
    def ratio(self) -> float:
        given = DEFAULT_RATIO if self.options.ratio is None else self.options.ratio
        return {"none": 0.0, "all": 1.0}.get(self.selector, given)

    @property
    def num_recomputed(self) -> int:
        """The document tokens that were computed anew, in the mean over the layers behind the first."""
        return count(self.num_chosen + len(self.reused), self.ratio) if len(self.narrowed) else self.num_chosen

    @property
    def narrowed_found(self) -> dict[str, int]:
        kept = 1 - self.num_recomputed / max(self.num_chosen, 1)
        return {source: int(kept * number) for source, number in self.num_narrowed_from.items()}

    def note_narrowed(self, spans: Iterable[tuple[int, int]], found: Sequence[Found]) -> None:
        for first, end in spans:
            for start, stop, source in found:
                self.num_narrowed_from[source] += num_within(self.narrowed, max(start, first), min(stop, end))

    @property
    def settled_selector(self) -> Selector:
        """The selector, or what it comes to where scores would not matter."""
        ends: dict[float, Selector] = {0.0: "none", 1.0: "all"}
        return ends.get(self.ratio, self.selector)

    def note_loading(self, num_loaded: Mapping[str, int]) -> None:
        if self.may_raise is not None and not self.is_scored:
            self.options = self.may_raise(self.options, num_loaded)

    def missing(self, context: Sequence[int], forest: PrefixForest, *, has_history: bool) -> list[list[int]]:
        """List the prompts of its documents that are not resident, and what is before the first."""
        num_exact = 0 if has_history else sum(forest.resident(self.salt, context))
        prompts = [self._alone(span, context) for span in self.spans if span.end > num_exact]
        if not has_history:
            prompts.insert(0, list(context[: self.spans[0].start]))
        distinct = {tuple(ids): ids for ids in prompts if ids}
        return [ids for ids in distinct.values() if sum(forest.resident(self.salt, ids)) < len(ids)]

    def open(self, path: Path, context: Sequence[int], forest: PrefixForest) -> Path:
        """See `Reuse.open`. The last token is never a document's: it is drawn from."""
        if self.root is not None and path.root is self.root:  # it goes on
            return path
        self.close(forest)  # what it had computed there is gone, in part, or was to be seen once
        first, end = path.num_tokens, min(self.spans[-1].end, len(context) - 1)
        self.reused = self.narrowed = np.empty(0, np.int64)
        self.num_chosen, self.is_probing, self.num_to_compare = 0, False, 0
        self.uses, self.num_exact, self.declined = [], first, EXACT if first >= end else EVICTED
        uses = [] if first >= end else self._uses(first, end, context, forest)
        if not uses:
            return path
        settled = self.settled_selector
        share = first_share(self.num_layers, self.ratio) if settled == "hkvd" else self.ratio
        is_probing = settled in NEEDS_SCORES and share < 1 and not self.is_scored
        wanted = [Wanted(use.start, use.end) for use in uses]
        how = "none" if is_probing else "all" if share == 1 else settled
        chosen = choose(how, wanted, share, self.seed, self.scores)
        narrowed = chosen if settled == "hkvd" and not is_probing else chosen[:0]
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
        self.uses = [(use.start, use.end) for use in uses]
        if is_probing:
            self.num_to_compare = len(self.reused) if self.selector == "hkvd" else 0
            self.scores = np.zeros(self.spans[-1].end)
        return blended

    def close(self, forest: PrefixForest) -> Root | None:
        if self.root is not None:
            forest.abandon(self.root, heir=self.root)
            self.root = None
        return self.base

    def without_room(self, forest: PrefixForest) -> Reuse:
        self.close(forest)
        return Reuse(declined=NO_ROOM, is_history_approximate=self.is_history_approximate)

    def note_scores(self, scores: FloatArray, *, is_last: bool) -> bool:
        """Take scores of rows: what they look at of each of `reused`, or how far the next of these are off.

        is_last  whether there are no more rows that look

        Returns whether the path is to be opened again, from `base`.
        """
        assert self.scores is not None
        if self.num_to_compare:
            self.scores[self.next_compared(len(scores))] = scores
            self.num_to_compare -= len(scores)
            is_last = not self.num_to_compare
        else:
            self.scores[self.reused] += scores
        self.is_probing, self.is_scored = not is_last, is_last
        return is_last

    def why_computed(self, span: DocumentSpan) -> str:
        if span.end - span.start < max(self.options.min_tokens, 1):
            return TOO_SHORT.why
        if span.end <= self.num_again:
            return ASKED_AGAIN.why
        if span not in self.spans:
            return TOO_LONG.why
        return "computed for this request, as part of its prefix" if span.end <= self.num_exact else EVICTED.why

    def place(self, ids: Sequence[int], context: Sequence[int]) -> tuple[int, int]:
        for span in self.spans:
            if self._alone(span, context) == ids:
                return span.start, span.start - len(self.sink_ids)
        return 0, 0

    def _usage(self, order: tuple[int, ...], documents: tuple[DocumentUsage, ...]) -> BlendUsage:
        if not self.uses:
            return Reuse._usage(self, order, documents)
        return BlendUsage(
            *(self.options.mode, self.why, order, documents, self.selector, self.ratio),
            reused=self.num_chosen + len(self.reused) - self.num_recomputed,
            recomputed=self.num_recomputed,
            is_measured=self.is_measured,
        )

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
) -> Blend | Declined:
    """Return how a request's documents are reused in place, or why they are not.

    controller  decides where the request leaves it to the engine
    num_tokens  of the prompt, and of what its session had before
    num_exact   of them, those from the first on that are not computed
    num_again   and those that another prompt began with, which `auto` computes exactly
    """
    options, why, may_raise = request.blend, "the request asks for it", None
    if options.mode == "off":
        return OFF
    whole = [span for span in request.documents if span.end - span.start >= max(options.min_tokens, 1)]
    spans = tuple(span for span in whole if span.end - span.start + len(sink_ids) < capacity)
    if not spans:
        return TOO_LONG if whole else TOO_SHORT
    if options.mode != "auto":
        num_again = 0
    else:
        is_exact = num_exact >= spans[-1].end
        num_exact = max(num_exact, num_again)
        spans = tuple(span for span in spans if span.end > num_again)
        num_reused = sum(max(span.end - max(span.start, num_exact), 0) for span in spans)
        num_text = max(num_tokens - num_exact - num_reused, 1)
        work = Work(num_exact, num_reused, num_text, num_layers)
        decided = controller.decide(options, work)
        if isinstance(decided, Declined):
            return decided
        if not spans:
            return EXACT if is_exact else ASKED_AGAIN
        if options.ratio is None:
            may_raise = partial(controller.raised, work)
        options, why = decided
    blend = Blend(
        options=options,
        spans=spans,
        salt=request.salt,
        seed=request.sampling.seed or 0,
        sink_ids=sink_ids,
        num_layers=num_layers,
        why=why,
        may_raise=may_raise,
        num_again=num_again,
    )
    if blend.settled_selector == "all":
        return ALL_ANEW
    blend.is_measured = controller.gate.is_measured(blend.selector, blend.ratio)
    return blend
