"""Engines over a cache tier: what one computed another loads, and no fault of the tier changes a token."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.names import Miss
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.model import decoder as decoder_module
from mneme.replicas.model.decoder import Decoder
from tests.budget import examples
from tests.replicas.chunk_stores import FakeStore, SlowRows
from tests.replicas.tiered_engine import answers, draw, full_prefill, make_cached_engine, run, runner_of, submit, usages

pytestmark = pytest.mark.engine

NUM_NEW = 6


def finish_saves(engine: Engine) -> None:
    """Everything that was to be saved is in the store, and nothing is left in the write buffer."""
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


def failing(attend: Callable[..., object], error: BaseException) -> Callable[..., object]:
    """Attention that fails in the second layer of the next step."""
    layers = itertools.count()

    def attend_once(*args: object, **more: object) -> object:
        if next(layers) == 1:
            raise error
        return attend(*args, **more)

    return attend_once


def test_a_failed_step_saves_nothing_of_itself_and_lets_go_of_pages_at_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    submit(engine, "a", draw(12, 200), NUM_NEW)
    wait_for_store(engine)
    with monkeypatch.context() as patched:
        patched.setattr(decoder_module.Decoder, "_is_native", lambda *_: False)  # by operation
        patched.setattr(decoder_module, "attend", failing(decoder_module.attend, RuntimeError("the device is gone")))
        with pytest.raises(RuntimeError):
            engine.step()
    engine.fail_all("gone")
    engine.connector.saver.before_reuse(np.arange(64))  # returns
    again = draw(13, 200)
    submit(engine, "b", again, NUM_NEW)
    assert answers(run(engine))["b"] == full_prefill(decoder, again, NUM_NEW)[0]
    finish_saves(engine)
    firsts = {tuple(chunk.header.token_ids[:3].tolist()) for chunk in store.chunks.values()}
    assert tuple(draw(12, 200)[:3]) not in firsts


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
