"""Chunks into a node: taken into memory if they are worth it, written to the disk behind that.

Loads go the other way (`prefetch.py`). What is on its way to the disk stays in memory until it is there; what is
deleted or superseded meanwhile does not stay on the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from mneme.cachetier.chunk.header import Chunk, ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.names import HostPut, Miss
from mneme.cachetier.node.disk import DiskTier, Put
from mneme.cachetier.node.index import BLOCK_BYTES, blocks_of
from mneme.cachetier.node.memory import Held, chunk_bytes
from mneme.cachetier.node.node_tiers import NodeTiers
from mneme.primitives import Worker

logger = logging.getLogger(__name__)

TAIL_DELAY_S = 2.0
_MIN_CHUNKS = 2  # of its size, that may wait whatever the bound: with fewer the disk would never get any
ROOM_WAIT_S = 3.0  # by whoever has time for it: longer than a disk that works takes for a chunk
_YIELD_S = 0.005
_MAX_YIELDS = 50  # before a chunk: a quarter of a second, or a node that always reads would never save
_WRITE_SHARE = 4  # of the host tier, as a divisor, may wait to be written
_MAX_RETRIED = 64  # chunks at a time
_MAX_LATE = 4096  # chunks in memory that are to be written when that is possible


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
        """Count bytes in whole blocks, as the host tier does."""
        return blocks_of(chunk_bytes(self.header)) * BLOCK_BYTES


class ChunkWriter:
    """Takes chunks into memory and queues them for the disk; `queue` is None without one."""

    def __init__(
        self,
        tiers: NodeTiers,
        host_bytes: int,
        is_loading: Callable[[], bool],
        tail_delay_s: float,
        room_wait_s: float = 0.0,
    ) -> None:
        """`room_wait_s`: how long a put waits for the disk, so that a burst is not lost; 0: no thread writes."""
        self._room_wait_s = room_wait_s
        self._tiers, self._host, self._lock = tiers, tiers.host, tiers.lock
        self._failed: dict[bytes, None] = {}  # in memory, and not on the disk by a fault
        self._late: dict[bytes, None] = {}  # likewise, as the queue was full
        self._again: set[bytes] = set()  # of both, those that are in the queue now
        self._on_way: set[bytes] = set()  # to the disk: in the queue, or about to be
        self.queue: WriteBehind | None = None
        if tiers.disk is not None:
            self.queue = WriteBehind(
                self._write,
                self._written,
                max_bytes=host_bytes // _WRITE_SHARE,
                clock=tiers.clock,
                is_loading=is_loading,
                tail_delay_s=tail_delay_s,
            )

    def put(self, header: ChunkHeader, payload: object, lineage: Lineage | None) -> HostPut:
        """See `NodeCache.put`."""
        outcome = self._put(header, payload, lineage)
        with self._lock:
            if outcome is HostPut.REFUSED:
                self._tiers.index.mark_gone(header.key)
            self._host.counters[outcome.value] += 1
            self._host.counters["put_bytes"] += chunk_bytes(header)
        self._tiers.drop_gone()
        return outcome

    def cancel(self, keys: Iterable[bytes]) -> None:
        """Take these out of the queue of writes."""
        if self.queue is not None:
            self.queue.cancel(keys)

    def write_again(self) -> None:
        """Queue some chunks that a fault has kept from the disk; to be called now and then."""
        with self._lock:
            keys = list(islice(self._failed, _MAX_RETRIED))
            again = [found for key in keys if (found := self._queue_again(key)) is not None]
            for key in keys:
                del self._failed[key]
        for header, held in again:
            self._submit(header, held, is_passing=False)

    def _queue_again(self, key: bytes) -> tuple[ChunkHeader, Held] | None:
        """Under the lock: a chunk that memory still has is to be written after all, and held until then."""
        entry = self._host.get(key)
        if entry is None or entry.header is None:
            return None
        self._tiers.index.hold(key)
        self._again.add(key)
        self._on_way.add(key)
        return entry.header, entry.held

    def _put(self, header: ChunkHeader, payload: object, lineage: Lineage | None) -> HostPut:
        if self._tiers.disk is not None and header.parent in self._tiers.disk:
            return self._put_held(header, payload, lineage)  # what went before it is found there
        with self._tiers.index.holding(header.parent):
            return self._put_held(header, payload, lineage)

    def _put_held(self, header: ChunkHeader, payload: object, lineage: Lineage | None) -> HostPut:
        """Put a chunk while its parent is held: what goes before a chunk is not evicted for it."""
        is_to_write = self._tiers.disk is not None and header.key not in self._tiers.disk
        until_s = time.monotonic() + self._room_wait_s
        while True:
            with self._lock:
                if self._is_kept(header.key):
                    return HostPut.KEPT
                if self._is_orphan(header):
                    self._host.counters["orphan"] += 1
                    return HostPut.REFUSED
                is_admitted = self._host.admits_chunk(header) and self._host.make_room(header)
                if is_admitted or (is_to_write and self._host.reserve_passage(header)):
                    if is_to_write:
                        self._on_way.add(header.key)
                    break
            wait_s = until_s - time.monotonic() if is_to_write else 0.0  # all of memory may wait for the disk
            if self.queue is None or wait_s <= 0 or not self.queue.await_one(wait_s):
                return HostPut.REFUSED
        self._tiers.drop_gone()  # the bytes of what goes for it are free before its own come
        held = self._taken(header, payload, is_passing=not is_admitted)
        if held is None:
            return HostPut.REFUSED
        if is_admitted:
            self._arrive(header, held, lineage, is_to_write=is_to_write)
        is_queued = is_to_write and self._submit(
            header, held, lineage, is_passing=not is_admitted, wait_s=self._room_wait_s
        )
        if is_admitted:
            return HostPut.TAKEN
        return HostPut.TO_DISK if is_queued else HostPut.REFUSED

    def _is_kept(self, key: bytes) -> bool:
        entry = self._host.get(key)
        if entry is not None:  # whoever computed it anew would have used it
            self._tiers.index.use(entry)
        return self._host.holds(key)

    def _is_orphan(self, header: ChunkHeader) -> bool:
        """Return whether its parent is known to be gone, so that nobody would find it."""
        parent = header.parent
        is_here = self._host.holds(parent) or (self._tiers.disk is not None and parent in self._tiers.disk)
        return not is_here and self._tiers.index.was_here(parent)

    def _taken(self, header: ChunkHeader, payload: object, *, is_passing: bool) -> Held | None:
        """Take the bytes over; if that fails, give the reserved room back."""
        held = None
        try:
            held = self._tiers.memory.accept(payload)
        except MemoryError:
            with self._lock:
                self._host.counters["memory_refused"] += 1
        finally:
            if held is None:
                with self._lock:
                    self._on_way.discard(header.key)
                    if is_passing:
                        self._host.passed(header.key)
                    else:
                        self._host.cancel(header.key)
        return held

    def _arrive(self, header: ChunkHeader, held: Held, lineage: Lineage | None, *, is_to_write: bool) -> None:
        with self._lock:
            if is_to_write:
                self._tiers.index.hold(header.key)  # first: room that is made for the free share must not be this
            superseded = self._tiers.arrive(header, held, lineage)
        self.cancel(superseded)

    def _submit(
        self,
        header: ChunkHeader,
        held: Held,
        lineage: Lineage | None = None,
        *,
        is_passing: bool,
        wait_s: float = 0.0,
    ) -> bool:
        assert self.queue is not None
        is_queued = header.parent not in self._late and self.queue.submit(
            header, held, is_passing=is_passing, lineage=lineage, wait_s=wait_s
        )
        if not is_queued:
            self._try_later(self._late, header.key)
            self._release(Pending(header, held, 0.0, is_passing=is_passing))
        return is_queued

    def _refill(self) -> None:
        """Queue the first of the late chunks that memory still has, if there is room."""
        assert self.queue is not None
        with self._lock:
            while self._late and next(iter(self._late)) not in self._host:
                del self._late[next(iter(self._late))]
            found = self._queue_again(next(iter(self._late), b""))
        if found is None:
            return
        header, held = found
        if self.queue.submit(header, held):
            with self._lock:
                self._late.pop(header.key, None)
        else:
            self._release(Pending(header, held, 0.0, is_passing=False))

    def _try_later(self, late: dict[bytes, None], key: bytes) -> None:
        with self._lock:
            if key in self._host:
                late[key] = None
            if len(late) > _MAX_LATE:
                del late[next(iter(late))]

    def _write(self, pending: Pending) -> None:
        """Write one chunk, on the queue's thread."""
        disk, key = self._tiers.disk, pending.header.key
        assert disk is not None
        if not self._is_wanted(key) or self._is_cut_off(pending.header, disk):
            return
        layers = self._tiers.memory.layers(pending.held)
        if isinstance(layers, Miss):
            with self._lock:
                self._host.missed(key, layers)
            return
        outcome = disk.put(Chunk(pending.header, layers), pending.lineage)
        if outcome not in (Put.WRITTEN, Put.KEPT):
            self._not_written(key, "not_written", is_to_retry=outcome is not Put.NO_ROOM)
        if not self._is_wanted(key):
            disk.delete([key])
        with self._lock:
            self._host.counters["written_late"] += outcome is Put.WRITTEN and key in self._again
        self._tiers.drop_gone()

    def _is_cut_off(self, header: ChunkHeader, disk: DiskTier) -> bool:
        """Return whether its parent is known, and neither on the disk nor on its way there.

        Nobody would find the chunk there after a restart. Chunks of a chain may come out of order.
        """
        parent = header.parent
        if parent in disk:
            return False
        with self._lock:
            is_known = self._host.holds(parent) or self._tiers.index.was_here(parent)
            is_cut_off = is_known and parent not in self._on_way
            is_to_retry = parent in self._failed or parent in self._late
        if is_cut_off:
            self._not_written(header.key, "not_written_orphan", is_to_retry=is_to_retry)
        return is_cut_off

    def _not_written(self, key: bytes, counter: str, *, is_to_retry: bool) -> None:
        """Note that a chunk is not on the disk: what follows it is not written before it is."""
        with self._lock:
            self._tiers.index.mark_gone(key)
            self._host.counters[counter] += 1
        if is_to_retry:
            self._try_later(self._failed, key)

    def _is_wanted(self, key: bytes) -> bool:
        """Return whether it was neither deleted nor superseded; it cannot have been evicted."""
        with self._lock:
            return self._host.holds(key)

    def _written(self, pending: Pending) -> None:
        """A chunk has left the queue: it may be evicted, and another may be queued."""
        self._release(pending)
        self._refill()

    def _release(self, pending: Pending) -> None:
        """Allow the eviction of a chunk that was written, or will not be for now."""
        key = pending.header.key
        with self._lock:
            self._again.discard(key)
            self._on_way.discard(key)
            if pending.is_passing:
                self._host.passed(key)
            else:
                self._tiers.index.release(key)
        if pending.is_passing:
            self._tiers.memory.drop(pending.held)


class WriteBehind:
    """Queues chunks for the disk: one thread, a bound of bytes, loading before saving.

    Each chunk that was taken is written or cancelled; `done` hears of it once, outside of the lock. A short chunk
    waits: while its sequence grows a longer one replaces it within seconds, and what was replaced before it was
    written costs nothing.
    """

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
        self._is_closed = False
        self._is_stalled = False  # somebody waited for room in vain, and nothing was written since
        self._counters: Counter[str] = Counter()
        self._thread = Worker("mneme-write-behind", self.step, lambda: self._count("error"))

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
        """Return whether it was taken; a queue that is full for `wait_s` takes no more.

        While the disk writes nothing at all only the first waits.
        """
        is_tail = header.num_tokens < header.layout.chunk_tokens
        due_s = self._clock() + (self._tail_delay_s if is_tail else 0.0)
        pending = Pending(header, held, due_s, is_passing=is_passing, lineage=lineage)
        with self._changed:
            if wait_s and not self._is_stalled and not self._has_room(pending):
                self._is_stalled = not self._in_a_hurry(lambda: self._has_room(pending), wait_s)
            if self._is_closed or header.key in self._whole or header.key in self._tails:
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
        """Return whether a chunk of the queue ended in this time: memory that it held can go for another."""
        with self._changed:
            if self._is_stalled or not self._num_bytes:
                return False
            before = self._num_ended
            has_ended = self._in_a_hurry(lambda: self._num_ended > before, timeout_s)
            self._is_stalled = not has_ended
            return has_ended

    def cancel(self, keys: Iterable[bytes]) -> int:
        """Take these out of the queue; returns how many. One that is being written is not stopped."""
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
            self._is_closed = True  # what ends below makes room for nothing more
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
        """Warn of the first chunk that is dropped. Under the lock."""
        if not self._counters["dropped"]:
            logger.warning("write-behind: the queue is full (%d bytes), chunks are not written", self._max_bytes)

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
