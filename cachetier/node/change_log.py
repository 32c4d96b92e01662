"""What came into a node's tiers and what went, in order, for a directory that follows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mneme.cachetier.store import TierName


class Change(NamedTuple):
    """A chunk that a tier has now, or has no more."""

    key: bytes
    tier: TierName
    num_bytes: int
    is_added: bool


OnChange = Callable[[list[Change]], None]


class ChangeLog:
    """`on_change` gets batches, one at a time, from whichever thread comes by; it must not raise."""

    def __init__(self, on_change: OnChange | None) -> None:
        self._on_change = on_change
        self._changes: deque[Change] = deque()
        self._announcing = threading.Lock()

    def note(self, change: Change) -> None:
        """Cheap; under the lock of the tier, so that changes of a key are in order."""
        if self._on_change is not None:
            self._changes.append(change)

    def announce(self) -> None:
        """Outside of all locks. Who comes while another thread is at it leaves its changes to that one."""
        while self._on_change is not None and self._changes and self._announcing.acquire(blocking=False):
            try:
                self._on_change([self._changes.popleft() for _ in range(len(self._changes))])
            finally:
                self._announcing.release()
