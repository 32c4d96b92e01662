"""Chunks out of the pool and into the cache tier, beside the engine (AttentionStore 3.2.2).

The chunks that a step completes are copied layer by layer while it computes the layers above; what ends with a request
is copied after the step. A second thread makes chunks of the copies, with their checksums, and puts them into the
store. What is to be saved waits in a write buffer of bounded size; if that is full, chunks are not saved, and nobody
waits. Before pages get another owner, `before_reuse` waits until their copies are done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.header import U8Array, make_chunk
from mneme.cachetier.pages.streams import Event
from mneme.cachetier.store import ChunkStore
from mneme.kernels.page_table import IntArray
from mneme.replicas.connector.pages import ChunkPages, ChunkTokens, PageBatch
from mneme.replicas.connector.saves import SaveJob

log = logging.getLogger(__name__)

NoteSave = Callable[[int, float], object]  # bytes of a chunk that was put, and the seconds that it took

_CLOSE_S = 5.0  # how long a close waits for what is being saved


@dataclass(slots=True, eq=False)
class _Copy:
    """One chunk on its way out."""

    job: SaveJob
    tokens: ChunkTokens
    layers: U8Array  # [layers, layer_bytes]
    page_ids: frozenset[int]
    num_left: int  # layers that are still to be copied, and one more until it is confirmed; less if it is void
    is_void: bool = False
    seconds: float = 0.0  # that threads were at it


class StepSaves:
    """The chunks that one step completes. Wherever Ctrl-C interrupts it, `abandon` lets go of all."""

    def __init__(self, saver: ChunkSaver) -> None:
        self._saver = saver
        self._copies: list[_Copy] = []
        self._num_layers = 0  # that were handed over

    def add(self, jobs: Sequence[SaveJob]) -> None:
        """Before the first layer."""
        for job in jobs:
            self._saver.begin_copy(job, self._copies)

    def layer_done(self, layer: int) -> None:
        """The layer's KV is written, or issued; a step that is replayed as a graph does not say so.

        A layer that was handed over is not handed over again, whoever says so twice.
        """
        if layer >= self._num_layers:
            self._saver.copy_layer(self._copies, layer)
            self._num_layers = layer + 1

    def finish(self, unsound: Collection[object] = ()) -> None:
        """The step is over, and what went wrong in it is known; nothing of these sequences is kept."""
        for layer in range(self._num_layers, self._saver.num_layers):
            self.layer_done(layer)
        for copy in self._copies:
            copy.is_void |= copy.job.is_void or copy.job.sequence in unsound
        self._saver.confirm(self._copies)

    def abandon(self) -> None:
        """The step failed: nothing of it is kept. What was handed over already may be so again: it is void."""
        for copy in self._copies:
            copy.is_void = True
        self.finish()


@dataclass(slots=True)
class _Task:
    """A layer of some chunks to be copied, or chunks to be put."""

    copies: list[_Copy]
    layer: int = 0
    after: Event | None = None


@dataclass(slots=True)
class SaveCounts:
    """Since the start."""

    chunks: int = 0  # put into the store
    bytes: int = 0
    refused: int = 0  # by the store
    dropped: int = 0  # as the write buffer was full
    void: int = 0  # the step went wrong
    failed: int = 0


@dataclass(slots=True)
class _Shared:
    """What the threads know: not the saver, so that it ends with its last user."""

    store: ChunkStore
    fingerprint: ModelFingerprint
    pages: ChunkPages
    note_save: NoteSave
    condition: threading.Condition = field(default_factory=threading.Condition)
    counts: SaveCounts = field(default_factory=SaveCounts)
    under_way: set[_Copy] = field(default_factory=set)  # the write buffer
    reading: set[_Copy] = field(default_factory=set)  # of those: they are not done with their pages
    to_copy: queue.SimpleQueue[_Task | None] = field(default_factory=queue.SimpleQueue)
    to_put: queue.SimpleQueue[_Copy | None] = field(default_factory=queue.SimpleQueue)


class ChunkSaver:
    """The engine's thread calls it."""

    def __init__(
        self,
        store: ChunkStore,
        fingerprint: ModelFingerprint,
        pages: ChunkPages,
        *,
        write_buffer_bytes: int,
        note_save: NoteSave,
    ) -> None:
        self.num_layers = fingerprint.layout.num_layers
        self._layout = fingerprint.layout
        self._max_bytes = write_buffer_bytes
        self._shared = _Shared(store, fingerprint, pages, note_save)
        self._threads = [
            threading.Thread(target=work, args=(self._shared,), name=name, daemon=True)
            for work, name in ((_copy_chunks, "kv-chunk-copies"), (_put_chunks, "kv-chunk-puts"))
        ]
        for thread in self._threads:
            thread.start()
        self._stop: Callable[[], object] = weakref.finalize(self, self._shared.to_copy.put, None)

    @property
    def counts(self) -> SaveCounts:
        return self._shared.counts

    @property
    def num_bytes(self) -> int:
        """In the write buffer."""
        with self._shared.condition:
            return sum(copy.layers.nbytes for copy in self._shared.under_way)

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """Chunks that are complete."""
        saves = StepSaves(self)
        try:
            saves.add(jobs)
            saves.finish()
        except BaseException:
            saves.abandon()
            raise

    def begin_copy(self, job: SaveJob, copies: list[_Copy]) -> None:
        """One more of the copies, if there is room in the write buffer."""
        shared, layers = self._shared, self._buffer(self._layout.layer_bytes(len(job.token_ids)))
        with shared.condition:
            if layers is None or self.num_bytes + layers.nbytes > self._max_bytes:
                shared.counts.dropped += 1
                return
            page_ids = frozenset(page_id for page_id, *_ in job.runs)
            tokens = ChunkTokens(len(job.token_ids), np.array(job.runs, np.int64))
            copy = _Copy(job, tokens, layers, page_ids, self.num_layers + 1)
            copies.append(copy)  # first: what is not among them is let go of by nobody
            shared.under_way.add(copy)
            shared.reading.add(copy)

    def copy_layer(self, copies: list[_Copy], layer: int) -> None:
        if copies:
            self._shared.to_copy.put(_Task(copies, layer, self._shared.pages.issued()))

    def confirm(self, copies: list[_Copy]) -> None:
        """What these hold is sound, but for those that are void."""
        for copy in copies:
            _layer_done(self._shared, copy)

    def before_reuse(self, device_pages: IntArray) -> None:
        """Return when no copy reads these pages any more."""
        shared = self._shared
        if not shared.reading:
            return
        with shared.condition:
            pages = set(device_pages.tolist())
            shared.condition.wait_for(lambda: all(pages.isdisjoint(copy.page_ids) for copy in shared.reading))

    def settle(self, timeout_s: float) -> bool:
        """Wait until what is to be saved now is in the store, or will not be; False if that took too long.

        From any thread.
        """
        began_s, shared = time.monotonic(), self._shared
        with shared.condition:
            before = shared.under_way.copy()
            is_put = shared.condition.wait_for(lambda: before.isdisjoint(shared.under_way), timeout_s)
        return is_put and shared.store.settle(max(timeout_s - (time.monotonic() - began_s), 0.0))

    def close(self) -> None:
        """Put what was confirmed, within a bounded time, and end the threads. Called twice it does nothing."""
        self._stop()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _buffer(self, num_layer_bytes: int) -> U8Array | None:
        try:
            return np.empty((self.num_layers, num_layer_bytes), np.uint8)
        except MemoryError:  # what is not saved is computed again
            return None


def _copy_chunks(shared: _Shared) -> None:
    batches: Sequence[PageBatch] = ()  # of the step whose layers are being copied
    while (task := shared.to_copy.get()) is not None:
        try:
            if not task.layer:
                batches = shared.pages.batches([copy.tokens for copy in task.copies])
            for batch in batches:
                _copy_layer(batch, task)
        except Exception:  # the edge of a thread: these chunks are not saved, and their pages are free again
            log.exception("chunks could not be copied")
            for copy in task.copies:
                copy.is_void = True
        for copy in task.copies:
            if task.layer == len(copy.layers) - 1:
                batches = ()
                _release_pages(shared, copy)
            _layer_done(shared, copy)
            del copy
        del task
    shared.to_put.put(None)


def _copy_layer(batch: PageBatch, task: _Task) -> None:
    copies, started_s = [task.copies[index] for index in batch.chunks], time.monotonic()
    if all(copy.is_void for copy in copies):
        return
    batch.gather(task.layer, [copy.layers[task.layer] for copy in copies], task.after)
    for copy in copies:
        copy.seconds += (time.monotonic() - started_s) / len(copies)


def _release_pages(shared: _Shared, copy: _Copy) -> None:
    with shared.condition:
        shared.reading.discard(copy)
        shared.condition.notify_all()


def _layer_done(shared: _Shared, copy: _Copy) -> None:
    with shared.condition:
        copy.num_left -= 1
        is_whole = not copy.num_left
    if is_whole:
        shared.to_put.put(copy)


def _put_chunks(shared: _Shared) -> None:
    while (copy := shared.to_put.get()) is not None:
        num_bytes = copy.layers.nbytes
        try:
            outcome = _put(shared, copy)
        except Exception:  # the edge of a thread: a chunk that is not saved is computed again
            log.exception("a chunk could not be put into the cache tier")
            outcome = "failed"
        with shared.condition:
            setattr(shared.counts, outcome, getattr(shared.counts, outcome) + 1)
            shared.counts.bytes += num_bytes if outcome == "chunks" else 0
            shared.under_way.discard(copy)
            shared.condition.notify_all()
        del copy


def _put(shared: _Shared, copy: _Copy) -> str:
    """Which count it belongs to."""
    if copy.is_void:
        return "void"
    job, started_s = copy.job, time.monotonic()
    positions = np.arange(job.start, job.start + len(job.token_ids), dtype=np.int32)
    chunk = make_chunk(job.lineage, shared.fingerprint, job.parent, job.token_ids, positions, list(copy.layers))
    if not shared.store.put(chunk, job.lineage):
        return "refused"
    shared.note_save(copy.layers.nbytes, copy.seconds + time.monotonic() - started_s)
    return "chunks"
