"""Chunks on their way from an engine's process to its node's actor, bounded in bytes; nobody waits for the answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from mneme.cachetier.chunk.header import Chunk, ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.distributed.objects import Refs, put_runs, runs_of
from mneme.cachetier.node.saving import HostPut

_logger = logging.getLogger(__name__)

_MAX_AGE_S = 20.0  # of a put that is not answered
_POLL_S = 0.5


class PutAnswer(NamedTuple):
    """What a node's actor says of a chunk that was put."""

    outcome: HostPut
    has_parent: bool  # the chunk before is there
    epoch: int  # of the actor; another after it was made again, with an empty host tier


class _Put(NamedTuple):
    refs: Refs  # the objects live as long as these
    header: ChunkHeader
    num_bytes: int
    since_s: float


class PutsUnderWay:
    """`done` hears of each put once, on this object's thread: its header, and the answer; None: there is none."""

    def __init__(self, max_bytes: int, wait_s: float, done: Callable[[ChunkHeader, PutAnswer | None], None]) -> None:
        self._max_bytes, self._wait_s, self._done = max_bytes, wait_s, done
        self._changed = threading.Condition()
        self._puts: dict[Any, _Put] = {}  # by answer
        self._num_bytes = 0
        self._counters: Counter[str] = Counter()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="mneme-puts", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {"put_bytes_under_way": self._num_bytes, **self._counters}

    def put(self, node: Any, chunk: Chunk, lineage: Lineage) -> bool:
        """False if too much is under way for longer than a put may wait, or the store is full."""
        num_bytes = sum(layer.nbytes for layer in chunk.layers)
        if not self._reserve(num_bytes):
            return False
        answer = None
        try:
            refs = put_runs(runs_of(chunk.layers))
            answer = node.put.remote(chunk.header, refs, lineage)
        except (MemoryError, RayError):
            return False
        finally:
            if answer is None:
                self._release(num_bytes, "put_failed")
        with self._changed:
            self._puts[answer] = _Put(refs, chunk.header, num_bytes, time.monotonic())
            self._changed.notify_all()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Whether all that was under way when this was called was answered in time."""
        with self._changed:
            before = set(self._puts)
            return self._changed.wait_for(lambda: before.isdisjoint(self._puts), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Whether all that is under way was answered in time; the rest is let go."""
        with self._changed:
            is_empty = self._changed.wait_for(lambda: not self._num_bytes, timeout_s)
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(2 * _POLL_S)
        return is_empty

    def _reserve(self, num_bytes: int) -> bool:
        """Room for one more: there always is when nothing is under way."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes, self._wait_s
            )
            if self._is_closed or not has_room:
                self._counters["put_dropped"] += 1
                return False
            self._num_bytes += num_bytes
            return True

    def _release(self, num_bytes: int, counter: str) -> None:
        with self._changed:
            self._num_bytes -= num_bytes
            self._counters[counter] += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._puts or self._is_closed)
                answers = list(self._puts)
                if self._is_closed:
                    return
            try:
                self._look_at(answers)
            except Exception:  # the thread's edge
                _logger.exception("puts under way could not be looked at")
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _POLL_S)

    def _look_at(self, answers: list[Any]) -> None:
        ready, waiting = ray.wait(answers, timeout=_POLL_S)
        for answer in ready:
            self._finish(answer, _said(answer))
        oldest_s = time.monotonic() - _MAX_AGE_S
        for answer in waiting:
            if self._puts[answer].since_s < oldest_s:
                self._finish(answer, None)

    def _finish(self, answer: Any, said: PutAnswer | None) -> None:
        put = self._puts.pop(answer)
        try:
            self._done(put.header, said)
        finally:
            self._release(put.num_bytes, "put_lost" if said is None else f"put_{said.outcome.value}")


def _said(answer: Any) -> PutAnswer | None:
    try:
        said: PutAnswer = ray.get(answer, timeout=1.0)  # it is ready
    except RayError:
        return None
    return said
