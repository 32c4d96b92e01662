"""Size times idle time, a trailing half at a time (Pensieve 4.3).

Size is what the eviction would free. Runs of one size are in order of their last use, so the highest score is that of
the oldest of some size: a choice looks at one run per size that occurs, and n pages have at most sqrt(2 n) sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.cachetier.policy.eviction_heap import EvictionHeap


class PensievePolicy(EvictionPolicy):
    """A run that was used just now scores 0, and goes only when all others do too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._heap_by_size: dict[int, EvictionHeap] = {}

    def _rank(self, candidate: Candidate) -> None:
        heap = self._heap_by_size.setdefault(candidate.num_pages, EvictionHeap())
        heap.push(candidate.key, (candidate.last_used_s,))

    def _unrank(self, candidate: Candidate) -> None:
        heap = self._heap_by_size[candidate.num_pages]
        heap.discard(candidate.key)
        if not heap:
            del self._heap_by_size[candidate.num_pages]

    def _choose(self) -> tuple[Hashable, int]:
        now_s = self._clock()
        oldest = [(size, *heap.first()) for size, heap in self._heap_by_size.items()]
        # Of equal scores the one that was idle for longer.
        size, _, key = max(oldest, key=lambda entry: (entry[0] * (now_s - entry[1][0]), -entry[1][0]))
        return key, -(-size // 2)
