"""What an engine says of its sessions and of recent prompts; no tensors, milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.errors import InvalidRequest, MnemeError, SessionNotFound
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.engine.output import MAX_EXPLANATIONS
from mneme.replicas.forest.paths import Rows
from mneme.replicas.queries import DeleteSession, ExplainPrompt, ForkSession, GetSession
from mneme.replicas.request import PromptUsage, SamplingParams
from mneme.replicas.sequence import Sequence
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, usage_of

KEY = ("", "public:s")


def session(engine: Engine, key: tuple[str, str] = KEY) -> dict[str, Any]:
    found: dict[str, Any] = answer(engine, GetSession(key))
    return found


def explained(engine: Engine, http_id: str, salt: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer(engine, ExplainPrompt(salt, http_id))
    return found


def test_a_session_tells_its_tokens_turns_tiers_and_hits() -> None:
    engine = make_engine()
    engine.submit(make_request("one.0", [1, 2, 3], session_id=KEY[1]))
    run(engine)
    engine.submit(make_request("two.0", [4, 1], session_id=KEY[1], append=True))
    run(engine)
    found = session(engine)
    assert (found["tokens"], found["turns"], found["answering"], found["queued"]) == (13, 2, False, 0)
    assert found["kv"] == {"device": 12, "host": 0, "absent": 1}  # the last token was never fed
    assert found["hit_history"] == [{"prompt_tokens": 3, "cached_tokens": 0}, {"prompt_tokens": 9, "cached_tokens": 6}]
    assert answer(engine, GetSession(("other", KEY[1]))) is None


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=6))
@settings(max_examples=examples(60))
def test_what_is_resident_is_what_a_request_would_find(prompts: list[list[int]]) -> None:
    engine = make_engine()
    for index, prompt in enumerate(prompts):
        engine.submit(make_request(f"r{index}", prompt, SamplingParams(temperature=0, max_tokens=2)))
    run(engine)
    for prompt in [*prompts, [*prompts[0], 1, 2, 0]]:
        found = engine.forest.resident("", prompt).device
        path = engine.forest.open_path("")
        assert path.extend(prompt, len(prompt)) == found
        engine.forest.release(path)
    assert engine.forest.resident("nobody", [1, 2]) == (0, 0)
    assert "nobody" not in engine.forest.roots


def test_ranges_say_where_a_prompt_came_from_and_sum_up() -> None:
    engine = make_engine(max_batch_tokens=16)
    long = [i % 5 for i in range(40)]
    engine.submit(make_request("aa-0.0", long))
    run(engine)
    engine.submit(make_request("bb.0", [*long, 1, 1, 1], salt=""))
    events = run(engine)
    (first,), (second,) = explained(engine, "aa"), explained(engine, "bb")
    assert first["ranges"] == [{"start": 0, "end": 40, "source": "recomputed"}]
    cached = usage_of(events, "bb.0")[1]
    assert second["ranges"] == [
        {"start": 0, "end": cached, "source": "device"},
        {"start": cached, "end": 43, "source": "recomputed"},
    ]
    assert second["kv_details"] == {
        "device": cached, "host": 0, "disk": 0, "peer": 0, "recomputed": 43 - cached, "dropped": 0,
        "truncated": 0,
    }  # fmt: skip
    assert explained(engine, "bb", salt="another key") == []
    assert explained(engine, "b") == explained(engine, "aa-0.0") == []


def test_an_explanation_says_where_an_answer_gave_way_and_where_it_was_resumed() -> None:
    engine = make_engine(num_pages=12, page_size=4, max_batch_tokens=32)
    for index in range(6):
        params = SamplingParams(temperature=0, max_tokens=20)
        engine.submit(make_request(f"r{index}.0", [index % 5, index // 5, *[3] * 4], params))
    run(engine)
    found = [entry for index in range(6) for entry in explained(engine, f"r{index}")]
    suspended = [num_tokens for entry in found for num_tokens in entry["suspended_at"]]
    assert len(suspended) == engine.scheduler.num_suspensions > 0
    assert all(0 <= num_tokens < 20 for num_tokens in suspended)
    assert found[0]["suspended_at"] == []  # the oldest
    assert {entry["resumed_at"] for entry in found} == {0}
    engine.submit(replace(make_request("moved.0", [1, 2, 3]), output_offset=2))
    run(engine)
    assert [entry["resumed_at"] for entry in explained(engine, "moved")] == [2]


def test_explanations_are_bounded() -> None:
    engine = make_engine()
    for index in range(MAX_EXPLANATIONS + 50):
        engine.submit(make_request(f"{index}x.0", [1, 2], SamplingParams(temperature=0, max_tokens=1)))
        run(engine)
    assert len(engine.explanations) == MAX_EXPLANATIONS
    assert explained(engine, "0x") == []
    assert len(explained(engine, f"{MAX_EXPLANATIONS}x")) == 1


def test_a_turn_appended_to_a_session_deleted_before_it_ends_with_its_error() -> None:
    engine = make_engine()
    engine.submit(make_request("one.0", [1, 2], session_id=KEY[1]))
    engine.submit(make_request("two.0", [4], session_id=KEY[1], append=True))
    answer(engine, DeleteSession(KEY))
    events = run(engine)
    (event,) = [event for event in events if event.request_id == "two.0"]
    assert "no such session" in (event.error or "")
    assert isinstance(event.refusal, SessionNotFound)
    with pytest.raises(SessionNotFound):
        engine.submit(make_request("three.0", [4], session_id=KEY[1], append=True))
    assert len(engine.sessions) == 0


def test_a_loop_returns_errors_and_outlives_questions(caplog: pytest.LogCaptureFixture) -> None:
    loop = EngineLoop(make_engine())
    loop.start()
    try:
        assert loop.query(GetSession(KEY)) is None
        assert isinstance(loop.query(ForkSession(KEY, "public:f")), InvalidRequest)
        assert type(loop.query(GetSession([]))) is MnemeError  # type: ignore[arg-type]
        loop.check_health()
    finally:
        loop.stop()
    assert "query failed" in caplog.text


@given(st.lists(st.tuples(st.integers(0, 24), st.integers(1, 6)), max_size=8))
def test_computed_ranges_are_those_that_were_computed(rows: list[tuple[int, int]]) -> None:
    """Chunks follow each other, skip what was found, or begin again further back after a suspension."""
    sequence = Sequence(request=make_request("r", [1]), ids=[1] * 20, num_prompt=20, max_tokens=4, arrival=0)
    expected = ["device"] * 20
    for start, count in rows:
        sequence.add_origins(Rows([(start, start + count)], [], 0, [], [0]))
        for position in range(start, min(start + count, 20)):
            expected[position] = "recomputed"
    if "recomputed" in expected:
        last = 19 - expected[::-1].index("recomputed")
        expected[last:] = ["recomputed"] * (20 - last)  # what was not begun
    else:
        expected = ["recomputed"] * 20
    ranges = sequence.origins.ranges(20)
    assert [each.source for each in ranges for _ in range(each.start, each.end)] == expected
    assert sequence.usage == PromptUsage(20, expected.count("device"))
    sequence.append(1)
    sequence.add_origins(
        Rows([(0, 20)], [], 0, [], [0])
    )  # suspended in decode: no longer the prompt's first computation
    assert sequence.origins.ranges(20) == ranges
