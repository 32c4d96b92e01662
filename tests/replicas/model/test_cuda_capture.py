"""What a capture leaves of torch when it succeeds and when it fails, on a device that is played."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from mneme.replicas.model.graphs import CudaCapture
from tests.replicas.model.played_cuda import PlayedCuda, play_cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    return play_cuda(monkeypatch)


def out_of_shared_memory() -> Exception:
    """What Triton raises where a kernel does not fit the device."""
    errors = pytest.importorskip("triton.runtime.errors")
    error: Exception = errors.OutOfResources(300_000, 232_448, "shared memory")
    return error


def test_a_captured_function_runs_once_before_and_when_it_is_replayed(cuda: PlayedCuda) -> None:
    capture, ran, is_collecting = CudaCapture(torch.device("cuda")), list[int](), list[bool]()

    def run() -> None:
        is_collecting.append(gc.isenabled())
        cuda.launch(lambda: ran.append(1))

    graph = capture(run)
    assert ran == [1]
    graph.replay()
    assert ran == [1, 1]
    assert is_collecting == [True, False]
    assert gc.isenabled()
    (side,) = set(cuda.launched_on)
    assert side is not cuda.engine
    assert cuda.stream is cuda.engine
    assert cuda.engine in side.waits_for
    assert side in cuda.engine.waits_for
    assert not cuda.open_pools


@pytest.mark.parametrize("is_recording", [False, True])
@pytest.mark.parametrize("make_error", [lambda: torch.OutOfMemoryError("CUDA out of memory"), out_of_shared_memory])
def test_a_function_that_raises_leaves_stream_pools_and_collection_as_they_were(
    cuda: PlayedCuda, is_recording: bool, make_error: Callable[[], Exception]
) -> None:
    capture, error = CudaCapture(torch.device("cuda")), make_error()

    def run() -> None:
        cuda.launch(lambda: None)
        if (cuda.capturing is not None) == is_recording:
            raise error

    with pytest.raises(type(error)):
        capture(run)
    assert (cuda.stream, cuda.open_pools, gc.isenabled()) == (cuda.engine, [], True)
    assert cuda.launched_on[0] in cuda.engine.waits_for  # what was launched before it failed, too
    capture(lambda: cuda.launch(lambda: None))


def test_a_capture_that_cannot_be_ended_costs_no_other(cuda: PlayedCuda) -> None:
    capture, ran = CudaCapture(torch.device("cuda")), list[str]()
    before = capture(lambda: cuda.launch(lambda: ran.append("before")))

    def run() -> None:
        if cuda.capturing is not None:
            cuda.synchronize()

    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(run)
    assert (cuda.stream, cuda.open_pools, gc.isenabled()) == (cuda.engine, [], True)
    after = capture(lambda: cuda.launch(lambda: ran.append("after")))
    first, failed, later = cuda.pools
    assert first == failed  # graphs share one
    assert later != failed  # torch never captures into that again
    ran.clear()
    before.replay()
    after.replay()
    assert ran == ["before", "after"]
