"""What every benchmark does alike: its options, arms that take turns, tables, checks, and the JSON line that ends it.

Nothing but the standard library is imported: peers have environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

NOT_MEASURED = "not measured"  # shown in the place of a value
NOT_RUN = "not run"
MATRIX_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve", "sme")
Name = TypeVar("Name")
Took = TypeVar("Took")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A promised figure. `value` None: this run did not measure it, and then it is neither met nor missed."""

    name: str
    value: float | None
    unit: str
    target: str
    ok: bool | None


def at_least(name: str, value: float | None, target: float, unit: str = "x", noise: float = 0.0) -> Check:
    """A figure that must reach its target; `noise` is the share by which two equal arms may differ by chance."""
    ok = None if value is None else value >= target * (1 - noise)
    return Check(name=name, value=value, unit=unit, target=f">={target:g}{_margin(noise)}", ok=ok)


def at_most(name: str, value: float | None, target: float, unit: str = "x", noise: float = 0.0) -> Check:
    """A figure that must not pass its target."""
    ok = None if value is None else value <= target * (1 + noise)
    return Check(name=name, value=value, unit=unit, target=f"<={target:g}{_margin(noise)}", ok=ok)


def closing_checks(checks: Iterable[Check]) -> dict[str, Any]:
    """Part of every closing line: `checks`, each of which was met or missed, and the names `not_measured`.

    A benchmark hands over all that it promises; what needs a GPU, or more than `--quick`, has no value.
    """
    found = list(checks)
    return {
        "checks": [
            {"name": c.name, "value": round(c.value, 4), "unit": c.unit, "target": c.target, "ok": c.ok}
            for c in found
            if c.value is not None
        ],
        "not_measured": [c.name for c in found if c.value is None],
    }


def _margin(noise: float) -> str:
    return f" (noise {noise:.0%})" if noise else ""


@dataclass(slots=True, kw_only=True)
class PartResult:
    """What one part of the benchmark found. A row is one line of its table: column -> value."""

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def print_part(part: PartResult) -> None:
    """The part's table and what it was held against."""
    print(f"\n== {part.name}: {part.title}")
    columns = list(dict.fromkeys(column for row in part.rows for column in row))
    lines = [columns, *([_shown(row.get(column)) for column in columns] for row in part.rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)] if columns else []
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for check in part.checks:
        print(shown_check(check))


def shown_check(check: Check) -> str:
    """A line that says whether a check was met."""
    verdict = {True: "ok", False: "MISSED", None: NOT_MEASURED}[check.ok]
    value = "" if check.value is None else f"{check.value:.3g} {check.unit}, "
    return f"  [{verdict}] {check.name}: {value}target {check.target}"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rounded(value: Any) -> Any:
    """Floats to five digits, all through nested lists and mappings."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return value


def options_of(description: str | None, *, quick: str, seed: bool = True, out: bool = False) -> argparse.ArgumentParser:
    """A parser for what benchmarks are told alike; `quick` says what `--quick` leaves out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if seed:
        parser.add_argument("--seed", type=int, default=0)
    if out:
        parser.add_argument("--out", type=Path, help="folder for JSON and plots")
    return parser


class Run:
    """One run of a benchmark, from its beginning to its closing line."""

    def __init__(self, name: str, args: argparse.Namespace, *, threads: int | None = None, **facts: Any) -> None:
        """`threads`: of torch, where this process computes on a CPU; `facts` are part of the closing line."""
        self.args = args
        self.checks: list[Check] = []
        self.started_s, self._load_before = time.perf_counter(), load_average()
        self._facts: dict[str, Any] = {
            "benchmark": name, "device": cpu_name(), "instructions": cpu_flags(), "kind": "cpu",
            "quick": args.quick,
            "seed": getattr(args, "seed", 0),
        }  # fmt: skip
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
            self._facts |= {"threads": threads, "torch": torch.__version__}
        self._facts |= facts

    def say(self, line: str) -> None:
        """Print a line, unless `--json` asked for the closing line alone."""
        if getattr(self.args, "json", None) is not True:
            print(line)

    def show(self, part: PartResult) -> PartResult:
        """Print a part's table and checks; its checks are the run's."""
        print_part(part)
        self.checks += part.checks
        return part

    def check(self, *checks: Check) -> None:
        """Print checks that belong to no table."""
        for check in checks:
            self.say(shown_check(check))
        self.checks += checks

    def closing(self, results: Any, **facts: Any) -> dict[str, Any]:
        """The closing line so far; floats in results have five digits."""
        return {
            **self._facts, **facts, "load_average": [self._load_before, load_average()],
            "elapsed_s": round(time.perf_counter() - self.started_s, 1),
            "results": rounded(results), **closing_checks(self.checks),
        }  # fmt: skip

    def keep(self, results: Any, **facts: Any) -> dict[str, Any]:
        """The closing line so far, also in a file where `--out` says; a run that is cut short leaves what it has."""
        closing = self.closing(results, **facts)
        if (folder := getattr(self.args, "out", None)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{closing['benchmark']}.json").write_text(json.dumps(closing) + "\n")
        return closing

    def end(self, results: Any, draw: Callable[[Path, dict[str, Any]], Any] | None = None, **facts: Any) -> None:
        """Print the closing line; keep it, and the plots of it, where `--out` or `--json FILE` say."""
        closing = self.keep(results, **facts)
        if (folder := getattr(self.args, "out", None)) is not None and draw is not None:
            draw(folder, closing)
        if isinstance(path := getattr(self.args, "json", None), Path):
            path.write_text(json.dumps(closing) + "\n")
        print(json.dumps(closing))


def take_turns(
    names: Iterable[Name], take: Callable[[Name], Took], num_rounds: int, *, num_warm: int = 1
) -> dict[Name, list[Took]]:
    """What `take` gives for each arm, round by round.

    Arms go forwards and backwards in alternation; the first `num_warm` rounds warm up and do not count.
    """
    found: dict[Name, list[Took]] = {name: [] for name in names}
    for number in range(num_warm + num_rounds):
        for name in found if number % 2 else reversed(found):
            took = take(name)
            if number >= num_warm:
                found[name].append(took)
    return found


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median over the rounds of a value over the base's of the same round."""
    return statistics.median(value / of for value, of in zip(values, base, strict=True))


def load_average() -> float:
    """The machine's load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def cpu_flags() -> str:
    """Name what the processor has of the instructions that decide how fast matrices are multiplied."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return " ".join(flag for flag in MATRIX_FLAGS if flag in flags)


def cpu_name() -> str:
    """Name the processor, with its family and model where the kernel tells them: virtual machines hide the rest."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    about = {name.strip(): value.strip() for name, _, value in lines}
    more = ", ".join(f"{name.removeprefix('cpu ')} {about[name]}" for name in ("cpu family", "model") if name in about)
    return about.get("model name", "unknown") + (f" ({more})" if more else "")
