"""A thread that does one small thing after the other, and survives their failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)

_AFTER_ERROR_S = 1.0


class Background:
    """`step` does one thing and says for how many seconds there is nothing to do; None: until `wake`."""

    def __init__(
        self, name: str, step: Callable[[], float | None], on_error: Callable[[], None], *, settle_s: float = 0.0
    ) -> None:
        """`settle_s`: after a wake it waits so long before it begins."""
        self._name, self._step, self._on_error, self._settle_s = name, step, on_error, settle_s
        self._event = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._event.set()

    def close(self, timeout_s: float) -> bool:
        """Whether it ended in time, after the step that it is at."""
        self._is_closed = True
        self.wake()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closed:
            self._event.clear()
            try:
                wait_s = self._step()
            except Exception:  # the edge of the thread: what failed is counted, and what follows is done
                _logger.exception("thread=%s a step failed", self._name)
                self._on_error()
                wait_s = _AFTER_ERROR_S
            if wait_s != 0 and not self._is_closed:
                is_woken = self._event.wait(wait_s)
                if is_woken and self._settle_s and not self._is_closed:
                    time.sleep(self._settle_s)
