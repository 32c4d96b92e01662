"""Tables, promised figures and the closing line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_MEASURED = "not measured"  # shown in the place of a value
NOT_RUN = "not run"


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
    """Part of every benchmark's closing line: `checks`, each of which was met or missed, and the names `not_measured`.

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


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def print_part(part: PartResult) -> None:
    """The part's table and what it was held against."""
    print(f"\n== {part.name}: {part.title}")
    columns = list(dict.fromkeys(column for row in part.rows for column in row))
    lines = [columns, *([_shown(row.get(column)) for column in columns] for row in part.rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)] if columns else []
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for check in part.checks:
        print_check(check)


def print_check(check: Check) -> None:
    verdict = {True: "ok", False: "MISSED", None: NOT_MEASURED}[check.ok]
    value = "" if check.value is None else f"{check.value:.3g} {check.unit}, "
    print(f"  [{verdict}] {check.name}: {value}target {check.target}")


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


def write_closing(folder: Path, closing: Mapping[str, Any]) -> None:
    """Keep the line that ends a benchmark in a file of the benchmark's name; the folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{closing['benchmark']}.json").write_text(json.dumps(closing) + "\n")
