"""Fits against the coefficients that made the points, and scales that follow."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.policy.linear_cost import LearnedCost, Point, Terms, fit
from tests.cachetier.cost_cases import PREFILL, PlayedClock

SHAPES: list[Terms] = [(1, r, r * (c + r / 2)) for r, c in itertools.product((16, 64, 512, 2048), (0, 1000, 30_000))]


def seconds(coefficients: Terms, terms: Terms) -> float:
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))


@pytest.mark.parametrize("true", [PREFILL, (0.0, 1e-4, 1e-8), (1e-2, 0.0, 1e-7), (1e-2, 1e-3, 0.0), (0.0, 2e-4, 0.0)])
def test_exact_points_give_their_coefficients(true: Terms) -> None:
    found = fit([Point(terms, seconds(true, terms)) for terms in SHAPES])
    assert found == pytest.approx(true, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_noisy_points_give_nearly_theirs(seed: int) -> None:
    draw = random.Random(seed)
    points = [Point(t, seconds(PREFILL, t) * draw.lognormvariate(0, 0.1)) for t in SHAPES * 2]
    found = fit(points)
    for terms in SHAPES:
        assert seconds(found, terms) == pytest.approx(seconds(PREFILL, terms), rel=0.2)


positive = st.floats(1e-5, 1e3)


@given(st.lists(st.tuples(positive, positive, positive, positive), min_size=1, max_size=8))
def test_no_coefficient_is_negative_and_none_near_is_better(drawn: list[tuple[float, float, float, float]]) -> None:
    points = [Point(each[:3], each[3]) for each in drawn]
    found = fit(points)
    assert all(each >= 0 for each in found)

    def error(coefficients: Terms) -> float:
        return sum((seconds(coefficients, point.terms) / point.seconds - 1) ** 2 for point in points)

    least = error(found)
    if len(points) >= 3:
        for index, factor in itertools.product(range(3), (0.0, 0.5, 0.99, 1.01, 2.0)):
            other = list(found)
            other[index] = other[index] * factor if found[index] else 1e-6 * factor
            assert error((other[0], other[1], other[2])) >= least * (1 - 1e-6) - 1e-9


def test_one_point_says_what_grows_with_the_work() -> None:
    assert fit([Point((1, 100, 5_000), 2.0)]) == pytest.approx((0, 0.02, 0))
    with pytest.raises(ValueError, match="points"):
        fit([])
    with pytest.raises(ValueError, match="points"):
        fit([Point((1, 1, 1), 0.0)])


@pytest.mark.parametrize("factor", [10, 0.1, 60])
def test_the_scale_follows_within_few_notes(factor: float) -> None:
    cost, terms, draw = LearnedCost(PREFILL, PlayedClock(), weight=0.35), SHAPES[4], random.Random(2)
    true_s = factor * cost.seconds(terms)
    for _ in range(3):
        cost.note(true_s * draw.lognormvariate(0, 0.05) / cost.seconds(terms))
    assert cost.seconds(terms) == pytest.approx(true_s, rel=0.2)


def test_slow_changes_are_followed_too() -> None:
    cost = LearnedCost(PREFILL, PlayedClock(), weight=0.35)
    for _ in range(8):
        cost.note(2 / cost.scale)
    assert cost.scale == pytest.approx(2, rel=0.05)


def test_one_measurement_that_is_far_off_moves_little() -> None:
    cost = LearnedCost(PREFILL, PlayedClock(), weight=0.2)
    cost.note(1e6)
    assert 1 < cost.scale < 2
    cost.note(1e-12)
    assert cost.scale == pytest.approx(1)


def test_noise_around_the_truth_averages_out() -> None:
    cost, draw = LearnedCost(PREFILL, PlayedClock(), weight=0.2), random.Random(1)
    scales = []
    for _ in range(400):
        cost.note(2 * draw.lognormvariate(0, 0.3) / cost.scale)
        scales.append(cost.scale)
    assert np.median(scales[20:]) == pytest.approx(2, rel=0.05)


def test_a_scale_drifts_back_with_its_half_life() -> None:
    clock = PlayedClock()
    cost = LearnedCost(PREFILL, clock, weight=1.0, half_life_s=60)
    lasting = LearnedCost(PREFILL, clock, weight=1.0)
    for each in (cost, lasting):
        each.note(9.0)
    clock.now_s += 60
    assert cost.scale == pytest.approx(3)
    clock.now_s += 600
    assert cost.scale == pytest.approx(1, rel=0.01)
    clock.now_s -= 1e6  # a clock that jumps
    assert cost.scale == pytest.approx(9)
    assert lasting.scale == pytest.approx(9)


def test_a_miss_says_at_least_twice_and_never_less() -> None:
    cost = LearnedCost(PREFILL, PlayedClock(), weight=0.35)
    cost.note_missed(0.1)
    assert cost.scale == pytest.approx(2)
    cost.note_missed(5)
    assert cost.scale == pytest.approx(10)
    for _ in range(20):
        cost.note_missed(1e9)
    assert cost.scale <= 1e4 * (1 + 1e-9)


def test_a_guess_is_replaced_by_the_first_measurement() -> None:
    clock = PlayedClock()
    cost = LearnedCost(PREFILL, clock, weight=0.35, is_guess=True)
    assert cost.is_trusted
    assert not cost.is_measured
    cost.note(100)
    assert cost.scale == pytest.approx(100)
    cost.note(1 / 4)
    assert cost.scale == pytest.approx(100 * 0.25**0.35)
    cost.note_missed(3)
    cost.note(1 / 300)
    assert cost.is_trusted
    assert cost.scale == pytest.approx(0.25**0.35)


def test_work_is_trusted_until_it_was_given_up_twice_in_a_row() -> None:
    clock = PlayedClock()
    cost = LearnedCost(PREFILL, clock, weight=0.35)
    for _ in range(2):
        cost.note_missed(3)
        assert cost.is_trusted
        cost.note(1.0)
    cost.note_missed(3)
    cost.note_missed(3)
    assert not cost.is_trusted
    clock.now_s += 60
    assert cost.is_trusted
