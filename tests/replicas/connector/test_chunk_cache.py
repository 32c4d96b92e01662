"""Engines over a cache tier: what one computed another loads, and no fault of the tier changes a token."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import LineageKind
from mneme.cachetier.names import Miss
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.engine.loop import EngineLoop
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.load import ReadBudget
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.truncation import Truncation
from tests.budget import examples
from tests.replicas.chunk_stores import CHUNK_TOKENS, FakeStore, SlowRows
from tests.replicas.tiered_engine import (
    answers,
    draw,
    full_prefill,
    load_decoder,
    make_cached_engine,
    run,
    runner_of,
    submit,
    usages,
)

pytestmark = pytest.mark.engine

NUM_NEW = 6


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder("llama-3", tmp_path_factory.mktemp("llama-3"))


def finish_saves(engine: Engine) -> None:
    """Everything that was to be saved is in the store, and nothing is left in the write buffer."""
    assert engine.connector is not None
    engine.close()
    assert engine.connector.saver.num_bytes == 0


def wait_for_store(engine: Engine) -> None:
    while engine.is_blocked:
        time.sleep(BLOCKED_S)


def fill(decoder: Decoder, store: FakeStore, *prompts: list[int]) -> list[list[int]]:
    """Let an engine answer these, and put what it has into the store; returns prompts with their answers."""
    engine = make_cached_engine(decoder, store)
    for index, ids in enumerate(prompts):
        submit(engine, str(index), ids, NUM_NEW)
    found = answers(run(engine))
    finish_saves(engine)
    return [ids + found[str(index)] for index, ids in enumerate(prompts)]


def test_another_engine_loads_what_one_computed(decoder: Decoder) -> None:
    store, ids = FakeStore(), draw(1, 210)
    (told,) = fill(decoder, store, ids)
    assert sorted(chunk.header.num_tokens for chunk in store.chunks.values()) == [23, 64, 64, 64]
    engine = make_cached_engine(decoder, store)
    again = [*told, *draw(2, 20)]
    submit(engine, "again", again, NUM_NEW)
    events = run(engine)
    expected = full_prefill(decoder, again, NUM_NEW)[0]
    assert answers(events)["again"] == expected
    usage = usages(events)["again"]
    assert usage.cached_tokens == usage.host_tokens == 215  # the last token's KV was never computed
    assert runner_of(engine).num_rows == len(again) - 215 + NUM_NEW - 1
    finish_saves(engine)
    assert store.num_open == 0
    assert not store.waiting


def test_a_chunk_is_saved_once(decoder: Decoder) -> None:
    store, ids = FakeStore(), draw(3, 150)
    (told,) = fill(decoder, store, ids)
    before = dict(store.chunks)
    fill(decoder, store, told)
    assert [key for key in before if store.chunks[key] is not before[key]] == []


def test_a_chunk_that_differs_in_the_middle_is_used_up_to_there(decoder: Decoder) -> None:
    store, ids = FakeStore(), draw(4, 128)
    fill(decoder, store, ids)
    other = ids[:100] + draw(5, 60)
    engine = make_cached_engine(decoder, store)
    submit(engine, "other", other, NUM_NEW)
    events = run(engine)
    assert answers(events)["other"] == full_prefill(decoder, other, NUM_NEW)[0]
    assert usages(events)["other"].host_tokens == 100
    finish_saves(engine)


def test_tenants_do_not_meet(decoder: Decoder) -> None:
    store, ids = FakeStore(), draw(6, 150)
    fill(decoder, store, ids)
    engine = make_cached_engine(decoder, store)
    submit(engine, "other", ids, NUM_NEW, salt="someone")
    assert usages(run(engine))["other"].cached_tokens == 0
    finish_saves(engine)


@pytest.mark.parametrize("edge", ["host", "disk", "peer_host"])
@pytest.mark.parametrize(("chunk", "layer"), [(0, 0), (1, 1), (2, 0)])
def test_a_layer_that_does_not_come_is_computed(decoder: Decoder, edge: str, layer: int, chunk: int) -> None:
    ids = draw(7, 200)
    store = FakeStore()
    (told,) = fill(decoder, store, ids)

    def fault(header: ChunkHeader, at: int) -> Miss | None:
        return Miss.BAD_CHECKSUM if at == layer and header.slot_position[0] == chunk * CHUNK_TOKENS else None

    store.edge, store.fault = edge, fault  # type: ignore[assignment]
    engine = make_cached_engine(decoder, store)
    submit(engine, "again", told, NUM_NEW)
    events = run(engine)
    assert answers(events)["again"] == full_prefill(decoder, told, NUM_NEW)[0]
    retracted = engine.scheduler.num_retracted
    assert retracted == 1 if edge == "host" else retracted <= 1  # what is read ahead may be known not to come
    finish_saves(engine)
    assert store.num_open == 0


def test_a_layer_that_hangs_is_given_up_and_computed(decoder: Decoder) -> None:
    """The load is late by far: rows take 0.1 ms each, so it has some milliseconds."""
    ids = draw(8, 200)
    store, goes_on = FakeStore(), threading.Event()
    (told,) = fill(decoder, store, ids)
    store.before_read = lambda layer: None if layer == 0 else _waited(goes_on)
    engine = make_cached_engine(decoder, store, costs=SlowRows(1e-4, step_s=5e-3))
    submit(engine, "again", told, NUM_NEW)
    events = run(engine)  # ends although the read does not
    goes_on.set()
    assert answers(events)["again"] == full_prefill(decoder, told, NUM_NEW)[0]
    assert engine.scheduler.num_retracted == 1
    finish_saves(engine)
    assert store.num_open == 0


def _waited(event: threading.Event) -> None:
    assert event.wait(60)


def test_beside_others_a_sequence_waits_until_its_chunks_are_in_memory(decoder: Decoder) -> None:
    ids = draw(9, 210)
    store, goes_on = FakeStore(), threading.Event()
    (told,) = fill(decoder, store, ids)
    store.edge, store.before_read = "disk", lambda layer: _waited(goes_on)
    engine = make_cached_engine(decoder, store)
    submit(engine, "running", draw(10, 20), 60)
    for _ in range(3):
        wait_for_store(engine)
        engine.step()
    submit(engine, "again", told, NUM_NEW)
    for _ in range(20):
        engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["running"]
    goes_on.set()
    events = run(engine)
    assert answers(events)["again"] == full_prefill(decoder, told, NUM_NEW)[0]
    assert usages(events)["again"].disk_tokens == 215
    finish_saves(engine)


@pytest.mark.parametrize("edge", ["host", "disk"])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_long_history_is_loaded_in_parts_beside_a_stream(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, is_aborted: bool, edge: Any
) -> None:
    """Also in steps that have nothing but a part (`is_aborted`); from a disk as the read buffer takes it."""
    store = FakeStore()
    (told,) = fill(decoder, store, draw(17, 210))
    store.edge, num_bytes = edge, max(chunk.header.payload_bytes for chunk in store.chunks.values())
    engine = make_cached_engine(decoder, store, costs=SlowRows(step_rows=16, chunk_s=10.0))
    assert engine.connector is not None
    engine.connector.loads.budget = ReadBudget(num_bytes)
    stream = draw(18, 20)
    submit(engine, "stream", stream, 20)
    while not engine.scheduler.running or not engine.scheduler.running[0].num_output:
        wait_for_store(engine)
        engine.step()
    submit(engine, "again", told, NUM_NEW)
    num_lengths, events = set(), []
    head = engine.scheduler.waiting.head
    while head.load is not None and not head.load.is_ready(is_alone=False):  # else the stream may end first
        time.sleep(BLOCKED_S)
    while len(engine.scheduler.running) < 2:
        engine.step()
    monkeypatch.setattr(type(engine.scheduler), "_has_streams", property(lambda self: True))
    if is_aborted:
        engine.abort("stream")
    while (again := engine.scheduler.running[-1]).load is not None:
        assert again.path is not None
        num_lengths.add(again.path.num_tokens)
        events += engine.step()
    assert num_lengths == {64, 128, 192}
    events += run(engine)
    assert answers(events)["again"] == full_prefill(decoder, told, NUM_NEW)[0]
    usage = usages(events)["again"]
    assert usage.host_tokens + usage.disk_tokens == 215
    assert engine_stats(engine)["cache"]["chunks"]["lost"] == 0
    finish_saves(engine)
    assert store.num_open == 0


def test_the_write_buffer_has_an_end(decoder: Decoder) -> None:
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    assert engine.connector is not None
    engine.connector.saver.max_bytes = 0
    submit(engine, "a", draw(11, 200), NUM_NEW)
    run(engine)
    finish_saves(engine)
    assert not store.chunks
    assert engine_stats(engine)["cache"]["chunks"]["dropped"] == 3


def test_a_failed_step_saves_nothing_of_itself(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    submit(engine, "a", draw(12, 200), NUM_NEW)
    attend = Decoder._attend

    def fails(self: Decoder, layer: object, index: int, *args: object) -> object:
        if index == 1:
            raise RuntimeError("the device is gone")
        return attend(self, layer, index, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "_attend", fails)
        wait_for_store(engine)
        with pytest.raises(RuntimeError):
            engine.step()
    engine.fail_all("gone")
    again = draw(13, 200)
    submit(engine, "b", again, NUM_NEW)
    assert answers(run(engine))["b"] == full_prefill(decoder, again, NUM_NEW)[0]
    finish_saves(engine)
    firsts = {tuple(chunk.header.token_ids[:3].tolist()) for chunk in store.chunks.values()}
    assert tuple(draw(12, 200)[:3]) not in firsts


def test_what_a_truncated_session_puts_is_its_own_unless_exact(decoder: Decoder) -> None:
    store, ids, window = FakeStore(), draw(14, 100), 128
    engine = make_cached_engine(decoder, store, max_context=window, num_pages=40)
    truncation = Truncation(strategy="reuse_kv")
    submit(engine, "a", ids, 80, session_id="s", truncation=truncation)
    told = ids + answers(run(engine))["a"]
    submit(engine, "b", told + draw(15, 10), 20, session_id="s", truncation=truncation)
    assert usages(run(engine))["b"].truncated_tokens > 0
    finish_saves(engine)
    assert {chunk.header.kind for chunk in store.chunks.values()} == {LineageKind.PREFIX, LineageKind.SESSION}
    for header in [chunk.header for chunk in store.chunks.values() if chunk.header.kind is LineageKind.PREFIX]:
        start, end = int(header.slot_position[0]), int(header.slot_position[-1]) + 1
        assert end <= window
        assert header.token_ids.tolist() == told[start:end]


traffic = st.lists(
    st.tuples(
        st.integers(0, 3),  # which history
        st.integers(1, 230),  # how much of it
        st.integers(0, 40),  # new tokens
        st.integers(0, 12),  # the step at which it arrives
        st.booleans(),  # of another engine
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(25))
@given(traffic, st.integers(0, 2**16), st.sampled_from(["host", "disk", "peer_disk"]), st.sampled_from([0, 0.1, 0.4]))
def test_any_traffic_and_any_faults_give_the_tokens_of_a_full_prefill(
    decoder: Decoder, requests: list[tuple[int, int, int, int, bool]], seed: int, edge: str, share: float
) -> None:
    chance = random.Random(seed)
    faults = [Miss.BAD_CHECKSUM, Miss.SHORT, Miss.ABSENT]
    store = FakeStore(edge=edge, fault=lambda *_: chance.choice(faults) if chance.random() < share else None)  # type: ignore[arg-type]
    engines = [make_cached_engine(decoder, store, num_pages=50, num_host_pages=6) for _ in range(2)]
    expected: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    for step in range(14):
        for index, (history, length, num_new, at, other) in enumerate(requests):
            if at == step:
                ids = draw(history, 230)[:length] + draw(100 + index, num_new)
                submit(engines[other], str(index), ids, NUM_NEW)
                expected[str(index)] = full_prefill(decoder, ids, NUM_NEW)[0]
        for engine in engines:
            for event in engine.step():
                found.setdefault(event.request_id, []).extend(event.token_ids)
            engine.forest.check()
    for engine in engines:
        for name, tokens in answers(run(engine)).items():
            found.setdefault(name, []).extend(tokens)
        engine.forest.check()
        assert engine.forest.device.num_in_use == 0
        finish_saves(engine)
    assert found == expected
    assert store.num_open == 0


def test_engines_of_a_path_that_is_gone_end(decoder: Decoder, tmp_path: Path) -> None:
    """Threads end with their engine, also where nobody closes it."""
    before = threading.active_count()
    engine = make_cached_engine(decoder, FakeStore())
    submit(engine, "a", draw(15, 100), NUM_NEW)
    run(engine)
    finish_saves(engine)
    del engine
    for thread in threading.enumerate():
        if thread.name.startswith(("kv-look", "kv-read", "kv-chunk")):
            thread.join(60)
            assert not thread.is_alive(), thread.name
    assert threading.active_count() <= before


def test_nothing_is_kept_of_a_sequence_whose_logits_are_not_finite(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    submit(engine, "a", draw(16, 150), NUM_NEW)
    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda *args: forward(*args) * float("nan"))
    events = run(engine)
    assert [event.finish_reason for event in events] == ["error"]
    finish_saves(engine)
    assert not store.chunks


def test_an_idle_engine_says_what_its_store_counts_now(decoder: Decoder) -> None:
    store = FakeStore()
    loop = EngineLoop(make_cached_engine(decoder, store))
    loop.start()
    try:
        store.num_reads = 7
        assert loop.stats()["cache"]["store"] == {"reads": 7}
        assert loop.stats()["cache"]["chunks"]["loaded"] == 0
    finally:
        loop.stop()
