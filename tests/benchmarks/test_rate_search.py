"""Where a sweep measures, and what it reads, on systems made of a formula."""

from __future__ import annotations

import math

import pytest
from rate_search import Point, Reading, Steps, Sweep, median_points, next_rate, throughput_at

STEPS = Steps(first_per_s=2.0, growth=1.5, closeness=1.1)


def point(offered_per_s: float, served_per_s: float, p90_s: float, num_turns: int = 100) -> Point:
    return Point(offered_per_s, served_per_s, p90_s, num_turns)


def test_throughput_is_read_on_the_line_between_two_rates() -> None:
    points = [point(2, 2.0, 0.010), point(4, 3.0, 0.020), point(8, 3.5, 0.090)]
    assert throughput_at(points, 0.015) == Reading(2.5)
    assert throughput_at(reversed(points), 0.055) == Reading(3.25)
    assert throughput_at(points, 0.020) == Reading(3.0)


def test_what_never_passes_the_bound_is_a_lower_limit() -> None:
    assert throughput_at([point(2, 2.0, 0.010)], 0.015) == Reading(2.0, is_at_least=True)


def test_what_is_over_the_bound_everywhere_has_no_reading() -> None:
    assert throughput_at([point(2, 2.0, 0.030)], 0.015) is None
    assert throughput_at([], 0.015) is None


def test_a_p90_of_few_turns_is_no_reading() -> None:
    under, over = point(2, 2.0, 0.01), point(4, 3.0, 0.03)
    assert throughput_at([under, over], 0.02) == Reading(2.5)
    assert throughput_at([under, over._replace(num_turns=19)], 0.02) is None
    assert throughput_at([under._replace(num_turns=19), over], 0.02) is None
    assert throughput_at([under._replace(num_turns=7)] * 3, 0.02) == Reading(2.0, is_at_least=True)


def test_a_system_that_is_overrun_reads_what_it_served_before() -> None:
    assert throughput_at([point(2, 2.0, 0.01), point(4, 1.0, 0.03)], 0.02) == Reading(2.0)
    assert throughput_at([point(2, 2.0, 0.01), point(4, 0.0, math.inf)], 0.02) == Reading(2.0)


def test_a_rate_beyond_the_first_that_fails_does_not_count() -> None:
    points = [point(2, 2.0, 0.010), point(4, 3.0, 0.030), point(8, 6.0, 0.010)]
    assert throughput_at(points, 0.020) == Reading(2.5)


def test_runs_at_one_rate_are_their_medians() -> None:
    runs = [point(4, 3.0, 0.3), point(2, 2.0, 0.1), point(4, 5.0, 0.1), point(4, 4.0, 0.2)]
    assert median_points(runs) == [point(2, 2.0, 0.1), point(4, 4.0, 0.2, 300)]


def test_rates_go_up_or_down_to_the_bound_and_then_halve() -> None:
    steps = Steps(first_per_s=2.0, growth=2.0, closeness=1.5)
    low, high = point(4, 4.0, 0.01), point(8, 5.0, 0.09)
    assert next_rate([], 0.05, steps) == 2.0
    assert next_rate([low], 0.05, steps) == 8.0
    assert next_rate([high], 0.05, steps) == 4.0
    assert next_rate([low, high], 0.05, steps) == pytest.approx(math.sqrt(32))
    assert next_rate([low, point(5.6, 4.0, 0.09)], 0.05, steps) is None


class Queues:
    """Systems whose p90 is 1 / (capacity - rate) seconds, and infinite from the capacity on."""

    def __init__(self, **capacities: float) -> None:
        self._capacities = capacities
        self.calls: list[tuple[str, float, int]] = []

    def measure(self, system: str, offered_per_s: float, seed: int) -> Point:
        self.calls.append((system, offered_per_s, seed))
        room = self._capacities[system] - offered_per_s
        return point(offered_per_s, min(offered_per_s, self._capacities[system]), 1 / room if room > 0 else math.inf)

    def sweep(self, num_runs: int = 1000) -> Sweep:
        return Sweep(self.measure, list(self._capacities), 1.0, STEPS, lambda: len(self.calls) >= num_runs)


def test_a_sweep_finds_each_systems_rate() -> None:
    queues = Queues(slow=6.0, fast=21.0)
    sweep = queues.sweep()
    sweep.search(0)
    for system, wanted in (("slow", 5.0), ("fast", 20.0)):
        reading = throughput_at(sweep.points[system], 1.0)
        assert reading is not None
        assert not reading.is_at_least
        assert reading.served_per_s == pytest.approx(wanted, rel=0.1)
    assert sweep.is_complete
    assert len(queues.calls) < 20


def test_systems_take_turns_at_a_rate() -> None:
    queues = Queues(a=6.0, b=7.0)
    queues.sweep().search(0)
    assert queues.calls[:4] == [("a", 2.0, 0), ("b", 2.0, 0), ("b", 3.0, 0), ("a", 3.0, 0)]
    # A rate inside both brackets is measured for both.
    by_rate = [{call[0] for call in queues.calls if call[1] == rate} for _, rate, _ in queues.calls]
    assert {"a", "b"} in by_rate[4:]


def test_rates_around_the_bound_are_repeated_with_every_seed() -> None:
    queues = Queues(slow=6.0, fast=21.0)
    sweep = queues.sweep()
    sweep.search(7)
    before = {system: median_points(points) for system, points in sweep.points.items()}
    num_searched = len(queues.calls)
    sweep.repeat([8, 9])
    repeated = queues.calls[num_searched:]
    assert [seed for *_, seed in repeated] == [8] * 4 + [9] * 4
    for system, points in before.items():
        rates = {rate for name, rate, _ in repeated if name == system}
        assert len(rates) == 2
        assert rates <= {point.offered_per_s for point in points}


def test_a_sweep_without_time_says_so() -> None:
    queues = Queues(slow=6.0, fast=21.0)
    sweep = queues.sweep(num_runs=3)
    sweep.search(0)
    sweep.repeat([1])
    assert len(queues.calls) == 3
    assert not sweep.is_complete
