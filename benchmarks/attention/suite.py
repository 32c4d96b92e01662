"""Runs the parts one after the other, each within its share of the time, and writes what they found."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention import (
    bandwidth,
    chunk,
    documents,
    headline,
    pensieve,
    plan_time,
    plots,
    regret,
    relay,
    roofline,
    rotation,
)
from attention.arms import backends
from attention.bench import DTYPES, Bench
from attention.machine import measure_ceilings
from attention.report import PartResult, closing_checks, print_part, rounded, write_closing
from attention.scenes import Heads, prefix_scene
from workloads import cpu_name, load_average

# Name -> what runs it and its share of the time; what a part does not use goes to those behind it.
PARTS: dict[str, tuple[Callable[[Bench], PartResult], int]] = {
    "headline": (headline.run, 28),
    "relay": (relay.run, 22),
    "bandwidth": (bandwidth.run, 6),
    "documents": (documents.run, 10),
    "rotation": (rotation.run, 5),
    "regret": (regret.run, 16),
    "plan_time": (plan_time.run, 5),
    "pensieve": (pensieve.run, 6),
    "chunk": (chunk.run, 7),
    "roofline": (roofline.run, 5),
}
# (GPU, CPU, quick): seconds for everything, and for the rounds of one point.
_BUDGET_S = (190.0, 900.0, 70.0)
_POINT_S = (0.12, 1.0, 0.15)
_RESULTS = Path(__file__).parents[1] / "results"


def run(args: argparse.Namespace) -> int:
    """Run what was asked for; returns the exit status: 1 if a promised figure was missed and `--strict` was given."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_attention: not run: no CUDA device", file=sys.stderr)
        return 2
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    if args.out is None and not args.quick:
        args.out = _RESULTS / f"attention-{time.strftime('%Y-%m-%d')}-{args.device}"
    load_before, started = load_average(), time.perf_counter()
    bench = _bench(args, device)
    budget_s = args.budget_s or bench.pick(cuda=_BUDGET_S[0], cpu=_BUDGET_S[1], quick=_BUDGET_S[2])
    chosen = args.only or list(PARTS)
    available = _backends(bench)
    print(f"{device_name(device)}: {', '.join(available)}; {_shown_ceilings(bench)}; load {load_before}")
    parts: list[PartResult] = []
    ends_s = started + budget_s
    for index, name in enumerate(chosen):
        runner, share = PARTS[name]
        remaining = sum(PARTS[other][1] for other in chosen[index:])
        bench.begin_part(max(0.0, ends_s - time.perf_counter()) * share / remaining)  # what a part saves, others get
        parts.append(runner(bench))
        print_part(parts[-1])
        closing = _closing(args, bench, parts, (load_before, load_average()), time.perf_counter() - started)
        closing["backends"] = available
        _write(args.out, closing)  # after each part: a run that is cut short leaves what it has
    if args.out is not None:
        drawn = plots.draw(args.out, closing)
        print(f"\nwrote {args.out / 'attention.json'} and {len(drawn)} plots")
    print(json.dumps(closing))
    missed = [check["name"] for check in closing["checks"] if check["ok"] is False]
    return 1 if missed and args.strict else 0


def _backends(bench: Bench) -> list[str]:
    """What can run here: without a compiler, say, `auto` is torch's backend, and the figures are of that."""
    return backends(prefix_scene(2, 32, 32, **bench.options(Heads(8, 2, 64), DTYPES["bfloat16"])))


def _shown_ceilings(bench: Bench) -> str:
    rates = bench.ceilings.flops_per_s
    products = [f"{name} {rates[dtype] / 1e12:.3g} TFLOP/s" for name, dtype in DTYPES.items() if dtype in rates]
    return f"copy {bench.ceilings.copy_bytes_per_s / 1e9:.3g} GB/s, products {', '.join(products)}"


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _bench(args: argparse.Namespace, device: torch.device) -> Bench:
    dtypes = [torch.bfloat16, torch.float32, *([torch.float16] if device.type == "cuda" else [])]
    now_s = time.process_time if args.clock == "cpu" else time.perf_counter
    kind = 2 if args.quick else 0 if device.type == "cuda" else 1
    return Bench(
        device=device, quick=args.quick, num_threads=args.threads,
        ceilings=measure_ceilings(device, dtypes, now_s=now_s),
        point_s=_POINT_S[kind], seed=args.seed, now_s=now_s,
    )  # fmt: skip


def _closing(
    args: argparse.Namespace, bench: Bench, parts: list[PartResult], loads: tuple[float, float], elapsed_s: float
) -> dict[str, Any]:
    """The line that ends the benchmark."""
    return {
        "benchmark": "attention", "device": device_name(bench.device), "kind": bench.device.type,
        "quick": args.quick, "threads": args.threads, "seed": args.seed, "clock": args.clock,
        "elapsed_s": round(elapsed_s, 1),
        "python": platform.python_version(), "torch": torch.__version__, "load_average": list(loads),
        "ceilings": {
            "copy_GB_per_s": rounded(bench.ceilings.copy_bytes_per_s / 1e9),
            "TFLOP_per_s": {str(d).removeprefix("torch."): rounded(rate / 1e12)
                            for d, rate in bench.ceilings.flops_per_s.items()},
            "cache_MiB": bench.ceilings.cache_bytes / 2**20,
        },
        "notes": bench.notes,
        "results": {part.name: {"title": part.title, "rows": rounded(part.rows)} for part in parts},
        **closing_checks(check for part in parts for check in part.checks),
    }  # fmt: skip


def _write(folder: Path | None, closing: dict[str, Any]) -> None:
    if folder is not None:
        write_closing(folder, closing)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small grids: at most 90 s on two CPU cores")
    parser.add_argument("--threads", type=int, default=1, help="of torch and OpenMP, on a CPU")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: the process's CPU time, for one thread on a machine that others use")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, help="for everything; points that do not fit are 'not run'")
    parser.add_argument("--out", type=Path, help="folder for JSON and plots; default, if not --quick: one in results/")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a promised figure is missed")
