"""The tier of CUDA engines: on a played device that runs its streams in any order events allow, and on a real one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mneme.cachetier.host_pages.cpu import zeros
from mneme.cachetier.host_pages.cuda import CudaTier, make_tier, runs
from mneme.cachetier.host_pages.streams import CudaStreams, allocate, near_node
from mneme.errors import ConfigError, TransferFailed
from mneme.replicas.model.timeline import Timeline
from tests.budget import examples
from tests.cachetier.model_tier import Operation, operations, run_operations
from tests.cachetier.played_streams import PlayedStreams
from tests.cachetier.pools import NUM_LAYERS, Pool, make_pool, wait_all

LAYER_BYTES = 2 * 2 * 4 * 6 * 4  # of a page of `make_pool`


@settings(max_examples=examples(100))
@given(
    st.lists(operations(num_device=8, num_host=6), max_size=25),
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 30),
    st.sampled_from([torch.float32, torch.int8]),
)
def test_any_order_of_streams_is_a_dictionary_of_pages(
    steps: list[Operation], seed: int, staged_pages: int, saved_pages: int, pace: int, dtype: torch.dtype
) -> None:
    chooser = random.Random(seed)
    streams, pool = PlayedStreams(chooser.randrange), make_pool(8, dtype)
    layer_bytes = LAYER_BYTES * dtype.itemsize // 4
    tier = CudaTier(pool, 6, streams, staging_bytes=staged_pages * layer_bytes, save_bytes=saved_pages * layer_bytes)

    def between() -> None:
        with streams.lock:
            for _ in range(chooser.randrange(pace + 1)):
                streams.go_on()

    run_operations(tier, pool, steps, streams.current().run, between)
    streams.finish()
    tier.close()
    assert not streams.pinned


def make(pool: Pool | None = None, **options: Any) -> tuple[CudaTier, PlayedStreams]:
    streams = PlayedStreams()
    return CudaTier(pool or make_pool(8), 6, streams, save_bytes=1, staging_bytes=1, **options), streams


def make_saved(pool: Pool) -> tuple[CudaTier, PlayedStreams]:
    """The pool's first page is in the first host page."""
    tier, streams = make(pool)
    tier.save(np.array([0]), np.array([0]))
    tier.before_reuse(np.array([0]))
    return tier, streams


def test_the_engines_thread_issues_no_copies_and_waits_for_launches_alone() -> None:
    tier, streams = make_saved(make_pool(8))
    streams.finish()
    loads, saves = streams.others()
    loads.is_held = True
    load, ran = tier.load(np.array([0]), np.array([7])), []
    for layer in range(NUM_LAYERS):
        load.wait_layer(layer)  # returns: it is launched
        streams.current().run(lambda layer=layer: ran.append(layer))  # type: ignore[misc]
    streams.finish()
    assert ran == []
    loads.is_held = False
    streams.finish()
    assert ran == [*range(NUM_LAYERS)]
    assert loads.threads == saves.threads == {"kv-transfers"}
    tier.close()


def test_copies_are_behind_what_the_engine_did_with_their_memory() -> None:
    """The allocator may have given staging memory that the engine's stream has freed and not come past."""
    streams = PlayedStreams()
    streams.current().run(lambda: None)
    tier = CudaTier(make_pool(8), 6, streams)
    begins = [stream.waits[0] for stream in streams.others()]
    assert [at for at, _ in begins] == [0, 0]
    assert not any(event.is_done() for _, event in begins)
    streams.step(streams.current())
    streams.step(streams.current())
    assert all(event.is_done() for _, event in begins)
    tier.close()


def test_a_layer_is_computed_while_the_next_is_on_its_way() -> None:
    pool = make_pool(8)
    tier, streams = make_saved(pool)
    engine, seen = streams.current(), []
    load = tier.load(np.array([0]), np.array([7]))
    for layer in range(NUM_LAYERS):
        load.wait_layer(layer)
        engine.run(lambda: seen.append([torch.equal(k[:, 7], k[:, 0]) for k in pool.k_pages]))
    while streams.go_on(lambda n: 0):  # the engine first wherever it can
        pass
    assert seen == [[other <= layer for other in range(NUM_LAYERS)] for layer in range(NUM_LAYERS)]
    tier.close()


def test_a_save_into_a_host_page_is_behind_the_load_that_reads_it() -> None:
    pool = make_pool(8)
    tier, streams = make_saved(pool)
    streams.choose = lambda n: n - 1  # saves first wherever they can
    tier.load(np.array([0]), np.array([7]))
    tier.save(np.array([1]), np.array([0]))
    tier.before_reuse(np.array([1]))
    streams.finish()
    assert torch.equal(pool.k_pages[:, :, 7], pool.k_pages[:, :, 0])
    tier.close()


def test_what_is_written_to_reused_pages_is_behind_loads_of_them() -> None:
    pool = make_pool(8)
    tier, streams = make_saved(pool)
    tier.load(np.array([0]), np.array([7]))
    tier.before_reuse(np.array([7]))
    streams.current().run(lambda: pool.k_pages[:, :, 7].fill_(5))
    streams.finish(lambda n: 0)  # the engine first wherever it can
    assert (pool.k_pages[:, :, 7] == 5).all()
    tier.close()


def test_a_closed_tier_moves_nothing() -> None:
    tier, streams = make()
    tier.save(np.arange(5), np.arange(5))
    tier.close()
    tier.close()
    assert not streams.pinned
    assert not any(stream.queue for stream in streams.others())
    for call in (tier.save, tier.load):
        with pytest.raises(TransferFailed, match="closed"):
            call(np.array([0]), np.array([0]))


def test_neighbours_are_one_run() -> None:
    assert runs(np.array([4, 5, 6, 2, 3, 9, 8]), 20) == [(0, 4, 7), (3, 2, 4), (5, 9, 10), (6, 8, 9)]
    assert runs(np.array([0]), 1) == [(0, 0, 1)]
    assert runs(np.array([], np.int64), 1) == []


def test_no_copy_crosses_the_border_of_two_slabs() -> None:
    assert runs(np.array([2, 3, 4, 5, 6, 7, 8, 11]), 3) == [(0, 2, 3), (1, 3, 6), (4, 6, 9), (7, 11, 12)]


class SlowStreams(PlayedStreams):
    """Pins what it is let to pin, and then no more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.may_pin, self.most = threading.Event(), most
        self.slabs: list[torch.Tensor] = []

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        if self.slabs:
            self.may_pin.wait()
        if len(self.slabs) == self.most:
            raise ConfigError("engine.host_cache_bytes: CUDA error 2")
        self.slabs.append(memory)
        return super().pin(memory)


def make_slow(pool: Pool, most: int) -> tuple[CudaTier, SlowStreams]:
    """A slab has as many pages as end where the system's pages do: 32 of 384 bytes a layer; there are three in each."""
    streams = SlowStreams(most)
    return CudaTier(pool, 80, streams, save_bytes=1, staging_bytes=1, slab_bytes=1), streams


def test_the_tier_is_there_before_all_of_it_is_pinned() -> None:
    pool = make_pool(8)
    tier, streams = make_slow(pool, most=1000)
    assert len(streams.slabs) == 1
    tier.save(np.array([0]), np.array([79]))
    wait_all(tier.load(np.array([79]), np.array([7])))
    streams.finish()
    assert torch.equal(pool.k_pages[:, :, 7], pool.k_pages[:, :, 0])
    streams.may_pin.set()
    tier.wait_pinned()
    ranges = sorted((slab.data_ptr(), slab.data_ptr() + slab.nbytes) for slab in streams.slabs)
    assert len(ranges) == 3 * NUM_LAYERS
    assert all(start % 4096 == 0 and end <= following for (start, end), (following, _) in pairwise(ranges))
    assert sum(slab.nbytes for slab in streams.slabs) == NUM_LAYERS * 80 * LAYER_BYTES
    tier.load(np.array([79]), np.array([6]))
    tier.before_reuse(np.array([6]))
    streams.finish()
    assert torch.equal(pool.k_pages[:, :, 6], pool.k_pages[:, :, 0])
    tier.close()
    assert not streams.pinned


def test_a_limit_that_is_met_later_is_said_and_the_tier_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"engine\.host_cache_bytes"):
        make_slow(make_pool(8), most=0)
    pool = make_pool(8)
    tier, streams = make_slow(pool, most=2)
    streams.may_pin.set()
    tier.wait_pinned()
    assert "engine.host_cache_bytes" in caplog.text
    tier.save(np.array([0]), np.array([79]))
    wait_all(tier.load(np.array([79]), np.array([7])))
    streams.finish()
    assert torch.equal(pool.k_pages[:, :, 7], pool.k_pages[:, :, 0])
    tier.close()
    assert not streams.pinned


def test_a_tier_that_is_closed_pins_no_more() -> None:
    tier, streams = make_slow(make_pool(8), most=1000)
    closing = threading.Thread(target=tier.close)
    closing.start()
    streams.may_pin.set()
    closing.join()
    assert not streams.pinned


@pytest.mark.parametrize(
    ("online", "node", "found"), [("0-1", "1", 1), ("0,2", "2", 2), ("0", "0", None), ("0-1", "-1", None)]
)
def test_memory_is_asked_of_the_gpu_s_node(tmp_path: Path, online: str, node: str, found: int | None) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    assert near_node(properties, tmp_path) is None
    for name, text in (("devices/system/node/online", online), ("bus/pci/devices/0000:1b:00.0/numa_node", node)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text + "\n")
    assert near_node(properties, tmp_path) == found
    assert near_node(SimpleNamespace(), tmp_path) is None


def test_memory_that_is_taken_of_a_node_keeps_its_content() -> None:
    memory = zeros((3 << 20,), torch.uint8, 4096)
    memory[:] = 7
    for node in (None, 0, 70):  # one that there is not is refused by the system, which changes nothing
        allocate(memory, node)
    assert (memory == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(operations(num_device=8, num_host=6), max_size=25))
def test_a_cuda_device_gives_a_dictionary_of_pages(dtype: torch.dtype, steps: list[Operation]) -> None:
    pool = make_pool(8, dtype, "cuda")
    tier = CudaTier(pool, 6, CudaStreams(pool.k_pages.device), staging_bytes=1, save_bytes=1)
    run_operations(tier, pool, steps)
    tier.close()


@pytest.mark.gpu
def test_a_cuda_device_moves_large_pages_beside_a_step() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    pool = make_pool(8, torch.bfloat16, "cuda")
    large = type(pool)(*(torch.randn(4, 8, 256, 32, 128, device="cuda", generator=generator).bfloat16() for _ in "kv"))
    timeline = Timeline()
    tier = make_tier(large, 512, timeline)
    assert isinstance(tier, CudaTier)
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
