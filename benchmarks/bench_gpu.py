"""What is measured on a GPU: `python benchmarks/bench_gpu.py TARGET [--dry] [--out FOLDER]`.

| target    | what it says                                                                                   |
|-----------|------------------------------------------------------------------------------------------------|
| check     | whether it works: compile, float64, tests, ceilings of memory and products, a small service    |
| attention | share of the bandwidth, of Eq. 10 and of the intercept; rotation, documents, prefill, tuning   |
| engine    | decode steps split into host and device time; kernels by name; draws; first tokens             |
| tiers     | the bus, the cache tier per 4k tokens, decode beside both                                      |
| served    | `mneme serve` under load: tokens/s, TTFT, ITL, what HTTP adds, a replica that is killed         |
| beside    | our engine and vLLM's in turns: time per token, first tokens                                   |

Run in this order (`make gpu` does, but for the last two): a figure means nothing where `check` fails. Each takes under
nine minutes, needs no network and no Ray (`served`: all that `mneme serve` does; `beside`: vLLM), and ends in one table
of at most 40 lines, with what was predicted (`gpu/predictions.py`) beside each figure, and one archive, in $OUT where
that is set. `--only` runs some of a target's steps. `--dry` runs all of it on a CPU at tiny shapes: the table says
"dry" for a figure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from gpu.preflight import reason_against

BUDGET_S = {"check": 500.0, "attention": 500.0, "engine": 500.0, "tiers": 400.0, "served": 470.0, "beside": 500.0}
_DRY_BUDGET_S = 1200.0  # what a busy machine makes of seconds is no failure


def main() -> int:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # what is wrong is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=tuple(BUDGET_S))
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny shapes, without figures")
    parser.add_argument("--budget-s", type=_seconds, help="for everything; what does not fit is 'not run'")
    parser.add_argument("--only", metavar="STEP,...", help="these steps of the target, such as smoke,engine")
    parser.add_argument("--out", type=Path, help="folder; default: one in results/")
    parser.add_argument("--mode", choices=("ray", "local"), default="ray", help="of served: with Ray, or one process")
    args = parser.parse_args()
    _prepare(args.dry)
    if (reason := reason_against(needs_device=not args.dry)) is not None:
        print(f"make gpu-{args.target}: not run: {reason}", file=sys.stderr)
        return 2
    folder = args.out or Path(__file__).parent / "results" / f"gpu-{time.strftime('%Y-%m-%d')}"
    for place in (folder / args.target, Path(os.environ.get("OUT") or folder)):
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            reason = f"nothing can be written to {place}: {error.strerror}"
            print(f"make gpu-{args.target}: not run: {reason}", file=sys.stderr)
            return 2
    from gpu import attention, check, engine, steps, tiers

    from mneme.kernels.triton.modules import triton_module

    triton_module("backend")  # imported once, before jobs fork
    targets = {"check": check.steps, "attention": attention.steps, "engine": engine.steps, "tiers": tiers.steps}
    if args.target == "served":
        from gpu import served

        targets["served"] = partial(served.steps, mode=args.mode)
    elif args.target == "beside":
        from gpu import beside_vllm

        targets["beside"] = beside_vllm.steps
    chosen = targets[args.target](args.dry)
    if args.only is not None:
        wanted, names = set(args.only.split(",")), [step.name for step in chosen]
        if unknown := wanted.difference(names):
            parser.error(f"{args.target} has no step {', '.join(sorted(unknown))}: it has {', '.join(names)}")
        chosen = [step for step in chosen if step.name in wanted]
    try:
        return steps.run_steps(
            args.target, chosen, folder / args.target, is_dry=args.dry,
            budget_s=args.budget_s or (_DRY_BUDGET_S if args.dry else BUDGET_S[args.target]),
        )  # fmt: skip
    finally:
        if args.target == "served":
            served.clean_up(folder / args.target)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")


def _prepare(is_dry: bool) -> None:
    """The environment of all jobs, before anything reads it."""
    # With the last, torch asks NVML whether there is a device: asking CUDA would forbid jobs, which fork, to use it.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    if not is_dry:
        os.environ["MNEME_NATIVE"] = "0"  # or every process would wait for a C++ compiler
    elif importlib.util.find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"


if __name__ == "__main__":
    sys.exit(main())
