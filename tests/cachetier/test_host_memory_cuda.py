"""The tier of CUDA engines: on a played device that runs its streams in any order events allow, and on a real one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mneme.cachetier.host_memory_cuda import PinnedHostMemory
from mneme.cachetier.staging import parts, runs
from mneme.cachetier.streams import CudaStreams
from mneme.cachetier.tiers import make_tier
from mneme.errors import TransferFailed
from mneme.replicas.timeline import Timeline
from tests.cachetier.model_tier import Operation, operations, run_operations
from tests.cachetier.played_streams import PlayedStream, PlayedStreams
from tests.cachetier.pools import NUM_LAYERS, make_pool, wait_all

LAYER_BYTES = 2 * 2 * 4 * 6 * 4  # of a page of `make_pool`


@settings(max_examples=300, deadline=None)
@given(
    st.lists(operations(num_device=8, num_host=6), max_size=25),
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 30),
)
def test_any_order_of_streams_is_a_dictionary_of_pages(
    steps: list[Operation], seed: int, staged_layers: int, buffer_pages: int, pace: int
) -> None:
    chooser = random.Random(seed)
    streams, pool = PlayedStreams(), make_pool(8)
    tier = PinnedHostMemory(
        pool, 6, streams, staged_layers=staged_layers,
        read_bytes=buffer_pages * LAYER_BYTES, save_bytes=NUM_LAYERS * LAYER_BYTES * (1 + buffer_pages % 2),
    )  # fmt: skip

    def between() -> None:
        for _ in range(chooser.randrange(pace + 1)):
            streams.go_on(chooser.randrange)
        assert tier.is_idle in (True, False)  # saves go on by it

    run_operations(tier, pool, steps, streams.current().run, between)
    streams.finish(chooser.randrange)
    tier.close()
    assert not streams.pinned


def begin(stream: PlayedStream) -> list[str]:
    """What the engine's stream does, by name."""
    seen: list[str] = []
    stream.run(lambda: seen.append("step"))
    return seen


def make(num_pages: int = 6, **options: int) -> tuple[PinnedHostMemory, PlayedStreams]:
    streams = PlayedStreams()
    return PinnedHostMemory(make_pool(8), num_pages, streams, save_bytes=1, read_bytes=1, **options), streams


def test_a_load_goes_before_saves_that_are_not_launched() -> None:
    tier, streams = make()
    tier.save(np.arange(5), np.arange(5))
    assert len(tier._launched) == 2
    load = tier.load(np.array([0]), np.array([7]))
    assert not tier.is_idle
    assert len(tier._saves) == 3
    streams.finish()
    load.wait_layer(NUM_LAYERS - 1)
    for left in (1, 0):
        assert not tier.is_idle
        assert len(tier._saves) == left
        streams.finish()
    assert tier.is_idle


def test_a_load_that_runs_holds_saves_back() -> None:
    tier, streams = make()
    tier.save(np.array([0]), np.array([0]))
    streams.finish()
    tier.load(np.array([0]), np.array([7]))
    tier.save(np.array([1, 2]), np.array([1, 2]))
    assert (len(tier._launched), len(tier._saves)) == (0, 2)
    streams.finish()
    assert not tier.is_idle
    assert not tier._saves


def test_reuse_waits_for_packing_not_for_the_bus() -> None:
    tier, streams = make(staged_layers=NUM_LAYERS)
    tier.save(np.array([3]), np.array([0]))
    tier.before_reuse(np.array([3]))
    engine = streams.current()
    seen = begin(engine)
    store = tier._store
    assert isinstance(store, PlayedStream)
    store_first, store.queue = store.queue, []  # the bus is held up
    streams.finish()
    assert seen == ["step"]
    store.queue = store_first
    streams.finish()


def test_a_load_is_fetched_while_the_step_before_uses_its_pages() -> None:
    tier, streams = make(staged_layers=2)
    pool = tier._pool
    tier.save(np.array([0]), np.array([0]))
    streams.finish()
    before = pool.k_pages[:, :, 7].clone()
    engine = streams.current()
    held: list[object] = [engine.record()]
    held, engine.queue = list(engine.queue), []  # the step before goes on
    tier.load(np.array([0]), np.array([7]))
    held, engine.queue = held + engine.queue, []
    while any(stream.can_go_on() for stream in streams._streams):
        streams.go_on(lambda n: 0)
    for buffer, layer in zip(tier._read._buffers, range(2), strict=True):
        assert torch.equal(buffer[0, 0], pool.k_pages[layer, :, 0])
    assert torch.equal(pool.k_pages[:, :, 7], before)
    engine.queue = held  # type: ignore[assignment]
    streams.finish()
    assert torch.equal(pool.k_pages[:, :, 7], pool.k_pages[:, :, 0])


def test_spans_come_from_the_times_of_events() -> None:
    streams, timeline = PlayedStreams(), Timeline(clock=lambda: 100.0)
    tier = PinnedHostMemory(make_pool(8), 6, streams, spans=timeline)
    tier.save(np.array([0, 3]), np.array([0, 1]))
    streams.finish()
    assert tier.is_idle
    tier.load(np.array([0]), np.array([7]))
    tier.close()
    by_track: dict[str, list[str]] = {}
    for span in timeline.spans():
        assert 100 <= span.start_s <= span.end_s
        by_track.setdefault(span.track, []).append(span.name)
    assert by_track == {f"{what}s": [f"{what} layer {i}" for i in range(NUM_LAYERS)] for what in ("save", "load")}


def test_a_closed_tier_moves_nothing() -> None:
    tier, streams = make()
    tier.save(np.arange(5), np.arange(5))
    tier.close()
    tier.close()
    assert not streams.pinned
    assert not any(stream.queue for stream in streams._streams)
    for call in (tier.save, tier.load):
        with pytest.raises(TransferFailed, match="closed"):
            call(np.array([0]), np.array([0]))


def test_neighbours_are_one_run() -> None:
    assert runs(np.array([4, 5, 6, 2, 3, 9, 8])) == [(0, 4, 7), (3, 2, 4), (5, 9, 10), (6, 8, 9)]
    assert runs(np.array([0])) == [(0, 0, 1)]
    assert runs(np.array([], np.int64)) == []
    assert parts(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 6)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(operations(num_device=8, num_host=6), max_size=25))
def test_a_cuda_device_gives_a_dictionary_of_pages(dtype: torch.dtype, steps: list[Operation]) -> None:
    pool = make_pool(8, dtype, "cuda")
    tier = PinnedHostMemory(pool, 6, CudaStreams(pool.k_pages.device), read_bytes=1, save_bytes=1)
    run_operations(tier, pool, steps)
    tier.close()


@pytest.mark.gpu
def test_a_cuda_device_moves_large_pages_beside_a_step() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    pool = make_pool(8, torch.bfloat16, "cuda")
    large = type(pool)(*(torch.randn(4, 8, 256, 32, 128, device="cuda", generator=generator).bfloat16() for _ in "kv"))
    timeline = Timeline()
    tier = make_tier(large, 512, timeline)
    assert isinstance(tier, PinnedHostMemory)
    expected = large.k_pages.clone()
    some, hosts = np.random.default_rng(2).permutation(256)[:200], np.random.default_rng(3).permutation(512)[:200]
    tier.save(some, hosts)
    tier.before_reuse(some)
    large.k_pages[:, :, torch.from_numpy(some).cuda()] = 0
    load = tier.load(hosts, some)
    for layer in range(4):
        load.wait_layer(layer)
        assert torch.equal(large.k_pages[layer], expected[layer])
    tier.close()
    assert {span.track for span in timeline.spans()} == {"saves", "loads"}
    small = make_tier(pool, 2)
    small.save(np.array([1]), np.array([0]))
    wait_all(small.load(np.array([0]), np.array([2])))
    assert torch.equal(pool.page(1), pool.page(2))
    small.close()
