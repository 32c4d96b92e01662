"""Inter-token latency of running decodes while long prompts are prefilled, for several chunk sizes.

    python benchmarks/bench_itl.py [--quick] [--seed 0] [--runs 5] [--json FILE]

The 31M-parameter Llama with random weights, bfloat16, one thread. Eight requests decode on 256 private tokens each;
`quiet` are the gaps between their tokens when nothing else runs, `pressed` those while a prompt is prefilled beside
them. Every decode has a row in every step, so a gap is a step, and what bounds it is what a step may hold:
`max_batch_tokens`. The last arm is our own baseline: a step so large that the prompt is one chunk, as without chunked
prefill.

`chunk`: the time of a step that is one full chunk at the end of the same prompt, alone in the engine; with a quiet gap
it is what a pressed gap may take. The price of small chunks is the prompt's own time to its first token (`ttft`).

`behind`: the time to the first token of a prompt of 64 tokens that is submitted right after one of 16,384, beside the
time alone and that of the long one. It is bounded by the step that has its rows; who comes while a step runs waits for
that one too.

Arms take turns, each from an empty cache; gaps of all runs together, medians elsewhere.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from engines import MAIN_MODEL, PAGE_SIZE, make_decoder, request
from harness import Check, PartResult, Run, at_most, options_of, take_turns
from random_models import SHAPES

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.runner import Runner

NUM_DECODES = 8
CONTEXT = 256  # of each decode
NUM_NEW = 2048  # of each decode: more than any run takes
SHORT, LONG = 64, 16_384
SHAPE = {**SHAPES[MAIN_MODEL], "max_position_embeddings": 32_768}
NOISE = 0.15  # by which two equal steps may differ on a shared machine


class Grid(NamedTuple):
    chunks: tuple[int, ...]  # tokens per step, beside the decodes
    prompt: int
    quiet_steps: int


FULL = Grid((128, 256, 512, 1024, 2048), 8192, 60)
QUICK = Grid((256, 1024), 4096, 30)


class Model:
    """Engines over one set of weights and one pool, each from an empty cache."""

    def __init__(self, seed: int) -> None:
        num_tokens = LONG + SHORT + NUM_DECODES * (CONTEXT + NUM_NEW)
        self._runner = Runner(make_decoder(SHAPE, seed), num_tokens // PAGE_SIZE + 64, PAGE_SIZE)
        self._random = random.Random(seed)

    def engine(self, chunk: int) -> Engine:
        config = EngineConfig(max_batch_tokens=chunk + NUM_DECODES, max_running=16, max_sessions=0)
        return Engine(self._runner, None, config)

    def submit(self, engine: Engine, name: str, num_tokens: int, max_tokens: int) -> None:
        ids = [self._random.randrange(16, 8192) for _ in range(num_tokens)]
        engine.submit(request(name, ids, max_tokens))


class Pressure(NamedTuple):
    """One run of one chunk size, ms."""

    quiet: list[float]
    pressed: list[float]
    chunk: float
    ttft: float


def timed_step(engine: Engine, ended: set[str] | None = None) -> float:
    """Milliseconds of a step; `ended` gets the requests that ended in it."""
    started = time.perf_counter()
    events = engine.step()
    elapsed_ms = (time.perf_counter() - started) * 1e3
    if ended is not None:
        ended.update(event.request_id for event in events if event.finish_reason)
    return elapsed_ms


def press(model: Model, chunk: int, grid: Grid) -> Pressure:
    """Quiet steps, then a prompt beside the decodes; then the prompt alone in an engine."""
    engine = model.engine(chunk)
    for index in range(NUM_DECODES):
        model.submit(engine, str(index), CONTEXT, NUM_NEW)
    decoding: set[str] = set()
    while len(decoding) < NUM_DECODES:
        decoding.update(event.request_id for event in engine.step() if event.token_ids)
    quiet = [timed_step(engine) for _ in range(grid.quiet_steps)]
    pressed, ended = [], set[str]()
    model.submit(engine, "prompt", grid.prompt, 1)
    before = engine.num_tokens["generated"]
    while "prompt" not in ended:
        pressed.append(timed_step(engine, ended))
    assert engine.num_tokens["generated"] - before == len(pressed) * NUM_DECODES + 1, "each decode is in each step"
    for index in range(NUM_DECODES):
        engine.abort(str(index))
    return Pressure(quiet, pressed, _last_full_chunk_ms(model, chunk, grid), sum(pressed))


def _last_full_chunk_ms(model: Model, chunk: int, grid: Grid) -> float:
    engine = model.engine(chunk)
    model.submit(engine, "prompt", grid.prompt, 1)
    times, ended = [], set[str]()
    while "prompt" not in ended:
        times.append(timed_step(engine, ended))
    num_full = grid.prompt // (chunk + NUM_DECODES)  # alone, it has the decodes' rows too
    return times[max(num_full - 1, 0)]


def first_token_ms(model: Model, chunk: int, prompts: dict[str, int]) -> dict[str, float]:
    """Time each prompt, by name, all submitted at once; `prompts` has their lengths."""
    engine, found = model.engine(chunk), dict[str, float]()
    started = time.perf_counter()
    for name, num_tokens in prompts.items():
        model.submit(engine, name, num_tokens, 1)
    while engine.has_work:
        ended = set[str]()
        timed_step(engine, ended)
        found |= dict.fromkeys(ended, (time.perf_counter() - started) * 1e3)
    return found


def pressure_part(model: Model, grid: Grid, num_runs: int) -> PartResult:
    chunks = (*grid.chunks, grid.prompt)
    press(model, grid.chunks[0], grid)  # a warm-up
    runs = take_turns(chunks, lambda chunk: press(model, chunk, grid), num_runs, num_warm=0)
    part = PartResult(name="itl", title=f"{NUM_DECODES} decodes beside a prompt of {grid.prompt:,} tokens; ms")
    for chunk, found in runs.items():
        quiet, pressed = ([gap for run in found for gap in getattr(run, name)] for name in ("quiet", "pressed"))
        chunk_ms = statistics.median(run.chunk for run in found)
        bound = chunk_ms + float(np.median(quiet))
        p99 = float(np.quantile(pressed, 0.99))
        row = {
            "chunk": chunk if chunk < grid.prompt else "whole prompt",
            "quiet p50": float(np.median(quiet)), "quiet p99": float(np.quantile(quiet, 0.99)),
            "pressed p50": float(np.median(pressed)), "pressed p99": p99, "gaps": len(pressed),
            "one chunk": chunk_ms, "p99/(chunk+quiet)": p99 / bound,
            "ttft": statistics.median(run.ttft for run in found),
        }  # fmt: skip
        part.rows.append(row)
        if chunk < grid.prompt:
            part.checks.append(_within_a_chunk(chunk, p99 / bound))
    part.checks += [_within_a_chunk(chunk, None) for chunk in FULL.chunks if chunk not in grid.chunks]
    return part


def _within_a_chunk(chunk: int, ratio: float | None) -> Check:
    return at_most(f"itl_p99_over_a_chunk_{chunk}", ratio, 1.0, noise=NOISE)


def behind_part(model: Model, grid: Grid, num_runs: int) -> PartResult:
    part = PartResult(name="behind", title=f"first token of {SHORT} tokens right behind {LONG:,}; ms")
    chunks = {grid.chunks[-1]: str(grid.chunks[-1]), LONG + SHORT: "whole prompt"}
    arms = {"alone": {"short": SHORT}, "behind": {"long": LONG, "short": SHORT}}
    pairs = [(chunk, arm) for chunk in chunks for arm in arms]
    found = take_turns(pairs, lambda pair: first_token_ms(model, pair[0], arms[pair[1]]), num_runs, num_warm=0)
    for chunk, name in chunks.items():
        alone = statistics.median(times["short"] for times in found[chunk, "alone"])
        behind, long = (statistics.median(times[who] for times in found[chunk, "behind"]) for who in ("short", "long"))
        part.rows.append({"chunk": name, "alone": alone, "behind": behind, "long": long, "behind/long": behind / long})
    share = 1 / -(-LONG // grid.chunks[-1])  # one step of those that the long prompt takes
    part.checks.append(at_most("short_behind_long_over_long", part.rows[0]["behind/long"], share, noise=NOISE))
    return part


def main() -> None:
    parser = options_of(__doc__, quick="two chunk sizes, two runs, a shorter prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the closing line to this file")
    args = parser.parse_args()
    grid, num_runs = (QUICK, 2) if args.quick else (FULL, args.runs)
    run = Run("itl", args, threads=1, dtype="bfloat16", model=SHAPE, decodes=NUM_DECODES, context=CONTEXT,
              prompt=grid.prompt, runs=num_runs)  # fmt: skip
    model = Model(args.seed)
    parts = [pressure_part(model, grid, num_runs), behind_part(model, grid, 1 if args.quick else num_runs)]
    run.end({run.show(part).name: part.rows for part in parts})


if __name__ == "__main__":
    main()
