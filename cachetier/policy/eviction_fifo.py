"""First in, first out, whatever was used meanwhile: what AttentionStore 4.3.4 compares with (Fig. 21)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.cachetier.policy.eviction_heap import EvictionHeap

_PER_PAGE, _MIN_KNOWN = 4, 1024  # keys whose arrival is known, those that are in use among them


class FifoPolicy(EvictionPolicy):
    """By when a key was first offered since it was last a victim."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._heap = EvictionHeap()
        self._arrivals = itertools.count()
        self._arrived: dict[Hashable, int] = {}  # oldest first
        self._max_known = max(_PER_PAGE * capacity, _MIN_KNOWN)

    def _rank(self, candidate: Candidate) -> None:
        arrived = self._arrived.get(candidate.key)
        if arrived is None:
            arrived = self._arrived[candidate.key] = next(self._arrivals)
            if len(self._arrived) > self._max_known:  # what went another way was never a victim
                del self._arrived[next(iter(self._arrived))]
        self._heap.push(candidate.key, (arrived,))

    def _unrank(self, candidate: Candidate) -> None:
        self._heap.discard(candidate.key)

    def _choose(self) -> tuple[Hashable, int]:
        _, key = self._heap.first()
        self._arrived.pop(key, None)
        return key, self.candidates[key].num_pages
