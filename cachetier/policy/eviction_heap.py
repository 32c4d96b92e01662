"""A heap of keys that may be taken back: stale entries are skipped, and swept when they are half of all."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable

Rank = tuple[float, ...]

_SLACK = 64  # entries that may be stale before they are swept


class EvictionHeap:
    """Keys by rank, smallest first; equal ranks in the order they came. A key stands in it once."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, int, Hashable]] = []
        self._serial_by_key: dict[Hashable, int] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._serial_by_key)

    @property
    def num_entries(self) -> int:
        """Stale ones too."""
        return len(self._entries)

    def push(self, key: Hashable, rank: Rank) -> None:
        serial = next(self._serials)
        self._serial_by_key[key] = serial
        heapq.heappush(self._entries, (rank, serial, key))

    def discard(self, key: Hashable) -> None:
        self._serial_by_key.pop(key, None)
        if len(self._entries) > 2 * len(self) + _SLACK:
            self._entries = [entry for entry in self._entries if self._is_true(entry)]
            heapq.heapify(self._entries)

    def first(self) -> tuple[Rank, Hashable]:
        """Rank and key; raises `IndexError` if it is empty."""
        while not self._is_true(self._entries[0]):
            heapq.heappop(self._entries)
        rank, _, key = self._entries[0]
        return rank, key

    def _is_true(self, entry: tuple[Rank, int, Hashable]) -> bool:
        _, serial, key = entry
        return self._serial_by_key.get(key) == serial
