"""A trace against tiers under a policy: what is found where, what moves, how long first tokens take.

The clock is the trace's. Nothing queues and nothing is busy: a request finds what was used before it, and its blocks
are there for the next one; how much of it is loaded and how much computed again, the engines' controller decides. With
`queue` the policy sees so many requests that come next, as if they waited. With
`prefetch` what they will use is brought from the disk to the host before (AttentionStore 3.3.1), as much as the disk
reads between two arrivals, for as many of them as the host holds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast, get_args

from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.eviction import EvictionPolicy, MinPolicy, PolicyName, make_policy
from mneme.cachetier.policy.load_controller import Loadable, LoadController
from mneme.cachetier.simulate.costs import Rates, stands_still
from mneme.cachetier.simulate.tiers import Block, SimulatedTiers
from mneme.cachetier.simulate.traces import TraceRequest
from mneme.cachetier.store import Edge
from mneme.errors import ConfigError, shown

SIMULATED_POLICIES: tuple[str, ...] = (*get_args(PolicyName), "min")
_HOST, _DISK = 1, 2
_TICK_S = 1e-6  # between requests of one timestamp: uses are in order
_UNBOUNDED = 2**62  # what policies are told of a tier without a bound
_EDGES: tuple[Edge, ...] = ("host", "disk")  # of the tiers under the device


@dataclass(slots=True)
class TierOutcome:
    """Blocks."""

    num_found: int
    num_written: int  # from the tier above; in the first, blocks that were computed
    num_read: int  # from here to a tier above; what is faster computed again is not read
    num_prefetched: int  # from the tier below, ahead of their use
    num_held: int  # at the end


@dataclass(slots=True)
class Outcome:
    """Of one run; one entry of `tiers` for each capacity."""

    num_requests: int = 0
    num_blocks: int = 0
    num_found: int = 0
    num_recomputed: int = 0  # of those that were found: loading them would have taken longer
    span_s: float = 0.0
    compute_s: float = 0.0  # of prefills
    tiers: list[TierOutcome] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    @property
    def block_hit_ratio(self) -> float:
        """Leading blocks found over all blocks."""
        return self.num_found / self.num_blocks if self.num_blocks else 0.0


class FirstToken(NamedTuple):
    ttft_s: float
    compute_s: float
    loaded: tuple[int, ...]  # blocks by tier: a beginning of what was found, the rest is computed again


class SimulatedLoads:
    """Requests that come one at a time; each block is a chunk."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._controller = LoadController(costs, stands_still)

    def first_token(self, input_tokens: int, block_tokens: int, found: Sequence[int]) -> FirstToken:
        """`found`: blocks by tier, device first; those nearer to the head are in faster tiers."""
        num_resident, below = found[0], list(zip(_EDGES, found[1:], strict=False))
        block_bytes = self.block_bytes(block_tokens)
        chunks = [Loadable(block_tokens, block_bytes, edge) for edge, count in below for _ in range(count)]
        plan = self._controller.plan(num_resident * block_tokens, input_tokens, chunks)
        left, loaded = plan.num_chunks, [num_resident]
        for _, count in below:
            loaded.append(min(count, left))
            left -= loaded[-1]
        num_new = max(input_tokens - sum(loaded) * block_tokens, 1)  # one token is always computed
        compute_s = self._costs.prefill_s(num_new, input_tokens - num_new)
        return FirstToken(plan.predicted_ttft_s, compute_s, tuple(loaded))

    def disk_blocks(self, seconds: float, block_tokens: int) -> float:
        """How many the disk gives in so long."""
        return seconds / self._costs.edge_s("disk", self.block_bytes(block_tokens))

    def block_bytes(self, block_tokens: int) -> int:
        return block_tokens * self._costs.calibration.kv_bytes_per_token


class CacheSimulator:
    """`capacities` in blocks, the device first, then host and disk; None is without a bound."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        capacities: Sequence[int | None],
        policy: str,
        *,
        costs: CostModel | None = None,
        queue: int = 0,
        prefetch: bool = False,
    ) -> None:
        if policy not in SIMULATED_POLICIES:
            raise ConfigError(f"policy: must be one of {', '.join(SIMULATED_POLICIES)} (got {shown(policy)})")
        if prefetch and not (queue and len(capacities) > _DISK and 0 not in capacities[_HOST:]):
            raise ConfigError("prefetch: needs a queue, a host tier and a disk tier")
        self._trace = trace
        self._loads = SimulatedLoads(costs or Rates().cost_model())
        self._queue = queue
        self._prefetches = prefetch
        self._unread = 0.0  # blocks that the disk could have read ahead by now
        self._loaded = [0] * len(capacities)  # blocks
        self._place = 0  # of the request that is played
        self._next = 0  # of the first that waits
        self._now_s = 0.0
        self._leaves: dict[int, list[Hashable | None]] = {}  # that the queue will use, by tier, once asked for
        uses = _places_by_block(trace) if policy == "min" else {}
        self.tiers = SimulatedTiers(capacities, lambda capacity: self._policy(policy, capacity, uses))
        for index, tier in enumerate(self.tiers.tiers):
            tier.policy.set_queue(partial(self._waiting, index))

    def run(self, on_request: Callable[[], object] = lambda: None) -> Outcome:
        """Play the trace; `on_request` is called after each request."""
        outcome = Outcome()
        for place, request in enumerate(self._trace):
            self._place = place
            idle_s = request.arrival_s - self._trace[max(place - 1, 0)].arrival_s
            self._now_s = max(request.arrival_s, self._now_s + _TICK_S)
            if self._prefetches:
                self._prefetch(self._loads.disk_blocks(idle_s, request.block_tokens))
            self._wait_from(place + 1)
            self._play(request, outcome)
            on_request()
        if self._trace:
            outcome.span_s = self._trace[-1].arrival_s - self._trace[0].arrival_s
        outcome.tiers = [
            TierOutcome(tier.num_found, tier.num_written, num_read, tier.num_prefetched, tier.num_blocks)
            for tier, num_read in zip(self.tiers.tiers, self._num_read(), strict=True)
        ]
        return outcome

    def _play(self, request: TraceRequest, outcome: Outcome) -> None:
        before = [tier.num_found for tier in self.tiers.tiers]
        num_found = self.tiers.use(request.block_ids, self._now_s)
        found = [tier.num_found - count for tier, count in zip(self.tiers.tiers, before, strict=True)]
        timing = self._loads.first_token(request.input_tokens, request.block_tokens, found)
        self._unread -= sum(timing.loaded[_DISK:])  # who needs it now goes first
        self._loaded = [sum(pair) for pair in zip(self._loaded, timing.loaded, strict=True)]
        outcome.num_requests += 1
        outcome.num_blocks += len(request.block_ids)
        outcome.num_found += num_found
        outcome.num_recomputed += num_found - sum(timing.loaded)
        outcome.compute_s += timing.compute_s
        outcome.ttft_s.append(timing.ttft_s)

    def _prefetch(self, num_readable: float) -> None:
        """For what waits, in the order of the queue, the request that is played next included."""
        self._unread = min(self._unread, 1.0) + num_readable  # a block that is begun goes on
        room = self.tiers.tiers[_HOST].capacity
        for request in self._trace[self._place : self._place + self._queue]:
            if room is not None:
                room -= len(request.block_ids)
            if self._unread < 1 or (room is not None and room < 0):
                return
            self._wait_from(self._place)
            self._unread -= self.tiers.prefetch(request.block_ids, _DISK, int(self._unread), self._now_s)

    def _num_read(self) -> list[int]:
        """Blocks that each tier gave to one above; the first gives none."""
        prefetched = [0, *(tier.num_prefetched for tier in self.tiers.tiers)]
        return [0, *(loaded + prefetched[index] for index, loaded in enumerate(self._loaded) if index)]

    def _policy(self, name: str, capacity: int | None, uses: dict[int, list[int]]) -> EvictionPolicy:
        if name == "min":
            return MinPolicy(self._next_use(uses))
        return make_policy(cast(PolicyName, name), lambda: self._now_s, _UNBOUNDED if capacity is None else capacity)

    def _wait_from(self, place: int) -> None:
        """The queue begins there; what was known of it may be so no more."""
        self._next = place
        self._leaves.clear()

    def _waiting(self, tier: int) -> list[Hashable | None]:
        if tier not in self._leaves:
            coming = self._trace[self._next : self._next + self._queue]
            self._leaves[tier] = self.tiers.leaves_of([request.block_ids for request in coming], tier)
        return self._leaves[tier]

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
