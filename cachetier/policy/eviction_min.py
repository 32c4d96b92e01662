"""Belady's MIN: what is used last of all goes first. Only a simulator knows that; it is the bound of all others."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.cachetier.policy.eviction_heap import EvictionHeap


class MinPolicy(EvictionPolicy):
    """`next_use` of a key grows with the time of it; infinity for never. A page at a time: its parent goes later."""

    def __init__(self, next_use: Callable[[Hashable], float]) -> None:
        super().__init__()
        self._next_use = next_use
        self._heap = EvictionHeap()

    def admits(self, candidate: Candidate) -> bool:
        return not self.candidates or -self._next_use(candidate.key) > self._heap.first()[0][0]

    def _rank(self, candidate: Candidate) -> None:
        self._heap.push(candidate.key, (-self._next_use(candidate.key),))

    def _unrank(self, candidate: Candidate) -> None:
        self._heap.discard(candidate.key)

    def _choose(self) -> tuple[Hashable, int]:
        return self._heap.first()[1], 1
