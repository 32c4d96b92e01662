"""Who came back comes back again: used once counts as used earlier (after 2Q and LRU-2: Johnson & Shasha 1994, O'Neil
et al. 1993).

Most runs are used once. So one that was is taken as up to `USED_ONCE_S` older than it is: it goes before all that
returned about as recently, so a flood of new sessions does not flush a tier, and what returned is not kept for ever
either. The longer the last victim had been idle, the less: a tier that keeps everything for `LONG_S` has seen who comes
back, and is LRU. So is one that has not evicted yet.

A run's place does not change as time goes by, so a heap keeps the order. What the queue will use stays, as in
`lookahead`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from mneme.cachetier.eviction import Candidate
from mneme.cachetier.eviction_lookahead import LookaheadPolicy

# In seconds, as people's pauses are, which have a median of two minutes. Tuned on the first half, by time, of the
# conversation trace (`bench_cache_policies.py`).
USED_ONCE_S = 240.0
LONG_S = 900.0


class ReturningPolicy(LookaheadPolicy):
    """`capacity` is the tier's, in pages."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._newest_s = -math.inf
        self._idle_s = math.inf  # of the last victim

    def admits(self, candidate: Candidate) -> bool:
        """Whether it would not be the next victim itself."""
        return not self.candidates or self._age_rank(candidate) > self._heap.first()[0][0]

    def _rank(self, candidate: Candidate) -> None:
        self._newest_s = max(self._newest_s, candidate.last_used_s)
        super()._rank(candidate)

    def _choose(self) -> tuple[Hashable, int]:
        key, num_pages = super()._choose()
        self._idle_s = self._newest_s - self.candidates[key].last_used_s
        return key, num_pages

    def _age_rank(self, candidate: Candidate) -> float:
        older_s = 0.0 if candidate.has_returned else USED_ONCE_S * max(0.0, 1 - self._idle_s / LONG_S)
        return candidate.last_used_s - older_s
