"""What the cache tier has of one sequence: looked for, and brought into memory, while the engine runs others.

A `Fetch` goes from *looking* (the store is asked) over *bringing* (bytes that are not in this node's memory are read,
first layers first) to *there*. It may stop at any time: what did not come is computed. One thread is at it until
`rest`; sources are closed once nobody wants it and no thread is at it.

Policy and threads only: no tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from mneme.cachetier.chunk import U8Array
from mneme.cachetier.chunk_store import ChainQuery, ChunkSource, Edge
from mneme.cachetier.load_controller import LoadPlan
from mneme.cachetier.misses import Miss
from mneme.replicas.origins import Source
from mneme.replicas.read_room import ReadRoom

GivenUp = Literal["lookup", "waiting", "loading"]  # which took too long; the last: within a step
GIVEN_UP: tuple[GivenUp, ...] = get_args(GivenUp)
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
        clock: Callable[[], float],
        on_closed: Callable[[Fetch], None] = lambda fetch: None,
        on_given_up: Callable[[GivenUp], None] = lambda what: None,
    ) -> None:
        """`on_given_up` is called once at most, on the engine's thread."""
        self.query = query
        self.num_resident = num_resident
        self.sources: list[ChunkSource] = []  # those that are to be loaded, in order
        self.plan: LoadPlan | None = None
        self.reads: dict[Edge, Reads] = {}  # so far
        self.is_given_up = False  # as it took too long
        self._look_until_s = look_until_s
        self._began_s = 0.0  # bringing, or loading; what was brought by a moment is in time then
        self._num_brought = 0  # layers
        self._num_sound = 0  # sources, before the first of which something could not be brought
        self._room, self._clock = room, clock
        self._on_closed, self._on_given_up = on_closed, on_given_up
        self._condition = threading.Condition()
        self._layers: list[dict[int, U8Array]] = []  # by chunk: what was brought and not yet taken
        self._is_busy = True  # a thread looks or reads, or is about to
        self._has_looked = self._is_there = self._is_closed = self._is_urgent = self._is_ended = False

    @property
    def is_closed(self) -> bool:
        """Nobody wants it any more."""
        return self._is_closed

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Positions whose KV each chunk has, as far as they can be had; none while that is not known."""
        if not self._has_looked or self._is_closed:
            return []
        sources = self.sources[: self._num_sound]
        return [(self.start_of(i), self.start_of(i) + source.num_usable) for i, source in enumerate(sources)]

    def start_of(self, index: int) -> int:
        """The position of a chunk's first token."""
        return (self.query.first + index) * self.query.chunk_tokens

    def source_of(self, index: int) -> Source:
        return SOURCE_BY_EDGE[self.sources[index].edge]

    def begin_load(self) -> None:
        """Pages were taken for it. What had come by now came in time, whatever it waited for."""
        assert self.plan is not None
        now_s = self._clock()
        before_s = self._due_s(self._num_brought - 1) if self._num_brought else 0.0
        self._began_s = max(self._began_s, now_s - before_s)

    def left_s(self, layer: int) -> float:
        """Until a layer must have come, or the rest is given up."""
        return self._began_s + self._due_s(layer) - self._clock()

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
        self.give_up("waiting" if self._has_looked else "lookup")
        self.close()
        return True

    def give_up(self, what: GivenUp) -> None:
        """It took too long; the edges are told so when it ends."""
        if not self.is_given_up:
            self.is_given_up = True
            self._on_given_up(what)

    def found(self, sources: list[ChunkSource], plan: LoadPlan) -> bool:
        """What the store has and the plan wants; whether some of it is to be brought. The rest is closed."""
        with self._condition:
            wanted = [] if self._is_closed else sources[: plan.num_chunks]
            self.sources, self.plan, self._num_sound = wanted, plan, len(wanted)
            self._layers = [{} for _ in wanted]
            self._began_s = self._clock()
            self._has_looked = True
        for source in sources[len(wanted) :]:
            source.close()
        return bool(self._far)

    def bring(self) -> None:
        """Read what is not in this node's memory, layer by layer; on a thread of its own."""
        num_layers = self.sources[0].header.layout.num_layers if self.sources else 0
        for layer in range(num_layers):
            for index in self._far:
                if index < self._num_sound and not self._bring(index, layer):
                    return
            self._num_brought = layer + 1

    def rest(self) -> None:
        """No thread is at it from now on."""
        with self._condition:
            self._is_busy, self._is_there = False, True
            self._condition.notify_all()
            is_closed = self._is_closed
        if is_closed:
            self._end()

    def take(self, index: int, layer: int) -> U8Array | Miss:
        """The bytes of a chunk's layer, checked; waits for them where they are being read. Each is taken once."""
        if index not in self._far:
            return self._read(index, layer)
        self._is_urgent = True
        self._room.wake()
        with self._condition:
            self._condition.wait_for(lambda: layer in self._layers[index] or self._is_lost(index))
            brought = self._layers[index].pop(layer, None)
        if brought is None:
            return Miss.ABSENT
        self._room.give(brought.nbytes)
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
        self._room.wake()

    def close(self) -> None:
        """Nobody wants it any more. What a thread is at ends by itself."""
        self.abandon()
        if not self._is_busy:
            self._end()

    def _due_s(self, layer: int) -> float:
        assert self.plan is not None
        return self.plan.due_s(layer, self.sources[0].header.layout.num_layers if self.sources else 1)

    @property
    def _far(self) -> list[int]:
        return [index for index, source in enumerate(self.sources) if source.edge != "host"]

    def _is_lost(self, index: int) -> bool:
        """Whether nothing more of a chunk is brought."""
        return self._is_closed or not self._is_busy or index >= self._num_sound

    def _bring(self, index: int, layer: int) -> bool:
        """False when nobody wants any more of it."""
        source = self.sources[index]
        if not self._room.has(source.header.layer_bytes):
            self._is_there = True  # as far as it can be: it goes on when the engine takes what was read
        if not self._room.take(source.header.layer_bytes, lambda: self._is_urgent, lambda: self._is_closed):
            return False
        read: U8Array | Miss = Miss.BUSY
        try:
            read = self._read(index, layer)
        finally:
            if isinstance(read, Miss):
                self._room.give(source.header.layer_bytes)
                self.lose_from(index)
        if not isinstance(read, Miss):
            with self._condition:
                self._layers[index][layer] = read
                self._condition.notify_all()
        return True

    def lose_from(self, index: int) -> None:
        """A chunk cannot be had, and those behind it are of no use without it; those before it are."""
        with self._condition:
            self._num_sound = min(self._num_sound, index)
            brought, self._layers[index:] = self._layers[index:], [{} for _ in self._layers[index:]]
            self._condition.notify_all()
        self._give_room(brought)

    def _read(self, index: int, layer: int) -> U8Array | Miss:
        source, started_s = self.sources[index], self._clock()
        try:
            read = source.read(layer)
        except MemoryError:
            read = Miss.BUSY
        num_bytes = 0 if isinstance(read, Miss) else read.nbytes
        self.note_read(index, num_bytes, layer == 0, self._clock() - started_s)
        return read

    def _give_room(self, brought: list[dict[int, U8Array]]) -> None:
        self._room.give(sum(read.nbytes for layers in brought for read in layers.values()))

    def _end(self) -> None:
        with self._condition:
            if self._is_ended:
                return
            self._is_ended = True
            layers, self._layers = self._layers, [{} for _ in self.sources]
        self._give_room(layers)
        for source in self.sources:
            source.close()
        self._on_closed(self)
