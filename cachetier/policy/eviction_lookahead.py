"""What the queue will use stays (AttentionStore 3.3.2).

The look-ahead window is the head of the queue: as many requests as sessions fit the tier, (capacity / mean size of a
run) of them. A run that one of them will use is exempt; the others go by their last use. If all runs are exempt, the
one whose first consumer is nearest to the window's tail goes. A run goes as a whole or not at all: a session uses all
of its KV or none.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from itertools import islice

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.cachetier.policy.eviction_heap import EvictionHeap, Rank

_MAX_WINDOW = 256  # requests: a choice looks at no more, however long the queue is


class LookaheadPolicy(EvictionPolicy):
    """`capacity` is the tier's, in pages."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._num_pages = 0  # of all candidates
        self._heap = EvictionHeap()

    def _rank(self, candidate: Candidate) -> None:
        self._num_pages += candidate.num_pages
        self._heap.push(candidate.key, (candidate.last_used_s,))

    def _unrank(self, candidate: Candidate) -> None:
        self._num_pages -= candidate.num_pages
        self._heap.discard(candidate.key)

    def _choose(self) -> tuple[Hashable, int]:
        exempt = self._first_consumers()
        key = self._oldest_but(exempt)
        if key is None:
            key = max(exempt, key=exempt.__getitem__)
        return key, self.candidates[key].num_pages

    def _first_consumers(self) -> dict[Hashable, int]:
        """The candidates in the window, with the place in the queue of the first request that will use each."""
        window = min(max(1, self._capacity * len(self.candidates) // self._num_pages), _MAX_WINDOW)
        places: dict[Hashable, int] = {}
        for place, key in enumerate(islice(self._queue(), window)):
            if key in self.candidates:
                places.setdefault(key, place)
        return places

    def _oldest_but(self, exempt: Collection[Hashable]) -> Hashable | None:
        return first_but(self._heap, exempt)


def first_but(heap: EvictionHeap, exempt: Collection[Hashable]) -> Hashable | None:
    """The first key that is not exempt; the heap is left as it was. None if there is none."""
    passed: list[tuple[Hashable, Rank]] = []
    found = None
    while found is None and len(heap):
        rank, key = heap.first()
        if key in exempt:
            heap.discard(key)
            passed.append((key, rank))
        else:
            found = key
    for key, rank in passed:
        heap.push(key, rank)
    return found
