"""KV of chunks into the pages that a step took for it, layer by layer, while the step computes (AttentionStore 3.2.1).

A thread takes each chunk's layer from its `Load`, checked, and copies it into the pool, on CUDA with a few others that
take beside it; the forward pass waits for a layer right before it needs it, and no longer than the load may take. What
fails, or comes too late, is *lost*: the pass goes on with whatever lies there, and when it is over the engine takes
back all that depends on it (`Scheduler.retract`). So a fault of the cache tier ends no request, and nobody gets a token
that was computed from wrong bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mneme.cachetier.names import Miss
from mneme.primitives import Workers
from mneme.replicas.connector.chunk_pages import ChunkPages, ChunkTokens, PageBatch
from mneme.replicas.forest.moves import Graft, GraftPiece
from mneme.replicas.forest.tree import Page
from mneme.replicas.load import Load

if TYPE_CHECKING:
    from mneme.cachetier.host_pages.streams import Event

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Piece:
    """Tracks one chunk on its way."""

    load: Load
    given: GraftPiece
    tokens: ChunkTokens
    num_done: int = 0  # layers in the pool
    is_lost: bool = False


class StepLoad:
    """Loads the chunks of one step; raises nothing for what does not come."""

    def __init__(
        self, grafts: Sequence[Graft], num_layers: int, pages: ChunkPages, take_all: Callable[..., object] = map
    ) -> None:
        """`take_all` is `map`, with the calls beside each other where pages have several readers."""
        self._pieces = [[_piece(graft, given) for given in graft.pieces] for graft in grafts]
        self._ending = [pieces[0].load for graft, pieces in zip(grafts, self._pieces, strict=True) if graft.is_last]
        self._all = [piece for pieces in self._pieces for piece in pieces]
        self._num_layers, self._pages, self._take_all = num_layers, pages, take_all
        self._events: list[list[Event]] = [[] for _ in range(num_layers)]  # of each layer's batches
        self._condition = threading.Condition()
        self._is_over = False
        self._after = pages.issued()
        self.num_lost = 0
        for of_load in self._pieces:
            of_load[0].load.num_readers = max(min(pages.num_readers, len(self._all)), 1)
            of_load[0].load.begin(of_load[-1].given.chunk + 1)

    def wait_layer(self, layer: int) -> None:
        """Return when this layer's pages may be read, but for what is lost.

        The time is that of the load that it waits for: those behind it are copied after it.
        """
        with self._condition:
            for pieces in self._pieces:
                load = pieces[0].load
                while not _has(pieces, layer):
                    if not self._condition.wait(max(load.left_s(), 0.0)) and not _has(pieces, layer):
                        load.give_up("loading")
                        self._lose(next(piece for piece in pieces if not piece.is_lost and piece.num_done <= layer))
                load.pause()
            events = self._events[layer].copy()
        for event in events:
            self._pages.wait(event)

    def finish(self) -> list[Page]:
        """End the load, as the pass is over: nothing is written but before what the engine issues from now on.

        Returns the pages whose KV did not come.
        """
        with self._condition:
            for piece in self._all:
                if piece.num_done < self._num_layers and not piece.is_lost:
                    self._lose(piece)
            self._is_over = True
            lost = [piece for piece in self._all if piece.is_lost]
            last = next((events[-1] for events in reversed(self._events) if events), None)
        self._pages.wait(last)  # copies are in order
        for load in self._ending:
            load.close()
        self.num_lost = len(lost)
        return [page for piece in lost for page in piece.given.pages]

    def run(self) -> None:
        """Copy layer after layer; on the thread of loads."""
        batches = self._pages.batches([piece.tokens for piece in self._all])
        for layer in range(self._num_layers):
            for batch in batches:
                self._copy(batch, layer)

    def _copy(self, batch: PageBatch, layer: int) -> None:
        pieces = [self._all[index] for index in batch.chunks]
        if all(piece.is_lost for piece in pieces):
            return
        started_s = time.monotonic()
        batch.begin()
        begun_s = time.monotonic() - started_s
        for _ in self._take_all(partial(self._put_layer, batch, layer), batch.chunks):  # type: ignore[attr-defined]
            pass
        with self._condition:  # held while the pool is written: `finish` returns when nothing is
            if self._is_over or all(piece.is_lost for piece in pieces):
                return
            started_s = time.monotonic()
            event = batch.scatter(layer, self._after)
            if event is not None:
                self._events[layer].append(event)
            seconds = begun_s + time.monotonic() - started_s
            for piece in pieces:
                if not piece.is_lost:
                    piece.num_done = layer + 1
                    piece.load.add_copy(piece.given.chunk, seconds / len(pieces))
            self._condition.notify_all()

    def _put_layer(self, batch: PageBatch, layer: int, number: int) -> None:
        """Take one chunk's layer into a batch. Never raises.

        The next batch may have the memory that this one gave when all of these calls have returned.
        """
        piece, load = self._all[number], self._all[number].load
        if piece.is_lost:
            return
        try:
            taken = load.read(piece.given.chunk, layer)
            started_s = time.monotonic()
            if not isinstance(taken, Miss):
                batch.put(number, taken)
                load.add_copy(piece.given.chunk, (time.monotonic() - started_s) / load.num_readers)
                return
        except Exception:  # the edge of a thread
            logger.exception("a chunk's layer could not be read")
        with self._condition:
            if not self._is_over and not piece.is_lost:
                self._lose(piece)

    def _lose(self, first: _Piece) -> None:
        """Lose a piece, and those of its sequence behind it."""
        pieces = next(pieces for pieces in self._pieces if first in pieces)
        for piece in pieces[pieces.index(first) :]:
            piece.is_lost = True
        first.load.lose_from(first.given.chunk)  # the thread may wait for it, and others behind it
        self._condition.notify_all()


class ChunkLoader:
    """Loads chunks into a device pool, one load for each step; the engine's thread calls it."""

    def __init__(self, num_layers: int, pages: ChunkPages) -> None:
        self.num_loaded = 0  # chunks
        self.num_lost = 0  # chunks that were to be loaded and did not come
        self._num_layers, self._pages = num_layers, pages
        self._load: StepLoad | None = None  # of the step that has begun
        self._readers = ThreadPoolExecutor(pages.num_readers, "kv-chunk-takes") if pages.num_readers > 1 else None
        self._take_all: Callable[..., object] = map if self._readers is None else self._readers.map
        self._thread = Workers("kv-chunk-loads", 1)

    def begin(self, grafts: Sequence[Graft]) -> StepLoad:
        """Begin the one load of chunks of the next step."""
        self._load = load = StepLoad(grafts, self._num_layers, self._pages, self._take_all)
        self._thread.run(partial(_run, load))
        self.num_loaded += sum(len(graft.pieces) for graft in grafts)
        return load

    def end(self) -> list[Page] | None:
        """End the load of a step whose forward pass is over, or that failed.

        Returns the pages whose KV did not come, None if none was to come.
        """
        load, self._load = self._load, None
        if load is None:
            return None
        lost = load.finish()
        self.num_lost += load.num_lost
        self.num_loaded -= load.num_lost
        return lost

    def close(self) -> None:
        self.end()
        if self._readers is not None:
            self._thread.run(partial(self._readers.shutdown, wait=False))  # behind a load that may hang
        self._thread.close(0.0)


def _run(load: StepLoad) -> None:
    try:
        load.run()
    except Exception:  # the edge of a thread: what was not copied is lost
        logger.exception("a load of chunks failed")
        load.finish()


def _has(pieces: Sequence[_Piece], layer: int) -> bool:
    return all(piece.is_lost or piece.num_done > layer for piece in pieces)


def _piece(graft: Graft, given: GraftPiece) -> _Piece:
    load = graft.chunks
    assert isinstance(load, Load)
    start = load.start_of(given.chunk)
    position, runs = given.start, []
    for page_id, offset, count in given.runs:
        runs.append((page_id, offset, count, position - start))
        position += count
    num_tokens = load.sources[given.chunk].header.num_tokens
    return _Piece(load, given, ChunkTokens(num_tokens, np.array(runs, np.int64).reshape(-1, 4)))
