"""Eviction policies that serve nobody: what others are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

from mneme.cachetier.policy.eviction import Candidate, LruPolicy
from mneme.primitives import Bounded

_PER_PAGE, _MIN_KNOWN = 4, 1024  # keys whose arrival `FifoPolicy` knows, those that are in use among them


class FifoPolicy(LruPolicy):
    """Evicts by when a key was first offered since it was last a victim, whatever was used meanwhile.

    AttentionStore 4.3.4 compares with it (Fig. 21).
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._arrivals = itertools.count()
        self._arrived = Bounded[Hashable, int](max(_PER_PAGE * capacity, _MIN_KNOWN))

    def _rank(self, candidate: Candidate) -> None:
        arrived = self._arrived.get(candidate.key)
        if arrived is None:
            arrived = self._arrived[candidate.key] = next(self._arrivals)
        self._heap.push(candidate.key, arrived)

    def _choose(self) -> tuple[Hashable, int]:
        key, num_pages = super()._choose()
        self._arrived.pop(key, None)
        return key, num_pages


class MinPolicy(LruPolicy):
    """Evicts a page that is used last of all (Belady's MIN), its parent later: the bound of all other policies.

    Only a simulator knows the future: `next_use` of a key grows with the time of it; infinity for never.
    """

    def __init__(self, next_use: Callable[[Hashable], float]) -> None:
        super().__init__()
        self._next_use = next_use

    def admits(self, candidate: Candidate) -> bool:
        return not self.candidates or -self._next_use(candidate.key) > self._heap.first()[0]

    def _rank(self, candidate: Candidate) -> None:
        self._heap.push(candidate.key, -self._next_use(candidate.key))

    def _choose(self) -> tuple[Hashable, int]:
        return self._heap.first()[1], 1
