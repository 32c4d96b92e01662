"""The simulated cluster on a trace: how near our router comes to one infinite cache, beside others, and how fast.

    python benchmarks/bench_simulated_cluster.py TRACE [--quick] [--only PART]... [--out FOLDER]

TRACE is Mooncake's conversation trace (12,031 requests), or one like it. Parts:

routers   100 replicas, two tenants that ask what the trace has, four times as fast: every router
thousand  1,000 replicas, ten tenants, eight times as fast, the first `--requests`: ours

All is as `mneme simulate cluster` would say: each step is planned by the engine's scheduler over its prefix forest.
Costs are those of Llama-2-70B on eight A800s. Times are those of this process on a CPU. What bounds the speed: steps,
pages and choices among all replicas, in Python and numpy. Memory: 0.7 GB for the first 2,000 requests of `routers`,
3 GB for the first 3,000 of `thousand`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Check, PartResult, Run, at_least, at_most, options_of

from mneme.lab.cache.costs import GB
from mneme.lab.cluster.play import ClusterShape, Simulation
from mneme.lab.cluster.replica import DEFAULT_DEVICE_GB, DEFAULT_RATES, EngineShape
from mneme.lab.cluster.routers import ROUTERS
from mneme.lab.cluster.workload import Turn, read_workload, scaled
from mneme.router.score import MINE, RouterConfig, load_bound

BLOCK_TOKENS = 512
LOADED = load_bound(1000 - 1, 1000, RouterConfig())  # requests at most where the mean is one, by the router's own bound
TITLES = {"routers": "100 replicas", "thousand": "1,000 replicas"}
PARTS = tuple(TITLES)
Rows = list[dict[str, Any]]  # by router, ours first
SHOWN = (
    "router", "replicas", "num_requests", "hit_ratio", "infinite_hit_ratio", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s",
    "itl_p50_s", "load_skew", "in_flight_skew_p99", "busy_share", "simulated_requests_per_minute", "took_s",
)  # fmt: skip


def play(turns: list[Turn], replicas: int, router: str = MINE, *, seed: int = 0) -> dict[str, Any]:
    costs = DEFAULT_RATES.cost_model()
    tokens = int(DEFAULT_DEVICE_GB * GB / costs.calibration.kv_bytes_per_token)
    shape = ClusterShape(replicas=replicas, router=router, engine=EngineShape(capacity_tokens=tokens), seed=seed)
    figures = Simulation(shape, turns, costs).run()
    return {name: figures[name] for name in SHOWN}


def checks_of(part: str, rows: Rows, *, is_quick: bool) -> list[Check]:
    """What a part promises; without rows it was not measured. Few requests do not load the cluster as is promised."""
    if part == "routers":
        speed = rows[0]["simulated_requests_per_minute"] if rows else None
        checks = [at_least("exact_requests_per_minute", speed, 10_000, "1/min")]
        for name in ("ttft_p50_s", "ttft_p90_s"):
            ratio = rows[0][name] / min(row[name] for row in rows[1:]) if rows and not is_quick else None
            checks.append(at_most(f"{name}_of_the_best_other", ratio, 1))
        return checks
    lost = 1 - rows[0]["hit_ratio"] / rows[0]["infinite_hit_ratio"] if rows else None
    return [
        at_most("below_one_infinite_cache_at_1000_replicas", lost, 0.05, ""),
        at_most("most_over_mean_load_at_1000_replicas", rows[0]["load_skew"] if rows else None, 1.25),
        at_most(
            "most_over_mean_in_flight_p99_at_1000_replicas", rows[0]["in_flight_skew_p99"] if rows else None, LOADED
        ),
    ]


def main() -> None:
    parser = options_of(__doc__, quick="400 requests, and no thousand replicas", out=True)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--requests", type=int, default=20_000, help="that the thousand get")
    args = parser.parse_args()
    run = Run("simulated-cluster", args, trace=args.trace.name)
    trace = read_workload(str(args.trace), BLOCK_TOKENS)
    of_100 = scaled(trace, 2, 4.0, args.seed)[: 400 if args.quick else 12_000]
    gc.freeze()
    gc.disable()  # as the command does
    take: dict[str, Callable[[], Rows]] = {
        "routers": lambda: [play(of_100, 100, router, seed=args.seed) for router in ROUTERS],
        "thousand": lambda: [play(scaled(trace, 10, 8.0, args.seed)[: args.requests], 1_000, seed=args.seed)],
    }
    found: dict[str, Rows] = {}
    for part in PARTS:
        found[part] = take[part]() if part in args.only and not (args.quick and part == "thousand") else []
        run.show(
            PartResult(
                name=part,
                title=TITLES[part],
                rows=found[part],
                checks=checks_of(part, found[part], is_quick=args.quick),
            )
        )
        run.keep(found)
    run.end(found)


if __name__ == "__main__":
    main()
