"""Chunks into a device's pool and out of it: the same bytes as on a CPU; copies beside a step, on played streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cachetier.host_pages.streams import CudaStreams
from mneme.cachetier.names import Miss
from mneme.replicas.connector import step_load
from mneme.replicas.connector.chunk_pages import ChunkPages, ChunkTokens
from mneme.replicas.connector.device_pages import CpuChunkPages, DeviceBatch, DeviceChunkPages, make_chunk_pages
from mneme.replicas.connector.step_load import StepLoad
from mneme.replicas.engine import build
from mneme.replicas.engine.calibration import bringing
from mneme.replicas.forest.moves import Graft, GraftPiece
from tests.budget import examples
from tests.cachetier.played_streams import PlayedStreams
from tests.cachetier.pools import NUM_LAYERS, Pool, make_pool
from tests.replicas.chunk_stores import FakeStore
from tests.replicas.tiered_engine import (
    answers,
    draw,
    full_prefill,
    load_decoder,
    make_cached_engine,
    run,
    submit,
    usages,
)

pytestmark = pytest.mark.engine

NUM_PAGES, PAGE_SIZE = 12, 4
TOKEN_BYTES = 2 * 2 * 6 * 4  # of `make_pool`, float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@st.composite
def tokens_of_chunks(draw: st.DrawFn) -> list[ChunkTokens]:
    """Chunks whose runs share neither slots nor tokens, with gaps, in any order."""
    pages, chunks = draw(st.permutations(range(NUM_PAGES))), []
    while pages and len(chunks) < 4:
        count = draw(st.integers(1, len(pages)))
        taken, pages = pages[:count], pages[count:]
        runs, token = [], draw(st.integers(0, 2))
        for page_id in taken:
            offset = draw(st.integers(0, PAGE_SIZE - 1))
            size = draw(st.integers(1, PAGE_SIZE - offset))
            runs.append((page_id, offset, size, token))
            token += size + draw(st.sampled_from((0, 0, 1)))
        chunks.append(ChunkTokens(token, np.array(draw(st.permutations(runs)), np.int64)))
    return chunks


def layer_of(chunk: ChunkTokens, pool: Pool, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    layer = torch.randn((2, 2, chunk.num_tokens, 6), generator=generator).to(pool.k_pages.dtype)
    layer_bytes = layer.flatten().view(torch.uint8).numpy()
    layer_bytes.flags.writeable = False
    return layer_bytes


def scatter_all(pages: ChunkPages, chunks: Sequence[ChunkTokens], pool: Pool) -> None:
    for layer in range(NUM_LAYERS):
        for batch in pages.batches(chunks):
            batch.begin()
            for index in batch.chunks:
                batch.put(index, layer_of(chunks[index], pool, 10 * index + layer))
            pages.wait(batch.scatter(layer, pages.issued()))


def gather_all(pages: ChunkPages, chunks: Sequence[ChunkTokens], pool: Pool) -> list[bytes]:
    layers = [np.zeros(layer_of(chunk, pool, 0).shape, np.uint8) for chunk in chunks]
    found = []
    for batch in pages.batches(chunks):
        for layer in range(NUM_LAYERS):
            batch.gather(layer, [layers[index] for index in batch.chunks], pages.issued())
            found += [layers[index].tobytes() for index in batch.chunks]
    return found


def check_same_bytes(make: Callable[[Pool], ChunkPages], finish: Callable[[], object], pool: Pool, chunks: Any) -> None:
    on_cpu = Pool(pool.k_pages.cpu().clone(), pool.v_pages.cpu().clone())
    pages = make(pool)
    scatter_all(CpuChunkPages(on_cpu), chunks, on_cpu)
    scatter_all(pages, chunks, on_cpu)
    finish()
    for ours, theirs in ((pool.k_pages, on_cpu.k_pages), (pool.v_pages, on_cpu.v_pages)):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    ours, theirs = (gather_all(each, chunks, on_cpu) for each in (pages, CpuChunkPages(on_cpu)))
    assert sorted(ours) == sorted(theirs)  # batches are others, so is the order


@settings(max_examples=examples(100))
@given(tokens_of_chunks(), st.sampled_from(DTYPES), st.integers(1, 60), st.integers(0, 2**32))
def test_a_device_has_the_bytes_of_a_cpu(
    chunks: list[ChunkTokens], dtype: torch.dtype, slot_tokens: int, seed: int
) -> None:
    streams, largest = PlayedStreams(random.Random(seed).randrange), max(chunk.num_tokens for chunk in chunks)
    token_bytes = TOKEN_BYTES * dtype.itemsize // 4

    def make(pool: Pool) -> ChunkPages:
        return DeviceChunkPages(pool, streams, largest * token_bytes, slot_bytes=slot_tokens * token_bytes)

    check_same_bytes(make, streams.finish, make_pool(NUM_PAGES, dtype), chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cuda_device_has_the_bytes_of_a_cpu(dtype: torch.dtype) -> None:
    generator = random.Random(1)
    for _ in range(30):
        pages = generator.sample(range(NUM_PAGES), NUM_PAGES)
        runs = [[(page, i % 2, 2, 2 * i) for i, page in enumerate(part)] for part in (pages[:5], pages[5:])]
        chunks = [ChunkTokens(2 * len(part), np.array(part, np.int64)) for part in runs]
        pool = make_pool(NUM_PAGES, dtype, "cuda")
        make = partial(make_chunk_pages, max_layer_bytes=14 * TOKEN_BYTES)
        check_same_bytes(make, torch.cuda.synchronize, pool, chunks)


@pytest.mark.parametrize("bad", [(NUM_PAGES, 0, 1, 0), (-1, 0, 1, 0), (0, 3, 2, 0), (0, -1, 1, 0), (0, 0, 1, 6)])
def test_a_run_out_of_range_is_refused_before_anything_moves(bad: tuple[int, ...]) -> None:
    pages = DeviceChunkPages(make_pool(NUM_PAGES), PlayedStreams(), 6 * TOKEN_BYTES)
    with pytest.raises(ValueError, match="run 1"):
        pages.batches([ChunkTokens(6, np.array([(1, 0, 2, 0), bad], np.int64))])


ONE_CHUNK = [ChunkTokens(8, np.array([(7, 0, 4, 0), (2, 0, 4, 4)], np.int64))]


def test_a_save_reads_what_the_engine_had_issued() -> None:
    """A write of every page; the engine's stream runs last wherever it need not run first."""
    pool, streams = make_pool(NUM_PAGES), PlayedStreams(lambda num_ready: num_ready - 1)
    pages = DeviceChunkPages(pool, streams, 8 * TOKEN_BYTES)
    streams.finish()
    for part in (pool.k_pages, pool.v_pages):
        streams.current().run(partial(part.fill_, 5))
    saved = np.zeros(8 * TOKEN_BYTES, np.uint8)
    pages.batches(ONE_CHUNK)[0].gather(1, [saved], pages.issued())
    assert (saved.view(np.float32) == 5).all()


class PlayedLoad:
    """Gives the bytes of chunks at once, but for layers that never come."""

    plan = None

    def __init__(self, chunks: Sequence[ChunkTokens], pool: Pool, missing: tuple[int, int] | None = None) -> None:
        self._chunks, self._pool, self._missing = chunks, pool, missing
        self.sources = [SimpleNamespace(header=SimpleNamespace(num_tokens=chunk.num_tokens)) for chunk in chunks]
        self.num_readers = 1
        self.before_take: Callable[[int], object] = lambda layer: None

    def start_of(self, index: int) -> int:
        return 8 * index

    def left_s(self) -> float:
        return 60.0

    def pause(self) -> None: ...

    def read(self, index: int, layer: int) -> np.ndarray | Miss:
        self.before_take(layer)
        is_missing = (index, layer) == self._missing
        return Miss.ABSENT if is_missing else layer_of(self._chunks[index], self._pool, 10 * index + layer)

    def begin(self, end: int) -> None: ...

    def add_copy(self, index: int, seconds: float) -> None: ...

    def lose_from(self, index: int) -> None: ...

    def close(self) -> None: ...


class Loading(NamedTuple):
    load: StepLoad
    chunk_source: PlayedLoad
    streams: PlayedStreams
    pool: Pool
    expected: Pool  # when all has come


def begin(
    monkeypatch: pytest.MonkeyPatch,
    *,
    missing: tuple[int, int] | None = None,
    slot_tokens: int = 8,
    issue: Callable[[PlayedStreams, Pool], None] = lambda streams, pool: None,
) -> Loading:
    """Three chunks of eight tokens, on pages of four; a slot holds one or two. `issue`: by the engine, before."""
    monkeypatch.setattr(step_load, "Load", PlayedLoad)
    streams, pool = PlayedStreams(), make_pool(NUM_PAGES)
    pages = [(7, 2), (0, 9), (4, 5)]
    chunks = [ChunkTokens(8, np.array([(a, 0, 4, 0), (b, 0, 4, 4)], np.int64)) for a, b in pages]
    expected = Pool(pool.k_pages.clone(), pool.v_pages.clone())
    scatter_all(CpuChunkPages(expected), chunks, expected)
    chunk_source: Any = PlayedLoad(chunks, pool, missing)
    pieces = [GraftPiece(i, 8 * i, 8 * i + 8, [(a, 0, 4), (b, 0, 4)], ()) for i, (a, b) in enumerate(pages)]
    device = DeviceChunkPages(pool, streams, 8 * TOKEN_BYTES, slot_bytes=slot_tokens * TOKEN_BYTES)
    issue(streams, pool)
    load = StepLoad([Graft(chunk_source, pieces)], NUM_LAYERS, device)
    return Loading(load, chunk_source, streams, pool, expected)


def has(loading: Loading, layer: int) -> bool:
    ours, theirs = loading.pool, loading.expected
    return torch.equal(ours.k_pages[layer], theirs.k_pages[layer]) and torch.equal(
        ours.v_pages[layer], theirs.v_pages[layer]
    )


@pytest.mark.parametrize("slot_tokens", [8, 16, 24])
@pytest.mark.parametrize("seed", range(10))
def test_each_layer_is_there_when_it_is_computed(monkeypatch: pytest.MonkeyPatch, slot_tokens: int, seed: int) -> None:
    """Whatever the order of the streams: no slot is written again before its copy is done."""
    loading = begin(monkeypatch, slot_tokens=slot_tokens)
    loading.streams.choose = random.Random(seed).randrange
    loading.load.run()
    engine, seen = loading.streams.current(), []
    for layer in range(NUM_LAYERS):
        loading.load.wait_layer(layer)
        engine.run(lambda layer=layer: seen.append(has(loading, layer)))  # type: ignore[misc]
    loading.streams.finish()
    assert seen == [True] * NUM_LAYERS
    assert loading.load.finish() == []


def test_a_load_is_behind_what_the_engine_issued_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of who had the pages before may still write them."""

    def issue(streams: PlayedStreams, pool: Pool) -> None:
        streams.finish()
        for part in (pool.k_pages, pool.v_pages):
            streams.current().run(partial(part.fill_, 5))

    loading = begin(monkeypatch, slot_tokens=24, issue=issue)
    loading.streams.choose = lambda num_ready: num_ready - 1  # the engine last wherever it need not run first
    loading.load.run()
    loading.streams.finish()
    assert all(torch.equal(loading.pool.page(page), loading.expected.page(page)) for page in (7, 2, 0, 9, 4, 5))


def test_nothing_is_copied_through_memory_that_the_engine_may_still_use() -> None:
    """What the allocator gives was perhaps freed by the engine's stream, before that has come so far."""
    streams, pool = PlayedStreams(), make_pool(NUM_PAGES)
    streams.current().run(lambda: None)
    pages = DeviceChunkPages(pool, streams, 8 * TOKEN_BYTES)
    before, streams.current().is_held = pool.k_pages.clone(), True
    (batch,) = pages.batches(ONE_CHUNK)
    batch.begin()
    batch.put(0, layer_of(ONE_CHUNK[0], pool, 1))
    batch.scatter(0, None)
    streams.finish()
    assert torch.equal(pool.k_pages, before)
    streams.current().is_held = False
    streams.finish()
    assert not torch.equal(pool.k_pages, before)


def test_loads_do_not_wait_for_what_is_computed_nor_layers_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = begin(monkeypatch)
    engine, ran = loading.streams.current(), []
    loads = loading.streams.others()
    loading.streams.finish()  # what was issued before
    engine.is_held = True
    loading.load.run()
    for layer in range(NUM_LAYERS):
        loading.load.wait_layer(layer)
        engine.run(lambda layer=layer: ran.append(layer))  # type: ignore[misc]
    loading.streams.finish()
    assert ran == []
    assert all(has(loading, layer) for layer in range(NUM_LAYERS))
    assert not any(stream.queue for stream in loads)


def test_a_layer_is_computed_before_the_next_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = begin(monkeypatch, slot_tokens=24)
    engine, ran = loading.streams.current(), []
    loading.load.run()  # two slots: the third layer waited for the first
    for layer in range(NUM_LAYERS):
        loading.load.wait_layer(layer)
        engine.run(lambda layer=layer: ran.append((layer, [has(loading, each) for each in range(NUM_LAYERS)])))  # type: ignore[misc]
    while engine.can_go_on() or loading.streams.go_on(lambda n: n - 1):  # the engine first wherever it can
        if engine.can_go_on():
            loading.streams.step(engine)
    assert ran == [(0, [True, False, False]), (1, [True, True, False]), (2, [True, True, True])]


def test_a_load_that_fails_midway_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = begin(monkeypatch, missing=(1, 1))
    loading.load.run()
    for layer in range(NUM_LAYERS):
        loading.load.wait_layer(layer)  # returns: what is lost is not waited for
    loading.load.finish()
    assert loading.load.num_lost == 2  # the chunk, and the one behind it
    engine, num_left = loading.streams.current(), []
    engine.run(lambda: num_left.append(sum(len(stream.queue) for stream in loading.streams.others())))
    loading.streams.finish()
    assert num_left == [0]
    assert all(torch.equal(loading.pool.page(page), loading.expected.page(page)) for page in (7, 2))


def test_nothing_is_written_once_a_load_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ended while the thread was at its second layer."""
    loading = begin(monkeypatch)
    before = loading.pool.k_pages.clone()
    loading.chunk_source.before_take = lambda layer: layer == 1 and loading.load.finish()
    loading.load.run()
    assert loading.load.num_lost == 3
    loading.streams.finish()
    assert has(loading, 0)
    assert torch.equal(before[1:], loading.pool.k_pages[1:])


def test_a_step_that_fails_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may have other owners at once."""
    loading = begin(monkeypatch, slot_tokens=24)
    loading.load.run()
    loading.load.wait_layer(0)
    loading.load.finish()
    loading.streams.current().run(lambda: loading.pool.k_pages.fill_(5))
    loading.streams.finish(lambda n: 0)  # the engine first wherever it can
    assert (loading.pool.k_pages == 5).all()


class AtOnce:
    """Streams whose work runs when it is issued, in whichever thread that is; an event has come when it is recorded."""

    def new(self) -> AtOnce:
        return self

    current = record = new

    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, event: object = None) -> None: ...

    def upload(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("fault", [None, RuntimeError("a bug")])
def test_engines_save_and_load_through_a_devices_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Exception | None
) -> None:
    """With the threads that they have; a read that raises costs a computation."""

    def make(pool: Pool, max_layer_bytes: int) -> ChunkPages:
        return DeviceChunkPages(pool, AtOnce(), max_layer_bytes, slot_bytes=1)  # type: ignore[arg-type]

    gather = DeviceBatch.gather

    def gather_behind(self: DeviceBatch, layer: int, into: Sequence[Any], after: Any) -> None:
        assert after is not None, "it may read a layer that is not computed yet"
        gather(self, layer, into, after)

    monkeypatch.setattr(DeviceBatch, "gather", gather_behind)
    monkeypatch.setattr(build, "make_chunk_pages", make)
    decoder, store, ids = load_decoder("llama-3", tmp_path), FakeStore(), draw(1, 250)
    for number in range(2):
        engine = make_cached_engine(decoder, store)
        submit(engine, "a", ids, 3)
        events = run(engine)
        assert answers(events)["a"] == full_prefill(decoder, ids, 3)[0]
        assert (usages(events)["a"].cached_tokens > 200) == (number == 1 and fault is None)
        assert engine.connector.saver.flush(60.0)
        engine.close()
        assert len(store.chunks) >= 4

        def raises(layer: int) -> None:
            if fault is not None and layer:
                raise fault

        store.before_read = raises


def test_calibration_copies_to_the_device_write_its_spare_page_alone() -> None:
    """For any number of bytes; each copy is done when the call returns."""
    pool = make_pool(NUM_PAGES)
    before = [pool.page(page) for page in range(NUM_PAGES)]
    streams = PlayedStreams()
    pages = DeviceChunkPages(pool, streams, 8 * TOKEN_BYTES)
    bring = bringing(pages, 7, TOKEN_BYTES, PAGE_SIZE)
    for num_bytes in (0, 5, TOKEN_BYTES, 5 * TOKEN_BYTES + 1, 40 * TOKEN_BYTES):
        bring(np.zeros(num_bytes, np.uint8))
        assert not any(stream.queue for stream in streams.others())
    assert not pool.page(0)[:, 0].any()
    assert all(torch.equal(pool.page(page), before[page]) for page in range(1, NUM_PAGES))


@pytest.mark.gpu
def test_a_cuda_device_loads_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads end although the engine's stream is busy; nothing of them is on the legacy default stream."""
    shape = (4, 8, 64, 32, 128)
    pool = Pool(*(torch.randn(shape, device="cuda").bfloat16() for _ in "kv"))
    chunks = [ChunkTokens(256, np.array([(8 * i + j, 0, 32, 32 * j) for j in range(8)], np.int64)) for i in range(8)]
    loads, saves = (DeviceChunkPages(pool, CudaStreams(pool.k_pages.device), 1 << 20, slot_bytes=1 << 21) for _ in "ls")
    layers = [[np.empty(1 << 20, np.uint8) for _ in chunks] for _ in range(4)]
    for batch in saves.batches(chunks):
        for layer in range(4):
            batch.gather(layer, layers[layer][batch.chunks.start : batch.chunks.stop], saves.issued())
    expected = pool.k_pages.clone()

    def scatter_all_layers(after: Any) -> Any:
        for layer in range(4):
            for batch in loads.batches(chunks):
                batch.begin()
                for index in batch.chunks:
                    batch.put(index, layers[layer][index])
                event = batch.scatter(layer, after)
        return event

    pool.k_pages.zero_()
    scatter_all_layers(loads.issued())  # the first launch of a kernel loads its module, which may wait for the device
    pool.k_pages.zero_()
    torch.cuda.synchronize()
    after = loads.issued()
    torch.cuda._sleep(2_000_000_000)  # the engine computes for about a second
    busy = torch.cuda.current_stream().record_event()
    event = scatter_all_layers(after)
    event.wait()
    assert not busy.query()
    loads.wait(event)
    assert torch.equal(pool.k_pages, expected)
