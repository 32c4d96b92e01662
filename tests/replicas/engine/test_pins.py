"""Pins against requests that were taken before them; no tensors, milliseconds."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.errors import PinRefused, SessionNotFound
from mneme.replicas.engine.pins import pin_prefix
from mneme.replicas.request import SamplingParams, TokenEvent
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of, usage_of


def test_a_turn_that_waits_for_its_session_is_not_refused_because_of_a_later_pin() -> None:
    engine = make_engine(num_pages=10, page_size=4)
    engine.submit(make_request("one.0", [1] * 2, SamplingParams(temperature=0, max_tokens=10), session_id="s"))
    engine.submit(make_request("two.0", [0] * 22, SamplingParams(temperature=0, max_tokens=16), session_id="s"))
    engine.step()
    with pytest.raises(PinRefused, match="would leave 9 unpinned; at least 10"):
        pin_prefix(engine, "", [1] * 2)
    assert len(tokens_of(run(engine), "two.0")) == 16
    pin_prefix(engine, "", [0] * 4)


def test_an_appended_turn_that_waits_has_room_for_all_that_comes_before_it() -> None:
    engine = make_engine(num_pages=10, page_size=4)
    four = SamplingParams(temperature=0, max_tokens=4)
    engine.submit(make_request("one.0", [1] * 16, four, session_id="s"))
    engine.submit(make_request("two.0", [2] * 4, four, session_id="s", append=True))
    engine.submit(make_request("three.0", [3] * 4, four, session_id="s", append=True))
    events = engine.step()
    with pytest.raises(PinRefused, match="would leave 8 unpinned; at least 9"):  # 16 + 4, 4 + 4, 4 + 4
        pin_prefix(engine, "", [1] * 5)
    pin_prefix(engine, "", [1] * 4)
    events += run(engine)
    assert [len(tokens_of(events, name)) for name in ("one.0", "two.0", "three.0")] == [4, 4, 4]
    assert usage_of(events, "three.0")[0] == 32


def test_a_request_without_a_limit_ends_sooner_where_a_pin_takes_the_room() -> None:
    engine = make_engine(num_pages=10, page_size=4)
    engine.submit(make_request("warm", [1] * 12, SamplingParams(temperature=0, max_tokens=1)))
    run(engine)
    engine.submit(make_request("endless", [2] * 8, SamplingParams(temperature=0)))
    for _ in range(3):
        engine.step()
    pin_prefix(engine, "", [1] * 12)
    assert len(tokens_of(run(engine), "endless")) <= 28 - 8
    engine = make_engine(num_pages=10, page_size=4)
    engine.submit(make_request("warm", [1] * 12, SamplingParams(temperature=0, max_tokens=1)))
    run(engine)
    engine.submit(make_request("endless", [2] * 8, SamplingParams(temperature=0, min_tokens=24)))
    with pytest.raises(PinRefused, match="would leave 7 unpinned; at least 8"):  # it was promised 24
        pin_prefix(engine, "", [1] * 12)


turns = st.lists(
    st.tuples(
        st.integers(0, 6),  # the step at which it arrives
        st.integers(1, 24),  # prompt tokens
        st.one_of(st.none(), st.integers(1, 16)),  # max_tokens
        st.sampled_from([None, "s", "s", "t"]),  # session
        st.booleans(),  # appended
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=300, deadline=None)
@given(turns, st.integers(10, 14), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 24)), min_size=1, max_size=4))
def test_no_pin_ends_or_refuses_what_was_taken_before_it(
    traffic: list[Any], num_pages: int, pinning: list[tuple[int, int]]
) -> None:
    """`pinning`: at which step, and how many tokens; what a session may come to is counted here too."""
    engine = make_engine(num_pages, 4)
    longest: dict[str | None, int] = {}
    taken: dict[str, int | None] = {}
    events: list[TokenEvent] = []
    for step in itertools.count():
        for index, (arrival, num_prompt, max_tokens, session, append) in enumerate(traffic):
            appends = append and session is not None
            needed = num_prompt + (max_tokens or 1) + (longest.get(session, 0) if appends else 0)
            if arrival != step or needed > engine.capacity:
                continue
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            ids = [index % 2] * num_prompt
            with contextlib.suppress(SessionNotFound):
                engine.submit(make_request(f"r{index}.0", ids, params, session_id=session, append=appends))
                taken[f"r{index}.0"] = max_tokens
                longest[session] = max(longest.get(session, 0), needed if max_tokens else engine.capacity)
        for start, length in pinning:
            if start == step:
                with contextlib.suppress(PinRefused):
                    pin_prefix(engine, "", [start % 2] * length)
        events += engine.step()
        if step > 40 and not engine.has_work:
            break
        assert step < 4_000, "some request never ends"
    for name, max_tokens in taken.items():
        assert [event.finish_reason for event in events if event.request_id == name][-1] == "length", name
        assert len(tokens_of(events, name)) == (max_tokens or len(tokens_of(events, name))) >= 1
