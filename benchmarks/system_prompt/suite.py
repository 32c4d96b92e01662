"""Runs the parts one after the other and writes what they found."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention.report import PartResult, closing_checks, print_part, rounded, write_closing
from random_models import SHAPES
from system_prompt import plots
from system_prompt.arms import ARMS, DTYPES, PAGE_SIZE, pool_pages
from system_prompt.batches import PROMISED, run_batch, run_few_shot, run_models, run_throughput
from system_prompt.bench import MAIN_MODEL, Bench
from system_prompt.capacity import run_capacity
from system_prompt.interactive import LIMIT_MS, run_interactive
from system_prompt.together import run_together
from workloads import cpu_name, load_average

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


def run(args: argparse.Namespace) -> int:
    """Run what was asked for; returns the exit status: 1 if a promised figure was missed and `--strict` was given."""
    torch.set_num_threads(1)
    if args.out is None and not args.quick:
        args.out = _RESULTS / f"system-prompt-{time.strftime('%Y-%m-%d')}-cpu"
    load_before, started = load_average(), time.perf_counter()
    bench = make_bench(args)
    print(f"{cpu_name()}, 1 thread; {MAIN_MODEL}, {args.dtype}; pool of {bench.num_pages} pages; load {load_before}")
    parts: list[PartResult] = []
    for name in args.only or PARTS:
        parts.append(PARTS[name](bench))
        print_part(parts[-1])
        closing = _closing(args, bench, parts, [load_before, load_average()], time.perf_counter() - started)
        _write(args.out, closing)  # after each part: a run that is cut short leaves what it has
    if args.out is not None:
        drawn = plots.draw(args.out, closing)
        print(f"\nwrote {args.out / 'system_prompt.json'} and {len(drawn)} plots")
    print(json.dumps(closing))
    missed = [check["name"] for check in closing["checks"] if check["ok"] is False]
    return 1 if missed and args.strict else 0


def make_bench(args: argparse.Namespace) -> Bench:
    """A pool in which the largest batch of every part runs unshared: what waiting for pages costs is not measured."""
    batch_limit = 16 if args.quick else 32
    largest = batch_limit if args.quick else _LARGEST_BATCH
    return Bench(
        quick=args.quick, dtype=DTYPES[args.dtype], seed=args.seed, batch_limit=batch_limit, rounds=args.rounds,
        num_pages=pool_pages(PROMISED, largest),
        now_s=time.process_time if args.clock == "cpu" else time.perf_counter,
    )  # fmt: skip


def _closing(
    args: argparse.Namespace, bench: Bench, parts: list[PartResult], loads: list[float], elapsed_s: float
) -> dict[str, Any]:
    """The line that ends the benchmark."""
    return {
        "benchmark": "system_prompt", "device": cpu_name(), "kind": "cpu", "quick": args.quick, "threads": 1,
        "seed": args.seed, "clock": args.clock, "elapsed_s": round(elapsed_s, 1),
        "python": platform.python_version(), "torch": torch.__version__, "load_average": loads,
        "model": SHAPES[MAIN_MODEL], "dtype": args.dtype, "page_size": PAGE_SIZE, "num_pages": bench.num_pages,
        "batch_limit": bench.batch_limit, "normalized_latency_limit_ms": LIMIT_MS,
        "arms": {arm.name: {"prefix_sharing": arm.prefix_sharing, "share": arm.share} for arm in ARMS},
        "results": {part.name: {"title": part.title, "rows": rounded(part.rows)} for part in parts},
        **closing_checks(check for part in parts for check in part.checks),
    }  # fmt: skip


def _write(folder: Path | None, closing: dict[str, Any]) -> None:
    if folder is not None:
        write_closing(folder, closing)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few points: at most 90 s on two CPU cores")
    parser.add_argument("--rounds", type=int, help="of every point; default: as many as each part takes")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: the process's CPU time, on a machine that others use")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for JSON and plots; default, if not --quick: one in results/")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a promised figure is missed")
