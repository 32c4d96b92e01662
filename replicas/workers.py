"""Threads that run tasks for one owner: those of fetches, of recalls of sessions, of what an engine is asked."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)

Task = Callable[[], None]
T = TypeVar("T")


class Workers:
    """Threads that run tasks in order. They hold up no exit of the process, and end with whoever made them."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(self, _stop, self._queue, num_threads)

    def run(self, task: Task) -> None:
        self._queue.put(task)

    def call(self, function: Callable[[], T]) -> T:
        """Return what the function gives on one of the threads, or raise what it raises."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.run(task)
        return future.result()

    def close(self, timeout_s: float) -> None:
        """Run what waits, if that takes no longer, and end."""
        self._stop()
        for thread in self._threads:
            thread.join(timeout_s)


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # the edge of a thread
            logger.exception("a task failed")
        del task


def _stop(tasks: queue.SimpleQueue[Task | None], num_threads: int) -> None:
    for _ in range(num_threads):
        tasks.put(None)
