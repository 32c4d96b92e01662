"""`mneme simulate cache`: what a cache of some size and policy would find of a trace. No Ray, no tensors, no KV."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mneme.cachetier.policy.cost_model import CostModel
from mneme.errors import ConfigError, shown
from mneme.lab.cache.costs import GB, Prices, load_costs, load_table
from mneme.lab.cache.simulator import SIMULATED_POLICIES, CacheSimulator, Outcome, rank
from mneme.lab.cache.synthetic import PREFIX, made_trace
from mneme.lab.cache.traces import BLOCK_OPTION, BLOCK_TOKENS, TraceRequest, most_used_within, read_trace
from mneme.lab.options import Option, add_options, check_options
from mneme.replicas.model.directory import load_model_config, model_directory

HOUR_S = 3600.0  # AttentionStore's unit of time (4.3.5)
TIERS = ("device", "host", "disk")
OPTIMUM = "min"  # the policy that knows the future
_COLOUR_BY_LABEL = {"on the device": "#0f6b4a", "on the host": "#4fa583", "on the disk": "#97ccb6", "": "#6b7788"}
_MAX_BLOCKS = 10**12
_MAX_GB = 1e9
_RATED_TOKENS = 2048  # of the prompt of which the prefill rate is told
_DEFAULT_SHARES = (0.1, 0.5, 1.0)  # capacities, of the trace's distinct blocks
_TERMINAL_S, _LINE_S = 0.1, 5.0  # between two looks at the progress


TRACE_HELP = (
    "FILE.jsonl (Mooncake, Bailian, Weka), FILE.csv (Azure, BurstGPT), FILE.json (ShareGPT, vLLM's conversations) or "
    "synthetic[:KEY=VALUE,...], such as synthetic:num_sessions=200,think_s=30 (default: synthetic, 1,000 conversations "
    "with ShareGPT's lengths)"
)


_OPTIONS = (
    Option("--trace", "TRACE", TRACE_HELP, default=PREFIX),
    Option("--policy", "NAME", f"one or several, by commas, of {', '.join(SIMULATED_POLICIES)}", default="returning"),
    Option(
        "--capacity-blocks", "N|inf",
        "one tier of so many blocks; several, by commas (default: 10%%, 50%% and 100%% of the trace's)",
    ),
    *(Option(f"--{name}-gb", "GB", f"the {name} tier, in 10^9 bytes; several, by commas") for name in TIERS),
    BLOCK_OPTION,
    Option("--prefill-tokens-per-s", "N", "of one replica (default: 5,700)", float),
    Option("--queue", "N", "requests to come that the policy sees (default 0)", int, 0, (0, 10_000)),
    Option(
        "--rates", "FILE", "JSON of measured rates, such as prefill_tokens_per_s, or a replica's cost model", Path
    ),
    Option("--prices", "FILE", "JSON of dollars per hour, such as host_gb_per_hour", Path),
    Option("--plot", "FILE.png", "hit rates of all runs, by tier, and cost", Path),
)  # fmt: skip
_MODEL_OPTIONS = (
    Option("--model", "DIR", "a model directory (or mneme-tiny): how large its KV is"),
    Option("--kv-bytes-per-token", "N", "of all layers (default: LLaMA-65B's)", float),
)


def add_cache_simulation(cache: argparse.ArgumentParser) -> None:
    cache.set_defaults(run=simulate_cache)
    add_options(cache, _OPTIONS)
    add_options(cache.add_mutually_exclusive_group(), _MODEL_OPTIONS)
    cache.add_argument(
        "--prefetch", action="store_true", help="bring what the queue will use from the disk to the host"
    )
    cache.add_argument("--json", action="store_true", help="one line of JSON")


def simulate_cache(args: argparse.Namespace) -> int:
    """Run every policy at every capacity. Raises `ConfigError`."""
    check_options(args, _OPTIONS)
    costs, prices = load_costs(args.rates, given_rates(args)), load_table(Prices, args.prices)
    policies = args.policy.split(",")
    for policy in policies:
        if policy not in SIMULATED_POLICIES:
            raise ConfigError(f"policy: must be one of {', '.join(SIMULATED_POLICIES)} (got {shown(policy)})")
    made = made_trace(args.trace, args.block_tokens or BLOCK_TOKENS)
    trace = read_trace(Path(args.trace), args.block_tokens) if made is None else made
    args.block_tokens = trace[0].block_tokens
    sizes = _sizes(args, args.block_tokens * costs.calibration.kv_bytes_per_token)
    num_distinct = len({block_id for request in trace for block_id in request.block_ids})
    sizes = sizes or [Size([max(round(share * num_distinct), 1)]) for share in _DEFAULT_SHARES]
    busy_blocks = most_used_within(trace, HOUR_S)
    with progress(len(sizes) * len(policies) * len(trace)) as advance:
        runs = [_run(trace, size, policy, costs, prices, args, advance) for size in sizes for policy in policies]
    for run in runs:
        run["hour_blocks"] = busy_blocks
    if args.plot is not None:
        plot_runs(args.plot, runs, f"{args.trace}, {costs.calibration.kv_bytes_per_token:,} bytes of KV per token")
        say(f"the plot is in {args.plot}")
    if num_distinct == sum(len(request.block_ids) for request in trace):
        why = ": its format does not say which prompts are alike" if args.trace.lower().endswith(".csv") else ""
        say(f"no block of this trace occurs twice, so no cache finds any{why}")
    if args.json:
        print(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}))
    else:
        print("\n".join([*_assumptions(costs, prices, args), "", *table(runs)]))
    return 0


def given_rates(args: argparse.Namespace) -> dict[str, float]:
    given = {"kv_bytes_per_token": args.kv_bytes_per_token, "prefill_tokens_per_s": args.prefill_tokens_per_s}
    if args.model is not None:
        config = load_model_config(model_directory(args.model))
        value_bytes = 4 if config.dtype == "float32" else 2
        given["kv_bytes_per_token"] = 2.0 * config.num_layers * config.kv_size * value_bytes
    return {name: value for name, value in given.items() if value is not None}


def _assumptions(costs: CostModel, prices: Prices, args: argparse.Namespace) -> list[str]:
    """Return what the figures rest on, and how to say otherwise."""
    kv_bytes = costs.calibration.kv_bytes_per_token
    prefill_per_s = _RATED_TOKENS / costs.prefill_s(_RATED_TOKENS, 0)
    host, disk = (GB / costs.edge_s(edge, int(GB)) for edge in ("host", "disk"))
    given = given_rates(args)
    whose = "" if args.rates or "kv_bytes_per_token" in given else " (LLaMA-65B)"
    machine = "" if args.rates or "prefill_tokens_per_s" in given else " (LLaMA-65B on four A100s: AttentionStore)"
    made = ["the trace is made: 1,000 conversations with ShareGPT's lengths; --trace FILE plays another"]
    device, memory, ssd = map(_plain, (prices.device_per_hour, prices.host_gb_per_hour, prices.disk_gb_per_hour))
    return [
        *(made if args.trace == PREFIX else ()),
        f"assumed: {kv_bytes:,} bytes of KV per token{whose}, "
        f"{host / GB:.3g} GB/s from the host, {disk / GB:.3g} GB/s from the disk,",
        f"  {prefill_per_s:,.0f} tokens/s of prefill{machine},",
        f"  {device} dollars per hour for a replica, {memory} for a GB of memory, {ssd} for a GB of disk",
        "  to say otherwise: --model or --kv-bytes-per-token, --prefill-tokens-per-s, --rates, --prices",
        f"a block is {args.block_tokens} tokens, {args.block_tokens * kv_bytes / 1e6:,.6g} MB",
    ]


def _plain(value: float) -> str:
    """Write a number without an exponent."""
    return f"{value:.8f}".rstrip("0").rstrip(".")


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """One line per run under two of headings, and what the columns mean."""
    names = list(runs[0]["tiers"])
    blocks = ["+".join("inf" if size is None else f"{size:,}" for size in run["capacity_blocks"]) for run in runs]
    tiers = "+".join(names)
    width = max(len(tiers), *map(len, blocks))
    found = 8 * (1 + len(names)) - 1
    lines = [
        f"{'':10} {'blocks':>{width}} {'found, % of all':>{found}} {'TTFT, s':>17} {'moved':>10} {'cost':>8}",
        f"{'policy':10} {tiers:>{width}} {'all':>7} "
        + " ".join(f"{name:>7}" for name in names)
        + f" {'p50':>8} {'p90':>8} {'GB':>10} {'$/hour':>8}",
    ]
    for run, size in zip(runs, blocks, strict=True):
        ratios = [run["block_hit_ratio"], *(run["tiers"][name]["hit_ratio"] for name in names)]
        ttft, cost = run["ttft_s"], run["hourly_cost"]
        lines.append(
            f"{run['policy'] + '*' * (run['policy'] == OPTIMUM):10} {size:>{width}} "
            + " ".join(f"{100 * ratio:7.2f}" for ratio in ratios)
            + f" {ttft['p50']:8.3f} {ttft['p90']:8.3f} {sum(run['moved_gb'].values()):10,.1f} "
            + ("       -" if cost is None else f"{cost:8.2f}")
        )
    lines += [
        "found: blocks at the beginning of a prompt that were cached, by the tier that had them; TTFT: loading and",
        "  computing, without a queue; moved: between tiers; cost: replicas busy with prefills, memory and disk",
    ]
    if any(run["policy"] == OPTIMUM for run in runs):
        lines.append(f"* {OPTIMUM} knows the future: the optimum, which no policy reaches")
    return lines


@contextmanager
def progress(num_requests: int) -> Iterator[Callable[[], None]]:
    """Show on stderr how many requests have been played: a bar in a terminal, else a line every few seconds."""
    done, shown_at = 0, time.monotonic()
    is_terminal = sys.stderr.isatty()
    every_s = _TERMINAL_S if is_terminal else _LINE_S
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_terminal) as bar:
        task = bar.add_task("", total=num_requests)

        def advance() -> None:
            nonlocal done, shown_at
            done += 1
            now = time.monotonic()
            if now - shown_at < every_s:
                return
            shown_at = now
            bar.update(task, completed=done)
            if not is_terminal:
                say(f"{done:,} of {num_requests:,} requests")

        yield advance


def say(text: str) -> None:
    print(f"mneme simulate: {text}", file=sys.stderr, flush=True)


class Size(NamedTuple):
    """Gives the sizes of a cache, for one run."""

    blocks: list[int | None]  # by tier
    host_gb: float = 0.0
    disk_gb: float = 0.0


def _sizes(args: argparse.Namespace, block_bytes: float) -> list[Size]:
    """Combine the tiers' given sizes in every way; nothing where none is given."""
    given = [getattr(args, f"{name}_gb") for name in TIERS]
    has_gigabytes = any(size is not None for size in given)
    if args.capacity_blocks is not None and has_gigabytes:
        raise ConfigError("capacity-blocks: cannot be given beside --device-gb, --host-gb or --disk-gb")
    if args.capacity_blocks is None and not has_gigabytes:
        return []
    if args.capacity_blocks is not None:
        return [Size([_num_blocks(size)]) for size in args.capacity_blocks.split(",")]
    choices = [_gigabytes(name, text) for name, text in zip(TIERS, given, strict=True)]
    return [_size_in_blocks(gigabytes, block_bytes) for gigabytes in itertools.product(*choices)]


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


def _size_in_blocks(gigabytes: Sequence[float], block_bytes: float) -> Size:
    blocks: list[int | None] = [int(size * GB / block_bytes) for size in gigabytes]
    if not any(blocks):
        size = f"{block_bytes / GB:.3g} GB"
        raise ConfigError(f"capacity: no tier holds a block of {size} (--model or --kv-bytes-per-token)")
    return Size(blocks, *gigabytes[1:])


def _num_blocks(text: str) -> int | None:
    if text == "inf":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 13 or not 1 <= int(text) <= _MAX_BLOCKS:
        rule = f"must be a whole number from 1 to {_MAX_BLOCKS}, or inf"
        raise ConfigError(f"capacity-blocks: {rule} (got {shown(text)})")
    return int(text)


def _run(
    trace: list[TraceRequest],
    size: Size,
    policy: str,
    costs: CostModel,
    prices: Prices,
    args: argparse.Namespace,
    advance: Callable[[], None],
) -> dict[str, Any]:
    started = time.perf_counter()
    simulator = CacheSimulator(trace, size.blocks, policy, costs=costs, queue=args.queue, prefetch=args.prefetch)
    outcome = simulator.run(advance)
    shape = {"policy": policy, "capacity_blocks": size.blocks, "block_tokens": args.block_tokens, "queue": args.queue}
    figures = _figures(outcome, args.block_tokens * costs.calibration.kv_bytes_per_token / GB, len(size.blocks))
    cost = None
    if outcome.span_s:  # prefills alone: decoding costs the same with every cache
        cost = round(prices.hourly(outcome.compute_s / outcome.span_s, size.host_gb, size.disk_gb), 4)
    took_s = round(time.perf_counter() - started, 2)
    assumed = {"kv_bytes_per_token": costs.calibration.kv_bytes_per_token}
    return {**shape, "prefetch": args.prefetch, **figures, "hourly_cost": cost, "assumed": assumed, "took_s": took_s}


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
    ttft = {"mean": statistics.fmean(ordered), **{f"p{p}": rank(ordered, p) for p in (50, 90, 99)}}
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


def plot_runs(path: Path, runs: Sequence[dict[str, Any]], subtitle: str) -> None:
    """Bars of hit ratios by tier, a row per run under its cache's size; beside them costs, where there are any.

    As in AttentionStore, Fig. 17, 21, 23. Raises `ConfigError`.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot: needs matplotlib, which is not installed: pip install 'mneme[lab]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels, places = _rows(runs)
    names = list(runs[0]["tiers"])
    hits = {f"on the {name}": [100 * run["tiers"][name]["hit_ratio"] for run in runs] for name in names}
    panels = [("blocks found (more is better)", "% of all blocks of all prompts", hits, "{:.1f}")]
    if all(run["hourly_cost"] is not None for run in runs):
        costs = {"": [run["hourly_cost"] for run in runs]}
        panels.append(("cost (less is better)", "dollars per hour: prefills, memory, disk", costs, "{:.2f}"))
    size = (3.0 + 4.0 * len(panels), 1.9 + 0.3 * len(labels))
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    try:
        for axes, (title, unit, series, form) in zip(all_axes[0], panels, strict=True):
            ends = [0.0] * len(runs)
            for label, values in series.items():
                axes.barh(places, values, left=ends, label=label, color=_COLOUR_BY_LABEL[label])
                ends = [end + value for end, value in zip(ends, values, strict=True)]
            for place, end in zip(places, ends, strict=True):
                axes.text(end, place, " " + form.format(end), va="center", fontsize=8)
            axes.set_xlim(0, max(*ends, 1e-9) * 1.15)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(unit)
            axes.spines[["top", "right"]].set_visible(False)
        axes = all_axes[0][0]
        if len(names) > 1:
            axes.legend(fontsize=7, loc="upper left", ncols=3, frameon=False)  # in the row of the first size
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        figure.suptitle(subtitle, fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _rows(runs: Sequence[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """Labels from the top, a size above its policies, and the row of each run."""
    labels: list[str] = []
    places: list[int] = []
    last = None
    for run in runs:
        if run["capacity_blocks"] != last:
            last = run["capacity_blocks"]
            sizes = ["no bound" if size is None else f"{size:,}" for size in last]
            labels.append(" + ".join(sizes) + " blocks:")
        places.append(len(labels))
        labels.append("optimum (min)" if run["policy"] == OPTIMUM else run["policy"])
    return labels, places
