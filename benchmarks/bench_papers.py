"""The papers' own experiments, by name: what they measured, ours beside theirs, part after part.

    python benchmarks/bench_papers.py                       what there is, and how far each is
    python benchmarks/bench_papers.py NAME... [--minutes 9] [--again] [--quick] [--seed 0] [--out FOLDER]

An experiment is a grid of points. Each point is kept in FOLDER/NAME.json when it is measured, and the same command goes
on with those that are left until its minutes are over: run it again until it says that all are there. Then its rows in
`results/papers/table.json` are written, which `.ci/papers` shows on docs/papers. `--quick` takes one or two points
into FOLDER alone. Which take how long: `papers/README.md`; what bounds each, its file's docstring.

`--vllm PYTHON`: its CPU build has a turn, too, in `relay-throughput` (`peers/vllm_cpu.py` says how to make it).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: compiled kernels read it once

from harness import Run, cpu_name, options_of
from papers import (
    conversations,
    deviation,
    documents,
    eviction,
    hierarchy,
    kernels,
    map_reduce,
    system_prompt,
    truncation,
)
from papers.experiment import RESULTS, Experiment, run_points, tell_table

ROOMS = (kernels, system_prompt, conversations, deviation, documents, map_reduce, eviction, hierarchy, truncation)
EXPERIMENTS: dict[str, type[Experiment]] = {each.name: each for room in ROOMS for each in room.EXPERIMENTS}


def show(folder: Path) -> None:
    """A line for each experiment."""
    for name, kind in EXPERIMENTS.items():
        path = folder / f"{name}.json"
        num_done = len(json.loads(path.read_text())["results"]) if path.exists() else 0
        num_points = len([*kind(0, is_quick=False).points()])
        print(f"{name:28} {num_done:3} of {num_points:3}, {kind.minutes:3} min, {', '.join(kind.rows)}: {kind.title}")


def main() -> int:
    parser = options_of(__doc__, quick="one or two points of each, and no table", out=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no point is begun")
    parser.add_argument("--again", action="store_true", help="forget the points that are there")
    parser.add_argument("--vllm", help="Python of an environment with vllm-cpu")
    args = parser.parse_args()
    is_kept = args.out is None and not args.quick
    args.out = args.out or (Path(tempfile.mkdtemp(prefix="mneme-papers-")) if args.quick else RESULTS)
    if unknown := [name for name in args.names if name not in EXPERIMENTS]:
        parser.error(f"there is no {', '.join(unknown)}")
    if not args.names:
        show(args.out)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that were started end, too
    are_whole = True
    for name in args.names:
        experiment = EXPERIMENTS[name](args.seed, is_quick=args.quick, vllm=args.vllm)
        run = Run(name, args, threads=1)
        if not run_points(experiment, run, 60 * args.minutes / len(args.names)):
            are_whole = False
        elif is_kept:
            found = json.loads((args.out / f"{name}.json").read_text())["results"]
            loads = [row["load"] for row in found]
            machine = f"{os.cpu_count()} cores, {cpu_name()}, load {min(loads):.0f} to {max(loads):.0f}"
            tell_table(experiment, found, f"bench_papers.py {name}", machine)
            run.say(f"{name}: its rows of the table are written; .ci/papers shows them")
    return 0 if are_whole else 3


if __name__ == "__main__":
    sys.exit(main())
