"""How many replicas there should be, by a clock that the tests turn."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.errors import ConfigError
from mneme.router.autoscaler import AutoscaleConfig, Autoscaler, ReplicaLoad

CONFIG = AutoscaleConfig(min=1, max=8, target_ttft_s=1.0, upscale_delay_s=5.0, downscale_delay_s=60.0)
IDLE = ReplicaLoad()


class Played:
    """A cluster whose replicas come and go at once."""

    def __init__(self, config: AutoscaleConfig = CONFIG, num: int = 1) -> None:
        self.autoscaler, self.target, self.now_s = Autoscaler(config), num, 0.0

    def replicas(self) -> list[str]:
        return [f"r{number}" for number in range(self.target)]

    def run(self, seconds: int, load: ReplicaLoad | None) -> int:
        """As many seconds with this load of each replica."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.target = self.autoscaler.decide(dict.fromkeys(self.replicas(), load), self.target, self.now_s)
        return self.target

    def share(self, seconds: int, total: ReplicaLoad) -> list[int]:
        """With work that spreads over however many there are; the target at each second."""
        targets = []
        for _ in range(seconds):
            each = ReplicaLoad(
                backlog_s=total.backlog_s / max(self.target, 1),
                prefill_share=min(total.prefill_share / max(self.target, 1), 1.0),
                num_requests=1,
            )
            targets.append(self.run(1, each))
        return targets


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (ReplicaLoad(backlog_s=2.5), 3),
        (ReplicaLoad(prefill_share=1.0), 2),
        (ReplicaLoad(kv_share=0.9), 2),
        (ReplicaLoad(step_s=0.35), 4),
        (ReplicaLoad(step_s=0.35, constant_s=0.05), 6),
        (ReplicaLoad(step_s=0.35, constant_s=0.12), 1),  # no number of replicas makes a step as short as promised
        (ReplicaLoad(backlog_s=1000.0), 8),
        (ReplicaLoad(backlog_s=0.9, prefill_share=0.7, kv_share=0.7, step_s=0.09), 1),
    ],
)
def test_a_step_of_load_is_answered_after_the_delay_by_as_many_as_it_needs(load: ReplicaLoad, wanted: int) -> None:
    played = Played()
    assert played.run(5, load) == 1
    assert played.run(1, load) == wanted


def test_a_ramp_is_followed_up_and_down_without_flapping() -> None:
    played = Played()
    up = [target for tenth in range(40) for target in played.share(10, ReplicaLoad(prefill_share=tenth / 10))]
    down = [target for tenth in range(40, -1, -1) for target in played.share(70, ReplicaLoad(prefill_share=tenth / 10))]
    assert up == sorted(up)
    assert max(up) == 6  # 3.9 of prefill, at 75% each
    assert down == sorted(down, reverse=True)
    assert down[-1] == 1


@pytest.mark.parametrize("num", [1, 8])
def test_what_any_step_takes_asks_for_no_replica(num: int) -> None:
    """Streams that one replica decodes in time need no second one, however many there are now."""
    played = Played(num=num)
    for _ in range(1000):
        streams = 16 / played.target
        played.run(1, ReplicaLoad(step_s=0.08 + 0.0005 * streams, constant_s=0.08, num_requests=streams))
    assert played.target == 1


def test_load_that_swings_within_the_margin_changes_nothing() -> None:
    played = Played(num=3)
    for _ in range(50):
        targets = played.share(10, ReplicaLoad(prefill_share=2.2)) + played.share(10, ReplicaLoad(prefill_share=1.6))
        assert set(targets) == {3}


def test_a_burst_shorter_than_the_delay_changes_nothing() -> None:
    played = Played()
    for _ in range(20):
        assert played.run(4, ReplicaLoad(backlog_s=12.7)) == 1
        assert played.run(4, IDLE) == 1


def test_fewer_go_one_at_a_time_after_the_delay_and_a_burst_begins_it_anew() -> None:
    played = Played(num=3)
    assert played.run(59, IDLE) == 3
    assert played.run(1, ReplicaLoad(backlog_s=0.8)) == 3
    assert played.run(60, IDLE) == 3
    assert played.run(1, IDLE) == 2
    assert played.run(61, IDLE) == 1
    assert played.run(500, IDLE) == 1


def test_none_where_nobody_asks_if_that_is_allowed() -> None:
    played = Played(AutoscaleConfig(min=0, max=2, downscale_delay_s=60.0))
    assert played.run(200, ReplicaLoad(num_requests=1)) == 1
    assert played.run(61, IDLE) == 0
    assert played.run(10, IDLE) == 0  # it is not for this policy to know who waits then
    between_reports = Played(AutoscaleConfig(min=0, max=2, downscale_delay_s=60.0))
    assert between_reports.run(200, ReplicaLoad(prefill_share=0.01)) == 1


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0])
def test_what_is_no_figure_counts_as_the_last_that_was_one(broken: float) -> None:
    nothing_new = ReplicaLoad(
        backlog_s=broken, prefill_share=broken, kv_share=broken, step_s=broken, num_requests=broken, saved_share=broken
    )
    assert Played().run(100, nothing_new) == 1
    played = Played()
    played.run(1, ReplicaLoad(backlog_s=2.5))
    assert played.run(10, nothing_new) == 3


def test_who_is_silent_counts_as_the_others_and_none_goes_meanwhile() -> None:
    autoscaler = Autoscaler(CONFIG)
    for now_s in range(200):
        loads = {"a": ReplicaLoad(prefill_share=0.2), "b": None, "c": None}
        assert autoscaler.decide(loads, 3, float(now_s)) == 3
    busy = {"a": ReplicaLoad(backlog_s=2.0), "b": None, "c": None}
    assert [autoscaler.decide(busy, 3, 200.0 + second) for second in range(6)][-1] == 6
    assert Played(num=4).run(1000, None) == 4


def test_a_clock_that_is_set_back_begins_the_delays_anew() -> None:
    played = Played()
    played.run(4, ReplicaLoad(backlog_s=3.0))
    played.now_s -= 3600.0
    assert played.run(5, ReplicaLoad(backlog_s=3.0)) == 1
    assert played.run(1, ReplicaLoad(backlog_s=3.0)) == 3


def test_a_clock_that_is_put_forward_begins_the_delays_anew() -> None:
    """As where a machine was suspended: an hour without a look is no hour without load."""
    played = Played(num=3)
    played.run(2, ReplicaLoad())
    played.now_s += 3600.0
    assert played.run(int(CONFIG.downscale_delay_s), ReplicaLoad()) == 3
    assert played.run(2, ReplicaLoad()) == 2


def test_replicas_that_cannot_start_are_given_up() -> None:
    """A cluster with room for fewer: those that run would never be too many."""
    autoscaler, target = Autoscaler(CONFIG), 8
    for now_s in range(600):
        target = autoscaler.decide(dict.fromkeys("abc"[:target], IDLE), target, float(now_s))
    assert target == 1


def test_the_one_whose_kv_saves_least_goes_first() -> None:
    autoscaler = Autoscaler(CONFIG)
    loads = {
        "warm": ReplicaLoad(saved_share=0.9),
        "busy": ReplicaLoad(saved_share=0.1, num_requests=5),
        "cold": ReplicaLoad(saved_share=0.1, num_requests=1),
    }
    autoscaler.decide(loads, 3, 0.0)
    assert autoscaler.cheapest_first() == ["cold", "busy", "warm"]
    autoscaler.decide({"warm": IDLE, "busy": None}, 2, 1.0)
    assert autoscaler.cheapest_first() == ["warm", "busy"]


_floats = st.floats() | st.just(0.0)
_loads = st.none() | st.builds(
    ReplicaLoad, backlog_s=_floats, prefill_share=_floats, kv_share=_floats, step_s=_floats, num_requests=_floats
)


@given(st.lists(st.tuples(_floats, st.dictionaries(st.sampled_from("abc"), _loads)), max_size=20))
def test_whatever_is_said_at_whatever_time_the_bounds_hold(
    said: list[tuple[float, dict[str, ReplicaLoad | None]]],
) -> None:
    autoscaler, target = Autoscaler(CONFIG), 2
    for now_s, loads in said:
        target = autoscaler.decide(loads, target, now_s)
        assert CONFIG.min <= target <= CONFIG.max


def test_ranges_of_replicas() -> None:
    assert AutoscaleConfig.of_range("1..3") == {"min": 1, "max": 3}
    for text in ("1-3", "1..", "..3", "a..b", "-1..3"):
        with pytest.raises(ConfigError, match="a number, or a range"):
            AutoscaleConfig.of_range(text)
