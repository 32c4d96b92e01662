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
from mneme.replicas.queries import DeleteSession
from mneme.replicas.request import GenerationRequest, PromptUsage, SamplingParams, TokenEvent
from tests.budget import examples
from tests.replicas.asked import answer
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.played_chunks import PlayedCache, make_played_engine
from tests.replicas.fake_runner import FakeRunner, continuation, lose
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


@pytest.mark.parametrize(("selector", "session"), [("none", None), ("first-k", "s"), ("query", None), ("hkvd", "s")])
def test_choices_of_a_turn_share_its_blend(selector: Any, session: str | None) -> None:
    engine, num_tokens = engine_of(max_batch_tokens=64, max_running=16), 4
    blend = BlendOptions(mode="selective", selector=selector, ratio=0.3, min_tokens=1)
    parts, rows = [(0, 1), B, (3,), A, (2, 2)], []
    expected = continuation(list(blended("again", parts).prompt_token_ids), num_tokens, 5)
    for turn, num_choices in (("alone", 1), ("three", 3)):
        before = num_rows(engine)
        for index in range(num_choices):
            more = {"choice_index": index, "session_id": session and turn}
            engine.submit(blended(f"{turn}.{index}", parts, blend, num_tokens, **more))
        events = run(engine)
        rows.append(num_rows(engine) - before)
        assert all(tokens_of(events, f"{turn}.{index}") == expected for index in range(num_choices))
        told = [event.usage.blend for event in events if event.usage is not None]
        assert len({(each.reused, each.recomputed) for each in told if each}) == 1
        assert not any(document.exact for each in told if each for document in each.documents)
    # Each other choice computes its prompt's last token, as the first token is drawn from it, and later output.
    num_documents = len(A) + len(B) + 2  # and what is before them: the first computed these
    assert rows[1] == rows[0] - num_documents + 2 * num_tokens


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


@pytest.mark.parametrize(
    ("selector", "ratio", "rows", "recomputed"),
    [
        ("first-k", 0.3, 1 + 2 + 3 + 2, 5),
        ("query", 0.3, (1 + 2) + (1 + 5 + 2), 5),  # text and question, twice; 30% of 15
        # Text and documents, in two steps; text, question and 0.2 * 0.93 * 3 of 15 (of 4 layers three are not exact).
        ("hkvd", 0.2, (1 + 15) + (1 + 9 + 2), 3),
    ],
)
def test_chosen_tokens_are_computed_anew(selector: Any, ratio: float, rows: int, recomputed: int) -> None:
    engine = engine_of(max_batch_tokens=64 if selector != "hkvd" else 16)
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)]))
    run(engine)
    before = num_rows(engine)
    blend = BlendOptions(mode="selective", selector=selector, ratio=ratio, min_tokens=1)
    request = blended("second", [(0, 1), B, (3,), A, (2, 2)], blend, 4)
    engine.submit(request)
    events = run(engine)
    assert tokens_of(events, "second") == continuation(list(request.prompt_token_ids), 4, 5)
    assert num_rows(engine) - before == rows + 3  # and later output
    told = usage_of(events).blend
    assert (told.selector, told.reused, told.recomputed) == (selector, 15 - recomputed, recomputed)  # in the mean
    assert not engine.forest.kept_roots
    assert engine.forest.device.num_in_use == 0


def test_nothing_behind_a_blend_is_found_by_another() -> None:
    engine = engine_of()
    engine.submit(blended("first", [(0, 1), A, B, (2, 2)]))
    run(engine)
    exact = blended("exact", [(0, 1), A, B, (2, 2)], OFF)
    engine.submit(exact)
    assert usage_of(run(engine)).cached_tokens == 2  # the text before the documents
    assert not engine.forest.kept_roots


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


@settings(max_examples=examples(200))
@given(
    traffic,
    st.tuples(st.sampled_from([2, 4, 8]), st.integers(14, 40), st.sampled_from([0, 0, 20])),
    st.integers(16, 40),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=8),
    st.sets(st.integers(0, 20), max_size=2),
    st.none() | st.tuples(st.sampled_from([0.0, 0.1, 0.4]), st.sampled_from([None, 1])),
    st.integers(0, 2**16),
)
def test_any_traffic_computes_what_each_request_alone_would(
    requests: list[Any],
    pool: tuple[int, int, int],
    max_batch_tokens: int,
    max_running: int,
    losses: list[tuple[int, int]],
    failing: set[int],
    tier: tuple[float, int | None] | None,
    seed: int,
) -> None:
    """`failing`: steps in which a copy fails; `tier`: that two engines share, and the share of chunks that it loses."""
    chance, options = random.Random(seed), {"max_batch_tokens": max_batch_tokens, "max_running": max_running}
    if tier is None:
        page_size, num_pages, num_host_pages = pool
        engines = [engine_of(num_pages * 4 // page_size, page_size, num_host_pages=num_host_pages, **options)]
        caches = []
    else:
        store = FakeStore(edge="disk", fault=lambda _header, _at: Miss.SHORT if chance.random() < tier[0] else None)
        caches = [PlayedCache(store, 4, step_chunks=tier[1]) for _ in range(2)]
        engines = [make_played_engine(FakeRunner(40, 4), cache, itertools.count().__next__) for cache in caches]
        failing = set()
    events: list[list[TokenEvent]] = [[] for _ in engines]
    asked: list[tuple[int, str, GenerationRequest]] = []
    for step in itertools.count():
        for index, each in enumerate(requests):
            arrival, parts, mode, selector, ratio, num_tokens, abort_after, session, n, order, salt = each
            if arrival == step:
                blend = BlendOptions(mode=mode, selector=selector, ratio=ratio, min_tokens=1, order=order)
                content = [POOL[part] if isinstance(part, int) else part for part in parts] + [(index % 5,)]
                request = blended(f"r{index}", content, blend, num_tokens, session_id=session, salt=salt)
                fits = len(request.prompt_token_ids) + num_tokens <= engines[0].capacity
                for at, choice in itertools.product(range(len(engines)), range(n)) if fits else ():
                    name = f"r{index}.{choice}"
                    engines[at].submit(replace(request, request_id=name, choice_index=choice))
                    if abort_after is None or choice != index % n:
                        asked.append((at, name, request))
            for engine in engines if abort_after is not None and arrival + abort_after == step else ():
                engine.abort(f"r{index}.{index % n}")
        for at, engine in enumerate(engines):
            for when, which in losses:
                if when == step:
                    lose(engine, which)
            for cache in caches[at : at + 1]:
                cache.now_s += chance.choice([0.1, 1, 20])
                cache.play(chance.choice([0, 1, None]), chance.choice([0, 1, None]))
            engine.runner.num_failing_transfers = int(step in failing)
            events[at] += engine.step()
            engine.forest.check()
        if step > 45 and not any(engine.has_work for engine in engines):
            break
        assert step < 5_000, "some request never ends"
    for at, name, request in asked:
        ids = in_its_order(request, events[at], name)
        assert tokens_of(events[at], name) == continuation(ids, request.sampling.max_tokens, 5)
    for cache in caches:
        cache.play()
        assert cache.num_open == 0
    for engine in engines:
        assert engine.forest.device.num_in_use == 0
        for key in itertools.product(("", "tenant"), ("s", "t")):
            if engine.sessions.get(key) is not None:
                answer(engine, DeleteSession(key))
        engine.forest.check()
        assert not engine.forest.kept_roots
