"""PNG plots in the form of the papers' figures, from a closing line alone; without matplotlib, none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import NOT_RUN
from plots import Points, caption_of, lines, save

Rows = Sequence[Mapping[str, Any]]
_NAMES = {"relay": "mneme", "PS": "shared in memory only", "none": "nothing shared"}


def draw(folder: Path, closing: Mapping[str, Any]) -> list[Path]:
    """Draw a file per part that has a figure and at least three points on its axis; returns their paths."""
    drawn = []
    for part, (plot, x) in {
        "throughput": (_throughput, "system"), "batch": (_batch, "batch"), "few_shot": (_few_shot, "examples"),
        "interactive": (_interactive, "system"), "capacity": (_capacity, "r"),
    }.items():  # fmt: skip
        found = closing["results"].get(part, {"rows": []})["rows"]
        rows = [row for row in found if not str(row.get("status", "")).startswith(NOT_RUN)]
        if len({row[x] for row in rows}) > 2:
            drawn.append(folder / f"{part}.png")
            plot(drawn[-1], f"31M Llama with random weights, {caption_of(closing)}", rows)
    return drawn


def _arms(rows: Rows, x: str, unit: str) -> dict[str, Points]:
    return {
        shown: [(row[x], row[f"{arm} {unit}"]) for row in rows if row.get(f"{arm} {unit}") is not None]
        for arm, shown in _NAMES.items()
    }


def _throughput(path: Path, caption: str, rows: Rows) -> None:
    shapes = list(dict.fromkeys((row["user"], row["new"]) for row in rows))
    panels = [
        lambda axes, shape=shape: lines(
            axes,
            _arms([row for row in rows if (row["user"], row["new"]) == shape], "system", "tok/s"),
            f"shared system prompt, tokens; {shape[0]} own, {shape[1]} new",
            "output tokens per second",
            log_x=True,
        )
        for shape in shapes
    ]
    save(path, "A batch of requests behind one system prompt (higher is better)", caption, *panels, share_y=True)


def _batch(path: Path, caption: str, rows: Rows) -> None:
    series, labels = _arms(rows, "batch", "decode tok/s"), ("requests at once", "tokens per second while all decode")
    title = "Decoding behind 2,048 shared tokens, by the size of the batch (higher is better)"
    save(path, title, caption, lambda axes: lines(axes, series, *labels, log_x=True))


def _few_shot(path: Path, caption: str, rows: Rows) -> None:
    panels = [
        lambda axes, new=new: lines(
            axes,
            _arms([row for row in rows if row["new"] == new], "examples", "s"),
            f"shared examples, tokens; answers of {new}",
            "seconds for all questions",
            log_x=True,
        )
        for new in dict.fromkeys(row["new"] for row in rows)
    ]
    save(path, "A batch of questions behind the same examples (lower is better)", caption, *panels)


def _interactive(path: Path, caption: str, rows: Rows) -> None:
    series, labels = _arms(rows, "system", "req/s"), ("shared system prompt, tokens", "requests per second")
    title = "Highest rate of Poisson arrivals at a fixed latency (higher is better)"
    save(path, title, caption, lambda axes: lines(axes, series, *labels, log_x=True))


def _capacity(path: Path, caption: str, rows: Rows) -> None:
    names = {"growth": "mneme", "1/(1-r)": "the most that is possible, 1 / (1 - r)"}
    series = {shown: [(100 * row["r"], row[column]) for row in rows] for column, shown in names.items()}
    labels = "% of the tokens that is shared", "times as many as without sharing"
    title = "Sequences that run at once in a fixed pool (higher is better)"
    save(path, title, caption, lambda axes: lines(axes, series, *labels, dashed=[names["1/(1-r)"]]))
