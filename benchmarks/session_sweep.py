"""Which system runs at which rate, when: arms that take turns, rates from coarse to fine. No engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rate_search import Point, bracket, median_points, next_rate

Measure = Callable[[str, float, int], Point]  # (system, offered requests per second, seed)


class Steps(NamedTuple):
    """The rates that a search goes through."""

    first_per_s: float
    growth: float  # of the coarse rates
    closeness: float  # ratio of the two rates around the bound that is narrow enough


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
        steps = self._steps
        found = {
            system: next_rate(
                points, self._bound_s, first=steps.first_per_s, growth=steps.growth, closeness=steps.closeness
            )
            for system, points in self.points.items()
        }
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
