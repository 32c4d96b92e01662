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

import asyncio
import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from conversations import CONTEXT, MIN_THINK_S, SHAPES, THINK_S_PER_TOKEN, Traffic, draw_requests, make_trace
from engines import (
    DTYPE,
    MAIN_MODEL,
    PAGE_SIZE,
    STATELESS,
    SYSTEMS,
    TWO_TIER,
    make_decoder,
    make_engine,
    make_runner,
    request,
)
from harness import Check, PartResult, Run, at_least, options_of
from plots import DIM, Points, caption_of, lines, save
from rate_search import Point, Reading, Steps, Sweep, median_points, throughput_at
from session_load import Load, Served, Window, counted, kv_per_turn, percentile, point_of
from workloads import MODEL_SHAPE, VOCAB_SIZE

from mneme.replicas.engine.engine import Engine

NOMINAL_S_PER_TOKEN = 0.015  # of an answer under load: how far conversations have come when a trace begins
BOUND = 4.0  # times the unloaded p90 of the stateless system
SHOWN = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
TARGETS = {"sharegpt": 1.6, "lmsys": 1.95}  # two-tier over stateless
MIN_FOUND = 0.9  # of prompt tokens, where the load leaves all conversations somewhere: a turn adds a tenth at most


class Scale(NamedTuple):
    """How large a run is."""

    window: Window
    think_scale: float
    num_pages: int
    num_host_pages: int
    num_unloaded: int  # turns that are answered one at a time
    growth: float  # of the coarse rates
    closeness: float  # ratio of the rates around the bound that is narrow enough
    num_rounds: int


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


class Unloaded(NamedTuple):
    """The stateless system, one turn at a time."""

    p90_s: float  # normalized latency
    served_per_s: float


class Runs:
    """Measures systems on one kind of conversations."""

    def __init__(self, shape: str, context: int, scale: Scale, seed: int) -> None:
        self._scale = scale
        self._seed = seed
        self._traffic = Traffic(
            shape=SHAPES[shape],
            context=context,
            think_scale=scale.think_scale,
            nominal_s_per_token=NOMINAL_S_PER_TOKEN,
        )
        self._decoder = make_decoder(MAIN_MODEL, seed, max_context=context)
        self.rows: list[dict[str, Any]] = []

    def measure(self, system: str, offered_per_s: float, seed: int) -> Point:
        """One run on an engine of its own, which is warmed up first."""
        window = self._scale.window
        trace = make_trace(replace(self._traffic, seed=seed), offered_per_s, window.ends_s)
        engine = self._engine(system)
        load = Load(engine, trace, think_scale=self._scale.think_scale, keeps_sessions=system != STATELESS)
        load.warm_up()
        num_steps = engine.num_steps
        asyncio.run(load.play(window.ends_s))
        turns = [*counted(load.served, load.began_s, window)]
        point = point_of(turns, window, offered_per_s)
        self.rows.append(
            {
                "system": system, "offered/s": offered_per_s, "seed": seed, "served/s": point.served_per_s,
                "p90 ms/token": point.p90_s * 1e3, **_per_turn(turns), "busy": load.busy_s / window.ends_s,
                "steps/s": (engine.num_steps - num_steps) / window.ends_s,
                "suspended": engine.scheduler.num_suspensions,
            }
        )  # fmt: skip
        return point

    def unloaded(self) -> Unloaded:
        """Turns on an idle engine, drawn from whole conversations; the first warms up and does not count."""
        engine = self._engine(STATELESS)
        traffic = self._traffic
        turns = draw_requests(traffic.shape, traffic.context, self._scale.num_unloaded + 1, self._seed)
        took_s = []
        for number, (num_prompt, num_out) in enumerate(turns):
            ids = random.Random(str(number)).choices(range(16, VOCAB_SIZE), k=num_prompt)
            started_s = time.perf_counter()
            engine.submit(request(str(number), ids, num_out))
            while engine.has_work:
                engine.step()
            took_s += [time.perf_counter() - started_s] if number else []
        normalized = [took / num_out for took, (_, num_out) in zip(took_s, turns[1:], strict=True)]
        return Unloaded(percentile(normalized, 90), len(took_s) / sum(took_s))

    def _engine(self, system: str) -> Engine:
        gc.collect()  # pools of engines that are gone
        scale = self._scale
        runner = make_runner(self._decoder, system, num_pages=scale.num_pages, num_host_pages=scale.num_host_pages)
        return make_engine(runner, system)


def _per_turn(turns: Sequence[Served]) -> dict[str, float]:
    """Means over the turns that count: prompt and output tokens, where the prompts' KV came from."""
    if not turns:
        return {}
    kv = kv_per_turn(turns)
    return {
        "turns": len(turns),
        "prompt": sum(turn.prompt_tokens or 0 for turn in turns) / len(turns),
        "out": sum(turn.output_tokens or 0 for turn in turns) / len(turns),
        "rows": kv.get("recomputed", 0.0) + kv.get("dropped", 0.0),
        "device": kv.get("device", 0.0),
        "host": kv.get("host", 0.0),
    }


class Found(NamedTuple):
    """What a part came to."""

    result: PartResult
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
    result = PartResult(name=name, title=_title(part, scale), rows=rows, checks=_checks(name, readings, runs.rows))
    figures = {
        "context": part.context, "unloaded": unloaded._asdict(), "bound_s_per_token": bound_s,
        "is_complete": sweep.is_complete,
        "at_bound": {system: reading and reading._asdict() for system, reading in readings.items()},
    }  # fmt: skip
    return Found(result, figures)


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
    """Compare the throughputs; None where the ratio could be less than it seems."""
    if reading is None or base is None or base.is_at_least:
        return None
    return reading.served_per_s / base.served_per_s


def _checks(name: str, readings: dict[str, Reading | None], rows: Sequence[dict[str, Any]] = ()) -> list[Check]:
    """What the part promises: throughput, and that what is kept is found, at the best of the loads."""
    if name not in TARGETS:
        return []
    ratio = _ratio(readings.get(TWO_TIER), readings.get(STATELESS))
    found = [1 - row["rows"] / row["prompt"] for row in rows if row["system"] == TWO_TIER and row.get("prompt")]
    return [
        at_least(f"{name}_two_tier_over_stateless", ratio, TARGETS[name]),
        at_least(f"{name}_two_tier_found", max(found, default=None), MIN_FOUND, "of prompt tokens"),
    ]


def main() -> None:
    parser = options_of(__doc__, quick="short runs of one part; at most 90 s on 2 cores", out=True)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all; with --quick lmsys")
    parser.add_argument("--budget-s", type=float, help="no run begins later; default 3600, 60 with --quick")
    args = parser.parse_args()
    scale = QUICK if args.quick else FULL
    run = Run("sessions", args, threads=1, model=MODEL_SHAPE, dtype=str(DTYPE), page_size=PAGE_SIZE,
              scale=scale._replace(window=scale.window._asdict())._asdict(),  # type: ignore[arg-type]
              think={"s_per_token": THINK_S_PER_TOKEN, "min_s": MIN_THINK_S, "factor": scale.think_scale},
              bound=f"{BOUND:g} x the unloaded p90 of {STATELESS}")  # fmt: skip
    names = args.only or (["lmsys"] if args.quick else list(PARTS))
    budget_s = args.budget_s if args.budget_s is not None else (60.0 if args.quick else 3600.0)
    results, ends_s = {}, time.perf_counter() + budget_s
    for index, name in enumerate(names):  # what a part does not use of its share of the time, the others get
        share = PARTS[name].share / sum(PARTS[other].share for other in names[index:])
        now_s = time.perf_counter()
        found = run_part(name, scale, args.seed, now_s + (ends_s - now_s) * share)
        run.show(found.result)
        results[name] = {**found.figures, "rows": found.result.rows}
    run.check(*(check for name in TARGETS if name not in results for check in _checks(name, {})))
    run.end(results, draw)


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


if __name__ == "__main__":
    main()
