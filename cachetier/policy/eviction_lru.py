"""Least recently used first, whole runs: pages of one run were last used together."""

from __future__ import annotations

from collections.abc import Hashable

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.cachetier.policy.eviction_heap import EvictionHeap


class LruPolicy(EvictionPolicy):
    """By the time of the last use alone."""

    def __init__(self) -> None:
        super().__init__()
        self._heap = EvictionHeap()

    def _rank(self, candidate: Candidate) -> None:
        self._heap.push(candidate.key, (candidate.last_used_s,))

    def _unrank(self, candidate: Candidate) -> None:
        self._heap.discard(candidate.key)

    def _choose(self) -> tuple[Hashable, int]:
        _, key = self._heap.first()
        return key, self.candidates[key].num_pages
