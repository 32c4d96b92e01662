"""Conversations of many turns in real time: normalized latency against throughput (Pensieve 6.1, Fig. 8 and 9).

    python benchmarks/bench_sessions.py [--quick] [--only PART]... [--seed 0] [--budget-s 3600] [--out FOLDER]

Three systems, one engine: `stateless` keeps nothing after a request (no prefix sharing, no sessions), `device-only`
keeps KV in the device pool, `two-tier` in host memory too. The pool is the same for all and does not hold both what
runs and what waits for its readers. Lengths, arrivals and time to think: conversations.py; both think times are scaled
by one factor, which is stated. Parts: `sharegpt` and `lmsys` with a context of 2,048; `sharegpt-8x` with 16,384 and
the same pool.

A point is one run of the engine at one offered rate: seconds of `ramp`, then the turns that end within the counted
ones. p90 is of normalized latency: from when a question is sent to its last token, over its output tokens. The bound
is 4 times the p90 of the stateless system that answers one turn at a time, measured first: a bound on what load may
cost. Rates: coarse steps until each system has passed the bound, then halves of the last step; all systems that a rate
tells something about take turns at it, with the same conversations. Then the rates next to the bound are run again with
other conversations, the search goes on if that moved one, and medians are read: throughput at the bound, on the line
between the two rates around it. Rates are run minutes apart, so the machine must be quiet throughout.

What bounds it: on one thread a row costs about 0.1 ms in a prefill, of which the stateless system has the whole history
for each turn; a decoded token 0.3 to 0.7 ms in a batch, mostly to read its own context. No system serves more turns
than it can decode answers for: capacities differ by 1 + prefill of histories / (decoding + prefill of questions), at
equal latency somewhat more, as a long prefill holds up all that decode beside it. The host tier copies on a thread of
its own, on another core.
`rows` are prompt tokens computed per turn, `busy` the share of the time that is spent in steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attention.report import Check, PartResult, at_least, closing_checks, print_part, rounded, write_closing
from conversations import CONTEXT, MIN_THINK_S, SHAPES, THINK_S_PER_TOKEN
from plots import DIM, Points, caption_of, lines, save
from rate_search import Point, Reading, median_points, throughput_at
from session_engines import DTYPE, PAGE_SIZE, STATELESS, SYSTEMS, TWO_TIER
from session_load import Window
from session_runs import Runs, Scale
from session_sweep import Steps, Sweep
from workloads import MODEL_SHAPE, cpu_name, load_average

BOUND = 4.0  # times the unloaded p90 of the stateless system
SHOWN = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
TARGETS = {"sharegpt": 1.6, "lmsys": 1.95}  # two-tier over stateless
FULL = Scale(Window(6.0, 30.0), 0.2, 768, 16 * 1024, 60, 1.5, 1.13, 3)
QUICK = Scale(Window(1.5, 6.0), 0.05, 512, 4 * 1024, 20, 2.0, 2.0, 1)


class Part(NamedTuple):
    shape: str
    context: int
    share: float  # of the budget


PARTS = {
    "sharegpt": Part("sharegpt", CONTEXT, 0.4),
    "lmsys": Part("lmsys", CONTEXT, 0.4),
    "sharegpt-8x": Part("sharegpt", 8 * CONTEXT, 0.2),
}


class Found(NamedTuple):
    """What a part came to."""

    result: PartResult
    points: dict[str, list[Point]]
    bound_s: float
    figures: dict[str, Any]


def run_part(name: str, scale: Scale, seed: int, ends_s: float) -> Found:
    """Search, repeat, read."""
    part = PARTS[name]
    runs = Runs(part.shape, part.context, scale, seed)
    unloaded = runs.unloaded()
    bound_s = BOUND * unloaded.p90_s
    print(f"\n{name}: unloaded p90 {unloaded.p90_s * 1e3:.2f} ms/token, bound {bound_s * 1e3:.1f}", flush=True)

    def measure(system: str, offered_per_s: float, run_seed: int) -> Point:
        point = runs.measure(system, offered_per_s, run_seed)
        shown = f"{point.served_per_s:6.2f} served/s, p90 {point.p90_s * 1e3:7.1f} ms/token"
        print(f"  {system:12} {offered_per_s:6.2f} offered/s: {shown}", flush=True)
        return point

    steps = Steps(2 * unloaded.served_per_s, scale.growth, scale.closeness)
    sweep = Sweep(measure, SYSTEMS, bound_s, steps, lambda: time.perf_counter() > ends_s)
    sweep.search(seed)
    sweep.repeat(range(seed + 1, seed + scale.num_rounds))
    sweep.search(seed)  # where medians moved a bracket
    readings = {system: throughput_at(points, bound_s) for system, points in sweep.points.items()}
    rows = [*runs.rows, *_reading_rows(readings)]
    result = PartResult(name=name, title=_title(part, scale), rows=rows, checks=_checks(name, readings))
    figures = {
        "context": part.context, "unloaded": unloaded._asdict(), "bound_s_per_token": bound_s,
        "is_complete": sweep.is_complete,
        "at_bound": {system: reading and reading._asdict() for system, reading in readings.items()},
    }  # fmt: skip
    return Found(result, sweep.points, bound_s, figures)


def _title(part: Part, scale: Scale) -> str:
    turns, tokens_in, tokens_out = SHAPES[part.shape].table
    return (
        f"{turns} turns, {tokens_in} in, {tokens_out} out at a context of {CONTEXT}, cut at {part.context}; "
        f"pool {scale.num_pages * PAGE_SIZE} tokens, host {scale.num_host_pages * PAGE_SIZE}; "
        f"think times x {scale.think_scale}"
    )


def _reading_rows(readings: dict[str, Reading | None]) -> list[dict[str, Any]]:
    base = readings.get(STATELESS)
    rows = []
    for system in SYSTEMS:
        reading = readings.get(system)
        row: dict[str, Any] = {"system": f"{system} at bound"}
        if reading is not None:
            row |= {"served/s": reading.served_per_s, "is_at_least": reading.is_at_least, "x": _ratio(reading, base)}
        rows.append(row)
    return rows


def _ratio(reading: Reading | None, base: Reading | None) -> float | None:
    """Of the throughputs; None where it could be less than it seems."""
    if reading is None or base is None or base.is_at_least:
        return None
    return reading.served_per_s / base.served_per_s


def _checks(name: str, readings: dict[str, Reading | None]) -> list[Check]:
    if name not in TARGETS:
        return []
    ratio = _ratio(readings.get(TWO_TIER), readings.get(STATELESS))
    return [at_least(f"{name}_two_tier_over_stateless", ratio, TARGETS[name])]


def run_all(names: list[str], scale: Scale, seed: int, budget_s: float) -> dict[str, Found]:
    """The parts one after the other; what one does not use of its share of the time, the others get."""
    found, ends_s = {}, time.perf_counter() + budget_s
    for index, name in enumerate(names):
        share = PARTS[name].share / sum(PARTS[other].share for other in names[index:])
        now_s = time.perf_counter()
        found[name] = run_part(name, scale, seed, now_s + (ends_s - now_s) * share)
        print_part(found[name].result)
    return found


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    scale = QUICK if args.quick else FULL
    names = args.only or (["lmsys"] if args.quick else list(PARTS))
    budget_s = args.budget_s if args.budget_s is not None else (60.0 if args.quick else 3600.0)
    found = run_all(names, scale, args.seed, budget_s)
    closing = {
        "benchmark": "sessions", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "seed": args.seed,
        "threads": 1, "torch": torch.__version__, "load_average": [load_before, load_average()],
        "elapsed_s": round(time.perf_counter() - started, 1), "model": MODEL_SHAPE, "dtype": str(DTYPE),
        "page_size": PAGE_SIZE, "scale": scale._replace(window=scale.window._asdict())._asdict(),  # type: ignore[arg-type]
        "think": {"s_per_token": THINK_S_PER_TOKEN, "min_s": MIN_THINK_S, "factor": scale.think_scale},
        "bound": f"{BOUND:g} x the unloaded p90 of {STATELESS}",
        "results": {name: rounded({**each.figures, "rows": each.result.rows}) for name, each in found.items()},
        **closing_checks(
            check for name in TARGETS for check in (found[name].result.checks if name in found else _checks(name, {}))
        ),
    }  # fmt: skip
    if args.out is not None:
        write_closing(args.out, closing)
        draw(args.out, closing)
    print(json.dumps(closing))


def draw(folder: Path, closing: dict[str, Any]) -> None:
    """p90 of normalized latency over the throughput, one line per system (Pensieve Fig. 8)."""
    names = {STATELESS: "nothing kept", "device-only": "mneme, device only", TWO_TIER: "mneme, device and host memory"}
    for part, found in closing["results"].items():
        bound_ms = found["bound_s_per_token"] * 1e3
        series = {shown: _medians(found["rows"], system) for system, shown in names.items()}

        def over_load(axes: Any, series: dict[str, Points] = series, bound_ms: float = bound_ms) -> None:
            lines(axes, series, "turns served per second (more is better)", "p90 of ms per token (lower is better)")
            axes.axhline(bound_ms, linestyle="--", color=DIM, linewidth=1, label=f"limit, {bound_ms:.1f} ms")
            axes.set_ylim(0, 3 * bound_ms)

        shape = SHOWN[PARTS[part].shape]
        title = f"Latency of conversations of {shape} lengths by load, context {found['context']:,} (lower is better)"
        save(folder / f"{part}.png", title, f"31M Llama with random weights, {caption_of(closing)}", over_load)


def _medians(rows: list[dict[str, Any]], system: str) -> Points:
    """(turns served per second, p90 in ms) at each offered rate."""
    points = [
        Point(row["offered/s"], row["served/s"], row["p90 ms/token"] / 1e3, row["turns"])
        for row in rows
        if row["system"] == system and row["p90 ms/token"] is not None
    ]
    return [(point.served_per_s, point.p90_s * 1e3) for point in median_points(points) if math.isfinite(point.p90_s)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs of one part; at most 90 s on 2 cores")
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all; with --quick lmsys")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, help="no run begins later; default 3600, 60 with --quick")
    parser.add_argument("--out", type=Path, help="folder for JSON and plots")
    return parser.parse_args()


if __name__ == "__main__":
    main()
