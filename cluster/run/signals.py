"""SIGINT and SIGTERM, seen by a thread of their own.

Python runs signal handlers on the main thread between two bytecodes, which is too late when that thread sits
in Ray's C++. The interpreter's wake-up descriptor is written at once, so a thread that reads it always
answers in time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Calls `on_signal(how many so far)` on its own thread."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.install()
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()

    def install(self) -> None:
        """Take the handlers (again: `ray.init` sets its own)."""
        for number in SIGNALS:
            signal.signal(number, _noted_by_the_thread)

    def _watch(self) -> None:
        count = 0
        while True:
            for number in os.read(self._read_end, 64):
                if number in SIGNALS:
                    count += 1
                    self._on_signal(count)


def _noted_by_the_thread(_number: int, _frame: object) -> None:
    pass
