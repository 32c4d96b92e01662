"""torch's captures without a device: streams are names, launches are calls, a graph is a list of them.

`torch.cuda.graph` is torch's own. What a capture leaves behind when it cannot be ended is that of torch before 2.13:
the stream, and a pool that counts as captured into.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch


class PlayedStream:
    def __init__(self, *_device: object) -> None:
        self.waits_for: list[PlayedStream] = []

    def wait_stream(self, other: PlayedStream) -> None:
        self.waits_for.append(other)


class PlayedEvent:
    def __init__(self, **_options: object) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: PlayedEvent) -> float:
        return 1.0


class PlayedCuda:
    """What torch knows of the device."""

    def __init__(self) -> None:
        self.stream = self.engine = PlayedStream()
        self.capturing: PlayedGraph | None = None
        self.open_pools: list[object] = []
        self.pools: list[object] = []  # of each capture that was begun
        self.launched_on: list[PlayedStream] = []

    def launch(self, work: Callable[[], object]) -> None:
        """A kernel on the current stream."""
        self.launched_on.append(self.stream)
        if self.capturing is None:
            work()
        else:
            self.capturing.work.append(work)

    def synchronize(self, *_device: object) -> None:
        """No stream may be waited for while this thread captures."""
        if self.capturing is not None:
            self.capturing.is_sound = False
            raise RuntimeError("operation not permitted when stream is capturing")

    def empty_cache(self) -> None:
        assert not self.open_pools, "captures are under way"

    def set_stream(self, stream: PlayedStream) -> None:
        self.stream = stream

    def end_pool(self, _device: int, pool: object) -> None:
        if pool not in self.open_pools:
            raise RuntimeError("this pool is not recorded into")
        self.open_pools.remove(pool)


class PlayedGraph:
    def __init__(self, cuda: PlayedCuda) -> None:
        self._cuda, self.work, self.is_sound = cuda, list[Callable[[], object]](), True

    def capture_begin(self, pool: object, **_options: object) -> None:
        assert pool not in self._cuda.open_pools, "this pool is captured into"
        self._cuda.open_pools.append(pool)
        self._cuda.pools.append(pool)
        self._cuda.capturing, self._pool = self, pool

    def capture_end(self) -> None:
        self._cuda.capturing = None
        if not self.is_sound:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._cuda.open_pools.remove(self._pool)

    def replay(self) -> None:
        for work in self.work:
            work()


def play_cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    """Until the test ends torch has this device."""
    cuda, pools = PlayedCuda(), iter(range(1000))

    class Stream(contextlib.AbstractContextManager[None]):
        def __init__(self, stream: PlayedStream) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            self._outer, cuda.stream = cuda.stream, self._stream

        def __exit__(self, *_: object) -> None:
            cuda.stream = self._outer

    played: dict[str, Any] = {
        "Stream": PlayedStream, "Event": PlayedEvent, "stream": Stream, "set_stream": cuda.set_stream,
        "current_stream": lambda *_: cuda.stream, "current_device": lambda: 0, "synchronize": cuda.synchronize,
        "device": lambda _: contextlib.nullcontext(), "empty_cache": cuda.empty_cache,
        "graph_pool_handle": lambda: (next(pools), 0), "CUDAGraph": lambda: PlayedGraph(cuda),
    }  # fmt: skip
    for name, part in played.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_pool, raising=False)
    return cuda
