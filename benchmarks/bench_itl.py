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

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from attention.report import Check, PartResult, at_most, closing_checks, print_part, rounded
from random_models import SHAPES, random_weights
from workloads import cpu_name, load_average

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.config import parse_model_config
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams

PAGE_SIZE = 32
NUM_DECODES = 8
CONTEXT = 256  # of each decode
NUM_NEW = 2048  # of each decode: more than any run takes
SHORT, LONG = 64, 16_384
SHAPE = {**SHAPES["llama-31m"], "max_position_embeddings": 32_768}
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
        config = parse_model_config(SHAPE, "llama-31m")
        weights = random_weights(config, torch.device("cpu"), torch.bfloat16, seed)
        num_tokens = LONG + SHORT + NUM_DECODES * (CONTEXT + NUM_NEW)
        self._runner = Runner(Decoder(config, weights), num_tokens // PAGE_SIZE + 64, PAGE_SIZE)
        self._random = random.Random(seed)

    def engine(self, chunk: int) -> Engine:
        config = EngineConfig(max_batch_tokens=chunk + NUM_DECODES, max_running=16, max_sessions=0)
        return Engine(self._runner, None, config)

    def submit(self, engine: Engine, name: str, num_tokens: int, max_tokens: int) -> None:
        ids = tuple(self._random.randrange(16, 8192) for _ in range(num_tokens))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        engine.submit(GenerationRequest(request_id=name, prompt_token_ids=ids, sampling=params))


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
    """Of each prompt, by name, all submitted at once; `prompts` has their lengths."""
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
    runs: dict[int, list[Pressure]] = {chunk: [] for chunk in chunks}
    press(model, grid.chunks[0], grid)  # a warm-up
    for run in range(num_runs):
        for chunk in chunks if run % 2 else reversed(chunks):
            runs[chunk].append(press(model, chunk, grid))
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
    found: dict[tuple[int, str], list[dict[str, float]]] = {(chunk, arm): [] for chunk in chunks for arm in arms}
    for _ in range(num_runs):
        for (chunk, arm), times in found.items():
            times.append(first_token_ms(model, chunk, arms[arm]))
    for chunk, name in chunks.items():
        alone = statistics.median(times["short"] for times in found[chunk, "alone"])
        behind, long = (statistics.median(times[who] for times in found[chunk, "behind"]) for who in ("short", "long"))
        part.rows.append({"chunk": name, "alone": alone, "behind": behind, "long": long, "behind/long": behind / long})
    share = 1 / -(-LONG // grid.chunks[-1])  # one step of those that the long prompt takes
    part.checks.append(at_most("short_behind_long_over_long", part.rows[0]["behind/long"], share, noise=NOISE))
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two chunk sizes, two runs, a shorter prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the closing line to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    grid, num_runs = (QUICK, 2) if args.quick else (FULL, args.runs)
    model = Model(args.seed)
    parts = [pressure_part(model, grid, num_runs), behind_part(model, grid, 1 if args.quick else num_runs)]
    for part in parts:
        print_part(part)
    closing = json.dumps(
        {
            "benchmark": "itl", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "dtype": "bfloat16",
            "model": SHAPE, "decodes": NUM_DECODES, "context": CONTEXT, "prompt": grid.prompt,
            "runs": num_runs, "seed": args.seed, "threads": 1, "torch": torch.__version__,
            "load_average": [load_before, load_average()], "elapsed_s": round(time.perf_counter() - started, 1),
            "results": {part.name: rounded(part.rows) for part in parts},
            **closing_checks(check for part in parts for check in part.checks),
        }
    )  # fmt: skip
    if args.json:
        args.json.write_text(closing + "\n")
    print(closing)


if __name__ == "__main__":
    main()
