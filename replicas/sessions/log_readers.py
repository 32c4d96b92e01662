"""Threads that read session logs: a few reads at a time, and none for longer than somebody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from mneme.replicas.workers import Workers

_NUM_READERS = 4

_T = TypeVar("_T")


class LogReaders:
    """Thread-safe. A read that hangs keeps its thread, not the process."""

    def __init__(self) -> None:
        self._workers = Workers("session-log-reader", _NUM_READERS)
        self._late: set[Future[Any]] = set()  # that run though nobody waits any more
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def num_late(self) -> int:
        return len(self._late)

    def begin(self, read: Callable[[], _T]) -> Future[_T] | None:
        """None: it would not be read, as each thread hangs in another read, or all is closed."""
        with self._lock:
            if self._is_closed or len(self._late) >= _NUM_READERS:
                return None
        begun: Future[_T] = Future()
        self._workers.run(lambda: self._run(begun, read))
        return begun

    def result(self, begun: Future[_T], until_s: float) -> _T:
        """By that time of `time.monotonic`; raises what the read did, `TimeoutError` or `CancelledError`."""
        try:
            return begun.result(max(until_s - time.monotonic(), 0.0))
        except TimeoutError:
            self._let_go(begun)
            raise

    def close(self) -> None:
        """What is not begun is cancelled; what runs is not waited for."""
        with self._lock:
            self._is_closed = True
        self._workers.close(0.0)

    def _run(self, begun: Future[_T], read: Callable[[], _T]) -> None:
        if self._is_closed:
            begun.cancel()
        if not begun.set_running_or_notify_cancel():
            return
        try:
            begun.set_result(read())
        except BaseException as error:  # whoever waits has it
            begun.set_exception(error)
        with self._lock:
            self._late.discard(begun)

    def _let_go(self, begun: Future[_T]) -> None:
        """It is never begun; or it hangs."""
        with self._lock:
            if not begun.cancel() and not begun.done():
                self._late.add(begun)
