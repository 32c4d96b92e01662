"""One time for each key: a heap whose entries may be too early, or of keys that are gone. Policy only."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

_SLACK = 64  # entries that are one too many, before they are swept

Key = TypeVar("Key")


class Deadlines(Generic[Key]):
    """Keeps times in seconds of the caller's clock; what is due is found in time that depends on what is due only."""

    def __init__(self) -> None:
        self._at_s_by_key: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._at_s_by_key)

    @property
    def num_entries(self) -> int:
        """Entries of the heap; bounded by the number of keys."""
        return len(self._heap)

    def set(self, key: Key, at_s: float) -> None:
        """The key is due then, and not when it was to be before."""
        before_s = self._at_s_by_key.get(key)
        self._at_s_by_key[key] = at_s
        if before_s is None or at_s < before_s:  # else its entry is early enough
            heapq.heappush(self._heap, (at_s, key))
            self._sweep()

    def discard(self, key: Key) -> None:
        """The key is never due."""
        if self._at_s_by_key.pop(key, None) is not None:
            self._sweep()

    def take_due(self, now_s: float) -> Iterator[Key]:
        """Take out each key whose time has passed; what is set meanwhile must be due later."""
        while self._heap and self._heap[0][0] < now_s:
            _, key = heapq.heappop(self._heap)
            at_s = self._at_s_by_key.get(key)
            if at_s is None:
                continue
            if at_s >= now_s:
                heapq.heappush(self._heap, (at_s, key))
                continue
            del self._at_s_by_key[key]
            yield key

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._at_s_by_key) + _SLACK:
            self._heap = [(at_s, key) for key, at_s in self._at_s_by_key.items()]
            heapq.heapify(self._heap)
