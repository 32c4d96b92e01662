"""Not asking again and again what does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MAX_FAILURES = 3  # in a row
_PAUSE_S = 0.5  # then, doubled while it goes on
_MAX_PAUSE_S = 16.0


class Breaker:
    """Of one peer. After failures in a row it allows nothing for a while, then a single try; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._next_try_s = float("-inf")

    @property
    def is_open(self) -> bool:
        """Nothing gets through."""
        return self._num_failures >= _MAX_FAILURES

    def allows(self) -> bool:
        """Whether to try; `succeeded` or `failed` follows if so."""
        with self._lock:
            if not self.is_open:
                return True
            now_s = self._clock()
            if now_s < self._next_try_s:
                return False
            self._next_try_s = now_s + self._pause_s()  # others wait for what comes of this try
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            if self.is_open:
                self._next_try_s = self._clock() + self._pause_s()

    def _pause_s(self) -> float:
        return min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(self._num_failures - _MAX_FAILURES, 10))
