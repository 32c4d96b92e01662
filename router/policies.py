"""Others' rules of routing, after their descriptions, each a few lines: `router.policy` serves by them.

The simulator and benchmarks/bench_policies.py compare them with ours.

A policy names a replica, by its number, and counts what it has sent itself, as all of these do. Rules that others state
in characters or pages are in blocks here. Where another system is told what its workers hold (Dynamo, llm-d), so it is
here; where it only remembers what it sent (Ray, SGLang), so it does here.

ray        PrefixCacheAffinityRouter (Ray Serve LLM 2.60): match rate over 0.1: the owners of the deepest match, else
           the replica of the smallest tree; unless queues differ by more than a threshold, infinite by default
sglang     the gateway's cache_aware: least requests where (max - min) > 64 and max > 1.5 min, else by match rate > 0.3
llm-d      prefix-cache-affinity-filter: those that hold >= 80%, unless the best of them waits 18 s longer than the best
           of all (tokens in flight / prefill rate); of these the one with the least tokens in flight
dynamo     overlap weight * blocks of prefill, those in progress too, + blocks of decode; the least, or by softmax
hash       a session's replica by hash, and nothing else
ring       a consistent hash ring of 100 places for each replica (Ray's ConsistentHashRouter)
"""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, Protocol

from mneme.router.token_hashes import text_hash

MINE: Final = "mneme"  # predicted seconds (`score.py`), no rule of these
PolicyName = Literal[
    "mneme", "random", "round-robin", "power-of-two", "hash", "ring", "ray", "sglang", "llm-d", "dynamo"
]


class Request(Protocol):
    """What a policy looks at. It is told of the same object until it has ended."""

    @property
    def block_ids(self) -> Sequence[int]:
        """Names of its full blocks, each of which stands for all before it too."""

    @property
    def session(self) -> object:
        """Return what requests have in common that go to one replica; of one alone, any number."""

    @property
    def input_tokens(self) -> int: ...


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


class Policy:
    """What all rules share: candidates, their requests and tokens in flight, as sent from here.

    `place` counts a request at the replica that it names until `ended`.
    """

    def __init__(self, rng: random.Random, token_s: Callable[[], float]) -> None:
        """`token_s`: what a token of a long prompt takes, as far as it is known."""
        self.rng, self.token_s = rng, token_s
        self.replicas: list[int] = []
        self.names: dict[int, str] = {}
        self.requests: Counter[int] = Counter()
        self.placed: dict[int, int] = {}
        self._expected: dict[int, int] = {}

    def choose(self, request: Request) -> int:
        raise NotImplementedError

    def place(self, request: Request) -> int:
        replica = self.choose(request)
        self.placed[id(request)] = replica
        self.requests[replica] += 1
        return replica

    def started(self, request: Request) -> None: ...

    def ended(self, request: Request) -> None:
        self.requests[self.placed.pop(id(request))] -= 1
        self._expected.pop(id(request), None)

    def set_replicas(self, replicas: Sequence[int], names: Sequence[str] = ()) -> None:
        """Take candidates; `names` are the same in every ingress, for rules that hash them; else the numbers are."""
        for replica in set(self.replicas).difference(replicas):
            self.forget(replica)
        self.replicas = list(replicas)
        self.names = dict(zip(replicas, names or map(str, replicas), strict=True))

    def forget(self, replica: int) -> None:
        """The replica is gone."""

    def restarted(self, replica: int) -> None: ...

    def stored(self, replica: int, block_id: int, *, is_there: bool) -> None: ...

    def expected(self, request: Request) -> int | None:
        return self._expected.get(id(request))

    def polled(self) -> None: ...

    def reported(self, replica: int, status: object) -> None: ...

    def least(self, among: Sequence[int] | None = None) -> int:
        """Return who has the least requests, the first of equals by chance."""
        among = self.replicas if among is None else among
        fewest = min(self.requests[r] for r in among)
        return self.rng.choice([r for r in among if self.requests[r] == fewest])

    def power_of_two(self) -> int:
        return self.least(self.rng.sample(self.replicas, min(2, len(self.replicas))))


class Random(Policy):
    def choose(self, request: Request) -> int:
        return self.rng.choice(self.replicas)


class RoundRobin(Policy):
    _next = 0

    def choose(self, request: Request) -> int:
        self._next += 1
        return self.replicas[self._next % len(self.replicas)]


class PowerOfTwo(Policy):
    def choose(self, request: Request) -> int:
        return self.power_of_two()


class SessionHash(Policy):
    def set_replicas(self, replicas: Sequence[int], names: Sequence[str] = ()) -> None:
        super().set_replicas(replicas, names)
        self.replicas.sort(key=self.names.__getitem__)

    def choose(self, request: Request) -> int:
        return self.replicas[text_hash(f"s{request.session}") % len(self.replicas)]


class HashRing(Policy):
    _PLACES = 100

    def set_replicas(self, replicas: Sequence[int], names: Sequence[str] = ()) -> None:
        super().set_replicas(replicas, names)
        places = range(self._PLACES)
        self._ring = sorted((text_hash(f"{self.names[r]}-{place}"), r) for r in replicas for place in places)

    def choose(self, request: Request) -> int:
        return self._ring[bisect.bisect(self._ring, (text_hash(f"s{request.session}"), -1)) % len(self._ring)][1]


class RayPrefix(Policy):
    match_rate, imbalanced = 0.1, math.inf

    def __init__(self, rng: random.Random, token_s: Callable[[], float]) -> None:
        super().__init__(rng, token_s)
        self.tree, self.size = Holders(), Counter[int]()

    def forget(self, replica: int) -> None:
        self.tree.drop(replica)
        del self.size[replica]

    def choose(self, request: Request) -> int:
        depth, owners = self.tree.deepest(request.block_ids)
        queues = [self.requests[r] for r in self.replicas]
        if max(queues) - min(queues) > self.imbalanced:
            replica = self.power_of_two()
        elif depth < self.match_rate * len(request.block_ids) or not depth:
            fewest = min(self.size[r] for r in self.replicas)
            replica = self.least([r for r in self.replicas if self.size[r] == fewest])
        else:
            replica = self.least(owners)
        self._expected[id(request)] = depth if replica in owners else 0
        self.size[replica] += len(request.block_ids) - (depth if replica in owners else 0)
        self.tree.add(replica, request.block_ids)
        return replica


class SGLangGateway(Policy):
    cache_threshold, balance_abs, balance_rel, most_blocks = 0.3, 64, 1.5, 2**20

    def __init__(self, rng: random.Random, token_s: Callable[[], float]) -> None:
        super().__init__(rng, token_s)
        self.tree = Holders(self.most_blocks)

    def forget(self, replica: int) -> None:
        self.tree.drop(replica)

    def choose(self, request: Request) -> int:
        depth, owners = self.tree.deepest(request.block_ids)
        queues = [self.requests[r] for r in self.replicas]
        most, fewest = max(queues), min(queues)
        is_imbalanced = most - fewest > self.balance_abs and most > self.balance_rel * fewest
        matches = depth > self.cache_threshold * len(request.block_ids)
        replica = owners[0] if matches and not is_imbalanced else self.least()
        self._expected[id(request)] = depth if replica in owners else 0
        self.tree.add(replica, request.block_ids)
        return replica


class _Informed(Policy):
    """Rules of systems that workers tell what they hold."""

    def __init__(self, rng: random.Random, token_s: Callable[[], float]) -> None:
        super().__init__(rng, token_s)
        self.index = Holders()

    def stored(self, replica: int, block_id: int, *, is_there: bool) -> None:
        if is_there:
            self.index.add(replica, (block_id,))
        else:
            self.index.remove(replica, block_id)

    def forget(self, replica: int) -> None:
        self.index.drop(replica)

    def restarted(self, replica: int) -> None:
        self.forget(replica)


class LlmdFilter(_Informed):
    affinity, penalty_s = 0.8, 18.0

    def __init__(self, rng: random.Random, token_s: Callable[[], float]) -> None:
        super().__init__(rng, token_s)
        self.tokens: Counter[int] = Counter()

    def choose(self, request: Request) -> int:
        matched = self.index.matched(request.block_ids)
        sticky = [r for r, depth in matched.items() if depth >= self.affinity * len(request.block_ids)]
        among = self.replicas
        if sticky:
            best, other = (min(self.tokens[r] for r in each) for each in (sticky, self.replicas))
            if (best - other) * self.token_s() <= self.penalty_s:
                among = sticky
        fewest = min(self.tokens[r] for r in among)
        replica = self.rng.choice([r for r in among if self.tokens[r] == fewest])
        self._expected[id(request)] = matched.get(replica, 0)
        self.tokens[replica] += request.input_tokens
        return replica

    def ended(self, request: Request) -> None:
        self.tokens[self.placed[id(request)]] -= request.input_tokens
        super().ended(request)


class DynamoCost(_Informed):
    overlap_weight, temperature = 1.0, 0.0

    def __init__(self, rng: random.Random, token_s: Callable[[], float]) -> None:
        super().__init__(rng, token_s)
        self.prefill: Counter[int] = Counter()  # blocks of prompts that are computed or wait
        self.decode: Counter[int] = Counter()  # of all requests
        self._waiting: dict[int, int] = {}

    def choose(self, request: Request) -> int:
        matched, size = self.index.matched(request.block_ids), len(request.block_ids)
        costs = {
            r: self.overlap_weight * max(self.prefill[r] + size - matched.get(r, 0), 0) + self.decode[r] + size
            for r in self.replicas
        }
        replica = self._draw(costs)
        self._expected[id(request)] = matched.get(replica, 0)
        self._waiting[id(request)] = size - matched.get(replica, 0)
        self.prefill[replica] += self._waiting[id(request)]
        self.decode[replica] += size
        return replica

    def _draw(self, costs: dict[int, float]) -> int:
        least = min(costs.values())
        if self.temperature <= 0:
            return self.rng.choice([r for r, cost in costs.items() if cost == least])
        spread = (max(costs.values()) - least) or 1.0
        weights = [math.exp((least - cost) / spread / self.temperature) for cost in costs.values()]
        return self.rng.choices(list(costs), weights)[0]

    def started(self, request: Request) -> None:
        self.prefill[self.placed[id(request)]] -= self._waiting.pop(id(request), 0)

    def ended(self, request: Request) -> None:
        self.started(request)
        self.decode[self.placed[id(request)]] -= len(request.block_ids)
        super().ended(request)


POLICIES: dict[str, Callable[[random.Random, Callable[[], float]], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "hash": SessionHash,
    "ring": HashRing,
    "ray": RayPrefix,
    "sglang": SGLangGateway,
    "llm-d": LlmdFilter,
    "dynamo": DynamoCost,
}


def _ones(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
