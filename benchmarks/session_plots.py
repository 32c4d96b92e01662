"""Plots of the benchmarks of sessions, in the form of the papers' figures; without matplotlib, none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rate_search import Point, median_points


def plot_latency(path: Path, title: str, points: Mapping[str, Sequence[Point]], bound_s: float) -> bool:
    """p90 of normalized latency over the throughput, one line per system (Pensieve Fig. 8)."""

    def draw(axes: Any) -> None:
        for system, own in points.items():
            line = [(p.served_per_s, p.p90_s * 1e3) for p in median_points(own) if math.isfinite(p.p90_s)]
            if line:
                axes.plot(*zip(*line, strict=True), "o-", label=system, markersize=3)
        axes.axhline(bound_s * 1e3, linestyle="--", color="grey", label="bound")
        axes.set_ylim(0, 3 * bound_s * 1e3)
        axes.set_xlabel("throughput, requests/s")
        axes.set_ylabel("normalized latency p90, ms per token")

    return _save(path, title, draw)


def plot_bars(
    path: Path,
    title: str,
    y_label: str,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    *,
    x_label: str = "history, tokens",
) -> bool:
    """A group of bars per history, or other case, one bar per arm, logarithmic (AttentionStore Fig. 14, 18, 25, 26)."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(bars)
        for index, (name, values) in enumerate(bars.items()):
            axes.bar([place + index * width for place in range(len(groups))], values, width, label=name)
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], groups)
        axes.set_yscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)

    return _save(path, title, draw)


def plot_rows(path: Path, title: str, x_label: str, bars: Mapping[str, Mapping[str, float]]) -> bool:
    """A row per name of a case, with a bar for each arm that has it, logarithmic; for names that are long."""
    names = list(dict.fromkeys(name for values in bars.values() for name in values))

    def draw(axes: Any) -> None:
        height = 0.8 / len(bars)
        for index, (arm, values) in enumerate(bars.items()):
            places = [names.index(name) + index * height for name in values]
            axes.barh(places, list(values.values()), height, label=arm)
        axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names, fontsize=6)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(x_label)

    return _save(path, title, draw)


def _save(path: Path, title: str, draw: Callable[[Any], None]) -> bool:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.8))
    try:
        draw(axes)
        axes.set_title(title, fontsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)
    return True
