"""Sessions that outgrow their window go on from what they keep; the fake runner checks what every row sees."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.errors import ContextLengthExceeded, InvalidRequest, ReplicaUnavailable, SessionNotFound
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.queries import DeleteSession, ForkSession, GetSession
from mneme.replicas.request import PromptUsage, SamplingParams, TokenEvent
from mneme.replicas.truncation import Truncation
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.fake_runner import FakeRunner, predict
from tests.replicas.losses import lose
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
def test_an_answer_goes_on_past_the_window(truncation: Truncation) -> None:
    engine = engine_of()
    ids = [1, 2, 3, 4, 0, 1, 2]
    assert tokens_of(say(engine, "a", ids, 100, truncation), "a") == played(ids, 100)
    runner: Any = engine.runner
    assert runner.num_rows == 7 + 99 if truncation is REUSE else runner.num_rows > 7 + 99 + 4 * 15


@pytest.mark.parametrize("truncation", [REUSE, RECOMPUTE])
def test_without_sharing_what_stays_is_computed_anew(truncation: Truncation) -> None:
    engine = engine_of(prefix_sharing=False)
    ids = [1, 2, 3, 4, 0, 1, 2]
    assert tokens_of(say(engine, "a", ids, 60, truncation), "a") == played(ids, 60)
    assert engine.forest.device.num_in_use == 0


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


def test_approximate_kv_is_for_its_session_alone() -> None:
    """Neither a stranger with the same tokens, nor a fork, nor a turn that asks for exact KV finds it."""
    engine = engine_of()
    ids = [1, 2, 3, 4, 0, 1, 2]
    said = tokens_of(say(engine, "a", ids, 36), "a")
    seen = [*ids, *said][16:]
    engine.submit(make_request("stranger", [*seen, 3], SamplingParams(temperature=0, max_tokens=1)))
    assert usage_of(run(engine)).cached_tokens == 0
    answer(engine, ForkSession(("", "s"), "t"))
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.submit(make_request("fork", [3], params, session_id="t", truncation=REUSE, append=True))
    events = run(engine)
    assert usage_of(events).cached_tokens == len(seen)  # what the stranger computed: exact
    assert tokens_of(events, "fork") == played([*seen, 3], 1)
    exact = say(engine, "exact", [3], 1, RECOMPUTE, append=True)
    assert usage_of(exact).cached_tokens == len(seen)
    assert usage_of(exact).truncated_tokens == 16


def test_pages_forget_the_truncations_that_kept_them_once_these_are_gone() -> None:
    forest = PrefixForest(num_pages=16, page_size=4)
    ids = list(range(8))
    first = forest.open_path("")
    first.write(ids, 8)
    for _ in range(5):
        path = forest.open_path("")
        path.extend(ids, 8)
        truncated = forest.truncate(path, [(2, 8)])
        assert truncated is not None
        assert all(page.keepers == {truncated.root} for page in first.pages)
        forest.release(truncated)
        forest.check()
        assert not any(page.keepers for page in first.pages)


def test_what_is_lost_is_computed_anew_and_the_answer_is_the_same() -> None:
    engine = engine_of()
    ids = [1, 2, 3, 4, 0, 1, 2]
    said = tokens_of(say(engine, "a", ids, 36), "a")
    engine.forest.clear()
    events = say(engine, "b", [3, 3], 3, append=True)
    assert tokens_of(events, "b") == played([*[*ids, *said][16:], 3, 3], 3)
    assert usage_of(events) == PromptUsage(29, 0, 0, 0, 16)


def test_kept_tokens_come_back_from_the_host() -> None:
    engine = engine_of(num_pages=12, num_host_pages=40)
    ids = [1, 2, 3, 4, 0, 1, 2]
    said = tokens_of(say(engine, "a", ids, 36), "a")
    engine.submit(make_request("others", [4] * 31, SamplingParams(temperature=0, max_tokens=1)))
    run(engine)
    events = say(engine, "b", [3, 3], 3, append=True)
    assert tokens_of(events, "b") == played([*[*ids, *said][16:], 3, 3], 3)
    assert usage_of(events).host_tokens > 0
    assert usage_of(events).cached_tokens == 26


def test_what_is_kept_first_stays_and_moves_nowhere() -> None:
    engine = engine_of()
    ids = [1, 2, 3, 4, 0, 1, 2]
    events = say(engine, "a", ids, 40, Truncation(keep_first=3))
    seen, said = list(ids), []
    for _ in range(40):
        if len(seen) > WINDOW:
            seen = seen[:3] + seen[19:]
        said.append(predict(seen, 5))
        seen.append(said[-1])
    assert tokens_of(events, "a") == said


def test_a_truncated_session_leaves_nothing_when_it_goes() -> None:
    engine = engine_of()
    say(engine, "a", [1, 2, 3], 40)
    assert engine.forest.device.num_cached > 5
    assert answer(engine, DeleteSession(("", "s")))
    assert not engine.forest.kept_roots
    engine.forest.check()
    assert len(engine.forest.device.free) == engine.forest.device.num_pages


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


def test_what_was_lost_is_not_kept_in_mind() -> None:
    """Neither nodes without KV, nor others' tokens that took the place of what was kept."""
    engine = engine_of()
    say(engine, "a", [1, 2, 3], 36)
    log = engine.sessions.get(("", "s"))
    assert log is not None
    assert log.root is not None
    assert log.root.kept
    engine.forest.clear()
    assert not log.root.kept
    assert engine.forest.open_kept(log.root) is None


def test_tokens_that_took_the_place_of_kept_ones_are_noticed() -> None:
    engine = engine_of()
    said = tokens_of(say(engine, "a", [1, 2, 3], 36), "a")
    log = engine.sessions.get(("", "s"))
    assert log is not None
    assert log.root is not None
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
