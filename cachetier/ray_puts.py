"""Chunks on their way from an engine's process to its node's actor: bounded in bytes, and looked after without waiting."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from mneme.cachetier.chunk import Chunk
from mneme.cachetier.node_cache import HostPut
from mneme.cachetier.ray_memory import Refs, put_runs, runs_of

_MAX_AGE_S = 20.0  # of a put that is not answered
_POLL_S = 0.05


class _Put(NamedTuple):
    answer: Any  # reference to a `HostPut`
    refs: Refs  # the objects live as long as these
    key: bytes
    num_bytes: int
    since_s: float


class PutsUnderWay:
    """`done` hears of each put once, from a thread that puts: its key, and what became of it; None: no answer."""

    def __init__(self, max_bytes: int, wait_s: float, done: Callable[[bytes, HostPut | None], None]) -> None:
        self._max_bytes, self._wait_s, self._done = max_bytes, wait_s, done
        self._lock = threading.Lock()
        self._puts: dict[Any, _Put] = {}  # by answer
        self._num_bytes = 0
        self.counters: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, node: Any, chunk: Chunk) -> bool:
        """False if too much is under way for longer than a put may wait, or the store is full."""
        num_bytes = sum(layer.nbytes for layer in chunk.layers)
        if not self._reserve(num_bytes):
            self.counters["put_refused"] += 1
            return False
        try:
            refs = put_runs(runs_of(chunk.layers))
            answer = node.put.remote(chunk.header, refs)
        except (MemoryError, RayError):
            self._release(num_bytes)
            self.counters["put_failed"] += 1
            return False
        with self._lock:
            self._puts[answer] = _Put(answer, refs, chunk.header.key, num_bytes, time.monotonic())
        self.poll()
        return True

    def poll(self, timeout_s: float = 0.0) -> None:
        """Look which puts are done; waits for one of them at most as long as said."""
        with self._lock:
            answers = list(self._puts)
        if not answers:
            return
        ready, waiting = ray.wait(answers, num_returns=len(answers) if not timeout_s else 1, timeout=timeout_s)
        oldest_s = time.monotonic() - _MAX_AGE_S
        for answer in ready:
            self._finish(answer, _outcome(answer))
        for answer in waiting:
            with self._lock:
                is_late = answer in self._puts and self._puts[answer].since_s < oldest_s
            if is_late:
                self._finish(answer, None)

    def drain(self, timeout_s: float) -> bool:
        """Whether none is left in time."""
        deadline_s = time.monotonic() + timeout_s
        while self._puts and time.monotonic() < deadline_s:
            self.poll(_POLL_S)
        return not self._puts

    def _reserve(self, num_bytes: int) -> bool:
        """Room for one more: there always is when nothing is under way."""
        deadline_s = time.monotonic() + self._wait_s
        while True:
            with self._lock:
                if not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes:
                    self._num_bytes += num_bytes
                    return True
            if time.monotonic() >= deadline_s:
                return False
            self.poll(_POLL_S)

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes

    def _finish(self, answer: Any, outcome: HostPut | None) -> None:
        with self._lock:
            put = self._puts.pop(answer, None)
            if put is None:  # another thread was first
                return
            self._num_bytes -= put.num_bytes
        self.counters["put_lost" if outcome is None else f"put_{outcome.value}"] += 1
        self._done(put.key, outcome)


def _outcome(answer: Any) -> HostPut | None:
    try:
        outcome: HostPut = ray.get(answer, timeout=1.0)  # it is ready
    except RayError:
        return None
    return outcome
