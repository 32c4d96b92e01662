"""Others' rules of routing, after their descriptions, each a few lines, for the simulator to compare with ours.

A policy names a replica, by its number, and counts what it has sent itself, as all of these do. Rules that others state
in characters or pages are in blocks here. Where another system is told what its workers hold (Dynamo, llm-d), so it is
here, at once and exactly; where it only remembers what it sent (Ray, SGLang), so it does here.

ray        PrefixCacheAffinityRouter (Ray Serve LLM 2.60): match rate over 0.1: the owners of the deepest match, else
           the replica of the smallest tree; unless queues differ by more than a threshold, infinite by default
sglang     the gateway's cache_aware: least requests where (max - min) > 64 and max > 1.5 min, else by match rate > 0.3
llm-d      prefix-cache-affinity-filter: those that hold >= 80%, unless the best of them waits 18 s longer than the best
           of all (tokens in flight / prefill rate); of these the one with the least tokens in flight
dynamo     overlap weight * blocks of prefill, those in progress too, + blocks of decode; the least, or by softmax
ring       a consistent hash ring of 100 places for each replica (Ray's ConsistentHashRouter)
polled     whoever reported the least load, until the next report
"""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mneme.cachetier.policy.cost_model import CostModel
from mneme.lab.cluster.simulated_replica import Status
from mneme.lab.cluster.workload import Turn
from mneme.replicas.forest.tree import DEVICE, HOST
from mneme.router.token_hashes import text_hash

_RATED_TOKENS = 8192  # of a long prompt


class World(NamedTuple):
    """What routers of one simulation share."""

    costs: CostModel
    clock: Callable[[], float]
    block_tokens: int
    hash_by_block: dict[int, int]


class Router:
    """Selects replicas. `place` counts the request there until `ended`."""

    def place(self, turn: Turn) -> int:
        raise NotImplementedError

    def started(self, turn: Turn, num_found: int) -> None:
        """Its first token has come, behind so many blocks that were not computed."""

    def ended(self, turn: Turn) -> None: ...

    def set_replicas(self, replicas: Sequence[int]) -> None: ...

    def restarted(self, replica: int) -> None:
        """The replica is there, and holds nothing."""

    def placed(self, replica: int, block_id: int, tier: int | None) -> None:
        """A block came to the replica's device, or to its host memory alone; None: it is in neither any more."""

    def expected(self, turn: Turn) -> int | None:
        """Return the blocks that it took the chosen replica to hold; None: it does not care."""

    def elsewhere_tokens(self, turn: Turn) -> int:
        """Return the tokens that it took another one to hold."""
        return 0

    def polled(self) -> None:
        """Ask replicas for their load."""

    def reported(self, replica: int, status: Status) -> None:
        """A step has ended."""


class Holders:
    """Which replicas hold which block: a bit for each replica in one number, so that a thousand cost as ten do."""

    def __init__(self, most_blocks: int | None = None) -> None:
        self._bits: OrderedDict[int, int] = OrderedDict()
        self._most = most_blocks

    def add(self, replica: int, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._bits[block_id] = self._bits.pop(block_id, 0) | 1 << replica
        while self._most is not None and len(self._bits) > self._most:
            self._bits.popitem(last=False)

    def remove(self, replica: int, block_id: int) -> None:
        if bits := self._bits.get(block_id, 0) & ~(1 << replica):
            self._bits[block_id] = bits
        else:
            self._bits.pop(block_id, None)

    def drop(self, replica: int) -> None:
        for block_id in list(self._bits):
            self.remove(replica, block_id)

    def deepest(self, block_ids: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many leading blocks are held by one replica, and by which."""
        depth, bits = 0, -1
        for block_id in block_ids:
            both = bits & self._bits.get(block_id, 0)
            if not both:
                break
            depth, bits = depth + 1, both
        return depth, list(_ones(bits)) if depth else []

    def matched(self, block_ids: Sequence[int]) -> dict[int, int]:
        """Return the leading blocks of each replica that holds some."""
        found: dict[int, int] = {}
        bits = self._bits.get(block_ids[0], 0) if block_ids else 0
        for depth, block_id in enumerate(block_ids[1:], 1):
            both = bits & self._bits.get(block_id, 0)
            found.update(dict.fromkeys(_ones(bits & ~both), depth))
            bits = both
        found.update(dict.fromkeys(_ones(bits), len(block_ids)))
        return found


class Policy(Router):
    """What all rules share: candidates, their requests and tokens in flight, as sent from here."""

    def __init__(self, rng: random.Random, world: World) -> None:
        self.rng = rng
        self.replicas: list[int] = []
        self.requests: Counter[int] = Counter()
        self.placed_at: dict[int, int] = {}
        self._expected: dict[int, int] = {}

    def choose(self, turn: Turn) -> int:
        raise NotImplementedError

    def place(self, turn: Turn) -> int:
        replica = self.choose(turn)
        self.placed_at[id(turn)] = replica
        self.requests[replica] += 1
        return replica

    def ended(self, turn: Turn) -> None:
        self.requests[self.placed_at.pop(id(turn))] -= 1
        self._expected.pop(id(turn), None)

    def set_replicas(self, replicas: Sequence[int]) -> None:
        for replica in set(self.replicas).difference(replicas):
            self.forget(replica)
        self.replicas = list(replicas)

    def forget(self, replica: int) -> None:
        """The replica is gone."""

    def expected(self, turn: Turn) -> int | None:
        return self._expected.get(id(turn))

    def least(self, among: Sequence[int] | None = None) -> int:
        """Return who has the least requests, the first of equals by chance."""
        among = self.replicas if among is None else among
        fewest = min(self.requests[r] for r in among)
        return self.rng.choice([r for r in among if self.requests[r] == fewest])

    def power_of_two(self) -> int:
        return self.least(self.rng.sample(self.replicas, min(2, len(self.replicas))))


class Polled(Policy):
    def __init__(self, rng: random.Random, world: World) -> None:
        super().__init__(rng, world)
        self._reported: Counter[int] = Counter()

    def choose(self, turn: Turn) -> int:
        return min(self.replicas, key=self._reported.__getitem__)

    def polled(self) -> None:
        self._reported = Counter(self.requests)


class RoundRobin(Policy):
    _next = 0

    def choose(self, turn: Turn) -> int:
        self._next += 1
        return self.replicas[self._next % len(self.replicas)]


class PowerOfTwo(Policy):
    def choose(self, turn: Turn) -> int:
        return self.power_of_two()


class HashRing(Policy):
    _PLACES = 100

    def set_replicas(self, replicas: Sequence[int]) -> None:
        super().set_replicas(replicas)
        places = range(self._PLACES)
        self._ring = sorted((text_hash(f"{r}-{place}"), r) for r in replicas for place in places)

    def choose(self, turn: Turn) -> int:
        return self._ring[bisect.bisect(self._ring, (text_hash(f"s{turn.session}"), -1)) % len(self._ring)][1]


class _Remembering(Policy):
    """Rules of systems that remember what they sent."""

    most_blocks: int | None = None

    def __init__(self, rng: random.Random, world: World) -> None:
        super().__init__(rng, world)
        self.tree, self.size = Holders(self.most_blocks), Counter[int]()

    def forget(self, replica: int) -> None:
        self.tree.drop(replica)
        del self.size[replica]

    def choose(self, turn: Turn) -> int:
        depth, owners = self.tree.deepest(turn.block_ids)
        queues = [self.requests[r] for r in self.replicas]
        replica = self.choose_by(depth / len(turn.block_ids), owners, max(queues), min(queues))
        self._expected[id(turn)] = depth if replica in owners else 0
        self.size[replica] += len(turn.block_ids) - self._expected[id(turn)]
        self.tree.add(replica, turn.block_ids)
        return replica

    def choose_by(self, match_rate: float, owners: Sequence[int], most: int, fewest: int) -> int:
        """`owners` have that share of the prompt; `most` and `fewest` requests has a replica."""
        raise NotImplementedError


class RayPrefix(_Remembering):
    match_rate, imbalanced = 0.1, math.inf

    def choose_by(self, match_rate: float, owners: Sequence[int], most: int, fewest: int) -> int:
        if most - fewest > self.imbalanced:
            return self.power_of_two()
        if match_rate < self.match_rate or not owners:
            smallest = min(self.size[r] for r in self.replicas)
            return self.least([r for r in self.replicas if self.size[r] == smallest])
        return self.least(owners)


class SGLangGateway(_Remembering):
    cache_threshold, balance_abs, balance_rel, most_blocks = 0.3, 64, 1.5, 2**20

    def choose_by(self, match_rate: float, owners: Sequence[int], most: int, fewest: int) -> int:
        is_imbalanced = most - fewest > self.balance_abs and most > self.balance_rel * fewest
        return owners[0] if match_rate > self.cache_threshold and not is_imbalanced else self.least()


class _Informed(Policy):
    """Rules of systems that workers tell what they hold."""

    def __init__(self, rng: random.Random, world: World) -> None:
        super().__init__(rng, world)
        self.index = Holders()

    def placed(self, replica: int, block_id: int, tier: int | None) -> None:
        """What the engine's host memory has is not gone."""
        if tier == DEVICE:
            self.index.add(replica, (block_id,))
        elif tier != HOST:
            self.index.remove(replica, block_id)

    def forget(self, replica: int) -> None:
        self.index.drop(replica)

    def restarted(self, replica: int) -> None:
        self.forget(replica)


class LlmdFilter(_Informed):
    affinity, penalty_s = 0.8, 18.0

    def __init__(self, rng: random.Random, world: World) -> None:
        super().__init__(rng, world)
        self.tokens: Counter[int] = Counter()
        self.token_s = world.costs.prefill_s(_RATED_TOKENS, 0) / _RATED_TOKENS

    def choose(self, turn: Turn) -> int:
        matched = self.index.matched(turn.block_ids)
        sticky = [r for r, depth in matched.items() if depth >= self.affinity * len(turn.block_ids)]
        among = self.replicas
        if sticky:
            best, other = (min(self.tokens[r] for r in each) for each in (sticky, self.replicas))
            if (best - other) * self.token_s <= self.penalty_s:
                among = sticky
        fewest = min(self.tokens[r] for r in among)
        replica = self.rng.choice([r for r in among if self.tokens[r] == fewest])
        self._expected[id(turn)] = matched.get(replica, 0)
        self.tokens[replica] += turn.input_tokens
        return replica

    def ended(self, turn: Turn) -> None:
        self.tokens[self.placed_at[id(turn)]] -= turn.input_tokens
        super().ended(turn)


class DynamoCost(_Informed):
    overlap_weight, temperature = 1.0, 0.0

    def __init__(self, rng: random.Random, world: World) -> None:
        super().__init__(rng, world)
        self.prefill: Counter[int] = Counter()  # blocks of prompts that are computed or wait
        self.decode: Counter[int] = Counter()  # of all requests
        self._waiting: dict[int, int] = {}

    def choose(self, turn: Turn) -> int:
        matched, size = self.index.matched(turn.block_ids), len(turn.block_ids)
        costs = {
            r: self.overlap_weight * max(self.prefill[r] + size - matched.get(r, 0), 0) + self.decode[r] + size
            for r in self.replicas
        }
        replica = self._draw(costs)
        self._expected[id(turn)] = matched.get(replica, 0)
        self._waiting[id(turn)] = size - matched.get(replica, 0)
        self.prefill[replica] += self._waiting[id(turn)]
        self.decode[replica] += size
        return replica

    def _draw(self, costs: dict[int, float]) -> int:
        least = min(costs.values())
        if self.temperature <= 0:
            return self.rng.choice([r for r, cost in costs.items() if cost == least])
        spread = (max(costs.values()) - least) or 1.0
        weights = [math.exp((least - cost) / spread / self.temperature) for cost in costs.values()]
        return self.rng.choices(list(costs), weights)[0]

    def started(self, turn: Turn, num_found: int) -> None:
        self.prefill[self.placed_at[id(turn)]] -= self._waiting.pop(id(turn), 0)

    def ended(self, turn: Turn) -> None:
        self.started(turn, 0)
        self.decode[self.placed_at[id(turn)]] -= len(turn.block_ids)
        super().ended(turn)


def _ones(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
