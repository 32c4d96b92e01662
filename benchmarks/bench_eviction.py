"""Eviction policies: what a turn costs with 100 to 100,000 stored sessions, and hit rates on traces of conversations.

    python benchmarks/bench_eviction.py [--quick] [--seed 0]

Policy only, one thread, no model. *Cost*: a pool full of sessions of four pages, 64 requests waiting; a turn of a
stored session that needs a page more, and a new session of four pages, both of which evict. The sizes take turns in one
run, medians. Bound: Python objects that are not in the processor's caches when there are many, and the logarithm of a
heap. A step is taken to last 2 ms, what `bench_step_overhead.py` promises for a step beside its arithmetic: real ones
are longer.

*Hit rate*: prompt tokens found over prompt tokens, `session_simulator.py`, for pools from a part of what the sessions
that are alive need to all of it, at loads without a queue, with a short one and a growing one. Bound: a pool that
never evicts.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from typing import NamedTuple, get_args

from attention.report import Check, at_most, closing_checks, print_check
from session_simulator import PAGE_SIZE, Simulator, TraceShape, make_trace
from workloads import cpu_name, load_average

from mneme.cachetier.policy.eviction import PolicyName, make_policy
from mneme.replicas.config import EngineConfig
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.nodes import Owner

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
        assert self._forest.num_free == 0

    def stored_turn_us(self) -> float:
        index = self._rng.randrange(self._num_sessions)
        return self._turn(self._ids(index, SESSION_PAGES + 1), self._owners[index])

    def new_turn_us(self) -> float:
        place = self._rng.randrange(self._num_sessions)
        self._forest.disown(self._owners[place])
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
        forest.extend(path, ids, len(ids))
        forest.write(path, ids, len(ids))
        forest.release(path, owner)
        took = time.perf_counter() - started
        forest.drain_moves()
        return took * 1e6


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, 100,000 sessions under one policy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    load_before, started = load_average(), time.perf_counter()
    sizes = {name: NUM_STORED if name == DEFAULT or not args.quick else NUM_STORED[:-1] for name in POLICIES}
    costs = {name: turn_costs(name, sizes[name], 300 if args.quick else 3000, args.seed) for name in POLICIES}
    print(f"{'policy':10} {'sessions':>9} {'stored turn':>12} {'new session':>12} {'p99':>8}   microseconds")
    for name, by_size in costs.items():
        for size, cost in by_size.items():
            print(f"{name:10} {size:9,} {cost.stored_us:12.1f} {cost.new_us:12.1f} {cost.p99_us:8.1f}")
    num_sessions = 300 if args.quick else 1500
    rates = hit_rates(num_sessions, args.seed)
    print(f"\n{'load, pages':>18} " + " ".join(f"{name:>10}" for name in POLICIES) + "   prompt tokens found")
    for case, by_name in rates.items():
        print(f"{case:>18} " + " ".join(f"{by_name[n]:10.3f}" if n in by_name else f"{'':>10}" for n in POLICIES))
    checks = checks_of(costs, rates)
    for check in checks:
        print_check(check)
    turn_us = {name: {size: cost._asdict() for size, cost in by.items()} for name, by in costs.items()}
    result = {
        "benchmark": "eviction", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "seed": args.seed,
        "load_average": [load_before, load_average()], "elapsed_s": round(time.perf_counter() - started, 1),
        "sessions_in_trace": num_sessions, "results": {"turn_us": turn_us, "hit_rate": rates},
        **closing_checks(checks),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
