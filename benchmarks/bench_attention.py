"""Our attention against theory and against other ways to call it, in the form of the papers' tables and figures.

    python benchmarks/bench_attention.py [--device cpu|cuda] [--quick] [--only PART] [--threads 1] [--out FOLDER]

| part      | what is measured                                                                           |
|-----------|--------------------------------------------------------------------------------------------|
| headline  | batch 32, 2,048 shared + 128 private: `auto` against contiguous SDPA and gather + SDPA     |
| relay     | RelayAttention Fig. 1 and 5: latency, speed-up over sequence-first beside Eq. 10           |
| bandwidth | sequence-first decode: share of the measured copy bandwidth                                |
| documents | documents at other positions in every sequence; virtual queries, sequence-first, SDPA      |
| rotation  | random deltas against deltas of zero                                                       |
| regret    | `auto` against the better of `always` and `never`                                          |

What bounds it: decode over private KV reads every key and value once (the copy bandwidth); a shared segment is read
once per batch, and from some batch size on its products bound it (the matrix rate). Both ceilings are measured in the
same run. Arms take turns, medians are reported, every arm is checked against float64 before it is timed, weights and
KV are random (the seed is stated). Each part has its share of the time; points that do not fit, or are too long for the
device, are "not run". The run ends in one line of JSON with all figures and the promised ones as `checks`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Before torch is imported: compiled kernels may bring an OpenMP of their own, which reads this once.
    threads = argparse.ArgumentParser(add_help=False)
    threads.add_argument("--threads", default="1")
    os.environ["OMP_NUM_THREADS"] = threads.parse_known_args()[0].threads

import torch
from attention import bandwidth, documents, headline, regret, relay, rotation
from attention.arms import backends
from attention.bench import DTYPES, Bench
from attention.machine import device_name, measure_ceilings
from attention.scenes import Heads, prefix_scene
from harness import PartResult, Run, options_of, rounded

# Name -> what runs it and its share of the time; what a part does not use goes to those behind it.
PARTS: dict[str, tuple[Callable[[Bench], PartResult], int]] = {
    "headline": (headline.run, 28),
    "relay": (relay.run, 22),
    "bandwidth": (bandwidth.run, 6),
    "documents": (documents.run, 10),
    "rotation": (rotation.run, 5),
    "regret": (regret.run, 16),
}
# (GPU, CPU, quick): seconds for everything, and for the rounds of one point.
_BUDGET_S = (190.0, 900.0, 70.0)
_POINT_S = (0.12, 1.0, 0.15)
_RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run what the command line asks for; the exit status is 1 if a figure was missed and `--strict` was given."""
    args = _options().parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_attention: not run: no CUDA device", file=sys.stderr)
        return 2
    if args.out is None and not args.quick:
        args.out = _RESULTS / f"attention-{time.strftime('%Y-%m-%d')}-{args.device}"
    run = Run("attention", args, threads=args.threads, device=device_name(device), kind=device.type, clock=args.clock,
              python=platform.python_version())  # fmt: skip
    bench = _bench(args, device)
    budget_s = args.budget_s or bench.pick(cuda=_BUDGET_S[0], cpu=_BUDGET_S[1], quick=_BUDGET_S[2])
    chosen = args.only or list(PARTS)
    rates = bench.ceilings.flops_per_s
    facts = {
        "backends": backends(prefix_scene(2, 32, 32, **bench.options(Heads(8, 2, 64), DTYPES["bfloat16"]))),
        "notes": bench.notes,
        "ceilings": {
            "copy_GB_per_s": rounded(bench.ceilings.copy_bytes_per_s / 1e9),
            "TFLOP_per_s": {str(d).removeprefix("torch."): rounded(rate / 1e12) for d, rate in rates.items()},
            "cache_MiB": bench.ceilings.cache_bytes / 2**20,
        },
    }
    print(f"{device_name(device)}: {facts['backends']}, {facts['ceilings']}")
    results: dict[str, Any] = {}
    ends_s = run.started_s + budget_s
    for index, name in enumerate(chosen):
        runner, share = PARTS[name]
        remaining = sum(PARTS[other][1] for other in chosen[index:])
        bench.begin_part(max(0.0, ends_s - time.perf_counter()) * share / remaining)  # what a part saves, others get
        part = run.show(runner(bench))
        results[name] = {"title": part.title, "rows": part.rows}
        run.keep(results, **facts)  # a run that is cut short leaves what it has
    run.end(results, **facts)
    return run.status


def _bench(args: argparse.Namespace, device: torch.device) -> Bench:
    dtypes = [torch.bfloat16, torch.float32, *([torch.float16] if device.type == "cuda" else [])]
    now_s = time.process_time if args.clock == "cpu" else time.perf_counter
    kind = 2 if args.quick else 0 if device.type == "cuda" else 1
    return Bench(
        device=device, quick=args.quick, num_threads=args.threads,
        ceilings=measure_ceilings(device, dtypes, now_s=now_s),
        point_s=_POINT_S[kind], seed=args.seed, now_s=now_s,
    )  # fmt: skip


def _options() -> argparse.ArgumentParser:
    parser = options_of(__doc__, quick="small grids: at most 90 s on two CPU cores", out=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="this part; may be repeated")
    parser.add_argument("--threads", type=int, default=1, help="of torch and OpenMP, on a CPU")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: the process's CPU time, for one thread on a machine that others use")  # fmt: skip
    parser.add_argument("--budget-s", type=float, help="for everything; points that do not fit are 'not run'")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a promised figure is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
