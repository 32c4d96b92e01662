"""`mneme simulate cluster`: what clients of a cluster would see under a trace, by router. No Ray, no tensors, no KV."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.eviction import PolicyName
from mneme.cachetier.simulate.costs import GB, load_costs
from mneme.cachetier.simulate.synthetic import PREFIX
from mneme.cachetier.simulate.traces import MAX_TOKENS
from mneme.cluster.cli.simulate import TRACE_HELP, check_range, progress, size_in_blocks
from mneme.cluster.simulate.exact import PAGE_TOKENS
from mneme.cluster.simulate.play import ClusterShape, Simulation
from mneme.cluster.simulate.replica import DEFAULT_DEVICE_GB, DEFAULT_RATES, EngineShape
from mneme.cluster.simulate.routers import ROUTERS
from mneme.cluster.simulate.scenarios import SCENARIOS
from mneme.cluster.simulate.workload import Turn, read_workload, scaled
from mneme.errors import ConfigError, shown
from mneme.router.autoscaler import AutoscaleConfig

_MAX_REPLICAS, _MAX_COPIES = 10_000, 1_000
_LARGEST_S = 1e6


class _Stored(argparse.Action):
    """Stores a value, and that it was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = *namespace.given, self.dest.replace("_", "-")


def add_cluster_simulation(parser: argparse.ArgumentParser) -> None:
    parser.register("action", None, _Stored)
    parser.set_defaults(given=())
    parser.add_argument(
        "--replicas", default="8", metavar="N", help="engines (default 8), or MIN..MAX, which the autoscaler keeps to"
    )
    parser.add_argument(
        "--router", default="mneme", metavar="NAME", help=f"several by commas, or all: {', '.join(ROUTERS)}"
    )
    parser.add_argument("--trace", default=PREFIX, metavar="TRACE", help=TRACE_HELP)
    parser.add_argument(
        "--scenario", choices=list(SCENARIOS), help="a case in which known rules fail, instead of a trace"
    )
    parser.add_argument(
        "--scale", type=int, default=1, metavar="N", help="so many tenants, each asking what the trace has"
    )
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="play the trace so many times as fast")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first ones")
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="sessions at once, whatever their times: a closed loop"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="clients ask again if no token came by then, three times"
    )
    parser.add_argument(
        "--ingresses", type=int, default=1, metavar="N", help="each with a router of its own (default 1)"
    )
    parser.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="JSON of measured rates, or a replica's cost model (default: Llama-2-70B on eight A800s)",
    )
    parser.add_argument(
        "--device-gb", type=float, metavar="GB", help="for KV, of one replica, in 10^9 bytes (default 400)"
    )
    for name in ("host", "disk"):
        parser.add_argument(
            f"--{name}-gb", type=float, default=0.0, metavar="GB", help=f"the {name} tier of one node (default 0)"
        )
    parser.add_argument(
        "--replicas-per-node", type=int, default=8, metavar="N", help="that share its tiers (default 8)"
    )
    parser.add_argument(
        "--policy", default="lru", choices=get_args(PolicyName), help="which blocks go first (default lru)"
    )
    parser.add_argument("--block-tokens", type=int, default=512, metavar="N", help="tokens in a block (default 512)")
    parser.add_argument(
        "--max-step-ms",
        type=float,
        metavar="MS",
        help="of a step beside streams (default, as the engine's: 50, or eight times what its decodes take)",
    )
    parser.add_argument(
        "--max-running", type=int, default=256, metavar="N", help="streams of one replica (default 256)"
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="every step, by the engine's scheduler and forest, instead of skipping alike ones",
    )
    parser.add_argument(
        "--max-batch-tokens", type=int, default=8192, metavar="N", help="rows of a step, with --exact (default 8192)"
    )
    parser.add_argument(
        "--startup", type=float, default=60.0, metavar="S", help="until a replica answers, with MIN..MAX (default 60)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="one line of JSON")


def simulate_cluster(args: argparse.Namespace) -> int:
    """Play the trace with every router. Raises `ConfigError`."""
    _check(args)
    names = list(ROUTERS) if args.router == "all" else args.router.split(",")
    for name in names:
        if name not in ROUTERS:
            raise ConfigError(f"router: must be one of {', '.join(ROUTERS)}, or all (got {shown(name)})")
    if args.scenario is not None:
        if ignored := [name for name in dict.fromkeys(args.given) if name not in ("scenario", "router", "seed")]:
            raise ConfigError(f"{', '.join(ignored)}: cannot be given beside --scenario, which has its own")
        shape, turns = SCENARIOS[args.scenario](args.seed)
        shape = replace(shape, exact=args.exact)
        costs = DEFAULT_RATES.cost_model()
    else:
        costs = DEFAULT_RATES.cost_model() if args.rates is None else load_costs(args.rates)
        turns = scaled(read_workload(args.trace, args.block_tokens), args.scale, args.speed, args.seed)
        turns = turns[: args.requests]
        shape = _shape(args, costs)
        if args.exact:
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
        print("\n".join([*_assumptions(args, costs, shape), "", *table(runs)]))
    return 0


def _check(args: argparse.Namespace) -> None:
    check_range("scale", args.scale, 1, _MAX_COPIES)
    check_range("ingresses", args.ingresses, 1, 1_000)
    check_range("replicas-per-node", args.replicas_per_node, 1, _MAX_REPLICAS)
    check_range("block-tokens", args.block_tokens, 1, MAX_TOKENS)
    check_range("max-running", args.max_running, 1, 100_000)
    check_range("max-batch-tokens", args.max_batch_tokens, 16, 2**20)
    for name in ("requests", "concurrency"):
        if getattr(args, name) is not None:
            check_range(name, getattr(args, name), 1, 10**9)
    for name in ("speed", "timeout", "startup", "max_step_ms"):
        value = getattr(args, name)
        if value is not None and not 1e-6 <= value <= _LARGEST_S:
            raise ConfigError(f"{name.replace('_', '-')}: must be over 0 and at most {_LARGEST_S:g} (got {value})")
    for name in ("device_gb", "host_gb", "disk_gb"):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= _LARGEST_S * 1e3:
            raise ConfigError(f"{name.replace('_', '-')}: must be from 0 to {_LARGEST_S * 1e3:g} (got {value})")


def _shape(args: argparse.Namespace, costs: CostModel) -> ClusterShape:
    gigabytes = (DEFAULT_DEVICE_GB if args.device_gb is None else args.device_gb, args.host_gb, args.disk_gb)
    block_bytes = args.block_tokens * costs.calibration.kv_bytes_per_token
    blocks = size_in_blocks(gigabytes, block_bytes).blocks
    device_tokens, host_tokens = (int(size * GB / costs.calibration.kv_bytes_per_token) for size in gigabytes[:2])
    if args.exact and args.disk_gb:
        raise ConfigError("disk-gb: cannot be simulated with --exact, which has the engine's own host memory alone")
    replicas, autoscale = _replicas(args.replicas)
    return ClusterShape(
        replicas=replicas,
        autoscale=autoscale,
        startup_s=args.startup,
        engine=EngineShape(
            max_step_s=None if args.max_step_ms is None else args.max_step_ms / 1e3,
            max_running=args.max_running,
            capacity_tokens=device_tokens,
            max_batch_tokens=args.max_batch_tokens,
            host_tokens=host_tokens // args.replicas_per_node,
        ),
        exact=args.exact,
        capacities=tuple(blocks if any(blocks[1:]) else blocks[:1]),
        replicas_per_node=args.replicas_per_node,
        policy=args.policy,
        ingresses=args.ingresses,
        timeout_s=args.timeout,
        concurrency=args.concurrency,
        seed=args.seed,
    )


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
        check_range("replicas", autoscale.min, 1, _MAX_REPLICAS)
        return autoscale.min, autoscale
    if not text.isdecimal():
        raise ConfigError(f"replicas: must be a number, or a range as 1..3 (got {shown(text)})")
    check_range("replicas", int(text), 1, _MAX_REPLICAS)
    return int(text), None


def _run(
    shape: ClusterShape, turns: Sequence[Turn], costs: CostModel, args: argparse.Namespace, advance: Any
) -> dict[str, Any]:
    figures = Simulation(shape, turns, costs).run(advance)
    asked = (
        {"scenario": args.scenario}
        if args.scenario
        else {name: getattr(args, name) for name in ("trace", "scale", "speed")}
    )
    return {**asked, "exact": shape.exact, "seed": args.seed, **figures}


def _assumptions(args: argparse.Namespace, costs: CostModel, shape: ClusterShape) -> list[str]:
    """Return what the figures rest on."""
    kv_bytes, decode_s = costs.calibration.kv_bytes_per_token, costs.decode_s(32, 32 * 4096)
    whose = "as measured" if args.rates and not args.scenario else "Llama-2-70B on eight A800s, from their data sheet"
    sizes = "+".join("no bound" if size is None else f"{size:,}" for size in shape.capacities)
    return [
        f"assumed ({whose}):",
        f"  {costs.prefill_s(8192, 0):.3g} s for a prompt of 8,192 tokens, {decode_s * 1e3:.3g} ms for a token of "
        "each of 32 streams behind 4,096 tokens,",
        f"  {kv_bytes:,} bytes of KV per token; blocks in a replica's device + its node's tiers: {sizes}",
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
