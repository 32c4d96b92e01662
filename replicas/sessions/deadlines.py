"""When sessions with a time of their own are to be looked at: a heap whose times may be too early. Policy only."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

_SLACK = 64  # entries of sessions that are gone, before they are swept

Key = TypeVar("Key")


class Deadlines(Generic[Key]):
    """Times in seconds of the caller's clock; a session may stand here more than once, and after it is gone."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, key: Key) -> None:
        heapq.heappush(self._heap, (at_s, key))

    def take_due(self, now_s: float) -> Iterator[Key]:
        """Take out each session whose time has passed; what is added meanwhile must be due later."""
        while self._heap and self._heap[0][0] < now_s:
            yield heapq.heappop(self._heap)[1]

    def is_stale(self, num_sessions: int) -> bool:
        """Whether most entries are of sessions that are gone or have moved on, if there are so many sessions."""
        return len(self._heap) > 2 * num_sessions + _SLACK

    def replace(self, entries: Iterable[tuple[float, Key]]) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)
