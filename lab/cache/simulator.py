"""A trace against tiers under a policy: what is found where, what moves, how long first tokens take.

The tiers are those of `mneme.cachetier.node`, with blocks of a trace for chunks and not a byte of KV. What is computed
is put into the device, into the host's memory if it is worth what would go for it there, and onto the disk; a block may
be in all of them. Where a node keeps a share of its memory free, nothing is kept free here.

The clock is the trace's. Nothing queues and nothing is busy: a request finds what was used before it, and its blocks
are there for the next one; how much of it is loaded and how much computed again, the engines' controller decides. With
`queue` the policy sees so many requests that come next, as if they waited. With `prefetch` what they will use is
brought from the disk to the host before (AttentionStore 3.3.1), as much as the disk reads between two arrivals, for as
many of them as the host holds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast, get_args

from mneme.cachetier.chunk.keys import LineageKind
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.names import Edge, EvictionPolicyName, TierName
from mneme.cachetier.node.index import BLOCK_BYTES, ChunkTier, Entry, NodeIndex
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.eviction import EvictionPolicy, make_policy
from mneme.cachetier.policy.load_controller import Loadable, LoadController
from mneme.errors import ConfigError, shown
from mneme.lab.cache.baselines import FifoPolicy, MinPolicy
from mneme.lab.cache.costs import Rates
from mneme.lab.cache.traces import TraceRequest

SIMULATED_POLICIES: tuple[str, ...] = (*get_args(EvictionPolicyName), "fifo", "min")
_DEVICE, _HOST, _DISK = range(3)
_KEY_BYTES = 8  # of a block's id
_TICK_S = 1e-6  # between requests of one timestamp: uses are in order
_UNBOUNDED = 2**50  # what policies are told of a tier without a bound
_EDGES: tuple[Edge, ...] = ("host", "disk")  # of the tiers under the device


@dataclass(slots=True)
class TierOutcome:
    """Blocks."""

    num_found: int
    num_written: int  # in the device, blocks that were computed or loaded
    num_read: int  # from here to the device, or to the host; what is faster computed again is not read
    num_prefetched: int  # from the disk, ahead of their use
    num_held: int  # at the end


@dataclass(slots=True)
class Outcome:
    """Holds the figures of one run; one entry of `tiers` for each capacity."""

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


def rank(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent do not pass."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1]


class FirstToken(NamedTuple):
    ttft_s: float
    compute_s: float
    loaded: tuple[int, ...]  # blocks by tier: a beginning of what was found, the rest is computed again


class SimulatedLoads:
    """Requests that come one at a time; each block is a chunk."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._controller = LoadController(costs)

    def first_token(self, input_tokens: int, block_tokens: int, found: Sequence[int]) -> FirstToken:
        """`found`: blocks by tier, device first; those nearer to the head are in faster tiers."""
        num_resident, below = found[0], list(zip(_EDGES, found[1:], strict=False))
        if not any(found[1:]):  # nothing to plan
            num_new = max(input_tokens - num_resident * block_tokens, 1)
            compute_s = self._costs.prefill_s(num_new, input_tokens - num_new)
            return FirstToken(compute_s, compute_s, tuple(found))
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
        """Return how many the disk gives in so long."""
        return seconds / self._costs.edge_s("disk", self.block_bytes(block_tokens))

    def block_bytes(self, block_tokens: int) -> int:
        return block_tokens * self._costs.calibration.kv_bytes_per_token


class BlockTier(ChunkTier):
    """A tier of blocks without bytes. `capacity` in blocks; None is without a bound."""

    def __init__(self, index: NodeIndex, name: TierName, capacity: int | None, policy: EvictionPolicy) -> None:
        super().__init__(index, policy, (_UNBOUNDED if capacity is None else capacity) * BLOCK_BYTES)
        self.name, self.capacity = name, capacity
        self.num_found = self.num_written = self.num_prefetched = 0

    def num_bytes(self, entry: Entry) -> int:
        return BLOCK_BYTES

    def _removed(self, entry: Entry) -> None:
        """Do nothing: nothing is left to be dropped."""

    def admits_block(self, key: bytes) -> bool:
        return self.admits(key, 1, self.max_blocks)

    def fill_chain(self, chain: Sequence[tuple[bytes, bytes]]) -> bool:
        """Take a chain of which nothing is there but its first parent, if all have room; its end alone is ranked."""
        if not chain or self.taken_blocks + len(chain) > self.max_blocks or any(key in self.index for _, key in chain):
            return False
        first_parent = chain[0][0]
        if first_parent and first_parent not in self:
            return False
        now_s = self.index.clock()
        entries = [Entry(key, parent, b"", b"", LineageKind.PREFIX, 0, now_s) for parent, key in chain]
        self.add_chain(entries)
        self.num_written += len(entries)
        return True

    def add_block(self, key: bytes, parent: bytes, spared: Container[bytes] = ()) -> bool:
        """A block comes if there is room; what it follows does not go for it. Whether it is there now."""
        is_full = self.taken_blocks >= self.max_blocks
        if is_full:
            self.index.hold(parent)
        if is_taken := self.reserve(key, b"", 1, spared=spared):
            entry = self.index.get(key)
            if entry is None:
                entry = Entry(key, parent, b"", b"", LineageKind.PREFIX, 0, self.index.clock())
            self.add(entry)
            self.num_written += 1
        if is_full:
            self.index.release(parent)
        return is_taken


class BlockTiers:
    """A device over one node's memory and disk, as many of these as there are capacities."""

    def __init__(
        self,
        capacities: Sequence[int | None],
        make_policy: Callable[[int, int | None], EvictionPolicy],
        clock: Callable[[], float],
    ) -> None:
        self.engine, self.node = NodeIndex(clock), NodeIndex(clock)
        names: tuple[TierName, ...] = ("host", "host", "disk")  # nobody asks for the device's
        self.tiers: list[BlockTier] = [
            BlockTier(self.node if place else self.engine, names[place], capacity, make_policy(place, capacity))
            for place, capacity in reversed([*enumerate(capacities)])
        ][::-1]

    def use(self, keys: Sequence[bytes]) -> list[int]:
        """One request; how many of its blocks were found in each tier, from its first on."""
        found, num_found = [0] * len(self.tiers), 0
        for key in keys:
            entry, place = self.engine.get(key) if num_found == found[_DEVICE] else None, _DEVICE
            if entry is not None:
                self.engine.use(entry)
            elif (entry := self.node.get(key)) is not None:
                self.node.use(entry)
                place = next(place for place, tier in enumerate(self.tiers) if place > _DEVICE and key in tier)
            else:
                break
            num_found += 1
            found[place] += 1
        for tier, count in zip(self.tiers, found, strict=True):
            tier.num_found += count
        chain = [*zip((b"", *keys), keys, strict=False)]
        self._compute(chain[found[_DEVICE] :], self.tiers[:1])
        self._compute(chain[num_found:], self.tiers[1:])
        return found

    def prefetch(self, keys: Sequence[bytes], limit: int, spared: Container[bytes]) -> int:
        """Bring what is of a request on the disk up to the host, head first, at most so many blocks: how many came."""
        host, num_moved = self.tiers[_HOST], 0
        for parent, key in zip((b"", *keys), keys, strict=False):
            if key in self.engine or key in host:
                continue
            if num_moved == limit or key not in self.node or not host.add_block(key, parent, spared):
                break
            host.num_written -= 1
            host.num_prefetched += 1
            num_moved += 1
        return num_moved

    def leaves_of(self, requests: Iterable[Sequence[bytes]], tier: int) -> list[bytes | None]:
        """Say for each request that waits where its part of a tier ends; None if it has none."""
        return [next((key for key in reversed(keys) if key in self.tiers[tier]), None) for keys in requests]

    def _compute(self, chain: Sequence[tuple[bytes, bytes]], tiers: Sequence[BlockTier]) -> None:
        """Put blocks, each behind its parent, into the device or into the node, as far as they can be found there."""
        if len(tiers) == 1 and tiers[0].fill_chain(chain):
            return
        for parent, key in chain:
            if not parent or any(parent in tier for tier in tiers):
                for tier in tiers:  # a disk takes what it has room for, as a node's does
                    if key not in tier and (tier.name == "disk" or tier.admits_block(key)):
                        tier.add_block(key, parent)
            if tiers and key not in tiers[0].index:
                tiers[0].index.mark_gone(key)  # as a node's writer does: when it comes again, it has returned


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
        self._leaves: dict[int, list[bytes | None]] = {}  # that the queue will use, by tier, once asked for
        uses = _places_by_block(trace) if policy == "min" else {}
        self.tiers = BlockTiers(capacities, partial(self._policy, policy, uses), lambda: self._now_s)
        num_blocks = sum(_UNBOUNDED if capacity is None else capacity for capacity in capacities[_HOST:])
        for index, tier in enumerate(self.tiers.tiers):
            tier.policy.set_queue(partial(self._waiting, index), num_blocks if index else None)

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
            TierOutcome(tier.num_found, tier.num_written, num_read, tier.num_prefetched, len(tier))
            for tier, num_read in zip(self.tiers.tiers, self._num_read(), strict=True)
        ]
        return outcome

    def _play(self, request: TraceRequest, outcome: Outcome) -> None:
        found = self.tiers.use(_keys(request))
        timing = self._loads.first_token(request.input_tokens, request.block_tokens, found)
        self._unread -= sum(timing.loaded[_DISK:])  # who needs it now goes first
        self._loaded = [sum(pair) for pair in zip(self._loaded, timing.loaded, strict=True)]
        outcome.num_requests += 1
        outcome.num_blocks += len(request.block_ids)
        outcome.num_found += sum(found)
        outcome.num_recomputed += sum(found) - sum(timing.loaded)
        outcome.compute_s += timing.compute_s
        outcome.ttft_s.append(timing.ttft_s)

    def _prefetch(self, num_readable: float) -> None:
        """Prefetch for what waits, in the order of the queue, the request that is played next included."""
        self._unread = min(self._unread, 1.0) + num_readable  # a block that is begun goes on
        room = self.tiers.tiers[_HOST].capacity
        for request in self._trace[self._place : self._place + self._queue]:
            if room is not None:
                room -= len(request.block_ids)
            if self._unread < 1 or (room is not None and room < 0):
                return
            self._wait_from(self._place)
            spared = {*filter(None, self._waiting(_HOST))}
            self._unread -= self.tiers.prefetch(_keys(request), int(self._unread), spared)

    def _num_read(self) -> list[int]:
        """Blocks that each tier gave to one above; the first gives none."""
        num_read = [0, *self._loaded[1:]]
        if len(num_read) > _DISK:
            num_read[_DISK] += self.tiers.tiers[_HOST].num_prefetched
        return num_read

    def _policy(self, name: str, uses: dict[int, list[int]], place: int, capacity: int | None) -> EvictionPolicy:
        if place and name == "density":  # of engines alone
            name = CacheConfig().eviction
        if name == "min":
            return MinPolicy(self._next_use(uses))
        num_blocks = _UNBOUNDED if capacity is None else capacity
        if name == "fifo":
            return FifoPolicy(num_blocks)
        return make_policy(cast(EvictionPolicyName, name), lambda: self._now_s, num_blocks)

    def _wait_from(self, place: int) -> None:
        """The queue begins there; what was known of it may be so no more."""
        self._next = place
        self._leaves.clear()

    def _waiting(self, tier: int) -> list[bytes | None]:
        if tier not in self._leaves:
            coming = self._trace[self._next : self._next + self._queue]
            self._leaves[tier] = self.tiers.leaves_of(map(_keys, coming), tier)
        return self._leaves[tier]

    def _next_use(self, uses: dict[int, list[int]]) -> Callable[[Hashable], float]:
        def next_use(key: Hashable) -> float:
            assert isinstance(key, bytes)
            places = uses[int.from_bytes(key)]
            index = bisect_right(places, self._place)
            return places[index] if index < len(places) else math.inf

        return next_use


def _places_by_block(trace: Sequence[TraceRequest]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, request in enumerate(trace):
        for block_id in request.block_ids:
            places.setdefault(block_id, []).append(place)
    return places


def _keys(request: TraceRequest) -> list[bytes]:
    return [block_id.to_bytes(_KEY_BYTES) for block_id in request.block_ids]
