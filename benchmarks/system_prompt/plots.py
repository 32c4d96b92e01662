"""PNG plots in the form of the papers' figures, from the rows that were measured; without matplotlib, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention.report import PartResult
from system_prompt.arms import ARMS

Rows = list[dict[str, Any]]


def draw(parts: Sequence[PartResult], folder: Path, device: str) -> list[Path]:
    """One file per part that has a figure and at least two points; returns their paths."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[Any, Rows], None]] = {
        "throughput": _throughput,
        "batch": _batch,
        "few_shot": _few_shot,
        "interactive": _interactive,
        "capacity": _capacity,
    }
    return [
        _draw_one(folder / f"{part.name}.png", figures[part.name], part.rows, f"{part.title}\n{device}")
        for part in parts
        if part.name in figures and len(part.rows) > 1
    ]


def _draw_one(path: Path, plot: Callable[[Any, Rows], None], rows: Rows, title: str) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.8))
    try:
        plot(axes, rows)
        axes.set_title(title, fontsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)
    return path


def _arms(axes: Any, rows: Rows, x: str, unit: str, *, style: str = "o-", note: str = "") -> None:
    """A line per arm, one colour each in every group of lines."""
    for index, arm in enumerate(ARMS):
        points = [(row[x], row[f"{arm.name} {unit}"]) for row in rows if row.get(f"{arm.name} {unit}") is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=f"C{index}", label=f"{arm.name}{note}", markersize=3)


def _axes(axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def _throughput(axes: Any, rows: Rows) -> None:
    shapes = list(dict.fromkeys((row["user"], row["new"]) for row in rows))
    for shape, style in zip(shapes, ("o-", "s--", "^:"), strict=False):
        chosen = [row for row in rows if (row["user"], row["new"]) == shape]
        _arms(axes, chosen, "system", "tok/s", style=style, note=f" {shape}")
    _axes(axes, "system prompt (tokens)", "output tokens/s")


def _batch(axes: Any, rows: Rows) -> None:
    _arms(axes, rows, "batch", "decode tok/s")
    _axes(axes, "batch size, 2,048 shared tokens", "tokens/s while all decode")


def _few_shot(axes: Any, rows: Rows) -> None:
    for new, style in zip(dict.fromkeys(row["new"] for row in rows), ("o-", "s--"), strict=False):
        _arms(axes, [row for row in rows if row["new"] == new], "examples", "s", style=style, note=f", {new} new")
    _axes(axes, "shared examples (tokens)", "seconds of the batch")


def _interactive(axes: Any, rows: Rows) -> None:
    _arms(axes, rows, "system", "req/s")
    _axes(axes, "system prompt (tokens)", "highest Poisson rate (requests/s)")


def _capacity(axes: Any, rows: Rows) -> None:
    for column, style in (("growth", "o-"), ("1/(1-r)", "--")):
        axes.plot([row["r"] for row in rows], [row[column] for row in rows], style, label=column)
    axes.set_xlabel("part of the tokens that is shared")
    axes.set_ylabel("running sequences, over those without sharing")
