"""Sessions that outgrow their window go on from what they keep; the fake runner checks what every row sees."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.errors import ContextLengthExceeded, InvalidRequest, ReplicaUnavailable, SessionNotFound
from mneme.replicas.engine.engine import Engine
from mneme.replicas.queries import DeleteSession, ForkSession, GetSession
from mneme.replicas.request import PromptUsage, SamplingParams, TokenEvent
from mneme.replicas.truncation import Truncation
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.fake_runner import FakeRunner, lose, predict
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of

WINDOW = 32
REUSE, RECOMPUTE = Truncation(keep_first=0), Truncation(strategy="recompute")


def engine_of(num_pages: int = 64, num_host_pages: int = 0, **options: Any) -> Engine:
    runner = FakeRunner(num_pages, 4, max_context=WINDOW, num_host_pages=num_host_pages)
    return make_engine(runner=runner, **options)


def say(
    engine: Engine, name: str, ids: list[int], num_tokens: int, truncation: Truncation | None = REUSE, **more: Any
) -> list[TokenEvent]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    engine.submit(make_request(name, ids, params, session_id="s", truncation=truncation, **more))
    return run(engine)


def played(ids: list[int], num_tokens: int, window: int = WINDOW, num_dropped: int = WINDOW // 2) -> list[int]:
    """What greedy decoding gives if the oldest `num_dropped` tokens go whenever the window is over."""
    seen, said = list(ids), []
    for _ in range(num_tokens):
        if len(seen) > window:
            seen = seen[num_dropped:]
        said.append(predict(seen, 5))
        seen.append(said[-1])
    return said


def usage_of(events: list[TokenEvent]) -> PromptUsage:
    usage = next(event.usage for event in events if event.usage is not None)
    return usage._replace(queue_s=0.0, prefill_s=0.0)


@pytest.mark.parametrize("truncation", [REUSE, RECOMPUTE])
@pytest.mark.parametrize("sharing", [True, False])
def test_an_answer_goes_on_past_the_window(truncation: Truncation, sharing: bool) -> None:
    engine = engine_of(prefix_sharing=sharing)
    ids = [1, 2, 3, 4, 0, 1, 2]
    assert tokens_of(say(engine, "a", ids, 100, truncation), "a") == played(ids, 100)
    assert engine.forest.device.num_in_use == 0
    runner: Any = engine.runner
    is_kept = truncation is REUSE and sharing
    assert runner.num_rows == 7 + 99 if is_kept else runner.num_rows > 7 + 99 + 4 * 15


def test_the_next_turn_goes_on_from_what_was_kept() -> None:
    engine = engine_of()
    ids = [1, 2, 3, 4, 0, 1, 2]
    said = tokens_of(say(engine, "a", ids, 36), "a")
    runner: Any = engine.runner
    before = runner.num_rows
    events = say(engine, "b", [3, 3], 3, append=True)
    seen = [*ids, *said][16:]
    assert tokens_of(events, "b") == played([*seen, 3, 3], 3)
    assert usage_of(events) == PromptUsage(29, 26, 0, 0, 16)
    assert runner.num_rows == before + 3 + 2  # one output token had no KV yet, two are new, two are drawn from
    described = answer(engine, GetSession(("", "s")))
    assert (described["tokens"], described["truncated"]) == (48, 16)
    assert described["kv"] == {"device": 31, "host": 0, "absent": 1}


def test_a_prompt_longer_than_the_window_is_cut() -> None:
    engine = engine_of()
    ids = [(7 * i) % 5 for i in range(50)]
    for name, truncation in (("a", REUSE), ("b", RECOMPUTE)):
        events = say(engine, name, ids, 2, truncation)
        assert usage_of(events).truncated_tokens >= 18
        seen = ids[usage_of(events).truncated_tokens :]
        assert tokens_of(events, name) == played(seen, 2)
        answer(engine, DeleteSession(("", "s")))
    with pytest.raises(ContextLengthExceeded):
        say(engine, "c", ids, 2, None)


def test_choices_that_keep_the_same_compute_what_is_new_once() -> None:
    engine = engine_of()
    say(engine, "a", [1, 2, 3], 24)
    runner: Any = engine.runner
    before = runner.num_rows
    params = SamplingParams(temperature=0, max_tokens=2)
    for choice in range(3):
        extra: dict[str, Any] = {"session_id": "s", "truncation": REUSE, "append": True, "choice_index": choice}
        engine.submit(make_request(f"b.{choice}", [1, 2, 3, 4, 0, 1, 2], params, **extra))
    run(engine)
    assert runner.num_rows == before + 8 + 2 + 3  # the prompt, a row for the logits of two others, and three decodes


def test_tokens_that_took_the_place_of_kept_ones_are_noticed() -> None:
    engine = engine_of()
    said = tokens_of(say(engine, "a", [1, 2, 3], 36), "a")
    log = engine.sessions.get(("", "s"))
    page = log.root.kept[-1].page
    page.tokens[-1] = (page.tokens[-1] + 1) % 5  # as after a loss and another's turn
    events = say(engine, "b", [3], 1, append=True)
    assert tokens_of(events, "b") == played([*[1, 2, 3, *said][16:], 3], 1)
    assert usage_of(events).cached_tokens == 0


@pytest.mark.at_length
@settings(max_examples=examples(75, at_length=200))
@given(
    st.lists(
        st.tuples(
            st.sampled_from("st"),
            st.lists(st.integers(0, 1), min_size=1, max_size=40),
            st.integers(1, 60),
            st.integers(1, 3),  # choices
            st.sampled_from(["", "", "", "abort", "delete", "fork", "exact"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(12, 30),
    st.sampled_from([0, 4, 40]),
    st.sampled_from([REUSE, RECOMPUTE, Truncation(), Truncation(ratio=0.3), Truncation(ratio=0.9)]),
    st.lists(st.integers(0, 1000), max_size=6),
)
def test_any_turns_end_and_every_row_sees_its_context(
    turns: list[tuple[str, list[int], int, int, str]],
    num_pages: int,
    num_host_pages: int,
    truncation: Truncation,
    losses: list[int],
) -> None:
    engine = engine_of(num_pages, num_host_pages)
    events: list[TokenEvent] = []
    for index, (session, ids, num_tokens, num_choices, and_then) in enumerate(turns):
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        known = engine.sessions.get(("", session))
        append = known is not None and known.running is None and bool(known.ids)
        way = RECOMPUTE if and_then == "exact" else truncation
        for choice in range(num_choices):
            extra = {"session_id": session, "truncation": way, "append": append, "choice_index": choice}
            engine.submit(make_request(f"r{index}.{choice}", ids, params, **extra))
        for _ in range(index % 4 * 8):
            events += engine.step()
            engine.forest.check()
        interfere(engine, and_then, f"r{index}.0", session)
        if losses:
            lose(engine, losses.pop())
    events += run(engine)
    for index, (_, _, num_tokens, num_choices, and_then) in enumerate(turns):
        for choice in range(num_choices):
            said = len(tokens_of(events, f"r{index}.{choice}"))
            assert said == num_tokens or (and_then == "abort" and choice == 0 and said < num_tokens)
    assert engine.forest.device.num_in_use == engine.forest.host.num_in_use == 0
    assert (len(engine.scheduler.waiting), engine.scheduler.waiting.num_tokens) == (0, 0)
    for session in "st":
        answer(engine, DeleteSession(("", session)))
        answer(engine, DeleteSession(("", f"{session}'")))
    engine.forest.check()
    assert not any(page.keepers for root in engine.forest.roots.values() for page in root.below_it())
    engine.forest.clear()
    assert not engine.forest.kept_roots
    assert len(engine.forest.device.free) == engine.forest.device.num_pages


def interfere(engine: Engine, what: str, request_id: str, session: str) -> None:
    if what == "abort":
        engine.abort(request_id)
    elif what == "delete":
        answer(engine, DeleteSession(("", session)))
    elif what == "fork":
        with contextlib.suppress(InvalidRequest, SessionNotFound, ReplicaUnavailable):
            answer(engine, ForkSession(("", session), f"{session}'"))
