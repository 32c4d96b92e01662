"""Says how a sequence uses the KV of its documents. The plain case: as a part of its exact prefix, and in no other way.

Scheduler and engine ask it what must be computed before the sequence may start (`missing`), for its path (`open`), for
rows beside those of its text (`num_to_compare`, `next_compared`), and what its usage says (`usage`). `Blend` has other
answers to the same questions. Policy only: no tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mneme.kernels.page_table import IntArray
from mneme.replicas.documents import EXACT, HISTORY, BlendUsage, Declined, DocumentSpan, DocumentUsage
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.pages import Root
from mneme.replicas.forest.paths import Path
from mneme.replicas.fuse.selectors import FloatArray
from mneme.replicas.request import GenerationRequest, Source

_NONE = np.empty(0, np.int64)

Found = tuple[int, int, Source]  # positions [start, end) whose KV was found, and where


@dataclass(slots=True, eq=False, kw_only=True)
class Reuse:
    """Reuses nothing in place."""

    gathers: ClassVar[bool] = False  # its documents are computed, and looked for in the cache tier, each by itself

    declined: Declined = HISTORY  # why it reuses nothing in place
    is_history_approximate: bool = False  # earlier turns of its session reuse documents in place
    num_missing: int = 0  # prompts that are being computed for it
    is_probing: bool = False  # its next rows are for choosing what is computed anew, and sample nothing
    num_to_compare: int = 0  # rows of documents, the last of `reused`, which are computed to be compared
    num_exact: int = 0  # tokens that its path began with
    uses: list[tuple[int, int]] = field(default_factory=list, repr=False)  # positions of what its path reuses
    reused: IntArray = field(default_factory=lambda: _NONE, repr=False)  # positions, in order
    narrowed: IntArray = field(default_factory=lambda: _NONE, repr=False)  # those whose rows may leave a pass

    @property
    def ratio(self) -> float:
        """The share of a document's tokens that is computed anew."""
        return 1.0

    def missing(self, context: Sequence[int], forest: PrefixForest, *, has_history: bool) -> list[list[int]]:
        """List the prompts to be computed before its path can be opened.

        has_history  whether the sequence goes on from its session's own KV
        """
        return []

    def place(self, ids: Sequence[int], context: Sequence[int]) -> tuple[int, int]:
        """Return where one of `missing` stands first in the sequence, and how far that is behind its own place."""
        return 0, 0

    def note_loading(self, num_loaded: Mapping[str, int]) -> None:
        """Note what of its documents is loaded in the step that its own rows are in, by where that comes from."""

    def open(self, path: Path, context: Sequence[int], forest: PrefixForest) -> Path:
        """Return a path that goes on from this one, which is given back, behind the documents; or the path itself."""
        return path

    def close(self, forest: PrefixForest) -> Root | None:
        """Drop what was computed on its path; returns the session's root which that went on from, if there is one."""
        return None

    def without_room(self, forest: PrefixForest) -> Reuse:
        """Return what is left of it where its pages did not fit."""
        return self

    def next_compared(self, max_rows: int) -> IntArray:
        """Return the positions of the rows that are compared next."""
        first = len(self.reused) - self.num_to_compare
        return self.reused[first : first + max_rows]

    def note_scores(self, scores: FloatArray, *, is_last: bool) -> bool:
        """Take scores of rows, unless the sequence began anew; returns whether its path is to be opened again."""
        return False

    def note_narrowed(self, spans: Iterable[tuple[int, int]], found: Sequence[Found]) -> None:
        """Note where the KV of `narrowed` in `spans`, which a step computes in the first layers, was found."""

    @property
    def narrowed_found(self) -> dict[str, int]:
        """Tokens of `narrowed` that were found, by source, in the mean over the layers behind the first."""
        return {}

    def why_computed(self, span: DocumentSpan) -> str:
        """Say why a document is computed of which nothing is reused."""
        return self.declined.why

    def usage(
        self, request: GenerationRequest, ids: Sequence[int], found: Sequence[Found], *, has_history: bool
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
        return BlendUsage("off", self.declined.why, order, documents, declined=self.declined.reason)

    def _documents(
        self, spans: Sequence[DocumentSpan], ids: Sequence[int], found: Sequence[Found]
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
            most = num_by_source.most_common(1)[0][0] if num_by_source else "computed"
            size = span.end - span.start
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
        return usage._replace(outcome="computed", why=self.why_computed(span))


def num_within(positions: IntArray, start: int, end: int) -> int:
    """Count those of ascending positions that lie in [start, end), which may be empty."""
    low, high = np.searchsorted(positions, (start, end))
    return max(int(high - low), 0)
