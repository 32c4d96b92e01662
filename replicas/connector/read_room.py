"""Bytes that were read ahead and not yet taken, under a bound (AttentionStore 3.2.1's read buffer)."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ReadRoom:
    """Of all fetches of an engine together. What is urgent is let in above the bound: somebody waits for it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_used = 0
        self._num_bytes = num_bytes
        self._condition = threading.Condition()

    def has(self, num_bytes: int) -> bool:
        return self.num_used + num_bytes <= self._num_bytes

    def take(self, num_bytes: int, is_urgent: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        """Wait for room, unless it is urgent. False if nobody wants these bytes any more.

        Whoever changes what the two say calls `wake`.
        """
        with self._condition:
            self._condition.wait_for(lambda: is_over() or is_urgent() or self.has(num_bytes))
            if is_over():
                return False
            self.num_used += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        with self._condition:
            self.num_used -= num_bytes
            self._condition.notify_all()

    def wake(self) -> None:
        """Those who wait look again."""
        with self._condition:
            self._condition.notify_all()
