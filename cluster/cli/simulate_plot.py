"""The plot of `mneme simulate cache`: where blocks were found, what an hour costs (AttentionStore Fig. 17, 21, 23)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mneme.errors import ConfigError

OPTIMUM = "min"  # the policy that knows the future
_COLOUR_BY_TIER = {"device": "#0f6b4a", "host": "#4fa583", "disk": "#97ccb6"}
_COST_COLOUR = "#6b7788"


def plot_runs(path: Path, runs: Sequence[dict[str, Any]], subtitle: str) -> None:
    """Bars of hit ratios by tier, a row per run under its cache's size; beside them costs, where there are any.

    Raises `ConfigError`.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot: needs matplotlib, which is not installed") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    has_costs = all(run["hourly_cost"] is not None for run in runs)
    labels, places = _rows(runs)
    size = (11.0 if has_costs else 7.0, 1.9 + 0.3 * len(labels))
    figure, axes = pyplot.subplots(1, 2 if has_costs else 1, figsize=size, squeeze=False, sharey=True)
    try:
        _draw_hits(axes[0][0], runs, places)
        if has_costs:
            costs = [run["hourly_cost"] for run in runs]
            _draw(
                axes[0][1], "cost (less is better)", "dollars per hour: prefills, memory, disk", places, costs, "{:.2f}"
            )
        axes[0][0].set_yticks(range(len(labels)), labels)
        axes[0][0].set_ylim(len(labels) - 0.5, -0.5)
        axes[0][0].tick_params(axis="y", length=0)
        figure.suptitle(subtitle, fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _rows(runs: Sequence[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """Labels from the top, a size above its policies, and the row of each run."""
    labels: list[str] = []
    places: list[int] = []
    last = None
    for run in runs:
        if run["capacity_blocks"] != last:
            last = run["capacity_blocks"]
            sizes = ["no bound" if size is None else f"{size:,}" for size in last]
            labels.append(" + ".join(sizes) + " blocks:")
        places.append(len(labels))
        labels.append("optimum (min)" if run["policy"] == OPTIMUM else run["policy"])
    return labels, places


def _draw_hits(axes: Any, runs: Sequence[dict[str, Any]], places: Sequence[int]) -> None:
    base = [0.0] * len(runs)
    for tier in runs[0]["tiers"]:
        ratios = [100 * run["tiers"][tier]["hit_ratio"] for run in runs]
        axes.barh(places, ratios, left=base, label=f"on the {tier}", color=_COLOUR_BY_TIER[tier])
        base = [low + ratio for low, ratio in zip(base, ratios, strict=True)]
    if len(runs[0]["tiers"]) > 1:
        axes.legend(fontsize=7, loc="upper left", ncols=3, frameon=False)  # in the row of the first size
    _draw(axes, "blocks found (more is better)", "% of all blocks of all prompts", places, base, "{:.1f}")


def _draw(axes: Any, title: str, unit: str, places: Sequence[int], values: Sequence[float], form: str) -> None:
    """Title, unit and the values behind the bars, which are drawn here if they are not yet."""
    if not axes.patches:
        axes.barh(places, values, color=_COST_COLOUR)
    for place, value in zip(places, values, strict=True):
        axes.text(value, place, " " + form.format(value), va="center", fontsize=8)
    axes.set_xlim(0, max(*values, 1e-9) * 1.15)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
