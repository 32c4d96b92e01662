"""How much may be read ahead of use: the read buffer of AttentionStore 3.2.1. No tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable

_WAIT_S = 0.05  # how often a reader that waits for room looks again


class ReadRoom:
    """Bytes that were read ahead and not yet taken, of all fetches together."""

    def __init__(self, num_bytes: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.num_used = 0
        self._num_bytes = num_bytes
        self._condition = threading.Condition()

    def has(self, num_bytes: int) -> bool:
        return self.num_used + num_bytes <= self._num_bytes

    def take(self, num_bytes: int, is_urgent: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        """Wait for room, unless it is urgent: somebody waits for these bytes. False if nobody wants them any more."""
        with self._condition:
            while not self.has(num_bytes) and not is_urgent() and not is_over():
                self._condition.wait(_WAIT_S)
            self.num_used += num_bytes
        if is_over():
            self.give(num_bytes)
            return False
        return True

    def give(self, num_bytes: int) -> None:
        with self._condition:
            self.num_used -= num_bytes
            self._condition.notify_all()
