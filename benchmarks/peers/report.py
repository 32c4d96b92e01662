"""What every peer script prints and writes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from harness import cpu_name, load_average
from workloads import WORKLOADS, Workload

RESULTS = Path(__file__).resolve().parents[1] / "results"


def parse_arguments(description: str | None) -> tuple[argparse.Namespace, Workload]:
    """`--workload W|S|P|D`, `--runs`, `--json` (one line of JSON alone, and the results file)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="W")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print only the JSON line, and write it to results/")
    parser.add_argument("--turns", action="store_true", help="run when asked to, for `bench_engine.py --beside`")
    arguments = parser.parse_args()
    return arguments, WORKLOADS[arguments.workload]


def take_turns(name: str, version: str, run: Callable[[int], float]) -> None:
    """Say who this is, then answer each line (a seed) with the seconds of a cold and a warm run of that seed."""
    print(json.dumps({"name": name, "version": version}), flush=True)
    for line in sys.stdin:
        seed = int(line)
        print(json.dumps({"cold_s": run(seed), "warm_s": run(seed)}), flush=True)


def report(
    arguments: argparse.Namespace, workload: Workload, name: str, version: str, cold_s: list[float], warm_s: list[float]
) -> None:
    """Medians of tokens per second; seconds are of whole runs of the workload."""
    entry = {
        "name": name,
        "version": version,
        "workload": arguments.workload,
        "tokens_per_s_cold": round(workload.output_tokens / statistics.median(cold_s), 1),
        "tokens_per_s_warm": round(workload.output_tokens / statistics.median(warm_s), 1),
        "cpu": cpu_name(),
        "threads": 1,
        "load_average": load_average(),
    }
    line = json.dumps(entry)
    if arguments.json:
        (RESULTS / f"peer-{name}-{arguments.workload}.json").write_text(line + "\n")
    else:
        print(f"{name} {version}, workload {arguments.workload}:")
    print(line)
