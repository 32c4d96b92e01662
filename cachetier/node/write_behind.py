"""Chunks on their way from a node's memory to its disk: one thread, a bound of bytes, loading before saving.

A short chunk waits: as long as its sequence grows it is replaced by a longer one within seconds, and what was replaced
before it was written costs nothing. So tails cost little of the disk's writes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.node.background import Background
from mneme.cachetier.node.host_tier import chunk_bytes
from mneme.cachetier.node.index import BLOCK_BYTES, blocks_of
from mneme.cachetier.node.memory import Held

_logger = logging.getLogger(__name__)

TAIL_DELAY_S = 2.0
_MIN_CHUNKS = 2  # of its size, that may wait whatever the bound: with fewer the disk would never get any
ROOM_WAIT_S = 3.0  # by whoever has time for it: longer than a disk that works takes for a chunk
_YIELD_S = 0.005
_MAX_YIELDS = 50  # before a chunk: a quarter of a second, or a node that always reads would never save


class Pending:
    """A chunk that is to be written."""

    __slots__ = ("due_s", "header", "held", "is_passing", "lineage")

    def __init__(
        self, header: ChunkHeader, held: Held, due_s: float, *, is_passing: bool, lineage: Lineage | None = None
    ) -> None:
        self.header, self.held, self.due_s, self.lineage = header, held, due_s, lineage
        self.is_passing = is_passing  # it is not in the host tier

    @property
    def num_bytes(self) -> int:
        """As the host tier counts them."""
        return blocks_of(chunk_bytes(self.header)) * BLOCK_BYTES


class WriteBehind:
    """Each chunk that was taken is written, or cancelled; `done` hears of it once, outside of the lock."""

    def __init__(
        self,
        write: Callable[[Pending], None],
        done: Callable[[Pending], None],
        *,
        max_bytes: int,
        clock: Callable[[], float],
        is_loading: Callable[[], bool] = lambda: False,
        tail_delay_s: float = TAIL_DELAY_S,
    ) -> None:
        self._write, self._done, self._clock, self._is_loading = write, done, clock, is_loading
        self._max_bytes, self._tail_delay_s = max_bytes, tail_delay_s
        self._changed = threading.Condition()
        self._whole: dict[bytes, Pending] = {}
        self._tails: dict[bytes, Pending] = {}
        self._num_bytes = 0
        self._num_finishing = 0
        self._num_hurries = 0
        self._num_ended = 0  # chunks that were written or cancelled
        self._num_yields = 0
        self._is_stalled = False  # somebody waited for room in vain, and nothing was written since
        self._counters: Counter[str] = Counter()
        self._thread = Background("mneme-write-behind", self.step, lambda: self._count("error"))

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        header: ChunkHeader,
        held: Held,
        *,
        is_passing: bool = False,
        lineage: Lineage | None = None,
        wait_s: float = 0.0,
    ) -> bool:
        """Whether it was taken; a queue that is full for `wait_s` takes no more.

        While the disk writes nothing at all only the first waits.
        """
        is_tail = header.num_tokens < header.layout.chunk_tokens
        due_s = self._clock() + (self._tail_delay_s if is_tail else 0.0)
        pending = Pending(header, held, due_s, is_passing=is_passing, lineage=lineage)
        with self._changed:
            if wait_s and not self._is_stalled and not self._has_room(pending):
                self._is_stalled = not self._in_a_hurry(lambda: self._has_room(pending), wait_s)
            if header.key in self._whole or header.key in self._tails:
                return False
            if not self._has_room(pending):
                self._warn_of_drops()
                self._counters["dropped"] += 1
                self._counters["dropped_bytes"] += pending.num_bytes
                return False
            (self._tails if is_tail else self._whole)[header.key] = pending
            self._num_bytes += pending.num_bytes
        self._thread.wake()
        return True

    def await_one(self, timeout_s: float) -> bool:
        """Whether a chunk of the queue ended in this time: memory that it held can go for another."""
        with self._changed:
            if self._is_stalled or not self._num_bytes:
                return False
            before = self._num_ended
            has_ended = self._in_a_hurry(lambda: self._num_ended > before, timeout_s)
            self._is_stalled = not has_ended
            return has_ended

    def cancel(self, keys: Iterable[bytes]) -> int:
        """These are not wanted any more; how many are not written. One that is being written is."""
        with self._changed:
            found = [p for key in keys if (p := self._whole.pop(key, None) or self._tails.pop(key, None)) is not None]
            self._counters["cancelled"] += len(found)
            self._counters["cancelled_bytes"] += sum(pending.num_bytes for pending in found)
        for pending in found:
            self._finish(pending)
        return len(found)

    def flush(self, timeout_s: float) -> bool:
        """Write all that waits, tails too; False if that took too long."""
        with self._changed:
            return self._in_a_hurry(lambda: not self._num_bytes and not self._num_finishing, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End after the chunk that is being written; what waits is not written."""
        is_ended = self._thread.close(timeout_s)
        with self._changed:
            waiting = [*self._whole, *self._tails]
        self.cancel(waiting)
        return is_ended

    def stats(self) -> dict[str, int]:
        with self._changed:
            counts = {"chunks": len(self._whole) + len(self._tails), "bytes": self._num_bytes}
            return counts | {"capacity_bytes": self._max_bytes} | dict(self._counters)

    def step(self) -> float | None:
        """Write the chunk that is due first; else, for how many seconds there is nothing to do."""
        if self._yields():
            return _YIELD_S
        with self._changed:
            pending = self._first()
            if pending is None:
                return None
            wait_s = pending.due_s - self._clock()
            if wait_s > 0 and not self._num_hurries:
                return wait_s
            (self._whole if pending.header.key in self._whole else self._tails).pop(pending.header.key)
        try:
            self._write(pending)
            self._is_stalled = False
        finally:
            self._finish(pending)
        return 0.0

    def _in_a_hurry(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Under the lock: wait for this while tails are written without their delay; False if it took too long."""
        self._num_hurries += 1
        self._thread.wake()
        try:
            return self._changed.wait_for(is_done, timeout_s)
        finally:
            self._num_hurries -= 1

    def _has_room(self, pending: Pending) -> bool:
        return self._num_bytes + pending.num_bytes <= max(self._max_bytes, _MIN_CHUNKS * pending.num_bytes)

    def _warn_of_drops(self) -> None:
        """Under the lock; once."""
        if not self._counters["dropped"]:
            _logger.warning("write-behind: the queue is full (%d bytes), chunks are not written", self._max_bytes)

    def _first(self) -> Pending | None:
        heads = [next(iter(queue.values())) for queue in (self._whole, self._tails) if queue]
        return min(heads, key=lambda pending: pending.due_s, default=None)

    def _yields(self) -> bool:
        """Loading goes before saving (Pensieve 5.1)."""
        self._num_yields = self._num_yields + 1 if self._is_loading() and self._num_yields < _MAX_YIELDS else 0
        return self._num_yields > 0

    def _finish(self, pending: Pending) -> None:
        with self._changed:
            self._num_bytes -= pending.num_bytes
            self._num_finishing += 1
            self._changed.notify_all()
        try:
            self._done(pending)  # which may submit another
        finally:
            with self._changed:
                self._num_finishing -= 1
                self._num_ended += 1
                self._changed.notify_all()

    def _count(self, name: str) -> None:
        with self._changed:
            self._counters[name] += 1
