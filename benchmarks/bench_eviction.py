"""Eviction policies: what a turn costs with 100 to 100,000 stored sessions, and hit rates on traces of conversations.

    python benchmarks/bench_eviction.py [--quick] [--seed 0]

Policy only, one thread, no model. *Cost*: a pool full of sessions of four pages, 64 requests waiting; a turn of a
stored session that needs a page more, and a new session of four pages, both of which evict. The sizes take turns in one
run, medians. Bound: Python objects that are not in the processor's caches when there are many, and the logarithm of a
heap. A step is taken to last 2 ms, what `bench_step_overhead.py` promises for a step beside its arithmetic: real ones
are longer.

*Hit rate*: prompt tokens found over prompt tokens, in simulated time with the forest's own code, for pools from a part
of what the sessions that are alive need to all of it, at loads without a queue, with a short one and a growing one.
Bound: a pool that never evicts. A session begins with one of a few system prompts, then takes turns: it asks, waits for
a free place, is answered, thinks, asks again with the whole history. A turn holds its pages, those of its answer too,
for as long as the model would take: uncached prompt tokens at the rate of prefill, then the answer at that of decode.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, get_args

from harness import Check, Run, at_most, options_of

from mneme.cachetier.names import PolicyName
from mneme.cachetier.policy.eviction import make_policy
from mneme.replicas.config import EngineConfig
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.pages import Owner
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.store import OutOfPages

PAGE_SIZE = 32
_VOCAB = list(range(32_000))
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT = EngineConfig().eviction
NUM_STORED = (100, 1_000, 10_000, 100_000)
SESSION_PAGES = 4
NUM_WAITING = 64
LOADS = {"no queue": 1.0, "short queue": 1.8, "long queue": 2.5}  # sessions per second: 32 places serve about 1.7
POOLS = (1500, 2500, 4000)  # pages
STEP_US = 2000.0
MAX_GROWTH = 0.05  # of a step
MAX_GAP = 0.01  # of the default's hit rate to the best


class Cost(NamedTuple):
    """Medians of one turn, microseconds."""

    stored_us: float
    new_us: float
    p99_us: float


class Store:
    """A pool full of sessions that nobody uses now."""

    def __init__(self, eviction: PolicyName, num_sessions: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now_s = 0.0
        num_pages = num_sessions * SESSION_PAGES
        policy = make_policy(eviction, lambda: self._now_s, num_pages)
        self._forest = PrefixForest(num_pages, PAGE_SIZE, policy=policy, clock=lambda: self._now_s)
        self._owners = [Owner() for _ in range(num_sessions)]  # replaced by new ones as they come, as an engine does
        self._num_sessions = num_sessions
        self._forest.look_ahead(self._waiting)
        for index in range(num_sessions):
            self._turn(self._ids(index, SESSION_PAGES), self._owners[index])
        assert len(self._forest.device.free) == 0

    def stored_turn_us(self) -> float:
        index = self._rng.randrange(self._num_sessions)
        return self._turn(self._ids(index, SESSION_PAGES + 1), self._owners[index])

    def new_turn_us(self) -> float:
        place = self._rng.randrange(self._num_sessions)
        self._forest.abandon(None, owner=self._owners[place])
        self._owners[place] = Owner()
        return self._turn(self._ids(self._rng.randrange(self._num_sessions, 2**31), SESSION_PAGES), self._owners[place])

    def _ids(self, index: int, num_pages: int) -> list[int]:
        return [index, *range(PAGE_SIZE * num_pages - 1)]

    def _waiting(self) -> list[Owner | None]:
        return list(self._owners[:NUM_WAITING])

    def _turn(self, ids: list[int], owner: Owner) -> float:
        self._now_s += self._rng.random()
        forest, started = self._forest, time.perf_counter()
        path = forest.open_path("")
        path.extend(ids, len(ids))
        path.write(ids, len(ids))
        forest.release(path, owner)
        took = time.perf_counter() - started
        forest.drain_moves()
        return took * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """Means of exponential draws, but for `num_turns`, which is geometric."""

    num_sessions: int
    sessions_per_s: float = 1.0
    num_turns: float = 7.58  # ShareGPT as in Pensieve 6.1: turns, tokens asked, tokens answered
    tokens_in: float = 31.26
    tokens_out: float = 180.44
    max_context: int = 2048  # a session ends before it outgrows this
    think_s_per_token: float = 0.1
    min_think_s: float = 5.0
    num_system_prompts: int = 4
    system_tokens: int = 256


class Turn(NamedTuple):
    asked: list[int]
    answer: list[int]
    think_s: float  # before the next turn


class SessionTrace(NamedTuple):
    name: str
    begins_s: float
    system_prompt: list[int]
    turns: list[Turn]


def make_trace(shape: TraceShape, seed: int) -> list[SessionTrace]:
    """Sessions in order of arrival (Poisson); the same for every policy."""
    rng = random.Random(seed)
    prompts = [rng.choices(_VOCAB, k=shape.system_tokens) for _ in range(shape.num_system_prompts)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    begins_s, sessions = 0.0, []
    for index in range(shape.num_sessions):
        begins_s += rng.expovariate(shape.sessions_per_s)
        prompt = rng.choices(prompts, weights)[0]
        turns = _turns(shape, rng, shape.max_context - len(prompt))
        sessions.append(SessionTrace(f"s{index}", begins_s, prompt, turns))
    return sessions


def _turns(shape: TraceShape, rng: random.Random, room: int) -> list[Turn]:
    turns: list[Turn] = []
    while not turns or rng.random() < 1 - 1 / shape.num_turns:
        num_in = 1 + int(rng.expovariate(1 / shape.tokens_in))
        num_out = 1 + int(rng.expovariate(1 / shape.tokens_out))
        room -= num_in + num_out
        if room < 0 and turns:
            break
        think_s = max(shape.min_think_s, shape.think_s_per_token * num_out)
        turns.append(Turn(rng.choices(_VOCAB, k=num_in), rng.choices(_VOCAB, k=num_out), think_s))
    return turns


@dataclass(slots=True)
class Outcome:
    """Sums over all turns."""

    prompt_tokens: int = 0
    found_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.found_tokens / self.prompt_tokens


class _Asked(NamedTuple):
    """A turn from the question to the end of its answer."""

    session: SessionTrace
    number: int  # of the turn, from 0
    prompt: list[int]

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.number]


class _Answered(NamedTuple):
    asked: _Asked
    path: Path


class Simulator:
    """One replica of `num_places` running turns."""

    def __init__(
        self,
        trace: list[SessionTrace],
        num_pages: int,
        eviction: PolicyName,
        *,
        num_places: int = 32,
        prefill_tokens_per_s: float = 4000.0,
        decode_tokens_per_s: float = 50.0,  # of one sequence
    ) -> None:
        self._num_places = num_places
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_tokens_per_s = decode_tokens_per_s
        self._now_s = 0.0
        self._forest = PrefixForest(
            num_pages,
            PAGE_SIZE,
            policy=make_policy(eviction, self._clock, num_pages),
            clock=self._clock,
        )
        self._owner_by_name = {session.name: Owner() for session in trace}
        self._forest.look_ahead(lambda: (self._owner_by_name[asked.session.name] for asked in self._waiting))
        self._waiting: deque[_Asked] = deque()
        self._num_running = 0
        self._serials = itertools.count()
        self._events: list[tuple[float, int, _Asked | _Answered]] = []
        self._outcome = Outcome()
        for session in trace:
            self._at(session.begins_s, _Asked(session, 0, session.system_prompt + session.turns[0].asked))

    def run(self) -> Outcome:
        """Play the whole trace. Raises `OutOfPages` if a turn cannot run even alone."""
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, _Asked):
                self._waiting.append(event)
            else:
                self._end(event)
            while self._waiting and self._num_running < self._num_places and self._begin(self._waiting[0]):
                self._waiting.popleft()
                self._num_running += 1
            if self._waiting and not self._num_running:
                raise OutOfPages
        self._forest.check()
        return self._outcome

    def _clock(self) -> float:
        return self._now_s

    def _at(self, when_s: float, event: _Asked | _Answered) -> None:
        heapq.heappush(self._events, (when_s, next(self._serials), event))

    def _begin(self, asked: _Asked) -> bool:
        """Take the pages of a turn and plan its end; False if they do not fit now."""
        forest, prompt, turn = self._forest, asked.prompt, asked.turn
        ids = prompt + turn.answer
        path = forest.open_path("")
        found = min(path.extend(prompt, len(prompt)), len(prompt) - 1)
        path.extend(ids, len(ids))
        if path.num_new_pages(ids, len(ids)) > forest.device.num_available:
            forest.release(path)
            return False
        path.write(ids, len(ids))
        forest.drain_moves()
        self._outcome.prompt_tokens += len(prompt)
        self._outcome.found_tokens += found
        prefill_s = (len(prompt) - found) / self._prefill_tokens_per_s
        self._at(self._now_s + prefill_s + len(turn.answer) / self._decode_tokens_per_s, _Answered(asked, path))
        return True

    def _end(self, answered: _Answered) -> None:
        (session, number, prompt), turn = answered.asked, answered.asked.turn
        self._forest.release(answered.path, self._owner_by_name[session.name])
        self._num_running -= 1
        if number + 1 < len(session.turns):
            history = prompt + turn.answer
            question = session.turns[number + 1].asked
            self._at(self._now_s + turn.think_s, _Asked(session, number + 1, history + question))


def turn_costs(eviction: PolicyName, sizes: tuple[int, ...], num_turns: int, seed: int) -> dict[int, Cost]:
    """By number of stored sessions."""
    stores = {size: Store(eviction, size, seed) for size in sizes}
    gc.collect()
    times: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in sizes}
    order = list(sizes)
    for _ in range(num_turns):
        order.append(order.pop(0))
        for size in order:
            times[size][0].append(stores[size].stored_turn_us())
            times[size][1].append(stores[size].new_turn_us())
    return {
        size: Cost(statistics.median(a), statistics.median(b), statistics.quantiles(a + b, n=100)[98])
        for size, (a, b) in times.items()
    }


def hit_rates(num_sessions: int, seed: int) -> dict[str, dict[str, float]]:
    """By load and pool, then by policy; the pool "all" never evicts."""
    rates: dict[str, dict[str, float]] = {}
    for load, sessions_per_s in LOADS.items():
        shape = TraceShape(num_sessions=num_sessions, sessions_per_s=sessions_per_s)
        trace = make_trace(shape, seed)
        all_pages = num_sessions * (shape.max_context // PAGE_SIZE + 1)
        for pool, num_pages in [*((str(pages), pages) for pages in POOLS), ("all", all_pages)]:
            names = POLICIES if pool != "all" else (DEFAULT,)
            rates[f"{load}, {pool}"] = {name: Simulator(trace, num_pages, name).run().hit_rate for name in names}
    return rates


def checks_of(costs: dict[PolicyName, dict[int, Cost]], rates: dict[str, dict[str, float]]) -> list[Check]:
    found = []
    for name, by_size in costs.items():
        few, many = by_size[min(NUM_STORED)], by_size.get(max(NUM_STORED))
        growth = None if many is None else max(many.stored_us - few.stored_us, many.new_us - few.new_us) / STEP_US
        title = f"{name}_turn_growth_{min(NUM_STORED)}_to_{max(NUM_STORED)}"
        found.append(at_most(title, growth, MAX_GROWTH, "of a 2 ms step"))
    gap = max(max(by_name.values()) - by_name[DEFAULT] for by_name in rates.values())
    return [*found, at_most("default_to_best_hit_rate", gap, MAX_GAP, "of prompt tokens")]


def main() -> None:
    args = options_of(__doc__, quick="fewer turns, 100,000 sessions under one policy").parse_args()
    num_sessions = 300 if args.quick else 1500
    run = Run("eviction", args, sessions_in_trace=num_sessions)
    sizes = {name: NUM_STORED if name == DEFAULT or not args.quick else NUM_STORED[:-1] for name in POLICIES}
    costs = {name: turn_costs(name, sizes[name], 300 if args.quick else 3000, args.seed) for name in POLICIES}
    print(f"{'policy':10} {'sessions':>9} {'stored turn':>12} {'new session':>12} {'p99':>8}   microseconds")
    for name, by_size in costs.items():
        for size, cost in by_size.items():
            print(f"{name:10} {size:9,} {cost.stored_us:12.1f} {cost.new_us:12.1f} {cost.p99_us:8.1f}")
    rates = hit_rates(num_sessions, args.seed)
    print(f"\n{'load, pages':>18} " + " ".join(f"{name:>10}" for name in POLICIES) + "   prompt tokens found")
    for case, by_name in rates.items():
        print(f"{case:>18} " + " ".join(f"{by_name[n]:10.3f}" if n in by_name else f"{'':>10}" for n in POLICIES))
    run.check(*checks_of(costs, rates))
    turn_us = {name: {size: cost._asdict() for size, cost in by.items()} for name, by in costs.items()}
    run.end({"turn_us": turn_us, "hit_rate": rates})


if __name__ == "__main__":
    main()
