"""Pages out to host memory and back, on the CPU; for the CUDA path see `test_cuda.py`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mneme.cachetier.host_pages.cpu import CpuTier
from mneme.kernels.native import kv as native_kv
from tests.budget import examples
from tests.cachetier.model_tier import Operation, operations, run_operations
from tests.cachetier.pools import make_pool, wait_all
from tests.kernels.cases import needs_native

TIMEOUT_S = 30.0


@pytest.fixture(params=["numpy", pytest.param("native", marks=needs_native)])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(native_kv, "library", lambda: None)
        yield


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_pages_come_back_as_they_went(dtype: torch.dtype, piece_bytes: int) -> None:
    pool = make_pool(12, dtype)
    tier = CpuTier(pool, 9, piece_bytes=piece_bytes)
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
@given(
    st.lists(operations(num_device=8, num_host=6), max_size=25),
    st.sampled_from([1, 500, 1 << 20]),
    st.sampled_from([torch.float32, torch.int8]),
)
def test_any_order_of_calls_is_a_dictionary_of_pages(
    steps: list[Operation], piece_bytes: int, dtype: torch.dtype
) -> None:
    pool = make_pool(8, dtype)
    tier = CpuTier(pool, 6, piece_bytes=piece_bytes)
    run_operations(tier, pool, steps)
    tier.close()


def test_pages_out_of_range_harm_nobody() -> None:
    pool = make_pool(12)
    tier = CpuTier(pool, 4)
    for device, host in (([12], [0]), ([0], [4]), ([0, 1], [2]), ([0, 0], [1, 2]), ([0, 1], [2, 2])):
        with pytest.raises(ValueError, match="pages"):
            tier.save(np.array(device), np.array(host))
        with pytest.raises(ValueError, match="pages"):
            tier.load(np.array(host), np.array(device))
    tier.save(np.array([3]), np.array([0]))
    wait_all(tier.load(np.array([0]), np.array([4])))
    assert torch.equal(pool.page(3), pool.page(4))
    tier.close()


def test_a_tier_that_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())
    tier = CpuTier(make_pool(), 4)
    tier.save(np.array([3]), np.array([0]))
    tier.before_reuse(np.array([3]))
    (thread,) = set(threading.enumerate()) - before
    del tier
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_an_interpreter_ends_that_did_not_close_its_tier() -> None:
    code = (
        "import numpy as np; from mneme.cachetier.host_pages.cpu import CpuTier; "
        "from tests.cachetier.pools import make_pool; tier = CpuTier(make_pool(200), 200, piece_bytes=1); "
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
        "from mneme.cachetier.host_pages.cpu import CpuTier\n"
        "torch.set_num_threads(2)\n"
        "pool = Pool(*torch.zeros(2, 2, 4, 64, 32, 64))\n"
        "tier = CpuTier(pool, 64)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "tier.save(np.arange(64), np.arange(64)); tier.load(np.arange(64), np.arange(64)).wait_layer(1)\n"
        "print(len(os.listdir('/proc/self/task')) - before, torch.get_num_threads())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "MNEME_NATIVE": native},
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["0", "2"]), done.stderr
