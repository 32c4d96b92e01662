"""The highest throughput at a bound on the latency: where to measure next, and how to read it. No engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MIN_TURNS_OF_P90 = 20  # two of them are beyond it


class Point(NamedTuple):
    """One system at one offered rate."""

    offered_per_s: float  # requests
    served_per_s: float
    p90_s: float  # normalized latency: seconds per output token
    num_turns: int  # that this is of


class Reading(NamedTuple):
    """Throughput at the bound."""

    served_per_s: float
    is_at_least: bool = False  # no rate that was measured is over the bound


def median_points(points: Iterable[Point]) -> list[Point]:
    """One point per offered rate, of the medians of its runs, in order of rate."""
    by_rate: dict[float, list[Point]] = {}
    for point in points:
        by_rate.setdefault(point.offered_per_s, []).append(point)
    return [
        Point(
            rate,
            statistics.median(p.served_per_s for p in same),
            statistics.median(p.p90_s for p in same),
            sum(p.num_turns for p in same),
        )
        for rate, same in sorted(by_rate.items())
    ]


def bracket(points: Sequence[Point], bound_s: float) -> tuple[Point | None, Point | None]:
    """The last point under the bound before the first one over it, and that one; None where there is none."""
    under: Point | None = None
    for point in points:
        if point.p90_s > bound_s:
            return under, point
        under = point
    return under, None


def throughput_at(points: Iterable[Point], bound_s: float) -> Reading | None:
    """The throughput at which the p90 passes the bound, on a line between the two points around it.

    None if even the lowest rate is over the bound, or nothing was measured, or a point is of too few turns for a p90.
    """
    under, over = bracket(median_points(points), bound_s)
    if under is None or min(point.num_turns for point in (under, over or under)) < MIN_TURNS_OF_P90:
        return None
    if over is None:
        return Reading(under.served_per_s, is_at_least=True)
    share = (bound_s - under.p90_s) / (over.p90_s - under.p90_s)
    # A system that is overrun may serve less than before: the bound is then met at no higher throughput.
    return Reading(under.served_per_s + share * max(over.served_per_s - under.served_per_s, 0.0))


def next_rate(
    points: Iterable[Point], bound_s: float, *, first: float, growth: float, closeness: float
) -> float | None:
    """The offered rate to measure next for one system; None when its bracket is narrow enough.

    first      where to begin
    growth     factor of the coarse steps, up or down, until the bound lies between two rates
    closeness  the ratio of the bracket's rates that is good enough
    """
    medians = median_points(points)
    if not medians:
        return first
    under, over = bracket(medians, bound_s)
    if over is None:
        return medians[-1].offered_per_s * growth
    if under is None:
        return medians[0].offered_per_s / growth
    if over.offered_per_s / under.offered_per_s <= closeness:
        return None
    return math.sqrt(under.offered_per_s * over.offered_per_s)
