"""Chunks of KV out of an engine into the cache tier: which ones, and how (AttentionStore 3.2.2).

*Which*: full chunks as steps complete them, tails as requests end. What a truncated or blended session sees goes there
from its first token on, some chunks a step, under keys that are its alone. A chunk that the store is known to have is
not saved again.

*How*: the chunks that a step completes are copied out of a device behind all that was launched of it, where steps are
launched ahead, else layer by layer while it computes the layers above; on a CPU all layers at once when it ends; what
ends with a request is copied after the step. A second thread makes chunks
of the copies, with their checksums, and puts them into the store. What is to be saved waits in a write buffer of
bounded size; if that is full, chunks are not saved, and nobody waits. Before pages get another owner, `before_reuse`
waits until their copies are done.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain as chained
from typing import TYPE_CHECKING

import numpy as np

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.header import I32Array, U8Array, make_chunk
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage, session_lineage
from mneme.cachetier.config import WRITE_BUFFER_BYTES
from mneme.cachetier.store import ChunkStore
from mneme.kernels.page_table import IntArray
from mneme.primitives import Bounded, Workers
from mneme.replicas.connector.chunk_pages import ChunkPages, ChunkTokens, PageBatch
from mneme.replicas.forest.paths import Path, references_of
from mneme.replicas.forest.tree import DEVICE
from mneme.replicas.sequence import ChunkChain, StepRows
from mneme.replicas.sequence import Sequence as RunningSequence

if TYPE_CHECKING:
    from mneme.cachetier.host_pages.streams import Event

logger = logging.getLogger(__name__)

_MAX_LINEAGES = 1024  # of tenants that were seen last
MIN_TAIL_TOKENS = 16  # shorter tails cost more to find than to compute
_MAX_OWN_CHUNKS = 16  # of a truncated or blended session that a step saves: more would fill the write buffer
_CLOSE_S = 5.0  # how long a close waits for what is being saved

TokenRun = tuple[int, int, int, int]  # page id, first offset, number of tokens, first token in the chunk
NoteSave = Callable[[int, float], object]  # bytes of a chunk that was put, and the seconds that it took


@dataclass(slots=True, eq=False, kw_only=True)
class SaveJob:
    """One chunk to be copied out of the pool, and where its tokens lie."""

    sequence: RunningSequence
    lineage: Lineage
    parent: bytes
    start: int  # position of the first token
    token_ids: list[int]
    rotated: I32Array  # where each key is
    runs: list[TokenRun]
    num_put_back: int  # of the sequence, when its pages were looked up

    @property
    def is_void(self) -> bool:
        """Return whether nobody may have it: its pages hold other KV than was to be computed, as the sequence went back
        to the queue for that, or its session was deleted meanwhile."""
        return self.sequence.num_put_back != self.num_put_back or self.sequence.chain is None

    def put_off(self, chunk_tokens: int) -> None:
        """Let a later step try again, where the chunks behind are of no use without it: nobody can compute it anew."""
        chain = self.sequence.chain
        if chain is not None and chain.event:
            chain.num_saved = min(chain.num_saved, self.start // chunk_tokens)


class SavePolicy:
    """Chooses what to save from what is on sequences' paths. Policy only: no tensors. The engine's thread calls it."""

    def __init__(self, store: ChunkStore, fingerprint: ModelFingerprint, page_size: int) -> None:
        self.fingerprint = fingerprint
        self._page_size = page_size
        self._store = store
        self._chunk_tokens = fingerprint.layout.chunk_tokens
        self._lineages = Bounded[str, Lineage](_MAX_LINEAGES)

    def lineage(self, salt: str) -> Lineage:
        """Return the lineage of a tenant's exact KV."""
        lineage = self._lineages[salt] = self._lineages.get(salt) or prefix_lineage(self.fingerprint, salt)
        return lineage

    def chain(self, sequence: RunningSequence, event: bytes = b"") -> ChunkChain:
        """Begin the chain of a sequence: of exact KV, or of what its session has computed since an event."""
        salt, session_id = sequence.request.salt, sequence.request.session_id
        if event and session_id is not None:
            return ChunkChain(session_lineage(self.fingerprint, salt, session_id, event), event=event)
        return ChunkChain(self.lineage(salt))

    def of_step(self, batch: Iterable[StepRows]) -> list[SaveJob]:
        """Return the full chunks that a step completes; its rows are scheduled and not computed yet."""
        jobs: list[SaveJob] = []
        for part in batch:
            chain, path = self._chain_of(part.sequence), part.sequence.path
            if chain is None or path is None or path.num_tokens // self._chunk_tokens <= chain.num_saved:
                continue
            # Rows of documents leave a step between layers, behind which their KV is another.
            if not path.root.is_blend or part.spans[0][0] >= path.root.start:
                jobs += self._full(part.sequence, chain, path, _MAX_OWN_CHUNKS if chain.event else None)
        return jobs

    def of_end(self, sequence: RunningSequence) -> list[SaveJob]:
        """Return what is left to save of a sequence that ends, its tail too."""
        chain, path = self._chain_of(sequence), sequence.path
        if chain is None or path is None:
            return []
        end = min(path.num_tokens, len(sequence.context) - 1)  # its last row may be under way: nobody knows it is sound
        jobs = self._full(sequence, chain, path, end=end)
        start = end - end % self._chunk_tokens
        if end - start >= MIN_TAIL_TOKENS:
            jobs += self._job(sequence, chain, path, start, end)
        return jobs

    def _chain_of(self, sequence: RunningSequence) -> ChunkChain | None:
        """Return the chain of what a sequence's path goes on from, begun anew where that is another."""
        chain, path = sequence.chain, sequence.path
        if chain is None or path is None or sequence.is_probing:
            return None
        if path.root.is_own and (sequence.request.session_id is None or sequence.request.choice_index):
            return None  # nobody goes on from it: a session does from its first choice
        if chain.event != path.root.event:
            chain = sequence.chain = self.chain(sequence, path.root.event)
        return chain

    def _full(
        self,
        sequence: RunningSequence,
        chain: ChunkChain,
        path: Path,
        limit: int | None = None,
        end: int | None = None,
    ) -> list[SaveJob]:
        jobs: list[SaveJob] = []
        size = self._chunk_tokens
        num_full = (path.num_tokens if end is None else end) // size
        while chain.num_saved < num_full and len(jobs) != limit:
            start = chain.num_saved * size
            chain.num_saved += 1
            jobs += self._job(sequence, chain, path, start, start + size)
        return jobs

    def _job(self, sequence: RunningSequence, chain: ChunkChain, path: Path, start: int, end: int) -> list[SaveJob]:
        """Return one job, or none; note the key of a full chunk."""
        ids, index = sequence.context[start:end], start // self._chunk_tokens
        parent = chain.keys[index - 1] if index else chain.lineage.root
        is_full = len(ids) == self._chunk_tokens
        key = chain.keys[index] if is_full and index < len(chain.keys) else chain.lineage.key(parent, ids)
        if is_full and index == len(chain.keys):
            chain.keys.append(key)
        if self._store.known([key]):
            return []
        found = token_runs(path, start, end, self._page_size)
        if found is None:
            return []
        runs, rotated = found
        return [
            SaveJob(
                sequence=sequence,
                lineage=chain.lineage,
                parent=parent,
                start=start,
                token_ids=ids,
                rotated=rotated,
                runs=runs,
                num_put_back=sequence.num_put_back,
            )
        ]


def token_runs(path: Path, start: int, end: int, page_size: int) -> tuple[list[TokenRun], I32Array] | None:
    """Find where the device has the tokens [start, end) of a path, and where their keys are rotated; None: not all."""
    if path.root.is_blend:
        return _blended_runs(path, start, end, page_size)
    kept, runs, positions, position = path.root.kept, list[TokenRun](), list[range](), start

    def first(index: int) -> int:
        """Return the position of a page's first token."""
        return kept[index].start + kept[index].delta if index < len(kept) else path.pages[index].start

    index = bisect_right(range(len(path.pages)), start, key=first) - 1
    while position < end:
        page, delta = path.pages[index], kept[index].delta if index < len(kept) else 0
        index += 1
        count = min(first(index) if index < len(path.pages) else end, end) - position
        page_id, rotated = page.ids[DEVICE], position - delta
        if page_id is None or page.start + page.filled[DEVICE] < rotated + count or count <= 0:
            return None
        runs.append((page_id, rotated % page_size, count, position - start))
        positions.append(range(rotated, rotated + count))
        position += count
    return runs, np.array([*chained.from_iterable(positions)], np.int32)


def _blended_runs(path: Path, start: int, end: int, page_size: int) -> tuple[list[TokenRun], I32Array] | None:
    """Find the same where a page's tokens stand anywhere, and documents' are covered by private ones."""
    places: dict[int, tuple[int, int, int]] = {}  # by position: page id, offset, where the key is rotated
    for page, first, last, delta, _, hidden in references_of(path):
        page_id, own = page.ids[DEVICE], page.positions
        positions = range(first, last) if own is None else own[first - page.start : last - page.start]
        if first == last or positions[0] + delta >= end or positions[-1] + delta < start:  # they are in order
            continue
        for place, rotated in enumerate(positions, first):
            if not start <= rotated + delta < end or hidden >> place % page_size & 1:
                continue
            if page_id is None or place >= page.start + page.filled[DEVICE]:
                return None
            places[rotated + delta] = page_id, place % page_size, rotated
    if len(places) < end - start:
        return None
    runs: list[TokenRun] = []
    for position in range(start, end):
        page_id, offset, _ = places[position]
        before = runs[-1] if runs else (page_id, offset, 0, 0)
        if runs and (page_id, offset) == (before[0], before[1] + before[2]):
            runs[-1] = before[0], before[1], before[2] + 1, before[3]
        else:
            runs.append((page_id, offset, 1, position - start))
    return runs, np.array([places[position][2] for position in range(start, end)], np.int32)


@dataclass(slots=True, eq=False)
class _Copy:
    """Tracks one chunk on its way out."""

    job: SaveJob
    tokens: ChunkTokens
    layers: U8Array  # [layers, layer_bytes]
    page_ids: frozenset[int]
    num_left: int  # layers that are still to be copied, and one more until it is confirmed; below 0 if it is void
    is_void: bool = False
    seconds: float = 0.0  # that threads were at it


@dataclass(slots=True)
class SaveCounts:
    """Counts chunks by outcome, since the start."""

    chunks: int = 0  # put into the store
    bytes: int = 0
    refused: int = 0  # by the store
    dropped: int = 0  # as the write buffer was full
    void: int = 0  # the step went wrong
    failed: int = 0


@dataclass(slots=True)
class _Shared:
    """Holds what the threads know: not the saver, so that they end with its last user."""

    store: ChunkStore
    fingerprint: ModelFingerprint
    pages: ChunkPages
    learn_save: NoteSave
    condition: threading.Condition = field(default_factory=threading.Condition)
    counts: SaveCounts = field(default_factory=SaveCounts)
    under_way: set[_Copy] = field(default_factory=set)  # the write buffer
    reading: set[_Copy] = field(default_factory=set)  # of those: they are not done with their pages
    batches: Sequence[PageBatch] = ()  # of the step whose layers are being copied
    copying: Workers = field(default_factory=lambda: Workers("kv-chunk-copies", 1))
    putting: Workers = field(default_factory=lambda: Workers("kv-chunk-puts", 1))


class ChunkSaver:
    """Copies chunks out of a device pool and puts them into the store; the engine's thread calls it."""

    def __init__(
        self,
        store: ChunkStore,
        fingerprint: ModelFingerprint,
        pages: ChunkPages,
        *,
        learn_save: NoteSave,
    ) -> None:
        self._layout, self._num_layers = fingerprint.layout, fingerprint.layout.num_layers
        self.max_bytes = WRITE_BUFFER_BYTES
        self._shared = _Shared(store, fingerprint, pages, learn_save)
        self._copies: list[_Copy] = []  # of the step that has begun
        self._num_handed_over = 0  # of its layers

    @property
    def counts(self) -> SaveCounts:
        return self._shared.counts

    @property
    def num_bytes(self) -> int:
        """Bytes in the write buffer."""
        with self._shared.condition:
            return sum(copy.layers.nbytes for copy in self._shared.under_way)

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """Save chunks that are complete, beside those of a step that may be under way."""
        of_step = self._copies, self._num_handed_over
        try:
            self._copies = []
            self.begin(jobs)
            self.end()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._copies, self._num_handed_over = of_step

    def begin(self, jobs: Sequence[SaveJob]) -> None:
        """Prepare to copy the chunks that the next step completes, as far as the write buffer has room.

        Wherever Ctrl-C interrupts a step, `abandon` releases all of its pages.
        """
        self.abandon()
        self._num_handed_over = 0
        for job in jobs:
            self._begin_copy(job)

    def layer_done(self, layer: int) -> None:
        """Copy a layer, whose KV is written or issued; a step that is replayed as a graph does not say so.

        A layer that was handed over is not handed over again, whoever says so twice. On a CPU all are left to `end`: to
        wake a thread between two layers costs a short step more than what it copies.
        """
        if self._shared.pages.by_layer:
            self._hand_over(layer + 1)

    def all_launched(self) -> None:
        """Copy all layers, behind what was launched so far."""
        self._hand_over(self._num_layers)

    def end(self, unsound: Collection[object] = ()) -> None:
        """Confirm the step's chunks, now that its outcome is known; nothing of the sequences `unsound` is kept, nor of
        those that went back to the queue because some of what they read did not come."""
        if not self._copies:
            return
        self._hand_over(self._num_layers)
        for copy in self._copies:
            copy.is_void |= copy.job.is_void or copy.job.sequence in unsound
        self._confirm()
        self._copies = []  # last: what Ctrl-C interrupts is abandoned

    def abandon(self) -> None:
        """Keep nothing of a step that failed. What was handed over already may be so again: it is void."""
        for copy in self._copies:
            copy.is_void = True
        self.end()

    def before_reuse(self, device_pages: IntArray) -> None:
        """Return when no copy reads these pages any more."""
        shared = self._shared
        if not shared.reading:
            return
        with shared.condition:
            pages = set(device_pages.tolist())
            shared.condition.wait_for(lambda: all(pages.isdisjoint(copy.page_ids) for copy in shared.reading))

    def flush(self, timeout_s: float) -> bool:
        """Wait until what is to be saved now is in the store, or will not be; False if that took too long.

        From any thread.
        """
        began_s, shared = time.monotonic(), self._shared
        with shared.condition:
            before = shared.under_way.copy()
            is_put = shared.condition.wait_for(lambda: before.isdisjoint(shared.under_way), timeout_s)
        return is_put and shared.store.flush(max(timeout_s - (time.monotonic() - began_s), 0.0))

    def close(self) -> None:
        """Put what was confirmed, within a bounded time, and end the threads. Called twice it does nothing."""
        self.abandon()
        self._shared.copying.close(_CLOSE_S)
        self._shared.putting.close(_CLOSE_S)

    def _begin_copy(self, job: SaveJob) -> None:
        """Add a copy to those of the step, if there is room in the write buffer."""
        shared, layers = self._shared, self._buffer(self._layout.layer_bytes(len(job.token_ids)))
        with shared.condition:
            if layers is None or self.num_bytes + layers.nbytes > self.max_bytes:
                shared.counts.dropped += 1
                job.put_off(self._layout.chunk_tokens)
                return
            page_ids = frozenset(page_id for page_id, *_ in job.runs)
            tokens = ChunkTokens(len(job.token_ids), np.array(job.runs, np.int64))
            copy = _Copy(job, tokens, layers, page_ids, self._num_layers + 1)
            self._copies.append(copy)  # first: nobody releases what is not among them
            shared.under_way.add(copy)
            shared.reading.add(copy)

    def _hand_over(self, num_layers: int) -> None:
        """Have the first layers copied, as far as they are not yet."""
        shared, layers = self._shared, range(self._num_handed_over, num_layers)
        if layers:
            if self._copies:
                shared.copying.run(partial(_copy_layers, shared, self._copies, layers, shared.pages.issued()))
            self._num_handed_over = num_layers

    def _confirm(self) -> None:
        """Let the step's copies be put, but for those that are void."""
        for copy in self._copies:
            _layers_done(self._shared, copy, 1)

    def _buffer(self, num_layer_bytes: int) -> U8Array | None:
        try:
            return np.empty((self._num_layers, num_layer_bytes), np.uint8)
        except MemoryError:  # what is not saved is computed again
            return None


def _copy_layers(shared: _Shared, copies: Sequence[_Copy], layers: range, after: Event | None) -> None:
    try:
        if not layers.start:
            shared.batches = shared.pages.batches([copy.tokens for copy in copies])
        for batch in shared.batches:
            for layer in layers:
                _gather(batch, [copies[index] for index in batch.chunks], layer, after)
    except Exception:  # the edge of a thread: these chunks are not saved, and their pages are free again
        logger.exception("chunks could not be copied")
        for copy in copies:
            copy.is_void = True
    for copy in copies:
        if layers.stop == len(copy.layers):
            shared.batches = ()
            _release_pages(shared, copy)
        _layers_done(shared, copy, len(layers))


def _gather(batch: PageBatch, copies: Sequence[_Copy], layer: int, after: Event | None) -> None:
    if all(copy.is_void for copy in copies):
        return
    started_s = time.monotonic()
    batch.gather(layer, [copy.layers[layer] for copy in copies], after)
    for copy in copies:
        copy.seconds += (time.monotonic() - started_s) / len(copies)


def _release_pages(shared: _Shared, copy: _Copy) -> None:
    with shared.condition:
        shared.reading.discard(copy)
        shared.condition.notify_all()


def _layers_done(shared: _Shared, copy: _Copy, num_layers: int) -> None:
    with shared.condition:
        num_before = copy.num_left
        copy.num_left -= num_layers
        is_whole = copy.num_left <= 0 < num_before
    if is_whole:
        shared.putting.run(partial(_put_chunk, shared, copy))


def _put_chunk(shared: _Shared, copy: _Copy) -> None:
    try:
        outcome = _put(shared, copy)
    except Exception:  # the edge of a thread: a chunk that is not saved is computed again
        logger.exception("a chunk could not be put into the cache tier")
        outcome = "failed"
    with shared.condition:
        setattr(shared.counts, outcome, getattr(shared.counts, outcome) + 1)
        shared.counts.bytes += copy.layers.nbytes if outcome == "chunks" else 0
        shared.under_way.discard(copy)
        shared.condition.notify_all()


def _put(shared: _Shared, copy: _Copy) -> str:
    """Put one chunk; returns the count that it belongs to."""
    if copy.is_void:
        return "void"
    job, started_s = copy.job, time.monotonic()
    chunk = make_chunk(job.lineage, shared.fingerprint, job.parent, job.token_ids, job.rotated, list(copy.layers))
    if not shared.store.put(chunk, job.lineage):
        return "refused"
    shared.learn_save(copy.layers.nbytes, copy.seconds + time.monotonic() - started_s)
    return "chunks"
