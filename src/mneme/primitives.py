"""What every room uses: a bounded map, a heap whose keys may be taken back, threads of steps and of tasks, and numbers
that say whether they are those that JSON has."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from decimal import Decimal
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

_SLACK = 64  # entries of a heap that may be stale before they are swept
_AFTER_ERROR_S = 1.0

Task = Callable[[], None]
T = TypeVar("T")
Key = TypeVar("Key")
Value = TypeVar("Value")


class Rounded(float):
    """A number that was written with more digits than it holds."""


def read_float(text: str) -> float:
    """Return the number that JSON's text means, as `Rounded` where it is another."""
    number = float(text)
    is_short = len(text) <= 15 and math.isfinite(number)
    return number if is_short or Decimal(text) == Decimal(repr(number)) else Rounded(number)


def place_of_rounded(value: Any, place: str = "#") -> str | None:
    """Return the JSON pointer of a number that is `Rounded`; None: there is none."""
    if isinstance(value, Mapping):
        found = (place_of_rounded(each, f"{place}/{name}") for name, each in value.items())
    elif isinstance(value, list | tuple):
        found = (place_of_rounded(each, f"{place}/{i}") for i, each in enumerate(value))
    else:
        return place if isinstance(value, Rounded) else None
    return next(filter(None, found), None)


class Bounded(OrderedDict[Key, Value]):
    """A dictionary of at most `max_items`: of more, the one that was set longest ago goes."""

    def __init__(self, max_items: int) -> None:
        super().__init__()
        self.max_items = max_items

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.max_items:
            self.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_items,), None, None, iter(self.items())


class LazyHeap(Generic[Key]):
    """Keys by rank, smallest first, equal ranks in the order they came; a key stands in it once.

    A key that is taken back or ranked anew leaves a stale entry: those are skipped, and swept when they are half of
    all. Every call costs the logarithm of the number of keys, on average.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Key]] = []
        self._serial_by_key: dict[Key, int] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._serial_by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._serial_by_key

    @property
    def num_entries(self) -> int:
        """Count entries, stale ones too."""
        return len(self._entries)

    def push(self, key: Key, rank: float) -> None:
        """Rank a key, which may be in the heap already."""
        serial = next(self._serials)
        self._serial_by_key[key] = serial
        heapq.heappush(self._entries, (rank, serial, key))
        self._sweep()

    def discard(self, key: Key) -> None:
        self._serial_by_key.pop(key, None)
        self._sweep()

    def first(self) -> tuple[float, Key]:
        """Rank and key; raises `IndexError` if it is empty."""
        while not self._is_true(self._entries[0]):
            heapq.heappop(self._entries)
        rank, _, key = self._entries[0]
        return rank, key

    def first_but(self, exempt: Collection[Key]) -> Key | None:
        """The first key that is not exempt, None if there is none; the heap is left as it was."""
        passed: list[tuple[float, int, Key]] = []
        found = None
        while found is None and len(passed) < len(self):
            _, key = self.first()
            if key in exempt:
                passed.append(heapq.heappop(self._entries))
            else:
                found = key
        for entry in passed:
            heapq.heappush(self._entries, entry)
        return found

    def pop_below(self, rank: float) -> Iterator[Key]:
        """Take out each key of a smaller rank; what is pushed meanwhile must not be one."""
        while self._serial_by_key and (first := self.first())[0] < rank:
            self.discard(first[1])
            yield first[1]

    def _is_true(self, entry: tuple[float, int, Key]) -> bool:
        _, serial, key = entry
        return self._serial_by_key.get(key) == serial

    def _sweep(self) -> None:
        if len(self._entries) > 2 * len(self._serial_by_key) + _SLACK:
            self._entries = [entry for entry in self._entries if self._is_true(entry)]
            heapq.heapify(self._entries)


class Worker:
    """A thread that runs `step` again and again and survives its errors.

    `step` does one small thing and returns for how many seconds there is nothing to do; None: until `wake`.
    """

    def __init__(
        self, name: str, step: Callable[[], float | None], on_error: Callable[[], None], *, wake_delay_s: float = 0.0
    ) -> None:
        """`wake_delay_s`: after a wake it waits so long before it begins."""
        self._name, self._step, self._on_error, self._wake_delay_s = name, step, on_error, wake_delay_s
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
                logger.exception("thread=%s a step failed", self._name)
                self._on_error()
                wait_s = _AFTER_ERROR_S
            if wait_s != 0 and not self._is_closed:
                is_woken = self._event.wait(wait_s)
                if is_woken and self._wake_delay_s and not self._is_closed:
                    time.sleep(self._wake_delay_s)


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

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Return what will have what the function gives on one of the threads, or raises."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.run(task)
        return future

    def call(self, function: Callable[[], T]) -> T:
        """Return what the function gives on one of the threads, or raise what it raises."""
        return self.begin(function).result()

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
