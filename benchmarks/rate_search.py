"""The highest throughput at a bound on the latency: where to measure next, arms in turns, and how to read it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

MIN_TURNS_OF_P90 = 20  # two of them are beyond it


class Point(NamedTuple):
    """One system at one offered rate."""

    offered_per_s: float  # requests
    served_per_s: float
    p90_s: float  # normalized latency: seconds per output token
    num_turns: int  # that this is of


Measure = Callable[[str, float, int], Point]  # (system, offered requests per second, seed)


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


class Steps(NamedTuple):
    """The rates that a search goes through."""

    first_per_s: float
    growth: float  # of the coarse rates
    closeness: float  # ratio of the two rates around the bound that is narrow enough


def next_rate(points: Iterable[Point], bound_s: float, steps: Steps) -> float | None:
    """The offered rate to measure next for one system; None when its bracket is narrow enough.

    Coarse steps up or down until the bound lies between two rates, then the middle, in logarithms.
    """
    medians = median_points(points)
    if not medians:
        return steps.first_per_s
    under, over = bracket(medians, bound_s)
    if over is None:
        return medians[-1].offered_per_s * steps.growth
    if under is None:
        return medians[0].offered_per_s / steps.growth
    if over.offered_per_s / under.offered_per_s <= steps.closeness:
        return None
    return math.sqrt(under.offered_per_s * over.offered_per_s)


class Sweep:
    """Measures systems around the rate at which their p90 passes the bound, until that is known or time is up."""

    def __init__(
        self, measure: Measure, systems: Sequence[str], bound_s: float, steps: Steps, is_late: Callable[[], bool]
    ) -> None:
        self._measure = measure
        self._bound_s = bound_s
        self._steps = steps
        self._is_late = is_late
        self._num_turns = 0
        self.points: dict[str, list[Point]] = {system: [] for system in systems}
        self.is_complete = True  # whether nothing was left out for want of time

    def search(self, seed: int) -> None:
        """Every system, until its bracket is narrow."""
        while wanted := self._wanted():
            rate = min(wanted.values())
            systems = [system for system, own in wanted.items() if own == rate or self._is_inside(system, rate)]
            if not self._turn(rate, systems, seed):
                return

    def repeat(self, seeds: Sequence[int]) -> None:
        """The rates around the bound once more with each seed."""
        rates = {system: self._bracket_rates(system) for system in self.points}
        for seed in seeds:
            for rate in sorted(set().union(*rates.values())):
                if not self._turn(rate, [system for system, own in rates.items() if rate in own], seed):
                    return

    def _wanted(self) -> dict[str, float]:
        found = {system: next_rate(own, self._bound_s, self._steps) for system, own in self.points.items()}
        return {system: rate for system, rate in found.items() if rate is not None}

    def _is_inside(self, system: str, rate: float) -> bool:
        """Whether the rate lies between the two that are known to be around the bound."""
        under, over = self._bracket(system)
        return under is not None and over is not None and under.offered_per_s < rate < over.offered_per_s

    def _bracket_rates(self, system: str) -> set[float]:
        return {point.offered_per_s for point in self._bracket(system) if point is not None}

    def _bracket(self, system: str) -> tuple[Point | None, Point | None]:
        return bracket(median_points(self.points[system]), self._bound_s)

    def _turn(self, rate: float, systems: Sequence[str], seed: int) -> bool:
        """Each of the systems once, forwards and backwards in alternation; False if time is up."""
        self._num_turns += 1
        for system in systems if self._num_turns % 2 else reversed(systems):
            if self._is_late():
                self.is_complete = False
                return False
            self.points[system].append(self._measure(system, rate, seed))
        return True
