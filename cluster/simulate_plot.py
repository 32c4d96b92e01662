"""The plot of `mneme simulate cache`: where blocks were found, what an hour costs (AttentionStore Fig. 17, 21, 23)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mneme.errors import ConfigError


def plot_runs(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Stacked bars of hit ratios by tier, a bar per run; below them costs, where there are any. Raises ConfigError."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot: needs matplotlib, which is not installed") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    has_costs = all(run["hourly_cost"] is not None for run in runs)
    size = (max(6.0, 0.7 * len(runs)), 7.2 if has_costs else 4.8)
    figure, axes = pyplot.subplots(2 if has_costs else 1, figsize=size, squeeze=False)
    try:
        _draw_hits(axes[0][0], runs)
        if has_costs:
            _draw_costs(axes[1][0], runs)
        for (each,) in axes:
            each.set_xticks(range(len(runs)), [_name(run) for run in runs], fontsize=6)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _draw_hits(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    base = [0.0] * len(runs)
    for tier in runs[0]["tiers"]:
        ratios = [run["tiers"][tier]["hit_ratio"] for run in runs]
        axes.bar(range(len(runs)), ratios, bottom=base, label=tier)
        base = [low + ratio for low, ratio in zip(base, ratios, strict=True)]
    axes.set_ylabel("blocks found of all")
    axes.legend()


def _draw_costs(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    axes.bar(range(len(runs)), [run["hourly_cost"] for run in runs], color="grey")
    axes.set_ylabel("dollars per hour: prefills and storage")


def _name(run: dict[str, Any]) -> str:
    sizes = ["inf" if size is None else f"{size:,}" for size in run["capacity_blocks"]]
    return "\n+".join([f"{run['policy']}\n{sizes[0]}", *sizes[1:]])
