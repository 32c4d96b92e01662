"""What the cache tier has of sequences that wait: looked for, and brought into memory, while the engine runs others.

A `Fetch` goes from *looking* (the store is asked) over *bringing* (bytes that are not in this node's memory are read,
first layers first) to *there*. It may stop at any time: what did not come is computed. Reads run on threads of their
own, under a bound of bytes; the engine's thread only asks how far a fetch is.

Policy and threads only: no tensors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from mneme.cachetier.chunk import U8Array
from mneme.cachetier.chunk_store import ChainQuery, ChunkSource, ChunkStore, Edge
from mneme.cachetier.cost_model import CostModel
from mneme.cachetier.load_controller import Loadable, LoadController, LoadPlan
from mneme.cachetier.misses import Miss
from mneme.replicas.origins import Source

log = logging.getLogger(__name__)

_NUM_THREADS = 2  # of each kind: who looks never waits behind who reads
_WAIT_S = 0.05  # how often a reader that waits for room looks again

SOURCE_BY_EDGE: dict[Edge, Source] = {"host": "host", "disk": "disk", "peer_host": "peer", "peer_disk": "peer"}


@dataclass(slots=True)
class Reads:
    """What was read over one edge; `num_chunks` counts chunks of which anything was read."""

    num_bytes: int = 0
    num_chunks: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, num_chunks: int, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.num_chunks += num_chunks
        self.seconds += seconds


class Fetch:
    """Chunks that one sequence may load. `is_ready`, `spans` and `close` never block: the engine calls them."""

    def __init__(
        self,
        query: ChainQuery,
        num_resident: int,
        look_until_s: float,
        room: ReadRoom,
        on_closed: Callable[[Fetch], None] = lambda fetch: None,
    ) -> None:
        self.query = query
        self.num_resident = num_resident
        self.sources: list[ChunkSource] = []  # those that are to be loaded, in order
        self.plan: LoadPlan | None = None
        self.reads: dict[Edge, Reads] = {}  # so far
        self.is_given_up = False  # as it took too long
        self._look_until_s = look_until_s
        self._began_s = 0.0  # bringing, or loading; what was brought by a moment is in time then
        self._num_brought = 0  # layers
        self._room, self._clock, self._on_closed = room, room.clock, on_closed
        self._condition = threading.Condition()
        self._layers: list[dict[int, U8Array | Miss]] = []  # by chunk: what was brought and not yet taken
        self._is_busy = False  # a thread reads
        self._has_looked = self._is_there = self._is_closed = self._is_urgent = self._is_ended = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Positions whose KV each chunk has; none while it is not known."""
        if not self._has_looked or self._is_closed:
            return []
        size, first = self.query.chunk_tokens, self.query.first
        starts = range(first * size, (first + len(self.sources)) * size, size)
        return [(start, start + source.num_usable) for start, source in zip(starts, self.sources, strict=True)]

    def begin_load(self) -> None:
        """Pages were taken for it. What had come by now came in time, whatever it waited for."""
        assert self.plan is not None
        now_s = self._clock()
        before_s = self._due_s(self._num_brought - 1) if self._num_brought else 0.0
        self._began_s = max(self._began_s, now_s - before_s)

    def left_s(self, layer: int) -> float:
        """Until a layer must have come, or the rest is given up."""
        return self._began_s + self._due_s(layer) - self._clock()

    def source_of(self, index: int) -> Source:
        return SOURCE_BY_EDGE[self.sources[index].edge]

    def is_ready(self, *, is_alone: bool) -> bool:
        """Whether the sequence need not wait for it any longer: all is in memory, nothing was found, or it is too late.

        Alone, it can be computed layer by layer as its chunks come; beside others it would hold them up.
        """
        if self._is_closed or self._is_there:
            return True
        if self._has_looked and is_alone:
            return True
        left_s = self.left_s(self._num_brought) if self._has_looked else self._look_until_s - self._clock()
        if left_s > 0:
            return False
        self.is_given_up = self._has_looked
        self.close()
        return True

    def found(self, sources: list[ChunkSource], plan: LoadPlan) -> bool:
        """What the store has and the plan wants; whether some of it is to be brought. The rest is closed."""
        with self._condition:
            wanted = [] if self._is_closed else sources[: plan.num_chunks]
            self.sources, self.plan = wanted, plan
            self._layers = [{} for _ in wanted]
            self._began_s = self._clock()
            self._has_looked, self._is_there, self._is_busy = True, not self._far, bool(self._far)
        for source in sources[len(wanted) :]:
            source.close()
        return self._is_busy

    def bring(self) -> None:
        """Read what is not in this node's memory, layer by layer; on a thread of its own."""
        num_layers = self.sources[0].header.layout.num_layers
        try:
            for layer in range(num_layers):
                for index in self._far:
                    if not self._bring(index, layer):
                        return
                self._num_brought = layer + 1
        finally:
            with self._condition:
                self._is_busy, self._is_there = False, True
                self._condition.notify_all()
                is_closed = self._is_closed
            if is_closed:
                self._close_sources()

    def take(self, index: int, layer: int) -> U8Array | Miss:
        """The bytes of a chunk's layer, checked; waits for them where they are being read. Each is taken once."""
        if index not in self._far:
            return self._read(index, layer)
        if not self._is_urgent:
            self._is_urgent = True
            self._room.hurry()
        with self._condition:
            self._condition.wait_for(lambda: layer in self._layers[index] or self._is_closed or not self._is_busy)
            brought = self._layers[index].pop(layer, None)
        if brought is None:
            return Miss.ABSENT
        self._give_room(brought)
        return brought

    def note_read(self, index: int, num_bytes: int, num_chunks: int, seconds: float) -> None:
        """Time that an edge took: of a read, or of what follows it."""
        with self._condition:
            self.reads.setdefault(self.sources[index].edge, Reads()).add(num_bytes, num_chunks, seconds)

    def abandon(self) -> None:
        """Whoever waits for bytes is told that there are none; the sources are closed later."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def close(self) -> None:
        """Nobody wants it any more. Reads that are under way end by themselves."""
        self.abandon()
        if not self._is_busy:
            self._close_sources()

    def _due_s(self, layer: int) -> float:
        assert self.plan is not None
        return self.plan.due_s(layer, self.sources[0].header.layout.num_layers if self.sources else 1)

    @property
    def _far(self) -> list[int]:
        return [index for index, source in enumerate(self.sources) if source.edge != "host"]

    def _bring(self, index: int, layer: int) -> bool:
        """False when there is no more to bring."""
        source = self.sources[index]
        if not self._room.has(source.header.layer_bytes):
            self._is_there = True  # as far as it can be: it goes on when the engine takes what was read
        if not self._room.take(source.header.layer_bytes, lambda: self._is_urgent, lambda: self._is_closed):
            return False
        read = self._read(index, layer)
        if isinstance(read, Miss):
            self._room.give(source.header.layer_bytes)
        with self._condition:
            self._layers[index][layer] = read
            self._condition.notify_all()
        return not isinstance(read, Miss)

    def _read(self, index: int, layer: int) -> U8Array | Miss:
        source, started_s = self.sources[index], self._clock()
        read = source.read(layer)
        num_bytes = 0 if isinstance(read, Miss) else read.nbytes
        self.note_read(index, num_bytes, layer == 0, self._clock() - started_s)
        return read

    def _give_room(self, brought: U8Array | Miss) -> None:
        if not isinstance(brought, Miss):
            self._room.give(brought.nbytes)

    def _close_sources(self) -> None:
        with self._condition:
            if self._is_ended:
                return
            self._is_ended = True
            layers, self._layers = self._layers, [{} for _ in self.sources]
        for brought in layers:
            for read in brought.values():
                self._give_room(read)
        for source in self.sources:
            source.close()
        self._on_closed(self)


class ReadRoom:
    """Bytes that were read ahead and not yet taken, of all fetches together (AttentionStore 3.2.1's read buffer)."""

    def __init__(self, num_bytes: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.num_used = 0
        self._num_bytes = num_bytes
        self._condition = threading.Condition()

    def has(self, num_bytes: int) -> bool:
        return self.num_used + num_bytes <= self._num_bytes

    def take(self, num_bytes: int, is_urgent: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        """Wait for room, unless it is urgent: somebody waits for these bytes. False if nobody wants them any more."""
        with self._condition:
            while not self.has(num_bytes) and not is_urgent() and not is_over():
                self._condition.wait(_WAIT_S)
            self.num_used += num_bytes
        if is_over():
            self.give(num_bytes)
            return False
        return True

    def hurry(self) -> None:
        """Something has become urgent: who waits for room is to look again."""
        with self._condition:
            self._condition.notify_all()

    def give(self, num_bytes: int) -> None:
        with self._condition:
            self.num_used -= num_bytes
            self._condition.notify_all()


class Fetches:
    """Threads that look and read, for all sequences of one engine."""

    def __init__(
        self,
        store: ChunkStore,
        controller: LoadController,
        costs: CostModel,
        *,
        read_buffer_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.room = ReadRoom(read_buffer_bytes, clock)
        self._store, self._controller, self._costs, self._clock = store, controller, costs, clock
        self._looking = ThreadPoolExecutor(_NUM_THREADS, "kv-look")
        self._reading = ThreadPoolExecutor(_NUM_THREADS, "kv-read")

    def begin(self, query: ChainQuery, num_resident: int) -> Fetch:
        """Look for a sequence of which the engine has the first `num_resident` tokens."""
        timeout_s = self._controller.lookup_timeout_s(num_resident, len(query.token_ids))
        fetch = Fetch(query, num_resident, self._clock() + timeout_s, self.room, self._closed)
        self._looking.submit(self._look, fetch, timeout_s)
        return fetch

    def forget(self, request_id: str) -> None:
        """The request waits no longer."""
        with suppress(RuntimeError):  # closed
            self._looking.submit(self._store.forget, [request_id])

    def close(self) -> None:
        """What has not begun never does; the threads end after what they are at."""
        for threads in (self._looking, self._reading):
            threads.shutdown(wait=False, cancel_futures=True)

    def _closed(self, fetch: Fetch) -> None:
        """What it read says how fast the edges are, also where it was given up."""
        for edge, reads in fetch.reads.items():
            self._costs.note_edge(
                edge, reads.num_bytes, reads.num_chunks, reads.seconds, is_complete=not fetch.is_given_up
            )
        self.forget(fetch.query.request_id)

    def _look(self, fetch: Fetch, timeout_s: float) -> None:
        try:
            sources = self._store.locate(fetch.query, timeout_s)
            plan = self._controller.plan(fetch.num_resident, len(fetch.query.token_ids), _loadable(fetch, sources))
            if fetch.found(sources, plan):
                self._reading.submit(fetch.bring)
        except Exception:  # the edge of a thread: the prompt is computed
            log.exception("looking for chunks failed request_id=%s", fetch.query.request_id)
            fetch.close()


def _loadable(fetch: Fetch, sources: list[ChunkSource]) -> list[Loadable]:
    """What each chunk would add to what the engine has."""
    loadable, start = [], fetch.query.first * fetch.query.chunk_tokens
    for source in sources:
        num_new = start + source.num_usable - max(start, fetch.num_resident)
        num_bytes = source.header.layer_bytes * source.header.layout.num_layers
        loadable.append(Loadable(max(num_new, 0), num_bytes, source.edge))
        start += source.header.num_tokens
    return loadable
