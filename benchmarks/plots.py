"""One look for the plots that pages of docs/ show, and for no others.

Titles say what is shown and which way is better, a caption names
machine and run. What is mneme's is green, in shades where there are several; all else is not. A benchmark draws with
`draw(folder, closing)`, from its closing line alone. Without matplotlib there are no plots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

GREENS = ("#0f6b4a", "#4fa583", "#97ccb6", "#c9e6da", "#073b29")  # of labels that begin with "mneme"
OTHERS = ("#6b7788", "#c98a2b", "#8a6aa0", "#b85c5c", "#4a86ad", "#a3a9b3", "#7d6b4f")
DIM = "#555b66"
Points = Sequence[tuple[float, float]]


def save(path: Path, title: str, caption: str, draw: Callable[[Any], None]) -> None:
    """Write a PNG of what is drawn on its axes; without matplotlib, nothing."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.4, 5))
    try:
        axes.set_axisbelow(True)
        axes.grid(color="#e4e6ea")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        draw(axes)
        figure.suptitle(title, fontsize=11.5, x=0.02, y=0.985, ha="left")
        figure.text(0.02, 0.012, caption, fontsize=7.5, color=DIM)
        handles, labels = axes.get_legend_handles_labels()
        num_rows = -(-len(labels) // 3) if len(labels) > 1 else 0
        if num_rows:  # above the panel: never over what it explains
            place = {"loc": "upper left", "bbox_to_anchor": (0.012, 0.955), "ncols": 3}
            figure.legend(handles, labels, fontsize=9, frameon=False, **place)
        figure.tight_layout(rect=(0, 0.035, 1, 1 - 0.045 * num_rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def caption_of(closing: Mapping[str, Any]) -> str:
    """Name the machine, threads, dtype and load of a run."""
    threads, loads = closing.get("threads"), closing["load_average"]
    parts = [
        " ".join(str(closing[key]) for key in ("device", "cpu") if key in closing),
        f"{threads} thread{'s' if threads > 1 else ''}" if threads else "",
        str(closing.get("dtype", "")).removeprefix("torch."),
        f"load average {loads[0]:g} before, {loads[1]:g} after",
        "a --quick run" if closing["quick"] else "",
    ]
    return ", ".join(part for part in parts if part)


def colors(labels: Collection[str]) -> dict[str, str]:
    """One for each label."""
    greens, others = iter(GREENS * len(labels)), iter(OTHERS * len(labels))
    return {label: next(greens if label.startswith("mneme") else others) for label in labels}


def lines(
    axes: Any, series: Mapping[str, Points], x_label: str, y_label: str, *, is_log: bool = False,
    dashed: Collection[str] = (),
) -> None:  # fmt: skip
    """Draw a line per label through its points; on a logarithmic x axis ticks are where points are."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    named = colors(series)
    for label, points in series.items():
        if points:
            style = "--" if label in dashed else "o-"
            axes.plot(*zip(*points, strict=True), style, color=named[label], label=label, markersize=4.5, linewidth=1.8)
    if is_log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({x for points in series.values() for x, _ in points})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
