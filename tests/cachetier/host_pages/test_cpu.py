"""Pages out to host memory and back, on the CPU; for the CUDA path see `test_cuda.py`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mneme.cachetier.host_pages.cpu import HostMemory
from mneme.errors import TransferFailed
from mneme.kernels.native import kv as native_kv
from mneme.kernels.native.kv import U8Array, gather_chunk, scatter_chunk
from mneme.kernels.page_table import IntArray
from mneme.replicas.model.timeline import Timeline
from tests.budget import examples
from tests.cachetier.model_tier import Operation, operations, run_operations
from tests.cachetier.pools import NUM_LAYERS, make_pool, wait_all
from tests.kernels.cases import needs_native

TIMEOUT_S = 30.0


@pytest.fixture(params=["numpy", pytest.param("native", marks=needs_native)])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(native_kv, "library", lambda: None)
        yield


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_pages_come_back_as_they_went(dtype: torch.dtype, piece_bytes: int) -> None:
    pool = make_pool(12, dtype)
    tier = HostMemory(pool, 9, piece_bytes=piece_bytes)
    device, host = np.array([7, 0, 11, 3]), np.array([8, 2, 0, 5])
    before = {page: pool.page(page) for page in range(12)}
    tier.save(device, host)
    tier.before_reuse(device)
    assert tier.is_idle
    for page in device.tolist():
        pool.write(page, before[page] * 0)
    wait_all(tier.load(host[::-1], np.array([1, 7, 2, 3])))
    for page, source in {1: 3, 7: 11, 2: 0, 3: 7}.items():
        assert torch.equal(pool.page(page), before[source])
    for page in (4, 5, 6, 8, 9, 10):
        assert torch.equal(pool.page(page), before[page])
    tier.close()


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(operations(num_device=8, num_host=6), max_size=25), st.sampled_from([1, 500, 1 << 20]))
def test_any_order_of_calls_is_a_dictionary_of_pages(steps: list[Operation], piece_bytes: int) -> None:
    pool = make_pool(8)
    tier = HostMemory(pool, 6, piece_bytes=piece_bytes)
    run_operations(tier, pool, steps)
    tier.close()


def test_pages_that_are_reused_were_copied_before() -> None:
    """The copy is held up until the engine waits to reuse the page."""
    pool = make_pool()
    begun, let_go = threading.Event(), threading.Event()

    def slow(k_pages: Tensor, v_pages: Tensor, runs: IntArray, num_tokens: int, chunk: U8Array) -> None:
        begun.set()
        assert let_go.wait(TIMEOUT_S)
        gather_chunk(k_pages, v_pages, runs, num_tokens, chunk)

    tier = HostMemory(pool, 4, gather=slow)
    expected = pool.page(6)
    tier.save(np.array([6]), np.array([1]))
    assert begun.wait(TIMEOUT_S)
    assert not tier.is_idle
    threading.Timer(0.01, let_go.set).start()
    tier.before_reuse(np.array([6]))
    pool.write(6, expected * 0)
    wait_all(tier.load(np.array([1]), np.array([2])))
    assert torch.equal(pool.page(2), expected)
    tier.close()


def test_a_copy_that_fails_reaches_the_engine() -> None:
    pool = make_pool()

    def broken(chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor) -> None:
        if runs[:, 0].tolist() == [4]:
            raise OSError("a broken page")
        scatter_chunk(chunk, num_tokens, runs, k_pages, v_pages)

    tier = HostMemory(pool, 4, scatter=broken)
    load = tier.load(np.array([0]), np.array([4]))
    with pytest.raises(TransferFailed, match="broken page"):
        load.wait_layer(0)
    tier.save(np.array([1]), np.array([3]))
    wait_all(tier.load(np.array([3]), np.array([2])))
    assert torch.equal(pool.page(1), pool.page(2))
    tier.close()


def test_pages_out_of_range_harm_nobody() -> None:
    pool = make_pool(12)
    tier = HostMemory(pool, 4)
    for device, host in (([12], [0]), ([0], [4]), ([0, 1], [2]), ([0, 0], [1, 2]), ([0, 1], [2, 2])):
        with pytest.raises(ValueError, match="pages"):
            tier.save(np.array(device), np.array(host))
        with pytest.raises(ValueError, match="pages"):
            tier.load(np.array(host), np.array(device))
    tier.save(np.array([3]), np.array([0]))
    wait_all(tier.load(np.array([0]), np.array([4])))
    assert torch.equal(pool.page(3), pool.page(4))
    tier.close()


def test_a_load_of_nothing_is_there_and_changes_nothing() -> None:
    pool = make_pool(12)
    tier = HostMemory(pool, 4)
    before = [pool.page(page).clone() for page in range(12)]
    none = np.array([], np.int64)
    tier.save(none, none)
    tier.before_reuse(none)
    wait_all(tier.load(none, none))
    assert all(torch.equal(pool.page(page), kept) for page, kept in enumerate(before))
    tier.close()


def test_a_tier_that_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())
    tier = HostMemory(make_pool(), 4)
    tier.save(np.array([3]), np.array([0]))
    tier.before_reuse(np.array([3]))
    (thread,) = set(threading.enumerate()) - before
    del tier
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_an_interpreter_ends_that_did_not_close_its_tier() -> None:
    code = (
        "import numpy as np; from mneme.cachetier.host_pages.cpu import HostMemory; "
        "from tests.cachetier.pools import make_pool; tier = HostMemory(make_pool(200), 200, piece_bytes=1); "
        "tier.save(np.arange(200), np.arange(200)); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")


@pytest.mark.parametrize("native", ["0", "1"])
def test_the_thread_starts_no_others(native: str) -> None:
    """Torch would copy this much with all its threads, also when another thread asks."""
    code = (
        "import os, torch, numpy as np\n"
        "from tests.cachetier.pools import Pool\n"
        "from mneme.cachetier.host_pages.cpu import HostMemory\n"
        "torch.set_num_threads(2)\n"
        "pool = Pool(*torch.zeros(2, 2, 4, 64, 32, 64))\n"
        "tier = HostMemory(pool, 64)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "tier.save(np.arange(64), np.arange(64)); tier.load(np.arange(64), np.arange(64)).wait_layer(1)\n"
        "print(len(os.listdir('/proc/self/task')) - before, torch.get_num_threads())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "MNEME_NATIVE": native},
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["0", "2"]), done.stderr


def test_spans_say_what_the_thread_did() -> None:
    timeline = Timeline()
    tier = HostMemory(make_pool(), 4, spans=timeline)
    tier.save(np.array([3, 4]), np.array([0, 1]))
    wait_all(tier.load(np.array([0]), np.array([5])))
    tier.close()
    spans = timeline.spans()
    assert [span.name for span in spans] == [
        f"{what} layer {i}" for what in ("save", "load") for i in range(NUM_LAYERS)
    ]
    assert {span.track for span in spans} == {"transfers"}
    assert [span.args["pages"] for span in spans] == [2, 2, 2, 1, 1, 1]
    assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
