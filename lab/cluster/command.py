"""`mneme simulate cache | cluster`; the latter is here: what clients would see under a trace, by router.

No Ray, no tensors, no KV.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from mneme.cachetier.names import EvictionPolicyName
from mneme.cachetier.policy.cost_model import CostModel
from mneme.errors import ConfigError, shown
from mneme.lab.cache.command import TRACE_HELP, add_cache_simulation, progress
from mneme.lab.cache.costs import GB, load_costs
from mneme.lab.cache.synthetic import PREFIX
from mneme.lab.cache.traces import BLOCK_OPTION
from mneme.lab.cluster.routers import ROUTERS
from mneme.lab.cluster.scenarios import SCENARIOS
from mneme.lab.cluster.simulated_replica import DEFAULT_DEVICE_GB, DEFAULT_RATES, PAGE_TOKENS, EngineShape
from mneme.lab.cluster.simulation import ClusterShape, Simulation
from mneme.lab.cluster.workload import Turn, read_workload, scaled
from mneme.lab.options import Option, add_options, check_options
from mneme.router.autoscaler import AutoscaleConfig

_SECONDS, _REPLICAS, _GB = (1e-6, 1e6), (1, 10_000), (0.0, 1e9)
_OPTIONS = (
    Option("--replicas", "N", "engines (default 8), or MIN..MAX, which the autoscaler keeps to", str, "8", _REPLICAS),
    Option("--router", "NAME", f"several by commas, or all: {', '.join(ROUTERS)} (default mneme)", default="mneme"),
    Option("--trace", "TRACE", TRACE_HELP, default=PREFIX),
    Option("--scenario", None, "a case in which known rules fail, instead of a trace", choices=list(SCENARIOS)),
    Option("--scale", "N", "so many tenants, each asking what the trace has", int, 1, (1, 1_000)),
    Option("--speed", "X", "play the trace so many times as fast", float, 1.0, _SECONDS),
    Option("--requests", "N", "only the first ones", int, None, (1, 10**9)),
    Option("--concurrency", "N", "sessions at once, whatever their times: a closed loop", int, None, (1, 10**9)),
    Option("--timeout", "S", "clients ask again if no token came by then, three times", float, None, _SECONDS),
    Option("--ingresses", "N", "each with a router of its own (default 1)", int, 1, (1, 1_000)),
    Option(
        "--rates", "FILE", "JSON of measured rates, or a replica's cost model (default: Llama-2-70B on eight A800s)",
        Path,
    ),
    Option("--device-gb", "GB", "for KV, of one replica, in 10^9 bytes (default 400)", float, DEFAULT_DEVICE_GB, _GB),
    Option("--host-gb", "GB", "the host tiers of one node's engines (default 0)", float, 0.0, _GB),
    Option("--replicas-per-node", "N", "that share its memory (default 8)", int, 8, _REPLICAS),
    Option("--policy", None, "which blocks go first (default lru)", str, "lru", None, get_args(EvictionPolicyName)),
    BLOCK_OPTION,
    Option(
        "--max-step-ms", "MS",
        "of a step beside streams (default, as the engine's: 50, or eight times what its decodes take)", float, None,
        _SECONDS,
    ),
    Option("--max-running", "N", "streams of one replica (default 256)", int, 256, (1, 100_000)),
    Option("--max-batch-tokens", "N", "rows of a step (default 8192)", int, 8192, (16, 2**20)),
    Option("--startup", "S", "until a replica answers, with MIN..MAX (default 60)", float, 60.0, _SECONDS),
    Option("--seed", "N", None, int, 0),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    add_cache_simulation(whats.add_parser("cache", help="hit rates, bytes moved and costs of a cache under a trace"))
    cluster = whats.add_parser("cluster", help="times, hit rates and load of a cluster under a trace, by router")
    cluster.set_defaults(run=simulate_cluster)
    # Without defaults, so that what is given is known.
    add_options(cluster, (each._replace(default=argparse.SUPPRESS) for each in _OPTIONS))
    cluster.add_argument("--exact", action="store_true", help="changes nothing: all steps are those of the scheduler")
    cluster.add_argument("--json", action="store_true", help="one line of JSON")


def simulate_cluster(args: argparse.Namespace) -> int:
    """Play the trace with every router. Raises `ConfigError`."""
    given = [each.name.lstrip("-") for each in _OPTIONS if hasattr(args, each.attribute)]
    args = argparse.Namespace(**{each.attribute: each.default for each in _OPTIONS} | vars(args))
    args.replicas, args.autoscale = _replicas(args.replicas)
    check_options(args, _OPTIONS)
    if args.scenario is not None and "router" not in given:
        args.router = ",".join(SCENARIOS[args.scenario].routers)
    names = list(ROUTERS) if args.router == "all" else args.router.split(",")
    for name in names:
        if name not in ROUTERS:
            raise ConfigError(f"router: must be one of {', '.join(ROUTERS)}, or all (got {shown(name)})")
    if args.scenario is not None:
        if ignored := [name for name in given if name not in ("scenario", "router", "seed")]:
            raise ConfigError(f"{', '.join(ignored)}: cannot be given beside --scenario, which has its own")
        shape, turns = SCENARIOS[args.scenario].make(args.seed)
        costs = DEFAULT_RATES.cost_model()
    else:
        costs = DEFAULT_RATES.cost_model() if args.rates is None else load_costs(args.rates)
        turns = scaled(read_workload(args.trace, args.block_tokens), args.scale, args.speed, args.seed)
        turns = turns[: args.requests]
        shape = _shape(args, costs)
        _check_fits(turns, shape)
    gc.freeze()
    gc.disable()  # few of millions of objects refer to each other: looking for those takes a fifth of the time
    try:
        with progress(len(names) * len(turns)) as advance:
            runs = [_run(replace(shape, router=name), turns, costs, args, advance) for name in names]
    finally:
        gc.enable()
        gc.unfreeze()
    if args.json:
        print(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}))
    else:
        shows = () if args.scenario is None else (f"{args.scenario}: {SCENARIOS[args.scenario].shows}",)
        print("\n".join([*shows, *_assumptions(args, costs, shape, turns), "", *table(runs)]))
    return 0


def _shape(args: argparse.Namespace, costs: CostModel) -> ClusterShape:
    kv_bytes = costs.calibration.kv_bytes_per_token
    device_tokens, host_tokens = (int(size * GB / kv_bytes) for size in (args.device_gb, args.host_gb))
    engine = EngineShape(
        max_step_s=None if args.max_step_ms is None else args.max_step_ms / 1e3, max_running=args.max_running,
        max_batch_tokens=args.max_batch_tokens, capacity_tokens=device_tokens,
        host_tokens=host_tokens // args.replicas_per_node,
    )  # fmt: skip
    return ClusterShape(
        replicas=args.replicas, autoscale=args.autoscale, startup_s=args.startup, engine=engine, policy=args.policy,
        ingresses=args.ingresses, timeout_s=args.timeout, concurrency=args.concurrency, seed=args.seed,
    )  # fmt: skip


def _check_fits(turns: Sequence[Turn], shape: ClusterShape) -> None:
    """An engine refuses what can never run; a simulated one would try for ever."""
    longest = max((turn.input_tokens + turn.output_tokens for turn in turns), default=0)
    capacity = (shape.engine.capacity_tokens or 0) // PAGE_TOKENS * PAGE_TOKENS
    if longest > capacity:
        raise ConfigError(f"device-gb: must hold the longest request, of {longest} tokens (got room for {capacity})")


def _replicas(text: str) -> tuple[int, AutoscaleConfig | None]:
    """Read a number, or a range as `mneme serve` has it."""
    if ".." in text:
        autoscale = AutoscaleConfig(**AutoscaleConfig.of_range(text))
        return autoscale.min, autoscale
    if not text.isdecimal():
        raise ConfigError(f"replicas: must be a number, or a range as 1..3 (got {shown(text)})")
    return int(text), None


def _run(
    shape: ClusterShape, turns: Sequence[Turn], costs: CostModel, args: argparse.Namespace, advance: Any
) -> dict[str, Any]:
    figures = Simulation(shape, turns, costs).run(advance)
    names = ("scenario",) if args.scenario else ("trace", "scale", "speed")
    return {**{name: getattr(args, name) for name in names}, "exact": True, "seed": args.seed, **figures}


def _assumptions(args: argparse.Namespace, costs: CostModel, shape: ClusterShape, turns: Sequence[Turn]) -> list[str]:
    """Return what the figures rest on."""
    kv_bytes, decode_s = costs.calibration.kv_bytes_per_token, costs.decode_s(32, 32 * 4096)
    whose = "as measured" if args.rates and not args.scenario else "Llama-2-70B on eight A800s, from their data sheet"
    size = turns[0].block_tokens if turns else 1
    bound, host = shape.engine.capacity_tokens, shape.engine.host_tokens // size
    device = "no bound" if bound is None else f"{bound // size:,}"
    return [
        f"assumed ({whose}):",
        f"  {costs.prefill_s(8192, 0):.3g} s for a prompt of 8,192 tokens, {decode_s * 1e3:.3g} ms for a token of "
        "each of 32 streams behind 4,096 tokens,",
        f"  {kv_bytes:,} bytes of KV per token; blocks in a replica's device + host memory: {device}+{host:,}",
    ]


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """One line per router, and what the columns mean."""
    lines = [
        f"{'':14}{'found, %':>9}{'TTFT, s':>18}{'':>9}{'E2E, s':>9}{'ITL, ms':>9}{'max/mean':>17}{'failed':>8}",
        f"{'router':14}{'':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'p50':>9}{'p50':>9}{'load':>8}{'in use':>9}{'':>8}",
    ]
    lines += [
        f"{run['router']:14}{100 * run['hit_ratio']:9.2f}{run['ttft_p50_s']:9.3f}{run['ttft_p90_s']:9.3f}"
        f"{run['ttft_p99_s']:9.3f}{run['e2e_p50_s']:9.3f}{1e3 * run['itl_p50_s']:9.2f}{run['load_skew']:8.2f}"
        f"{run['in_flight_skew_p99']:9.2f}{run['num_failed']:8}"
        for run in runs
    ]
    one = runs[0]
    lines += [
        f"{run['router']}: {min(sizes)} to {max(sizes)} replicas, {run['replica_s'] / run['span_s']:.1f} on average"
        for run in runs
        if len(sizes := [size for _, size in run["sizes"]]) > 1
    ]
    return [
        *lines,
        f"found: leading blocks of prompts; one cache that holds all finds {100 * one['infinite_hit_ratio']:.2f}%.",
        "  TTFT: with the queue; load: seconds that replicas were busy; in use: requests in flight,",
        f"  the 99th percentile over time. {one['num_requests']:,} requests, "
        f"{one['simulated_requests_per_minute'] or 0:,} a minute of one core",
    ]
