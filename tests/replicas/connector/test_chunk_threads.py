"""The threads of an engine's cache tier: nothing that they are at, and no end of an engine, leaves anything behind."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import numpy as np
import pytest

from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.names import Miss
from mneme.cachetier.node.node_admin import NodeAdmin
from mneme.replicas.blend.gate import Gate as BlendGate
from mneme.replicas.connector import save
from mneme.replicas.connector.device_pages import CpuChunkPages
from mneme.replicas.connector.save import ChunkSaver
from mneme.replicas.documents import BlendOptions
from mneme.replicas.engine.commands import ManagedChunks
from mneme.replicas.engine.engine import Engine
from mneme.replicas.llm import LLM
from mneme.replicas.model import decoder as decoder_module
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.queries import DeleteSequencePages, DeleteTenantPages
from mneme.replicas.request import SamplingParams
from tests.cachetier.nodes import make_node
from tests.replicas.asked import answer
from tests.replicas.blend.test_blended_traffic import blended
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.connector.test_chunk_cache import failing, wait_for_store
from tests.replicas.tiered_engine import answers, draw, full_prefill, make_cached_engine, run, submit

pytestmark = pytest.mark.engine

NUM_NEW = 3
WAIT_S = 60.0


@pytest.fixture
def filled(decoder: Decoder) -> FakeStore:
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    submit(engine, "a", draw(1, 150), NUM_NEW)
    run(engine)
    engine.close()
    assert store.chunks
    return store


class NumpyWithoutMemory:
    def empty(self, *_: object) -> None:
        raise MemoryError

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)


class Gate:
    """Reads that stop until they are let go on; says when the first has come."""

    def __init__(self) -> None:
        self.has_come, self._goes_on = threading.Event(), threading.Event()

    def __call__(self, layer: int) -> None:
        self.has_come.set()
        assert self._goes_on.wait(WAIT_S)

    def open(self) -> None:
        self._goes_on.set()


def check_closed(engine: Engine, store: FakeStore, *, hung: bool = False) -> None:
    """Once its threads have ended. A store that is closed by then is not told who waits no longer (`hung`)."""
    for thread in threading.enumerate():
        if thread.name.startswith(("kv-look", "kv-read", "kv-chunk")):
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name
    connector = engine.connector
    assert store.num_open == 0
    assert hung or not store.waiting
    assert (connector.loads.num_open, connector.loads.budget.num_used) == (0, 0)
    assert connector.saver.num_bytes == 0


@pytest.mark.parametrize("where", ["disk", "peer_host", "locate"])
def test_an_engine_closes_while_a_read_or_a_question_hangs(decoder: Decoder, filled: FakeStore, where: str) -> None:
    if where == "locate":
        gate = gate_before_locate(filled)
    else:
        filled.edge, filled.before_read = where, (gate := Gate())
    engine = make_cached_engine(decoder, filled)
    submit(engine, "a", draw(1, 150), NUM_NEW)
    assert gate.has_come.wait(WAIT_S)
    engine.close()  # returns, although the read does not
    gate.open()
    check_closed(engine, filled, hung=True)


def gate_before_locate(store: FakeStore) -> Gate:
    """The store answers no question before it is open."""
    gate, locate = Gate(), store.locate

    def slow(query: object, timeout_s: float) -> object:
        gate(0)
        return locate(query, timeout_s)  # type: ignore[arg-type]

    store.locate = slow  # type: ignore[method-assign,assignment]
    return gate


def test_a_request_that_is_aborted_while_the_store_is_asked_waits_there_no_longer(
    decoder: Decoder, filled: FakeStore
) -> None:
    """The store learns of the request after it has ended; it is told of the end after that."""
    gate = gate_before_locate(filled)
    engine = make_cached_engine(decoder, filled)
    submit(engine, "a", draw(1, 150), NUM_NEW)
    assert gate.has_come.wait(WAIT_S)
    engine.abort("a")
    gate.open()
    until_s = time.monotonic() + WAIT_S
    while engine.connector.loads.num_open and time.monotonic() < until_s:  # a close would not wait for that
        time.sleep(0.001)
    engine.close()
    check_closed(engine, filled)


@pytest.mark.parametrize("how", ["raises", "finds what raises"])
def test_a_store_that_raises_costs_a_computation(decoder: Decoder, filled: FakeStore, how: str) -> None:
    def broken(*_: object) -> Miss | None:
        raise RuntimeError("a bug")

    if how == "raises":
        filled.locate = broken  # type: ignore[method-assign,assignment]
    else:
        filled.edge, filled.fault = "disk", broken
    engine = make_cached_engine(decoder, filled)
    submit(engine, "a", draw(1, 150), NUM_NEW)
    assert answers(run(engine))["a"] == full_prefill(decoder, draw(1, 150), NUM_NEW)[0]
    engine.close()
    check_closed(engine, filled)


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize(
    ("name", "number", "by_layer"),
    [
        ("_buffer", 1, True), ("_hand_over", 0, True), ("_hand_over", 4, True), ("_hand_over", 1, False),
        ("_confirm", 0, False), ("_confirm", 1, True),
    ],
)  # fmt: skip
def test_an_interrupt_in_the_midst_of_saves_lets_go_of_pages(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, name: str, number: int, by_layer: bool, is_after: bool
) -> None:
    """Ctrl-C, of a step's saves or of those of a request's end."""
    monkeypatch.setattr(CpuChunkPages, "by_layer", by_layer)
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    submit(engine, "a", draw(3, 150), 1)
    call, numbers = getattr(ChunkSaver, name), itertools.count()

    def interrupted(*args: object) -> object:
        is_now = next(numbers) == number
        if is_now and not is_after:
            raise KeyboardInterrupt
        result = call(*args)
        if is_now:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(ChunkSaver, name, interrupted)
        wait_for_store(engine)
        with pytest.raises(KeyboardInterrupt):
            run(engine)
        engine.fail_all("interrupted")
    assert engine.connector.saver.flush(5.0)
    engine.connector.saver.before_reuse(np.arange(64))  # returns
    engine.close()
    check_closed(engine, store)


def test_no_memory_for_a_copy_is_a_chunk_that_is_not_saved(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    with monkeypatch.context() as patched:
        patched.setattr(save, "np", NumpyWithoutMemory())
        submit(engine, "a", draw(3, 150), NUM_NEW)
        events = run(engine)
    assert answers(events)["a"] == full_prefill(decoder, draw(3, 150), NUM_NEW)[0]
    assert engine.connector.saver.counts.dropped == 3
    engine.close()
    check_closed(engine, store)


def test_threads_end_with_an_engine_that_nobody_closes(decoder: Decoder) -> None:
    before = set(threading.enumerate())
    engine = make_cached_engine(decoder, FakeStore())
    submit(engine, "a", draw(4, 100), NUM_NEW)
    run(engine)
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert len(started) >= 7  # two that look, two that read, one that loads, two that save
    del engine
    for _ in range(2):  # the last batch's rows, which the runner keeps, hold the sequences back from the first one
        gc.collect()
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_of_an_llm_that_ends_early_leaves_nothing_to_match(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """What it was to compute is not there: the same prompt is computed anew, also after Ctrl-C."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm, prompt = LLM(dtype="float32", config={"num_pages": 64}), list(range(40, 140))
    with monkeypatch.context() as patched:
        patched.setattr(decoder_module.Decoder, "_is_native", lambda *_: False)  # by operation
        patched.setattr(decoder_module, "attend", failing(decoder_module.attend, error()))
        with pytest.raises(error):
            llm.generate([prompt], greedy)
    found = llm.generate([prompt], greedy)[0]
    llm.close()
    fresh = LLM(dtype="float32", config={"num_pages": 64})
    assert found.outputs[0].token_ids == fresh.generate([prompt], greedy)[0].outputs[0].token_ids
    assert found.metrics.cached_tokens == 0
    fresh.close()


def test_a_deletion_waits_for_what_is_being_saved(decoder: Decoder) -> None:
    """Or it would come into the tier behind the deletion, and stay."""
    store, gate = FakeStore(), Gate()
    put = store.put

    def slow(chunk: Chunk, lineage: Lineage) -> bool:
        gate(0)
        return put(chunk, lineage)

    store.put = slow  # type: ignore[method-assign]
    engine = make_cached_engine(decoder, store)
    submit(engine, "a", draw(1, 150), NUM_NEW)
    run(engine)
    assert gate.has_come.wait(WAIT_S)
    admin, fingerprint = NodeAdmin(make_node(), "node"), engine.connector.fingerprint
    tier = ManagedChunks(admin=admin, fingerprint=fingerprint, flush_saves=engine.connector.saver.flush)
    num_there: list[int] = []

    def delete() -> None:
        answer(engine, DeleteTenantPages(""), tier)
        num_there.append(len(store.chunks))

    thread = threading.Thread(target=delete)
    thread.start()
    thread.join(0.2)
    assert num_there == []
    gate.open()
    thread.join(WAIT_S)
    engine.close()
    assert num_there == [len(store.chunks)] == [3]


@pytest.mark.parametrize("session_id", [None, "public:deleted"])
def test_a_turn_that_runs_while_its_kv_is_deleted_saves_none_afterwards(
    decoder: Decoder, session_id: str | None
) -> None:
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    submit(engine, "a", draw(1, 40), NUM_NEW, session_id=session_id)
    while engine.is_blocked or not engine.scheduler.running:
        engine.step()
    answer(engine, DeleteTenantPages(""))
    assert answers(run(engine))["a"]
    engine.close()
    assert store.chunks == {}


@pytest.mark.parametrize("deletes", ["nothing", "running", "ended"])
def test_what_is_computed_behind_an_answer_is_not_behind_its_deletion(decoder: Decoder, deletes: str) -> None:
    """What reused documents is begun as an exact prompt when it has ended, with its answer: both would come anew."""
    store, allows = FakeStore(), BlendGate({"first-k": 0.5}, "", (0.5,))
    engine = make_cached_engine(decoder, store, gate=allows, num_pages=128, max_batch_tokens=64, max_running=8)
    first, second = draw(2, 100), draw(3, 100)
    for name, documents in (("first", [second, first]), ("second", [first, second])):
        parts = [tuple(draw(1, 8)), *documents, tuple(draw(4, 5))]
        request = blended(name, parts, BlendOptions(min_tokens=2), NUM_NEW, session_id=f"public:{name}")
        if name == "second":
            assert engine.connector.saver.flush(WAIT_S)
            store.chunks.clear()
        engine.submit(request)
        if name == "first":
            run(engine)
    while engine.is_blocked or not any(not s.request.request_id.count("/") for s in engine.scheduler.running):
        engine.step()
    if deletes == "running":
        answer(engine, DeleteTenantPages(""))
    while "second" in engine.in_flight:
        engine.step()
    if deletes == "ended":
        answer(engine, DeleteSequencePages("", (), ("", "public:second")))
    assert engine.connector.saver.flush(WAIT_S)
    store.chunks.clear()  # its own, which the tier deletes then
    run(engine)
    engine.close()
    assert bool(store.chunks) == (deletes == "nothing")


@pytest.mark.parametrize(("last", "are_saved"), [(0, False), (1, True)])
def test_a_request_that_runs_while_what_it_begins_with_is_deleted_saves_none_of_it(
    decoder: Decoder, last: int, are_saved: bool
) -> None:
    """One that only begins alike does."""
    store = FakeStore()
    engine = make_cached_engine(decoder, store)
    ids = draw(1, 40)
    submit(engine, "a", ids, NUM_NEW)
    while engine.is_blocked or not engine.scheduler.running:
        engine.step()
    answer(engine, DeleteSequencePages("", (*ids[:29], ids[29] + last)))
    answer(engine, DeleteSequencePages("other", tuple(ids)))
    assert answers(run(engine))["a"]
    engine.close()
    assert bool(store.chunks) == are_saved


def test_nothing_is_left_of_a_request_that_could_not_begin(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_cached_engine(decoder, FakeStore())
    assert engine.connector is not None

    def fail(*_args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.connector, "_query", fail)
        with pytest.raises(MemoryError):
            submit(engine, "a", draw(1, 150), NUM_NEW)
    assert engine.in_flight == {}
    submit(engine, "a", draw(1, 150), NUM_NEW)
    assert answers(run(engine))["a"]
    engine.close()
