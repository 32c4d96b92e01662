"""A trace against tiers under a policy: what is found where, what moves, how long first tokens take.

The clock is the trace's. Nothing queues and nothing is busy: a request finds what was used before it, and its blocks
are there for the next one. With `queue` the policy sees so many requests that come next, as if they waited.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from mneme.cachetier.cache_costs import Rates
from mneme.cachetier.eviction import EvictionPolicy
from mneme.cachetier.eviction_min import MinPolicy
from mneme.cachetier.eviction_policies import PolicyName, make_policy
from mneme.cachetier.simulated_tiers import Block, SimulatedTiers
from mneme.cachetier.traces import TraceRequest
from mneme.errors import ConfigError, shown

SIMULATED_POLICIES: tuple[str, ...] = (*get_args(PolicyName), "min")
_TICK_S = 1e-6  # between requests of one timestamp: uses are in order
_UNBOUNDED = 2**62  # what policies are told of a tier without a bound


@dataclass(slots=True)
class TierOutcome:
    """Blocks."""

    num_found: int
    num_written: int  # from the tier above; in the first, blocks that were computed
    num_read: int  # from here to the first tier
    num_held: int  # at the end


@dataclass(slots=True)
class Outcome:
    """Of one run; one entry of `tiers` for each capacity."""

    num_requests: int = 0
    num_blocks: int = 0
    num_found: int = 0
    span_s: float = 0.0
    compute_s: float = 0.0  # of prefills
    tiers: list[TierOutcome] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    @property
    def block_hit_ratio(self) -> float:
        """Leading blocks found over all blocks."""
        return self.num_found / self.num_blocks if self.num_blocks else 0.0


class CacheSimulator:
    """`capacities` in blocks, the device first, then host and disk; None is without a bound."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        capacities: Sequence[int | None],
        policy: str,
        *,
        rates: Rates | None = None,
        queue: int = 0,
    ) -> None:
        if policy not in SIMULATED_POLICIES:
            raise ConfigError(f"policy: must be one of {', '.join(SIMULATED_POLICIES)} (got {shown(policy)})")
        self._trace = trace
        self._rates = rates or Rates()
        self._queue = queue
        self._place = 0  # of the request that is played
        self._now_s = 0.0
        self._leaves: list[Hashable | None] | None = None  # that the queue will use, once asked for
        uses = _places_by_block(trace) if policy == "min" else {}
        self.tiers = SimulatedTiers(capacities, lambda capacity: self._policy(policy, capacity, uses))

    def run(self) -> Outcome:
        outcome = Outcome()
        for place, request in enumerate(self._trace):
            self._place = place
            self._now_s = max(request.arrival_s, self._now_s + _TICK_S)
            self._leaves = None
            self._play(request, outcome)
        if self._trace:
            outcome.span_s = self._trace[-1].arrival_s - self._trace[0].arrival_s
        outcome.tiers = [
            TierOutcome(tier.num_found, tier.num_written, tier.num_read, tier.num_blocks) for tier in self.tiers.tiers
        ]
        return outcome

    def _play(self, request: TraceRequest, outcome: Outcome) -> None:
        before = [tier.num_found for tier in self.tiers.tiers]
        num_found = self.tiers.use(request.block_ids, self._now_s)
        found = [tier.num_found - count for tier, count in zip(self.tiers.tiers, before, strict=True)]
        timing = self._rates.first_token(request.input_tokens, request.block_tokens, found)
        outcome.num_requests += 1
        outcome.num_blocks += len(request.block_ids)
        outcome.num_found += num_found
        outcome.compute_s += timing.compute_s
        outcome.ttft_s.append(timing.ttft_s)

    def _policy(self, name: str, capacity: int | None, uses: dict[int, list[int]]) -> EvictionPolicy:
        if name == "min":
            return MinPolicy(self._next_use(uses))
        policy = make_policy(cast(PolicyName, name), lambda: self._now_s, _UNBOUNDED if capacity is None else capacity)
        policy.set_queue(self._waiting)
        return policy

    def _waiting(self) -> list[Hashable | None]:
        if self._leaves is None:
            coming = self._trace[self._place + 1 : self._place + 1 + self._queue]
            self._leaves = self.tiers.leaves_of([request.block_ids for request in coming])
        return self._leaves

    def _next_use(self, uses: dict[int, list[int]]) -> Callable[[Hashable], float]:
        def next_use(key: Hashable) -> float:
            assert isinstance(key, Block)
            places = uses[key.key]
            index = bisect_right(places, self._place)
            return places[index] if index < len(places) else math.inf

        return next_use


def _places_by_block(trace: Sequence[TraceRequest]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, request in enumerate(trace):
        for block_id in request.block_ids:
            places.setdefault(block_id, []).append(place)
    return places
