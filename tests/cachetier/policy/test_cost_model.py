"""Fits give what made the points, scales follow, steps and edges teach the right kind; what was learned can be kept."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.names import COST_EDGES
from mneme.cachetier.policy.cost_model import CostModel, LearnedCost, Point, Terms, calibrated, fit
from mneme.errors import ConfigError
from tests.cachetier.cost_cases import DECODE, PREFILL, TOKEN_BYTES, PlayedClock, make_costs

tokens = st.integers(0, 200_000)
counts = st.integers(0, 5_000)


@given(tokens, tokens, tokens, tokens)
def test_more_work_never_takes_less(num_new: int, context: int, more: int, longer: int) -> None:
    costs = make_costs()
    assert 0 <= costs.prefill_s(num_new, context) <= costs.prefill_s(num_new + more, context + longer)
    batch = num_new % 500
    assert 0 <= costs.decode_s(batch, context) <= costs.decode_s(batch + 1, context + longer)


@given(st.sampled_from(COST_EDGES), st.integers(0, 2**40), counts, st.integers(0, 2**40), counts)
def test_more_bytes_and_chunks_never_take_less(edge: Any, num_bytes: int, chunks: int, more: int, others: int) -> None:
    costs = make_costs()
    assert 0 <= costs.edge_s(edge, num_bytes, chunks) <= costs.edge_s(edge, num_bytes + more, chunks + others)


def test_a_long_prompt_pays_for_each_of_its_steps() -> None:
    costs = make_costs(prefill=(1.0, 1e-3, 0.0))
    assert costs.prefill_s(2048, 0) == pytest.approx(1 + 2.048)
    assert costs.prefill_s(2049, 0) == pytest.approx(2 + 2.049)
    assert costs.prefill_s(0, 100) == costs.decode_s(0, 0) == costs.edge_s("disk", 0, 0) == 0


def test_steps_teach_their_own_kind() -> None:
    costs = make_costs()
    prefill_s, decode_s = costs.prefill_s(512, 1000), costs.decode_s(4, 4 * 1001)
    for _ in range(30):
        costs.learn_step([(512, 1000)], 3 * prefill_s)
    assert costs.prefill_s(512, 1000) == pytest.approx(3 * prefill_s, rel=0.01)
    assert costs.decode_s(4, 4004) == pytest.approx(decode_s)
    for _ in range(30):
        costs.learn_step([(1, 1000)] * 4, decode_s / 2)
    assert costs.decode_s(4, 4004) == pytest.approx(decode_s / 2, rel=0.01)
    assert costs.step_scales == pytest.approx((3, 0.5), rel=0.01)
    assert set(costs.accuracy()) == {"prefill", "decode"}


def test_a_mixed_step_teaches_each_kind_by_its_part() -> None:
    costs = make_costs()
    decodes = [(1, 1000)] * 2
    predicted_s = costs.prefill_s(2048, 0) + costs.decode_s(2, 2002) - DECODE[0]
    costs.learn_step([(2048, 0), *decodes], 2 * predicted_s)
    prefill, decode = costs.step_scales
    assert prefill > 1.13 > 1.02 > decode > 1
    found = costs.accuracy()["mixed"]
    assert found["count"] == 1
    assert found["relative_error_sum"] == pytest.approx(0.5)
    assert found["predicted_s"] == pytest.approx(predicted_s)


def test_an_edge_follows_and_drifts_back_alone() -> None:
    clock = PlayedClock()
    costs = make_costs(clock)
    before_s, host_s = costs.edge_s("disk", 1 << 24, 4), costs.edge_s("host", 1 << 24, 4)
    for _ in range(8):
        costs.learn_edge("disk", 1 << 24, 4, 10 * before_s)
    assert costs.edge_s("disk", 1 << 24, 4) == pytest.approx(10 * before_s, rel=0.1)
    assert costs.edge_s("host", 1 << 24, 4) == host_s
    clock.now_s += 900
    assert costs.edge_s("disk", 1 << 24, 4) == pytest.approx(before_s, rel=0.01)


def test_what_is_found_costs_the_mean_of_memory_and_disk() -> None:
    costs = make_costs()
    assert costs.found_terms("host") == costs.terms_of("host")
    for _ in range(100):
        costs.learn_found(["disk", "disk", "disk", "host", "peer_host"])
    mean = [0.25 * near + 0.75 * far for near, far in zip(costs.terms_of("host"), costs.terms_of("disk"), strict=True)]
    assert costs.found_terms("host") == pytest.approx(mean, rel=1e-3)
    assert costs.found_terms("peer_host") == costs.terms_of("peer_host")


def test_what_was_learned_survives_json() -> None:
    clock = PlayedClock()
    costs = make_costs(clock, disk=(1e-3, 2e-3, 1e-9))
    costs.learn_step([(100, 0)], 1.0)
    costs.learn_edge("host", 1 << 24, 4, 1.0)
    costs.learn_found(["host", "disk", "peer_disk"])
    again = CostModel.from_mapping(json.loads(json.dumps(costs.as_mapping())), clock)
    assert again.calibration == costs.calibration
    assert again.as_mapping()["scales"] == pytest.approx(costs.as_mapping()["scales"])
    for memory in ("host", "peer_host"):
        assert again.found_terms(memory) == pytest.approx(costs.found_terms(memory))
    assert again.prefill_s(3000, 10) == pytest.approx(costs.prefill_s(3000, 10))
    for edge in COST_EDGES:
        assert again.edge_s(edge, 1 << 22, 3) == pytest.approx(costs.edge_s(edge, 1 << 22, 3))


@pytest.mark.parametrize(
    "change",
    [
        {"prefill": [1, -2, 3]},
        {"decode": [1, math.nan, 3]},
        {"edges": {"disk": [1, math.inf, 0]}},
        {"edges": 3},
        {"step_rows": 0},
        {"kv_bytes_per_token": None},
        {"scales": {"disk": 0.0}},
        {"scales": {"disk": 10**400}},
        {"disk_shares": {"host": 1.5}},
    ],
)
def test_broken_mappings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CostModel.from_mapping({**make_costs().as_mapping(), **change})
    with pytest.raises(ConfigError):
        CostModel.from_mapping([change])


def test_a_calibration_comes_from_steps_and_edges() -> None:
    true = make_costs()
    shapes = [[(32, 0)], [(500, 0)], [(500, 500)], [(2000, 4000)]]
    steps: list[Any] = [(shape, true.prefill_s(*shape[0])) for shape in shapes]
    steps += [([(1, c)] * b, true.decode_s(b, b * (c + 1))) for b, c in ((1, 50), (8, 50), (1, 4000))]
    steps.append(([(1, 9), (50, 0)], 1e9))  # mixed: of no use for a fit
    disk = [Point((1, n, n * size), true.edge_s("disk", n * size, n)) for n, size in ((1, 10), (8, 10), (1, 1 << 24))]
    found = calibrated(steps, {"disk": disk, "host": []}, step_rows=2048, kv_bytes_per_token=TOKEN_BYTES)
    assert found.prefill == pytest.approx(PREFILL)
    assert found.decode == pytest.approx(DECODE)
    assert found.edges == {"disk": pytest.approx((2e-4, 2e-4, 1e-9))}
    with pytest.raises(ValueError, match="points"):
        calibrated(steps[:4], {}, step_rows=2048, kv_bytes_per_token=TOKEN_BYTES)


SHAPES: list[Terms] = [(1, r, r * (c + r / 2)) for r, c in itertools.product((16, 64, 512, 2048), (0, 1000, 30_000))]


def seconds(coefficients: Terms, terms: Terms) -> float:
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))


@pytest.mark.parametrize("true", [PREFILL, (0.0, 1e-4, 1e-8), (1e-2, 0.0, 1e-7), (1e-2, 1e-3, 0.0), (0.0, 2e-4, 0.0)])
def test_exact_points_give_their_coefficients(true: Terms) -> None:
    found = fit([Point(terms, seconds(true, terms)) for terms in SHAPES])
    assert found == pytest.approx(true, rel=1e-6, abs=1e-12)


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
        cost.learn(true_s * draw.lognormvariate(0, 0.05) / cost.seconds(terms))
    assert cost.seconds(terms) == pytest.approx(true_s, rel=0.2)


def test_one_measurement_that_is_far_off_moves_little() -> None:
    cost = LearnedCost(PREFILL, PlayedClock(), weight=0.2)
    cost.learn(1e6)
    assert 1 < cost.scale < 2
    cost.learn(1e-12)
    assert cost.scale == pytest.approx(1)


def test_a_scale_drifts_back_with_its_half_life() -> None:
    clock = PlayedClock()
    cost = LearnedCost(PREFILL, clock, weight=1.0, half_life_s=60)
    lasting = LearnedCost(PREFILL, clock, weight=1.0)
    for each in (cost, lasting):
        each.learn(9.0)
    clock.now_s += 60
    assert cost.scale == pytest.approx(3)
    clock.now_s += 600
    assert cost.scale == pytest.approx(1, rel=0.01)
    clock.now_s -= 1e6  # a clock that jumps
    assert cost.scale == pytest.approx(9)
    assert lasting.scale == pytest.approx(9)


def test_a_guess_is_replaced_by_the_first_measurement() -> None:
    clock = PlayedClock()
    cost = LearnedCost(PREFILL, clock, weight=0.35, is_calibrated=False)
    assert not cost.is_measured
    cost.learn(100)
    assert cost.scale == pytest.approx(100)
    cost.learn(1 / 4)
    assert cost.scale == pytest.approx(100 * 0.25**0.35)
    assert cost.is_measured
