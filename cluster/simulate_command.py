"""`mneme simulate cache`: what a cache of some size and policy would find of a trace. No Ray, no tensors, no KV."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mneme.cachetier.cache_costs import GB, Prices, load_costs, load_table
from mneme.cachetier.cache_simulator import SIMULATED_POLICIES, CacheSimulator, Outcome
from mneme.cachetier.cost_model import CostModel
from mneme.cachetier.synthetic_trace import PREFIX, make_trace, parse_shape
from mneme.cachetier.traces import MAX_TOKENS, TraceRequest, most_used_within, read_trace
from mneme.cluster.simulate_plot import plot_runs
from mneme.errors import ConfigError, shown

HOUR_S = 3600.0  # AttentionStore's unit of time (4.3.5)
TIERS = ("device", "host", "disk")
DEFAULT_POLICY = "returning"
_MAX_BLOCKS = 10**12
_MAX_GB = 1e9
_MAX_QUEUE = 10_000


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    cache = whats.add_parser("cache", help="hit rates, bytes moved and costs of a cache under a trace")
    cache.add_argument(
        "--trace", required=True, help="FILE.jsonl (Mooncake), FILE.csv (Azure) or synthetic[:KEY=VALUE,...]"
    )
    cache.add_argument(
        "--policy", default=DEFAULT_POLICY, help=f"one or several, by commas, of {', '.join(SIMULATED_POLICIES)}"
    )
    cache.add_argument("--capacity-blocks", metavar="N|inf", help="one tier of so many blocks; several, by commas")
    for name in TIERS:
        cache.add_argument(f"--{name}-gb", metavar="GB", help=f"the {name} tier, in 10^9 bytes; several, by commas")
    cache.add_argument("--block-tokens", type=int, default=512, help="tokens in a block (default 512)")
    cache.add_argument("--queue", type=int, default=0, help="requests to come that the policy sees (default 0)")
    cache.add_argument(
        "--prefetch", action="store_true", help="bring what the queue will use from the disk to the host"
    )
    cache.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="JSON of measured rates, such as prefill_tokens_per_s, or a replica's cost model",
    )
    cache.add_argument("--prices", type=Path, metavar="FILE", help="JSON of dollars per hour, such as host_gb_per_hour")
    cache.add_argument("--plot", type=Path, metavar="FILE.png", help="hit rates of all runs, by tier, and cost")
    cache.add_argument("--json", action="store_true", help="one line of JSON")


def simulate(args: argparse.Namespace) -> int:
    """Run every policy at every capacity. Raises `ConfigError`."""
    _check_range("block-tokens", args.block_tokens, 1, MAX_TOKENS)
    _check_range("queue", args.queue, 0, _MAX_QUEUE)
    costs, prices = load_costs(args.rates), load_table(Prices, args.prices)
    sizes = _sizes(args, _block_bytes(costs, args))
    policies = args.policy.split(",")
    for policy in policies:
        if policy not in SIMULATED_POLICIES:
            raise ConfigError(f"policy: must be one of {', '.join(SIMULATED_POLICIES)} (got {shown(policy)})")
    trace = _trace(args.trace, args.block_tokens)
    busy_blocks = most_used_within(trace, HOUR_S)
    runs = [_run(trace, size, policy, costs, prices, args) for size in sizes for policy in policies]
    for run in runs:
        run["hour_blocks"] = busy_blocks
    if args.plot is not None:
        plot_runs(args.plot, runs)
    if args.json:
        print(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}))
    else:
        print("\n".join(table(runs)))
    return 0


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """One line per run, hit ratios by tier."""
    names = list(runs[0]["tiers"])
    head = f"{'policy':>10} {'blocks':>20} {'hit ratio':>10}" + "".join(f" {'in ' + name:>10}" for name in names)
    lines = [f"{head} {'TTFT p50':>10} {'p90 s':>8} {'GB moved':>10} {'$/hour':>8}"]
    for run in runs:
        blocks = "+".join("inf" if size is None else str(size) for size in run["capacity_blocks"])
        found = "".join(f" {run['tiers'][name]['hit_ratio']:10.4f}" for name in names)
        ttft, moved = run["ttft_s"], sum(run["moved_gb"].values())
        cost = math.nan if run["hourly_cost"] is None else run["hourly_cost"]
        line = f"{run['policy']:>10} {blocks:>20} {run['block_hit_ratio']:10.4f}{found}"
        lines.append(f"{line} {ttft['p50']:10.3f} {ttft['p90']:8.3f} {moved:10.1f} {cost:8.2f}")
    return lines


def _trace(name: str, block_tokens: int) -> list[TraceRequest]:
    if name == PREFIX or name.startswith(PREFIX + ":"):
        return make_trace(parse_shape(name), block_tokens)
    return read_trace(Path(name), block_tokens)


class Size(NamedTuple):
    """Of a cache: what one run is of."""

    blocks: list[int | None]  # by tier
    host_gb: float = 0.0
    disk_gb: float = 0.0


def _block_bytes(costs: CostModel, args: argparse.Namespace) -> int:
    block_tokens: int = args.block_tokens
    return block_tokens * costs.calibration.kv_bytes_per_token


def _sizes(args: argparse.Namespace, block_bytes: float) -> list[Size]:
    """What to run: every combination of the tiers' sizes."""
    given = [getattr(args, f"{name}_gb") for name in TIERS]
    if (args.capacity_blocks is None) == all(size is None for size in given):
        raise ConfigError("capacity: give --capacity-blocks, or some of --device-gb, --host-gb and --disk-gb")
    if args.capacity_blocks is not None:
        return [Size([_num_blocks(size)]) for size in args.capacity_blocks.split(",")]
    choices = [_gigabytes(name, text) for name, text in zip(TIERS, given, strict=True)]
    return [_size(gigabytes, block_bytes) for gigabytes in itertools.product(*choices)]


def _gigabytes(name: str, text: str | None) -> list[float]:
    sizes = []
    for part in "0" if text is None else text.split(","):
        try:
            size = float(part)
        except ValueError:
            size = math.nan
        if not 0 <= size <= _MAX_GB:
            raise ConfigError(f"{name}-gb: must be from 0 to {_MAX_GB:g} (got {shown(part)})")
        sizes.append(size)
    return sizes


def _size(gigabytes: Sequence[float], block_bytes: float) -> Size:
    blocks: list[int | None] = [int(size * GB / block_bytes) for size in gigabytes]
    if not any(blocks):
        raise ConfigError(
            f"capacity: no tier holds a block of {block_bytes / GB:.3g} GB (kv_bytes_per_token in --rates)"
        )
    return Size(blocks, *gigabytes[1:])


def _num_blocks(text: str) -> int | None:
    if text == "inf":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 13 or not 1 <= int(text) <= _MAX_BLOCKS:
        raise ConfigError(
            f"capacity-blocks: must be a whole number from 1 to {_MAX_BLOCKS}, or inf (got {shown(text)})"
        )
    return int(text)


def _check_range(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise ConfigError(f"{name}: must be from {smallest} to {largest} (got {shown(value)})")


def _run(
    trace: list[TraceRequest], size: Size, policy: str, costs: CostModel, prices: Prices, args: argparse.Namespace
) -> dict[str, Any]:
    started = time.perf_counter()
    simulator = CacheSimulator(trace, size.blocks, policy, costs=costs, queue=args.queue, prefetch=args.prefetch)
    outcome = simulator.run()
    shape = {"policy": policy, "capacity_blocks": size.blocks, "block_tokens": args.block_tokens, "queue": args.queue}
    figures = _figures(outcome, _block_bytes(costs, args) / GB, len(size.blocks))
    cost = None
    if outcome.span_s:  # prefills alone: decoding costs the same with every cache
        cost = round(prices.hourly(outcome.compute_s / outcome.span_s, size.host_gb, size.disk_gb), 4)
    took_s = round(time.perf_counter() - started, 2)
    return {**shape, "prefetch": args.prefetch, **figures, "hourly_cost": cost, "took_s": took_s}


def _figures(outcome: Outcome, block_gb: float, num_tiers: int) -> dict[str, Any]:
    named = dict(zip(TIERS[:num_tiers], outcome.tiers, strict=True))
    moved: dict[str, float] = {}
    for name, tier in list(named.items())[1:]:
        moved[f"to_{name}"] = round(tier.num_written * block_gb, 3)
        moved[f"from_{name}"] = round(tier.num_read * block_gb, 3)
    ratios = {
        name: {"hit_ratio": round(tier.num_found / max(outcome.num_blocks, 1), 6), "held_blocks": tier.num_held}
        for name, tier in named.items()
    }
    ordered = sorted(outcome.ttft_s)
    ttft = {"mean": statistics.fmean(ordered), **{f"p{p}": _rank(ordered, p) for p in (50, 90, 99)}}
    return {
        "num_requests": outcome.num_requests,
        "num_blocks": outcome.num_blocks,
        "block_hit_ratio": round(outcome.block_hit_ratio, 6),
        "recomputed_blocks": outcome.num_recomputed,
        "tiers": ratios,
        "moved_gb": moved,
        "prefetched_gb": round(sum(tier.num_prefetched for tier in outcome.tiers) * block_gb, 3),  # of what moved
        "ttft_s": {name: round(value, 6) for name, value in ttft.items()},
        "prefill_s": round(outcome.compute_s, 3),
        "busy_devices": round(outcome.compute_s / outcome.span_s, 4) if outcome.span_s else None,
    }


def _rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]
