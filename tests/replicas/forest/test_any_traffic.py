"""Any traffic over any pool: each request computes what it would alone, and everything is given back."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.errors import PinRefused
from mneme.replicas.forest.paths import Path
from mneme.replicas.request import SamplingParams, TokenEvent
from tests.budget import examples
from tests.replicas.fake_runner import FakeRunner, continuation, lose
from tests.replicas.schedule.test_engine_policy import POLICIES, make_engine, make_request, tokens_of

requests = st.lists(
    st.tuples(
        st.integers(0, 25),  # the step at which it arrives
        st.lists(st.integers(0, 1), min_size=1, max_size=24),
        st.integers(1, 16),  # max_tokens
        st.sampled_from(["", "tenant"]),
        st.one_of(st.none(), st.integers(0, 12)),  # steps until it is aborted
        st.sampled_from([None, None, "s", "t"]),  # session
        st.integers(1, 3),  # choices
    ),
    min_size=1,
    max_size=12,
)


traffic_and_pool = st.tuples(
    requests,
    st.integers(10, 24),
    st.sampled_from([4, 8]),
    st.integers(16, 40),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 11)), max_size=4),
    st.sampled_from([0, 0, 3, 12, 40]),
    st.sampled_from([None, None, 3, 9]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1000)), max_size=8),
    st.booleans(),
)


@pytest.mark.at_length
@settings(max_examples=examples(150, at_length=400))
@given(traffic_and_pool)
def test_any_traffic_computes_what_each_request_alone_would(case: tuple[Any, ...]) -> None:
    check_traffic(*case)


def check_traffic(
    traffic: list[Any],
    num_pages: int,
    page_size: int,
    max_batch_tokens: int,
    max_running: int,
    sharing: bool,
    eviction: str,
    pinning: list[tuple[int, int, int]],
    num_host_pages: int,
    window: int | None,
    losses: list[tuple[int, int]],
    runs_ahead: bool,
) -> None:
    """`pinning`: at which step, for how many steps, and the prompt of which request; `losses`: at which step what."""
    runner = FakeRunner(num_pages, page_size, num_host_pages=num_host_pages, window=window, runs_ahead=runs_ahead)
    engine = make_engine(
        runner=runner,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        prefix_sharing=sharing,
        eviction=eviction,
    )
    pins: list[tuple[int, Path]] = []
    events: list[TokenEvent] = []
    names: dict[str, Any] = {}
    for step in itertools.count():
        for index, (arrival, ids, max_tokens, salt, abort_after, session, n) in enumerate(traffic):
            choices = [f"r{index}.{choice}" for choice in range(n)]
            if arrival == step:
                params = SamplingParams(temperature=0, max_tokens=max_tokens)
                for choice, name in enumerate(choices):
                    extra = {"salt": salt, "session_id": session, "choice_index": choice}
                    request = make_request(name, ids, params, **extra)
                    if len(ids) + max_tokens > engine.capacity and pins:
                        continue  # refused at submission, or as a queued turn when it starts
                    names[name] = traffic[index]
                    engine.submit(request)
            if abort_after is not None and arrival + abort_after == step:
                engine.abort(choices[0])
        for start, length, index in pinning:
            if start == step:
                _, ids, _, salt, *_ = traffic[index % len(traffic)]
                with contextlib.suppress(PinRefused):
                    pins.append((step + length, engine.pins.pin_prefix(salt, ids)))
        for end, pin in pins:
            if end == step:
                engine.scheduler.unpin(pin)
        for at, index in losses:
            if at == step and sharing:
                lose(engine, index)
        events += engine.step()
        engine.forest.check()
        if step > 61 and not engine.has_work:
            break
        assert step < 4_000, "some request never ends"
    for name, (_, ids, max_tokens, _, abort_after, _, _) in names.items():
        expected = continuation(ids, max_tokens, 5)
        got = tokens_of(events, name)
        assert got == expected[: len(got)]
        assert len(got) == max_tokens or abort_after is not None
        assert sum(e.finish_reason is not None for e in events if e.request_id == name) == 1
    assert engine.forest.device.num_in_use == 0
    assert engine.in_flight == {}
