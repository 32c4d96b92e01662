"""How long a load may take, of the time that it costs."""

from __future__ import annotations

import pytest

from mneme.cachetier.policy.load_controller import LoadPlan
from mneme.replicas.connector.fetch import LoadClock
from tests.cachetier.cost_cases import PlayedClock

NUM_LAYERS = 10
PLAN = LoadPlan(
    num_chunks=4,
    deadline_s=1.0,
    slack_s=0.05,
    predicted_load_s=0.7,
    predicted_recompute_s=1.0,
    predicted_ttft_s=0.8,
    latest_s=0.9,
    latest_beside_s=0.8,
    step_chunks=1,
    first_s=0.1,
)


def make() -> tuple[LoadClock, PlayedClock]:
    clock = PlayedClock()
    return LoadClock(PLAN, NUM_LAYERS, clock), clock


@pytest.mark.parametrize(("is_read_ahead", "left_s"), [(False, [0.09, 0.45, 0.9]), (True, [1.9, 1.9, 1.9])])
def test_what_is_in_memory_is_due_from_the_load_on_whatever_it_waited_for(
    is_read_ahead: bool, left_s: list[float]
) -> None:
    """What was read ahead, when computing it after the last layer was due would have ended."""
    times, clock = make()
    if is_read_ahead:
        times.begin_bringing()
    times.num_brought = NUM_LAYERS
    clock.now_s += 100.0  # an earlier request runs
    times.stop()
    times.begin_load()
    assert [times.left_s(layer) for layer in (0, 4, 9)] == pytest.approx(left_s)


def test_what_the_sequence_waited_counts_only_for_what_it_waits_for() -> None:
    times, clock = make()
    times.begin_bringing()
    assert times.left_to_wait_s() == pytest.approx(0.08)
    times.num_brought = 5
    clock.now_s += 0.4
    times.stop()
    clock.now_s += 100.0  # for pages
    times.begin_load()
    assert times.left_s(4) == pytest.approx(0.9 + 1.0)
    assert times.left_s(5) == pytest.approx(0.54 - 0.4)
    clock.now_s += 0.1
    assert times.left_s(4) == pytest.approx(0.8 + 1.0)
    assert times.left_s(5) == pytest.approx(0.04)


def test_a_twentieth_is_what_it_waits_for_somebody_who_reads() -> None:
    times, clock = make()
    clock.now_s += 100.0  # others' chunks are read, and others run
    assert times.left_to_wait_s() == pytest.approx(0.05)
    clock.now_s += 0.04
    assert times.left_to_wait_s() == pytest.approx(0.01)
    times.begin_bringing()
    assert times.left_to_wait_s() == pytest.approx((0.8 - 0.04) / 10)
    times.num_brought = 9
    assert times.left_to_wait_s() == pytest.approx(0.8 - 0.04)
    clock.now_s += 0.8
    assert times.left_to_wait_s() < 0


def test_alone_it_is_computed_meanwhile() -> None:
    times, clock = make()
    times.begin_load()
    assert times.left_s(0) == pytest.approx(0.09)
    clock.now_s += 0.02
    times.begin_bringing()
    assert times.left_s(0) == pytest.approx(0.088)
    assert times.left_s(9) == pytest.approx(0.88)


def test_it_may_take_as_long_as_what_is_loaded_with_it_too() -> None:
    times, clock = make()
    times.begin_bringing()
    times.num_brought = 5
    times.begin_load(10.0)
    clock.now_s += 0.01
    assert times.left_s(0) == pytest.approx(0.9 - 0.01 + 1.0 + 1.0)
    assert times.left_s(9) == pytest.approx(0.9 - 0.01 + 10.0)


def test_what_a_step_computes_of_others_is_not_time_that_the_load_takes() -> None:
    times, clock = make()
    times.num_brought = NUM_LAYERS
    times.begin_load()
    clock.now_s += 5.0
    assert times.left_s(4, computed_s=5.0) == pytest.approx(0.45 - 0.1 * 4 / 10)  # but for its own rows
    assert times.left_s(4, computed_s=0.01) == pytest.approx(0.45 - 5.0)  # the rest was waited
