"""A device that is played: work of its streams runs in any order that events allow, chosen by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from mneme.kernels.page_table import IntArray

Choose = Callable[[int], int]  # a number below n


class PlayedEvent:
    """Done when its stream has come past it; `tick` is when that was."""

    def __init__(self, streams: PlayedStreams) -> None:
        self.tick: int | None = None
        self._streams = streams

    def wait(self) -> None:
        while not self.is_done():  # another thread may be about to run what it waits for
            assert self._streams.go_on() or self.is_done(), "the event never comes"

    def is_done(self) -> bool:
        return self.tick is not None

    def seconds_since(self, start: PlayedEvent) -> float:  # type: ignore[override]
        assert self.tick is not None
        assert start.tick is not None
        return float(self.tick - start.tick)


class PlayedStream:
    """A queue of work, waits and events."""

    def __init__(self, streams: PlayedStreams) -> None:
        self._streams = streams
        self.is_held = False  # it stands still
        self.threads: set[str] = set()  # that appended work
        self.queue: list[Callable[[], None] | PlayedEvent] = []
        self.waits: list[tuple[int, PlayedEvent]] = []  # (how much of all that was appended comes before, event)
        self._num_appended = self.num_run = 0

    def run(self, work: Callable[[], None]) -> None:
        self.threads.add(threading.current_thread().name)
        self._append(work)

    def wait(self, event: PlayedEvent) -> None:  # type: ignore[override]
        with self._streams.lock:
            self.waits.append((self._num_appended, event))

    def record(self) -> PlayedEvent:
        event = PlayedEvent(self._streams)
        self._append(event)
        return event

    def upload(self, ids: IntArray) -> Tensor:
        return torch.from_numpy(ids)

    def can_go_on(self) -> bool:
        return (
            bool(self.queue)
            and not self.is_held
            and all(event.is_done() for at, event in self.waits if at <= self.num_run)
        )

    def _append(self, item: Callable[[], None] | PlayedEvent) -> None:
        with self._streams.lock:
            self.queue.append(item)
            self._num_appended += 1


class PlayedStreams:
    """All streams; the first is the engine's. What waits for an event goes on as `choose` says."""

    def __init__(self, choose: Choose = lambda n: 0) -> None:
        self.choose = choose
        self.lock = threading.RLock()  # held while work runs
        self._streams = [PlayedStream(self)]
        self.tick = 0
        self.pinned: list[int] = []

    def new(self) -> PlayedStream:
        self._streams.append(PlayedStream(self))
        return self._streams[-1]

    def current(self) -> PlayedStream:
        return self._streams[0]

    def others(self) -> list[PlayedStream]:
        """All but the engine's."""
        return self._streams[1:]

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else 85, dtype=dtype)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        address = memory.data_ptr()
        self.pinned.append(address)

        def unpin() -> None:
            self.finish()
            self.pinned.remove(address)

        return unpin

    def go_on(self, choose: Choose | None = None) -> bool:
        """Run one piece of work that may run now; False if all streams have come to their ends, or are held."""
        with self.lock:
            ready = [stream for stream in self._streams if stream.can_go_on()]
            if not ready:
                is_held = any(stream.is_held for stream in self._streams)
                assert is_held or not any(stream.queue for stream in self._streams), "streams wait for each other"
                return False
            self.step(ready[(choose or self.choose)(len(ready))])
            return True

    def step(self, stream: PlayedStream) -> None:
        """Run the next piece of one stream's work."""
        item = stream.queue.pop(0)
        stream.num_run += 1
        self.tick += 1
        if isinstance(item, PlayedEvent):
            item.tick = self.tick
        else:
            item()

    def finish(self, choose: Choose | None = None) -> None:
        while self.go_on(choose):
            pass
