"""Who came back comes back again: used once counts as used earlier (after 2Q and LRU-2: Johnson & Shasha 1994, O'Neil
et al. 1993).

Most runs are used once. So one that was counts as older than it is, by `USED_ONCE_S` when it is new and by less the
older it is: it goes before all that returned about as recently, so a flood of new sessions does not flush a tier, and
what returned is not kept for ever either. A run that nobody came back to for `LONG_S` is as old as it is: a tier that
keeps everything for so long is LRU. Both kinds stand in the order of their last use, and a choice compares two.

What the queue will use stays, as in `lookahead`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable

from mneme.cachetier.policy.eviction import Candidate
from mneme.cachetier.policy.eviction_heap import EvictionHeap
from mneme.cachetier.policy.eviction_lookahead import LookaheadPolicy, first_but

# In seconds, as people's pauses are, which have a median of two minutes. Tuned on the first half, by time, of the
# conversation trace; `bench_cache_policies.py` says how. USED_ONCE_S < LONG_S: the order by last use is kept.
USED_ONCE_S = 300.0
LONG_S = 600.0


class ReturningPolicy(LookaheadPolicy):
    """`capacity` is the tier's, in pages."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._returned = EvictionHeap()  # the other heap has what was used once
        self._newest_s = -math.inf

    def admits(self, candidate: Candidate) -> bool:
        """Whether it would not be the next victim itself."""
        key = self._oldest_but(())
        return key is None or self._counted_age_s(candidate) < self._counted_age_s(self.candidates[key])

    def _rank(self, candidate: Candidate) -> None:
        self._newest_s = max(self._newest_s, candidate.last_used_s)
        if candidate.has_returned:
            self._num_pages += candidate.num_pages
            self._returned.push(candidate.key, (candidate.last_used_s,))
        else:
            super()._rank(candidate)

    def _unrank(self, candidate: Candidate) -> None:
        super()._unrank(candidate)
        self._returned.discard(candidate.key)

    def _oldest_but(self, exempt: Collection[Hashable]) -> Hashable | None:
        keys = [key for heap in (self._heap, self._returned) if (key := first_but(heap, exempt)) is not None]
        return max(keys, key=lambda key: self._counted_age_s(self.candidates[key]), default=None)

    def _counted_age_s(self, candidate: Candidate) -> float:
        age_s = self._newest_s - candidate.last_used_s
        return age_s if candidate.has_returned else age_s + USED_ONCE_S * max(0.0, 1 - age_s / LONG_S)
