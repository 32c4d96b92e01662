"""Limits of the queue, when to come again, deadlines, and shares of a step: the engine with a fake runner and clock."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.errors import ConfigError, DeadlineExceeded, InvalidRequest, Overloaded, PinRefused
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.input import MAX_RETRY_S, MIN_RETRY_S, DrainRate
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.queries import GetSession
from mneme.replicas.request import SamplingParams, TokenEvent
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.fake_runner import Clock, FakeRunner, continuation
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of

LONG = SamplingParams(temperature=0, max_tokens=40)


def engine_with_clock(num_pages: int = 64, **options: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    return make_engine(num_pages, clock=clock, **options), clock


def test_waiting_tokens_are_limited_and_one_large_request_is_taken_alone() -> None:
    engine = make_engine()
    engine.limits.max_tokens = 100
    engine.submit(make_request("larger.0", [1] * 150))
    engine.submit(make_request("larger.1", [1] * 150, choice_index=1))  # the same request
    with pytest.raises(Overloaded, match="300 prompt tokens are waiting, of at most 100"):
        engine.submit(make_request("small", [2]))
    engine.step()
    engine.submit(make_request("a", [2] * 99))
    engine.submit(make_request("b", [3]))
    assert engine_stats(engine)["waiting_tokens"] == 100
    refused = make_request("c", [3])
    assert not engine.limits.has_room(refused)
    with pytest.raises(Overloaded):
        engine.submit(refused)
    assert engine_stats(engine)["refused"] == {"requests": 0, "tokens": 2, "session": 0}
    assert sum(event.finish_reason == "length" for event in run(engine)) == 4
    assert engine_stats(engine)["waiting_tokens"] == 0


def test_what_another_replica_had_taken_is_taken_however_much_waits() -> None:
    """Its client reads the answer already: a replica that goes is a pause for it."""
    engine = make_engine(max_waiting=1)
    engine.limits.max_tokens = 100
    engine.submit(make_request("waits", [1] * 100))
    with pytest.raises(Overloaded):
        engine.submit(make_request("new", [2] * 10))
    engine.submit(make_request("resumed", [2] * 10, output_offset=2))
    assert sum(event.finish_reason == "length" for event in run(engine)) == 2


def test_queued_turns_count() -> None:
    engine = make_engine(max_waiting=3)
    engine.limits.max_tokens = 20
    engine.submit(make_request("one.0", [1] * 30, session_id="s"))
    engine.step()
    engine.submit(make_request("two.0", [1] * 15, session_id="s"))
    assert engine_stats(engine)["waiting_tokens"] == 15
    with pytest.raises(Overloaded, match="tokens"):
        engine.submit(make_request("other.0", [2] * 6))
    for name in ("three.0", "four.0"):
        engine.submit(make_request(name, [1] * 2, session_id="s"))
    with pytest.raises(Overloaded, match="3 requests are waiting"):
        engine.submit(make_request("other.0", [2]))
    engine.abort("three.0")
    assert engine_stats(engine)["waiting_tokens"] == 17
    run(engine)
    assert engine_stats(engine)["waiting_tokens"] == 0


def test_too_many_turns_of_one_session_are_refused_with_a_time() -> None:
    engine = make_engine()
    for number in range(65):
        engine.submit(make_request(f"{number}.0", [1], session_id="s"))
    with pytest.raises(Overloaded, match="64 requests of this session") as refused:
        engine.submit(make_request("66.0", [1], session_id="s"))
    assert refused.value.retry_after_s == MIN_RETRY_S
    assert engine_stats(engine)["refused"]["session"] == 1
    assert sum(event.finish_reason == "length" for event in run(engine)) == 65


def test_retry_after_is_what_the_queue_takes_to_drain() -> None:
    engine, clock = engine_with_clock(max_running=1, max_waiting=10)
    for number in range(10):  # of 10 tokens and four steps of 0.5 s each
        engine.submit(make_request(f"r{number}", [number % 5, number // 5, *[0] * 8]))
    with pytest.raises(Overloaded) as refused:
        engine.submit(make_request("one more", [1]))
    assert refused.value.retry_after_s == MIN_RETRY_S  # nothing is measured yet
    for number in range(10, 13):
        for _ in range(4):
            engine.step()
            clock.now_s += 0.5
        engine.submit(make_request(f"r{number}", [number % 5, number // 5, *[0] * 8]))
    with pytest.raises(Overloaded) as refused:
        engine.submit(make_request("one more", [1]))
    assert refused.value.retry_after_s == pytest.approx(10 * 2.0, rel=0.1)
    clock.now_s += 1000  # one step that takes very long
    engine.step()
    engine.submit(make_request("one more", [1]))
    with pytest.raises(Overloaded) as refused:
        engine.submit(make_request("and one", [1]))
    assert refused.value.retry_after_s == MAX_RETRY_S


def test_idle_time_does_not_slow_the_measured_rate() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    for taken in (0, 100, 200):
        rate.measure(taken, is_waiting=taken < 200)
        clock.now_s += 1
    clock.now_s += 1000
    rate.measure(200, is_waiting=True)
    assert rate.drain_s(500) == pytest.approx(5.0)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), 86_401.0])
def test_bad_timeouts_are_refused(timeout_s: float) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="timeout_s"):
        engine.submit(make_request("a", [1], timeout_s=timeout_s))
    with pytest.raises(ConfigError, match=r"engine\.request_timeout_s"):
        EngineConfig(request_timeout_s=timeout_s)
    assert not engine.has_work


def test_a_queue_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_waiting\b"):
        EngineConfig(max_waiting=0)


def ends(events: list[TokenEvent]) -> dict[str, Any]:
    return {event.request_id: event.refusal or event.finish_reason for event in events if event.finish_reason}


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    engine, clock = engine_with_clock(max_running=1, num_pages=24)
    engine.submit(make_request("runs.0", [1, 2], LONG, session_id="s", timeout_s=10))
    engine.submit(make_request("queued.0", [1, 2, 3], LONG, session_id="s", timeout_s=5))
    engine.submit(make_request("waits", [3] * 9, LONG, timeout_s=5.5))
    engine.submit(make_request("in time", [4], timeout_s=60))
    engine.step()
    engine.step()
    clock.now_s = 5.2
    assert list(ends(engine.step())) == ["queued.0"]
    clock.now_s = 5.6
    assert list(ends(engine.step())) == ["waits"]
    assert engine_stats(engine)["requests"]["waiting"] == 1
    engine.step()
    clock.now_s = 10.1
    last = engine.step()
    assert isinstance(ends(last)["runs.0"], DeadlineExceeded)
    assert engine.num_missed_deadlines == 3
    found: dict[str, Any] = answer(engine, GetSession(("", "s")))
    assert found["tokens"] == 2 + 5  # the session keeps what was generated in five steps, as after an abort
    assert tokens_of(last + run(engine), "in time") == continuation([4], 4, 5)
    assert engine.forest.device.num_in_use == 0
    assert (engine.in_flight, len(engine.deadlines)) == ({}, 0)


def test_usage_says_how_long_a_request_waited_and_how_long_its_prompt_took() -> None:
    engine, clock = engine_with_clock(max_running=1)  # 16 rows a step
    clock.now_s = 1.0
    for name, length in (("a", 20), ("b", 3)):
        engine.submit(make_request(name, [1 + (name == "b")] * length, SamplingParams(temperature=0, max_tokens=2)))
    usages = {}
    while engine.has_work:
        clock.now_s += 1.0
        usages.update({event.request_id: event.usage for event in engine.step() if event.usage is not None})
    waited = {name: (usage.queue_s, usage.prefill_s) for name, usage in usages.items()}
    # The first step is at 2 s; the prompt of `a` takes two steps, its answer one more.
    assert waited == {"a": (1.0, 1.0), "b": (4.0, 0.0)}
    assert engine.num_tokens["device"] + engine.num_tokens["recomputed"] == engine.num_tokens["prompt"] == 23


def test_the_default_is_for_requests_that_name_none() -> None:
    engine, clock = engine_with_clock(request_timeout_s=5)
    engine.submit(make_request("default", [1], LONG))
    engine.submit(make_request("own", [2], timeout_s=60))
    clock.now_s = 6
    found = ends(run(engine))
    assert (type(found["default"]), found["own"]) == (DeadlineExceeded, "length")


def test_an_id_that_comes_again_has_its_own_deadline() -> None:
    engine, clock = engine_with_clock()
    engine.submit(make_request("a", [1], timeout_s=5))
    run(engine)
    clock.now_s = 4
    engine.submit(make_request("a", [1], LONG, timeout_s=50))
    clock.now_s = 6
    assert ends(run(engine)) == {"a": "length"}


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.lists(st.integers(0, 1), min_size=1, max_size=20),
            st.integers(1, 12),
            st.sampled_from([None, "s", "t"]),
            st.one_of(st.none(), st.integers(1, 20)),
        ),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
)
def test_any_deadlines_give_one_end_each_and_only_their_own(traffic: list[Any], runs_ahead: bool) -> None:
    clock = Clock()
    engine = make_engine(runner=FakeRunner(12, 4, runs_ahead=runs_ahead), clock=clock, max_running=3)
    events: list[TokenEvent] = []
    for step in itertools.count():
        clock.now_s = float(step)
        for index, (arrival, ids, max_tokens, session, timeout_s) in enumerate(traffic):
            if arrival == step:
                params = SamplingParams(temperature=0, max_tokens=max_tokens)
                engine.submit(make_request(f"r{index}.0", ids, params, session_id=session, timeout_s=timeout_s))
        events += engine.step()
        engine.forest.check()
        if step > 20 and not engine.has_work:
            break
        assert step < 1000
    for index, (_, ids, max_tokens, _, timeout_s) in enumerate(traffic):
        name = f"r{index}.0"
        (end,) = [event for event in events if event.request_id == name and event.finish_reason]
        got = tokens_of(events, name)
        assert got == continuation(ids, max_tokens, 5)[: len(got)]
        assert (len(got) == max_tokens) == (end.finish_reason == "length")
        assert end.finish_reason == "length" or isinstance(end.refusal, DeadlineExceeded)
        assert timeout_s is not None or end.finish_reason == "length"
        assert timeout_s is None or len(got) <= timeout_s + 1, "it ran on after its time"
    assert engine.num_missed_deadlines == sum(event.refusal is not None for event in events)
    assert engine.forest.device.num_in_use == 0
    assert (engine.in_flight, len(engine.deadlines)) == ({}, 0)


def test_refusals_cross_processes() -> None:
    for error in (DeadlineExceeded(), Overloaded("full", retry_after_s=7.0), PinRefused(9, 7, 8)):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_prompts_in_a_step_have_halves_of_what_is_left_and_no_row_is_wasted() -> None:
    engine = make_engine(num_pages=400, page_size=4, max_batch_tokens=64)
    for index in range(4):
        engine.submit(make_request(f"r{index}", [index, *[i % 5 for i in range(200)]]))
    engine.step()
    rows = [sequence.path.num_tokens for sequence in engine.scheduler.running if sequence.path]
    assert rows == [32, 16, 8, 8]
    assert engine.runner.num_rows == 64  # type: ignore[attr-defined]


def test_a_prompt_that_was_cut_keeps_the_pages_that_it_will_need() -> None:
    engine = make_engine(num_pages=40, page_size=4, max_batch_tokens=64)
    engine.submit(make_request("first", [0] * 120))
    engine.submit(make_request("second", [1] * 60))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_suspensions == 0
