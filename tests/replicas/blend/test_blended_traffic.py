"""Engines that reuse documents in place, against the fake runner: every row sees its whole context, once."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.names import Miss
from mneme.errors import ContextLengthExceeded
from mneme.replicas.documents import BlendOptions, BlendUsage, DocumentSpan
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.queries import DeleteSession, ForkSession
from mneme.replicas.request import GenerationRequest, PromptUsage, SamplingParams, TokenEvent
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.played_chunks import PlayedCache, make_played_engine
from tests.replicas.fake_runner import FakeRunner, continuation, lineages
from tests.replicas.losses import lose
from tests.replicas.schedule.test_engine_policy import make_engine, make_request, run, tokens_of

REUSE = BlendOptions(mode="full_reuse", min_tokens=1)
OFF = BlendOptions(mode="off")
A, B = [1, 2, 3, 4, 0, 1, 2, 3, 3], [4, 4, 2, 0, 1, 1]


def engine_of(num_pages: int = 64, page_size: int = 4, **options: Any) -> Engine:
    runner = FakeRunner(num_pages, page_size, num_host_pages=options.pop("num_host_pages", 0))
    return make_engine(runner=runner, **options)


def blended(
    name: str, parts: list[list[int] | tuple[int, ...]], blend: BlendOptions = REUSE, num_tokens: int = 4, **more: Any
) -> GenerationRequest:
    """A request of texts (tuples) and documents (lists)."""
    ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, list):
            spans.append(DocumentSpan(len(ids), len(ids) + len(part), f"d{len(spans)}", len(ids), len(ids) + len(part)))
        ids += part
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    return make_request(name, ids, params, documents=tuple(spans), blend=blend, **more)


def usage_of(events: list[TokenEvent]) -> PromptUsage:
    return next(event.usage for event in events if event.usage is not None)


def num_rows(engine: Engine) -> int:
    runner: Any = engine.runner
    count: int = runner.num_rows
    return count


def test_documents_are_computed_once_and_reused_in_any_order() -> None:
    engine = engine_of(max_batch_tokens=64)
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)]))
    first = run(engine)
    assert {event.request_id for event in first} == {"first"}  # nobody hears of what is computed for it
    before = num_rows(engine)
    request = blended("second", [(0, 1), B, (3,), A, (2, 2)])
    engine.submit(request)
    events = run(engine)
    assert tokens_of(events, "second") == continuation(list(request.prompt_token_ids), 4, 5)
    assert num_rows(engine) - before == 1 + 2 + 3  # the text between, the question, later output
    usage = usage_of(events)
    assert (usage.prompt_tokens, usage.cached_tokens) == (20, 17)
    assert usage.blend is not None
    assert (usage.blend.mode, usage.blend.selector, usage.blend.reused) == ("full_reuse", "none", 15)
    assert engine.forest.device.num_in_use == 0


def test_a_tenant_finds_no_document_of_another() -> None:
    engine = engine_of(max_batch_tokens=64)
    rows = []
    for number, salt in enumerate(("one", "other", "one")):
        before = num_rows(engine)
        request = blended(f"r{number}", [(0,), A, B, (number,)], salt=salt, num_tokens=1)
        engine.submit(request)
        assert tokens_of(run(engine), f"r{number}") == continuation(list(request.prompt_token_ids), 1, 5)
        rows.append(num_rows(engine) - before)
    assert rows[0] == rows[1] == rows[2] + 1 + len(A) + len(B)
    assert engine.forest.resident("", A) == (0, 0)


def test_what_is_computed_in_its_own_slots_is_not_called_dropped() -> None:
    engine = engine_of(max_batch_tokens=64)
    for number in range(2):
        engine.submit(blended(f"r{number}", [(0, 1), A, (number,), B, (2, 2)], num_tokens=1))
        assert usage_of(run(engine)).dropped_tokens == 0


def blend_of(engine: Engine, parts: list[Any], blend: BlendOptions = REUSE, **more: Any) -> BlendUsage:
    engine.submit(blended("asked", parts, blend, 1, **more))
    usage = usage_of(run(engine)).blend
    assert usage is not None
    return usage


def test_it_is_said_of_each_document_what_became_of_it() -> None:
    engine = engine_of(max_batch_tokens=64, num_pages=32)
    engine.submit(blended("head", [(0, 1), A, (2,)], OFF))
    run(engine)
    blend = BlendOptions(mode="full_reuse", min_tokens=4)
    parts = [(0, 1), A, B, [2, 3], B, [1] * 200, (3,)]
    engine.submit(blended("first", [(1,), B, (2,)]))
    run(engine)
    with pytest.raises(ContextLengthExceeded):
        blend_of(engine, parts, blend)
    del parts[5]
    told = blend_of(engine, parts, blend)
    assert [(each.outcome, each.source, each.why) for each in told.documents] == [
        ("exact", "device", "part of the exact prefix"),
        ("blended", "device", "its KV is reused behind other text"),
        ("computed", "computed", "shorter than blend.min_tokens"),
        ("blended", "device", "it has the tokens of d1, and the same KV is reused"),
    ]
    assert told.token_counts() == {"reused": 2 * len(B), "exact": len(A), "recomputed": 2}
    chosen = blend_of(engine, [(4,), A, (1,), B, (2,)], BlendOptions(mode="selective", selector="all", min_tokens=1))
    assert {each.why for each in chosen.documents} == {"all of its tokens are to be computed anew"}
    stats = engine_stats(engine)["blend"]
    assert stats["requests"] == {"none": 2}
    assert stats["declined"] == {"off": 1, "exact": 1}
    assert stats["tokens"] == {"reused": 3 * len(B), "exact": len(A), "recomputed": 2 * len(A) + len(B) + 2}


@pytest.mark.parametrize(
    ("options", "blend", "reason"),
    [
        ({}, OFF, "off"),
        ({}, BlendOptions(min_tokens=1), "not_allowed"),
        ({"prefix_sharing": False}, REUSE, "not_shared"),
        ({"window": 8}, REUSE, "sliding_window"),
        ({}, BlendOptions(mode="full_reuse"), "too_short"),
        ({"num_pages": 6}, REUSE, "no_room"),
    ],
)
def test_why_documents_are_not_reused_is_said_and_counted(
    options: dict[str, Any], blend: BlendOptions, reason: str
) -> None:
    runner = FakeRunner(options.pop("num_pages", 64), 4, window=options.pop("window", None))
    engine = make_engine(runner=runner, **options)
    told = blend_of(engine, [(0, 1), A, B, (2, 2)], blend)
    assert (told.mode, told.declined, told.reused) == ("off", reason, 0)
    assert {(each.outcome, each.why) for each in told.documents} == {("computed", told.why)}
    assert engine_stats(engine)["blend"]["declined"] == {reason: 1}


def test_documents_that_are_known_exactly_are_not_blended() -> None:
    engine = engine_of()
    blend_of(engine, [(0, 1), A, (2, 2)], OFF)
    told = blend_of(engine, [(0, 1), A, (2, 2)])
    assert (told.declined, told.documents[0].outcome) == ("exact", "exact")
    told = blend_of(engine, [(0, 1), B, (2, 2)])
    assert told.documents[0].outcome == "blended"


@pytest.mark.parametrize("selector", ["none", "first-k", "query", "hkvd"])
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("session", [None, "s"])
def test_choices_of_a_turn_share_its_blend(selector: Any, num_tokens: int, session: str | None) -> None:
    engine = engine_of(max_batch_tokens=64, max_running=16)
    blend = BlendOptions(mode="selective", selector=selector, ratio=0.3, min_tokens=1)
    parts = [(0, 1), B, (3,), A, (2, 2)]
    rows = []
    for turn, num_choices in (("alone", 1), ("three", 3)):
        before = num_rows(engine)
        for index in range(num_choices):
            more = {"choice_index": index, "session_id": session and turn}
            engine.submit(blended(f"{turn}.{index}", parts, blend, num_tokens, **more))
        events = []
        while engine.has_work:
            events += engine.step()
            engine.forest.check()
        rows.append(num_rows(engine) - before)
        for index in range(num_choices):
            request = blended("again", parts, blend)
            assert tokens_of(events, f"{turn}.{index}") == continuation(list(request.prompt_token_ids), num_tokens, 5)
        told = [event.usage.blend for event in events if event.usage is not None]
        assert {(each.reused, each.recomputed) for each in told if each} == {
            (each.reused, each.recomputed) for each in told[:1] if each
        }
        assert not any(document.exact for each in told if each for document in each.documents)
    # Each other choice computes its prompt's last token, as the first token is drawn from it, and later output.
    num_documents = len(A) + len(B) + 2  # and what is before them: the first computed these
    assert rows[1] == rows[0] - num_documents + 2 * num_tokens
    assert engine.forest.device.num_in_use == 0
    for turn in ("alone", "three") if session else ():
        answer(engine, DeleteSession(("", turn)))
    engine.forest.check()
    assert not engine.forest.kept_roots


def test_a_deleted_session_takes_its_own_text_along_but_no_document() -> None:
    engine = engine_of(max_batch_tokens=64)
    head, question = (3, 3, 3, 3), (2, 2, 2, 2)
    for name, documents in {"a": [A, B], "b": [B, A]}.items():
        engine.submit(blended(name, [head, *documents, question], session_id=name))
        run(engine)
    ids, said = [*head, *B, *A, *question], continuation([*head, *B, *A, *question], 4, 5)
    answer(engine, DeleteSession(("", "a")))
    engine.forest.check()
    assert [engine.forest.resident("", document) for document in (A, B)] == [(len(A), 0), (len(B), 0)]
    params = SamplingParams(temperature=0, max_tokens=1)
    before = num_rows(engine)
    engine.submit(make_request("b2", [3], params, session_id="b", append=True))
    assert tokens_of(run(engine), "b2") == continuation([*ids, *said, 3], 1, 5)
    assert num_rows(engine) - before == 2  # the last output had no KV yet
    answer(engine, DeleteSession(("", "b")))
    engine.forest.check()
    assert not engine.forest.kept_roots
    assert sum(engine.forest.resident("", head)) == 0
    assert [sum(engine.forest.resident("", document)) for document in (A, B)] == [len(A), len(B)]


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("index", range(3))
def test_a_choice_that_ends_early_harms_no_other(at: int, index: int) -> None:
    engine = engine_of(max_batch_tokens=16, max_running=16)
    request = blended("turn", [(0, 1), B, (3,), A, (2, 2)])
    for choice in range(3):
        engine.submit(replace(request, request_id=f"turn.{choice}", choice_index=choice))
    events = []
    for step in itertools.count():
        if step == at:
            engine.abort(f"turn.{index}")
        if not engine.has_work:
            break
        events += engine.step()
        engine.forest.check()
    expected = continuation(list(request.prompt_token_ids), 4, 5)
    for choice in range(3):
        said = tokens_of(events, f"turn.{choice}")
        assert said == (expected[: len(said)] if choice == index else expected)
    assert engine.forest.device.num_in_use == 0
    assert not engine.forest.kept_roots


def test_what_reuses_documents_runs_beside_them() -> None:
    engine = engine_of(max_batch_tokens=64)
    request = blended("a", [(0, 1), A, B, (2, 2)], num_tokens=1)
    engine.submit(request)
    assert tokens_of(engine.step(), "a") == continuation(list(request.prompt_token_ids), 1, 5)
    assert not engine.has_work


def test_requests_that_come_together_wait_for_each_document_once() -> None:
    engine = engine_of(num_pages=256, max_batch_tokens=64, max_running=2)
    documents = [[index % 5, index // 5, 1, 2] for index in range(8)]
    requests = [blended(f"r{n}", [(0, n), *documents[n:], *documents[:n], (2, n)], num_tokens=1) for n in range(4)]
    for request in requests:
        engine.submit(request)
    events: list[TokenEvent] = []
    for _ in range(8):  # two documents a step, then two requests
        events += engine.step()
    for request in requests:
        assert tokens_of(events, request.request_id) == continuation(list(request.prompt_token_ids), 1, 5)
    assert not engine.has_work
    assert num_rows(engine) <= sum(map(len, documents)) + 4 * (2 + 2)


def test_chosen_tokens_are_computed_anew() -> None:
    engine = engine_of(max_batch_tokens=64)
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)]))
    run(engine)
    before = num_rows(engine)
    blend = BlendOptions(mode="selective", selector="first-k", ratio=0.3, min_tokens=1)
    engine.submit(blended("second", [(0, 1), B, A, (2, 2)], blend, 1))
    usage = usage_of(run(engine))
    assert num_rows(engine) - before == 2 + 3 + 2
    assert usage.blend is not None
    assert (usage.blend.reused, usage.blend.recomputed) == (10, 5)


def test_tokens_that_the_question_looks_at_are_computed_anew_in_a_second_pass() -> None:
    engine = engine_of(max_batch_tokens=64)
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)]))
    run(engine)
    before = num_rows(engine)
    blend = BlendOptions(mode="selective", selector="query", ratio=0.3, min_tokens=1)
    request = blended("second", [(0, 1), B, (3,), A, (2, 2)], blend, 4)
    engine.submit(request)
    events = run(engine)
    assert tokens_of(events, "second") == continuation(list(request.prompt_token_ids), 4, 5)
    assert num_rows(engine) - before == (1 + 2) + (1 + 5 + 2) + 3  # text and question, twice; 30% of 15; later output
    usage = usage_of(events)
    assert usage.blend is not None
    assert (usage.blend.selector, usage.blend.reused, usage.blend.recomputed) == ("query", 10, 5)
    assert not engine.forest.kept_roots
    assert engine.forest.device.num_in_use == 0


def test_keys_of_documents_are_compared_before_some_are_computed_anew() -> None:
    engine = engine_of(max_batch_tokens=16)
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)]))
    run(engine)
    before = num_rows(engine)
    blend = BlendOptions(mode="selective", selector="hkvd", ratio=0.2, min_tokens=1)
    request = blended("second", [(0, 1), B, (3,), A, (2, 2)], blend, 4)
    engine.submit(request)
    events = run(engine)
    assert tokens_of(events, "second") == continuation(list(request.prompt_token_ids), 4, 5)
    # Text and documents, in two steps; text, question and 0.2 * 0.93 * 3 of 15 (of 4 layers three are not exact).
    assert num_rows(engine) - before == (1 + 15) + (1 + 9 + 2) + 3
    usage = usage_of(events)
    assert usage.blend is not None
    assert (usage.blend.selector, usage.blend.reused, usage.blend.recomputed) == ("hkvd", 12, 3)  # in the mean
    assert not engine.forest.kept_roots
    assert engine.forest.device.num_in_use == 0


@pytest.mark.parametrize("selector", ["query", "hkvd"])
@pytest.mark.parametrize("at", range(4))
def test_an_abort_between_the_passes_leaves_nothing(at: int, selector: Any) -> None:
    engine = engine_of(max_batch_tokens=24)
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)], session_id="s"))
    run(engine)
    kept = len(engine.forest.kept_roots)
    blend = BlendOptions(mode="selective", selector=selector, ratio=0.3, min_tokens=1)
    engine.submit(blended("second", [(0, 1), B, (3,), A, (2, 2)], blend, 4, session_id="s", append=True))
    for _ in range(at):
        engine.step()
    engine.abort("second")
    run(engine)
    engine.forest.check()
    assert engine.forest.device.num_in_use == 0
    assert len(engine.forest.kept_roots) <= kept + 1  # the session's
    answer(engine, DeleteSession(("", "s")))
    assert not engine.forest.kept_roots


def test_nothing_behind_a_blend_is_found_by_another() -> None:
    engine = engine_of()
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)]))
    run(engine)
    exact = blended("exact", [(0, 1), A, B, (2, 2)], OFF)
    engine.submit(exact)
    assert usage_of(run(engine)).cached_tokens == 2  # the text before the documents
    assert not engine.forest.kept_roots


def test_a_session_goes_on_from_its_blend_and_nobody_else_does() -> None:
    engine = engine_of()
    request = blended("a", [(0, 1), A, B, (2, 2)], session_id="s")
    engine.submit(request)
    said = tokens_of(run(engine), "a")
    ids = [*request.prompt_token_ids, *said]
    before = num_rows(engine)
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.submit(make_request("b", [3], params, session_id="s", append=True))
    events = run(engine)
    assert tokens_of(events, "b") == continuation([*ids, 3], 1, 5)
    assert num_rows(engine) - before == 2  # the last output had no KV yet
    told = usage_of(events).blend
    assert told is not None
    assert (told.mode, told.documents, told.as_json()["history"]) == ("off", (), "approximate")
    assert not engine_stats(engine)["blend"]["declined"]
    answer(engine, ForkSession(("", "s"), "t"))
    engine.submit(make_request("fork", [3], params, session_id="t", append=True))
    usage = usage_of(run(engine))
    assert (usage.cached_tokens, usage.blend) == (2, None)
    answer(engine, DeleteSession(("", "s")))
    engine.forest.check()
    assert not engine.forest.kept_roots


def test_a_turn_that_asks_for_exact_kv_does_not_see_the_blend() -> None:
    engine = engine_of()
    engine.submit(blended("a", [(0, 1), A, B, (2, 2)], session_id="s"))
    run(engine)
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.submit(make_request("b", [3], params, session_id="s", append=True, blend=OFF))
    assert usage_of(run(engine)).cached_tokens == 2


def test_a_later_turn_adds_documents() -> None:
    engine = engine_of()
    first = blended("a", [(0, 1), A, (2, 2)], session_id="s")
    engine.submit(first)
    ids = [*first.prompt_token_ids, *tokens_of(run(engine), "a")]
    second = blended("b", [(3,), B, A, (1,)], session_id="s", append=True)
    before = num_rows(engine)
    engine.submit(second)
    events = run(engine)
    assert num_rows(engine) - before == len(B) + 1 + 2 + 3  # the last output had no KV; the new text; later output
    assert tokens_of(events, "b") == continuation([*ids, *second.prompt_token_ids], 4, 5)
    usage = usage_of(events)
    assert usage.blend is not None
    assert usage.blend.reused == len(A) + len(B)


def test_an_abort_while_documents_are_computed_ends_them_too() -> None:
    engine = engine_of(max_batch_tokens=16)
    engine.submit(blended("a", [(0,), A * 3, B * 3, (2,)]))
    engine.step()
    engine.abort("a")
    run(engine)
    assert not engine.in_flight
    assert engine.forest.device.num_in_use == 0


@pytest.mark.parametrize("at", range(6))
def test_a_failed_step_is_computed_again(at: int) -> None:
    engine = engine_of()
    runner: Any = engine.runner
    request = blended("a", [(0,), A, B, (2,)])
    engine.submit(request)
    events = []
    for step in itertools.count():
        if not engine.has_work:
            break
        runner.num_failing_transfers = int(step == at)
        events += engine.step()
        engine.forest.check()
    assert tokens_of(events, "a") == continuation(list(request.prompt_token_ids), 4, 5)


traffic = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step at which it arrives
        st.lists(
            st.one_of(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=5).map(tuple)), min_size=1, max_size=5
        ),
        st.sampled_from(["full_reuse", "selective", "off"]),
        st.sampled_from(["first-k", "random", "none", "all", "query", "hkvd", "query+first-k"]),
        st.sampled_from([0.0, 0.2, 0.5, 1.0]),
        st.integers(1, 8),  # max_tokens
        st.one_of(st.none(), st.none(), st.integers(0, 9)),  # steps until it is aborted
        st.sampled_from([None, None, "s", "t"]),  # session
        st.sampled_from([1, 1, 3]),  # choices
        st.sampled_from(["given", "any"]),  # order
        st.sampled_from(["", "", "tenant"]),
    ),
    min_size=1,
    max_size=8,
)
POOL = [A, B, [2] * 11, [0, 3]]


def in_its_order(request: GenerationRequest, events: list[TokenEvent], name: str) -> list[int]:
    """The prompt in the order of documents that the engine chose."""
    blend = next(event.usage.blend for event in events if event.request_id == name and event.usage is not None)
    return list((request if blend is None else request.in_order(blend.order)).prompt_token_ids)


@settings(max_examples=examples(150))
@given(
    traffic,
    st.sampled_from([2, 4, 8]),
    st.integers(14, 40),
    st.integers(8, 40),
    st.integers(1, 6),
    st.sampled_from([0, 0, 20]),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=8),
)
def test_any_traffic_computes_what_each_request_alone_would(
    requests: list[Any],
    page_size: int,
    num_pages: int,
    max_batch_tokens: int,
    max_running: int,
    num_host_pages: int,
    losses: list[tuple[int, int]],
) -> None:
    engine = engine_of(
        num_pages * 4 // page_size,
        page_size,
        max_batch_tokens=max(max_batch_tokens, 16),
        max_running=max_running,
        num_host_pages=num_host_pages,
    )
    events: list[TokenEvent] = []
    expected: dict[str, GenerationRequest] = {}
    for step in itertools.count():
        for index, each in enumerate(requests):
            arrival, parts, mode, selector, ratio, num_tokens, abort_after, session, n, order, salt = each
            if arrival == step:
                options = BlendOptions(mode=mode, selector=selector, ratio=ratio, min_tokens=1, order=order)
                content = [POOL[part] if isinstance(part, int) else part for part in parts] + [(index % 5,)]
                request = blended(f"r{index}", content, options, num_tokens, session_id=session, salt=salt)
                if len(request.prompt_token_ids) + num_tokens <= engine.capacity:
                    for choice in range(n):
                        engine.submit(replace(request, request_id=f"r{index}.{choice}", choice_index=choice))
                        if abort_after is None or choice != index % n:
                            expected[f"r{index}.{choice}"] = request
            if abort_after is not None and arrival + abort_after == step:
                engine.abort(f"r{index}.{index % n}")
        for at, which in losses:
            if at == step:
                lose(engine, which)
        events += engine.step()
        engine.forest.check()
        if step > 45 and not engine.has_work:
            break
        assert step < 3_000, "some request never ends"
    for name, request in expected.items():
        ids, num_tokens = in_its_order(request, events, name), request.sampling.max_tokens
        assert num_tokens is not None
        assert tokens_of(events, name) == continuation(ids, num_tokens, 5)
    assert engine.forest.device.num_in_use == 0
    for session_key in itertools.product(("", "tenant"), ("s", "t")):
        if engine.sessions.get(session_key) is not None:
            answer(engine, DeleteSession(session_key))
    engine.forest.check()
    assert not engine.forest.kept_roots


@settings(max_examples=examples(60))
@given(
    traffic,
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([None, 1]),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=4),
    st.integers(0, 2**16),
)
def test_any_chunk_of_a_document_may_be_lost_on_its_way(
    requests: list[Any], fault_share: float, step_chunks: int | None, losses: list[tuple[int, int]], seed: int
) -> None:
    """Two engines share a cache tier, which loses chunks in the middle of what reuses them."""
    chance = random.Random(seed)
    store = FakeStore(edge="disk", fault=lambda _header, _at: Miss.SHORT if chance.random() < fault_share else None)
    caches = [PlayedCache(store, 4, step_chunks=step_chunks) for _ in range(2)]
    engines = [make_played_engine(FakeRunner(40, 4), cache, itertools.count().__next__) for cache in caches]
    events: list[list[TokenEvent]] = [[], []]
    asked: list[tuple[int, GenerationRequest]] = []
    for step in itertools.count():
        for index, each in enumerate(requests):
            arrival, parts, mode, selector, ratio, num_tokens, *_, order, salt = each
            if arrival == step:
                options = BlendOptions(mode=mode, selector=selector, ratio=ratio, min_tokens=1, order=order)
                content = [POOL[part] if isinstance(part, int) else part for part in parts] + [(index % 5,)]
                request = blended(f"r{index}", content, options, num_tokens, salt=salt)
                for at in range(2) if len(request.prompt_token_ids) + num_tokens <= engines[0].capacity else ():
                    engines[at].submit(request)
                    asked.append((at, request))
        for at, (engine, cache) in enumerate(zip(engines, caches, strict=True)):
            for when, which in losses:
                if when == step:
                    lose(engine, which)
            cache.now_s += chance.choice([0.1, 1, 20])
            cache.play(chance.choice([0, 1, None]), chance.choice([0, 1, None]))
            events[at] += engine.step()
            engine.forest.check()
        if step > 45 and not any(engine.has_work for engine in engines):
            break
        assert step < 5_000, "some request never ends"
    for at, request in asked:
        ids, num_tokens = in_its_order(request, events[at], request.request_id), request.sampling.max_tokens
        assert num_tokens is not None
        assert tokens_of(events[at], request.request_id) == continuation(ids, num_tokens, 5)
    for engine, cache in zip(engines, caches, strict=True):
        cache.play()
        assert (engine.forest.device.num_in_use, cache.num_open) == (0, 0)
        assert not engine.forest.kept_roots


def test_what_is_behind_a_reused_document_is_told_from_exact_kv() -> None:
    engine = engine_of(max_batch_tokens=64)
    runner: Any = engine.runner
    exact = lineages("", [0, 1, *A, 2, 2])
    engine.submit(blended("a", [(0, 1), A, (2, 2)], num_tokens=1))
    engine.step()
    found = {lineage for _, _, lineage in runner.slots.values()}
    assert found >= {*exact[:2], *lineages("", A)}  # the text before, and the document alone
    assert not found & set(exact[2:])


def test_documents_that_come_when_an_answer_has_begun_are_reused_from_then() -> None:
    engine = engine_of(max_batch_tokens=64)
    blend = BlendOptions(mode="selective", selector="hkvd", ratio=0.3, min_tokens=1)
    request = blended("late", [(0, 1), A, (3,), B, (2, 2)], blend, 6)
    engine.submit(request)
    for number in range(3):
        engine.abort(f"late/child-{number}")  # nothing is there to be reused
    events = engine.step()
    engine.submit(blended("other", [(4,), A, B, (2,)], num_tokens=1))
    while not tokens_of(events, "other"):
        events += engine.step()
    engine.scheduler.reopen(engine.scheduler.running[0])  # as if it had been suspended, and its own pages evicted
    engine.forest.drop_prefix("", [0, 1])
    events += run(engine, 100)
    assert tokens_of(events, "late") == continuation(list(request.prompt_token_ids), 6, 5)
    assert usage_of([event for event in events if event.request_id == "late"]).cached_tokens == 0
