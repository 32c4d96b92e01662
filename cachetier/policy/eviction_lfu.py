"""Least frequently used first, a page at a time, with dynamic aging.

A page's rank is its uses plus the rank of the last victim when it was offered: what was popular once, and is not any
more, is overtaken by what is used now instead of staying for good.
"""

from __future__ import annotations

from collections.abc import Hashable

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.cachetier.policy.eviction_heap import EvictionHeap


class LfuPolicy(EvictionPolicy):
    """By the number of uses; equals by the time of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._heap = EvictionHeap()
        self._age = 0.0

    def _rank(self, candidate: Candidate) -> None:
        self._heap.push(candidate.key, (self._age + candidate.num_uses, candidate.last_used_s))

    def _unrank(self, candidate: Candidate) -> None:
        self._heap.discard(candidate.key)

    def _choose(self) -> tuple[Hashable, int]:
        (age, _), key = self._heap.first()
        self._age = age
        return key, 1  # the page before it may have been used more often
