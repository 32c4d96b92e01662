"""A device that is played: work of its streams runs in any order that events allow, chosen by the test."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mneme.kernels.page_table import IntArray

Choose = Callable[[int], int]  # a number below n


class PlayedEvent:
    """Done when its stream has come past it; `tick` is when that was."""

    def __init__(self) -> None:
        self.tick: int | None = None

    def is_done(self) -> bool:
        return self.tick is not None

    def seconds_since(self, start: PlayedEvent) -> float:  # type: ignore[override]
        assert self.tick is not None
        assert start.tick is not None
        return float(self.tick - start.tick)


class PlayedStream:
    """A queue of work, waits and events."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None] | PlayedEvent] = []
        self.waits: list[tuple[int, PlayedEvent]] = []  # (how much of all that was appended comes before, event)
        self._num_appended = self.num_run = 0

    def run(self, work: Callable[[], None]) -> None:
        self._append(work)

    def wait(self, event: PlayedEvent) -> None:  # type: ignore[override]
        self.waits.append((self._num_appended, event))

    def record(self) -> PlayedEvent:
        event = PlayedEvent()
        self._append(event)
        return event

    def upload(self, ids: IntArray) -> Tensor:
        return torch.from_numpy(ids)

    def can_go_on(self) -> bool:
        return bool(self.queue) and all(event.is_done() for at, event in self.waits if at <= self.num_run)

    def _append(self, item: Callable[[], None] | PlayedEvent) -> None:
        self.queue.append(item)
        self._num_appended += 1


class PlayedStreams:
    """All streams; the first is the engine's."""

    def __init__(self) -> None:
        self._streams = [PlayedStream()]
        self.tick = 0
        self.pinned: list[int] = []

    def new(self) -> PlayedStream:
        self._streams.append(PlayedStream())
        return self._streams[-1]

    def current(self) -> PlayedStream:
        return self._streams[0]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        address = memory.data_ptr()
        self.pinned.append(address)

        def unpin() -> None:
            self.finish()
            self.pinned.remove(address)

        return unpin

    def go_on(self, choose: Choose) -> bool:
        """Run one piece of work that may run now; False if all streams have come to their ends."""
        ready = [stream for stream in self._streams if stream.can_go_on()]
        if not ready:
            assert not any(stream.queue for stream in self._streams), "streams wait for each other"
            return False
        stream = ready[choose(len(ready))]
        item = stream.queue.pop(0)
        stream.num_run += 1
        self.tick += 1
        if isinstance(item, PlayedEvent):
            item.tick = self.tick
        else:
            item()
        return True

    def finish(self, choose: Choose = lambda n: 0) -> None:
        while self.go_on(choose):
            pass
