"""Runs the parts one after the other and writes what they found."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import MAIN_MODEL
from harness import PartResult, Run, options_of
from random_models import SHAPES
from system_prompt import plots
from system_prompt.batches import PROMISED, run_batch, run_few_shot, run_models, run_throughput
from system_prompt.bench import ARMS, DTYPES, PAGE_SIZE, Bench, pool_pages
from system_prompt.capacity import run_capacity
from system_prompt.interactive import LIMIT_MS, run_interactive
from system_prompt.together import run_together

PARTS: dict[str, Callable[[Bench], PartResult]] = {
    "together": run_together,
    "capacity": run_capacity,
    "throughput": run_throughput,
    "few_shot": run_few_shot,
    "interactive": run_interactive,
    "batch": run_batch,
    "models": run_models,
}
_LARGEST_BATCH = 64
_RESULTS = Path(__file__).parents[1] / "results"


def run(description: str | None) -> int:
    """Run what the command line asks for; the exit status is 1 if a figure was missed and `--strict` was given."""
    args = _options(description).parse_args()
    if args.out is None and not args.quick:
        args.out = _RESULTS / f"system-prompt-{time.strftime('%Y-%m-%d')}-cpu"
    bench = make_bench(args)
    run = Run(
        "system_prompt", args, threads=1, clock=args.clock, python=platform.python_version(), model=SHAPES[MAIN_MODEL],
        dtype=args.dtype, page_size=PAGE_SIZE, num_pages=bench.num_pages, batch_limit=bench.batch_limit,
        normalized_latency_limit_ms=LIMIT_MS,
        arms={arm.name: {"prefix_sharing": arm.prefix_sharing, "share": arm.share} for arm in ARMS},
    )  # fmt: skip
    results: dict[str, Any] = {}
    for name in args.only or PARTS:
        part = run.show(PARTS[name](bench))
        results[name] = {"title": part.title, "rows": part.rows}
        run.keep(results)  # a run that is cut short leaves what it has
    run.end(results, plots.draw)
    return run.status


def make_bench(args: argparse.Namespace) -> Bench:
    """A pool in which the largest batch of every part runs unshared: what waiting for pages costs is not measured."""
    batch_limit = 16 if args.quick else 32
    largest = batch_limit if args.quick else _LARGEST_BATCH
    return Bench(
        quick=args.quick, dtype=DTYPES[args.dtype], seed=args.seed, batch_limit=batch_limit, rounds=args.rounds,
        num_pages=pool_pages(PROMISED, largest),
        now_s=time.process_time if args.clock == "cpu" else time.perf_counter,
    )  # fmt: skip


def _options(description: str | None) -> argparse.ArgumentParser:
    parser = options_of(description, quick="few points: at most 90 s on two CPU cores", out=True)
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="this part; may be repeated")
    parser.add_argument("--rounds", type=int, help="of every point; default: as many as each part takes")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: the process's CPU time, on a machine that others use")  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a promised figure is missed")
    return parser
