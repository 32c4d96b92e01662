"""Loads what the cache tier has of a sequence: the store is asked, bytes are read ahead, a step copies them into pages.

A load may end at any time: what did not come is computed. It may be waited for as long as its plan says, in all, at the
head of the queue and within steps; time in which its sequence waits for something else, or a step computes, is free.
The engine and one worker thread own it; its sources are closed when both have left it.

Policy and threads only: no tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from mneme.cachetier.chunk.header import I32Array, U8Array
from mneme.cachetier.names import Edge, Miss
from mneme.cachetier.policy.load_controller import LoadPlan
from mneme.cachetier.store import ChainQuery, ChunkSource
from mneme.replicas.report import GivenUp
from mneme.replicas.request import Source

SOURCE_BY_EDGE: dict[Edge, Source] = {"host": "host", "disk": "disk", "peer_host": "peer", "peer_disk": "peer"}

Owner = Literal["engine", "thread"]


class LoadState(Enum):
    """Says how far a load is."""

    ASKING = "asking"  # the store has not answered
    READING = "reading"  # a thread reads what the next step is to load
    READY = "ready"  # a step may load it; or there is nothing to load
    DONE = "done"  # nobody wants it any more
    LOST = "lost"  # it was waited for as long as it may: what did not come by then is computed


class ReadBudget:
    """Bounds the bytes that an engine's loads read ahead together (the read buffer of AttentionStore 3.2.1).

    What is urgent is let in above the bound: somebody waits for it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_used = 0
        self.num_bytes = num_bytes
        self._condition = threading.Condition()

    def has(self, num_bytes: int) -> bool:
        return self.num_used + num_bytes <= self.num_bytes

    def reserve(self, num_bytes: int, is_urgent: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        """Wait for room, unless it is urgent. False if nobody wants these bytes any more.

        Whoever changes what the two say calls `wake`.
        """
        with self._condition:
            self._condition.wait_for(lambda: is_over() or is_urgent() or self.has(num_bytes))
            if is_over():
                return False
            self.num_used += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        with self._condition:
            self.num_used -= num_bytes
            self._condition.notify_all()

    def wake(self) -> None:
        """Let those who wait look again."""
        with self._condition:
            self._condition.notify_all()


@dataclass(slots=True)
class Reads:
    """Counts what was read over one edge."""

    num_bytes: int = 0
    num_layers: int = 0  # of chunks
    seconds: float = 0.0
    since_s: float | None = None  # when the read began that is under way


class Load:
    """Chunks that one sequence may load. What the engine calls never blocks."""

    def __init__(
        self,
        query: ChainQuery,
        num_resident: int,
        budget: ReadBudget,
        clock: Callable[[], float],
        *,
        wait_s: float,
        timeout_s: float,
        num_stored: int = 0,
        is_alone: bool = True,
        on_part: Callable[[Load], None] = lambda load: None,
        on_closed: Callable[[Load], None] = lambda load: None,
        on_given_up: Callable[[Load, GivenUp], None] = lambda load, what: None,
    ) -> None:
        """Begin to ask for a sequence of which the engine has the first `num_resident` tokens.

        wait_s, timeout_s  how long nothing is computed before an answer, how long an answer may take
        num_stored         tokens behind the resident ones that its session had
        is_alone           nothing else runs or waits
        on_part            a thread is to read on
        on_given_up        is called once at most, on the engine's thread
        """
        self.query, self.num_resident, self.num_stored, self.is_alone = query, num_resident, num_stored, is_alone
        self.state = LoadState.ASKING
        self.plan: LoadPlan | None = None
        self.sources: list[ChunkSource] = []  # those that are to be loaded, in order
        self.reads: dict[Edge, Reads] = {}  # so far
        self.num_readers = 1  # threads that take at once: what each is at counts for a part of the time
        self._asked_s, self._timeout_s = clock(), timeout_s
        self._left_s = wait_s  # that it may still be waited for
        self._since_s: float | None = self._asked_s  # when that time began to run; None: it stands
        self._parts: Sequence[range] = ()  # of its chunks: each is read, layer by layer, before the next
        self._layers: list[dict[int, U8Array]] = []  # by chunk: what was read ahead and not yet taken
        self._num_ahead = 0  # bytes that were read ahead
        # Its chunks before these: all is in memory; a step may load them; steps have begun to load them; can be had.
        self.num_read = self._num_ready = self._num_begun = self._num_sound = 0
        self._owners: set[Owner] = {"engine", "thread"}
        self._budget, self._clock = budget, clock
        self._on_part, self._on_closed, self._on_given_up = on_part, on_closed, on_given_up
        self._condition = threading.Condition()

    # What is known of it.

    @property
    def is_asking(self) -> bool:
        return self.state is LoadState.ASKING

    @property
    def is_overdue(self) -> bool:
        """Return whether the answer takes longer than it may, so that nobody need wait for it."""
        return self._clock() - self._asked_s >= self._timeout_s

    @property
    def is_decided(self) -> bool:
        """Return whether nobody need wait for it: a step may load it, or nothing is to come."""
        return self.state not in (LoadState.ASKING, LoadState.READING)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Positions whose KV each chunk has, as far as they can be had; none while that is not known."""
        sources = self.sources[: self._num_sound]
        return [(self.start_of(i), self.start_of(i) + source.num_usable) for i, source in enumerate(sources)]

    @property
    def end(self) -> int:
        """The position behind the last token that it has."""
        return max((end for _, end in self.spans), default=0)

    def start_of(self, index: int) -> int:
        """The position of a chunk's first token."""
        return (self.query.first + index) * self.query.chunk_tokens

    def rotated(self, index: int) -> I32Array:
        """Return where the keys of a chunk's tokens are rotated."""
        return self.sources[index].header.slot_position

    def source_of(self, index: int) -> Source:
        return SOURCE_BY_EDGE[self.sources[index].edge]

    def has_all(self, num_tokens: int) -> bool:
        """Whether nothing of so many tokens is missing but the end that is shorter than a chunk."""
        return self.end >= num_tokens // self.query.chunk_tokens * self.query.chunk_tokens

    def is_outdated(self, num_resident: int) -> bool:
        """Return whether the engine has lost what is before what is coming."""
        if self.state in (LoadState.ASKING, LoadState.LOST):
            return False
        spans = self.spans
        return num_resident < (spans[0][0] if spans else self.num_resident)

    def num_rows_before(self, num_tokens: int) -> int:
        """Count the rows behind so many tokens that a step may compute while the store is asked: to a chunk's end.

        What is found is loaded behind them.
        """
        return self.query.chunk_tokens - num_tokens % self.query.chunk_tokens

    def num_at_once(self, limit: int) -> int:
        """Count the chunks that a step loads, of which it should load no more than `limit`.

        What is still read comes layer by layer of a whole part, so all of that is loaded at once.
        """
        end = next((part.stop for part in self._parts if part.stop > self._num_begun), self._num_begun)
        num_chunks = end - self._num_begun
        return min(limit, num_chunks) if limit == 0 or self.num_read >= end else num_chunks

    # The time that it may be waited for.

    def left_s(self) -> float:
        """Return the seconds that it may still be waited for. They run from now on, until `pause`."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        return self._left_s - (now_s - self._since_s)

    def pause(self) -> None:
        """Stop the time: its sequence waits for something else, or for nothing. An answer's time always runs."""
        with self._condition:
            if not self.is_asking and self._since_s is not None:
                self._left_s, self._since_s = self.left_s(), None

    def is_ready(self, *, is_alone: bool) -> bool:
        """Return whether the sequence, which could run, need not wait for it any longer.

        Alone, it can be computed layer by layer as its chunks come; beside others it would hold them up.
        """
        with self._condition:
            if self.is_asking:
                return self.left_s() <= 0
            self._read_on()  # the part before is in its pages
            is_waited_for = self.state is LoadState.READING and not is_alone
            if is_waited_for and self.left_s() > 0:
                return False
            self.pause()
        if is_waited_for:
            self.give_up("waiting")
            self.close()
        return True

    def give_up(self, what: GivenUp) -> None:
        """Let it be lost: it took too long."""
        with self._condition:
            was_lost, self.state = self.state is LoadState.LOST, LoadState.LOST
        if not was_lost:
            self._on_given_up(self, what)

    # The way of its bytes.

    def skip_computed(self, sources: list[ChunkSource]) -> list[ChunkSource]:
        """Close the sources of which the sequence has all by now; the rest begins at `start_of(0)`."""
        num_skipped = max(self.num_resident // self.query.chunk_tokens - self.query.first, 0)
        self.query = replace(self.query, first=self.query.first + num_skipped)
        for source in sources[:num_skipped]:
            source.close()
        return sources[num_skipped:]

    def found(self, sources: list[ChunkSource], plan: LoadPlan, parts: Sequence[range]) -> bool:
        """Keep what the plan wants of what the store has, close the rest; returns whether some is to be read."""
        with self._condition:
            wanted = sources[: plan.num_chunks] if self.is_asking else []
            self.sources, self.plan, self._parts = wanted, plan, parts
            self._layers = [{} for _ in wanted]
            is_far = any(source.edge != "host" for source in wanted)
            self._num_sound = len(wanted)
            if not is_far:
                self.num_read = self._num_ready = len(wanted)
            if self.is_asking:
                self._left_s, self._since_s = plan.may_wait_s, None
                self.state = LoadState.READING if is_far else LoadState.READY
        for source in sources[len(wanted) :]:
            source.close()
        return is_far

    def read_ahead(self) -> None:
        """Read what is not in this node's memory, layer by layer, on a thread of its own, which leaves it then.

        A further part is read when the one before it is in its pages.
        """
        try:
            while (part := self._next_part()) is not None:
                far = [index for index in part if self.sources[index].edge != "host"]
                for layer in range(self.sources[0].header.layout.num_layers):
                    for index in far:
                        if index < self._num_sound:
                            self._read_layer(index, layer, part)
                with self._condition:
                    self.num_read = part.stop
                self._set_ready(part)
        except BaseException:
            self.lose_from(0)
            self.leave("thread")
            raise

    def begin(self, end: int) -> None:
        """Let a step load its chunks before `end`: what is not there yet is urgent. A copy alone has all its time."""
        with self._condition:
            self._num_begun = max(self._num_begun, end)
            self.pause()
            if self.num_read >= end and self.plan is not None:
                self._left_s = self.plan.may_wait_s
            self._update_state()
            if end > self.num_read:  # a step that loads all at once waits for parts that nobody was to read yet
                self._read_on()
        self._budget.wake()

    def read(self, index: int, layer: int) -> U8Array | Miss:
        """Return the bytes of a chunk's layer, checked; waits for those being read. Each is taken once."""
        if self.sources[index].edge == "host":
            return self._read(index, layer, self.num_readers)
        with self._condition:
            self._condition.wait_for(lambda: layer in self._layers[index] or index >= self._num_sound)
            read = self._layers[index].pop(layer, None)
        if read is None:
            return Miss.ABSENT
        self._budget.release(read.nbytes)
        return read

    def lose_from(self, index: int) -> None:
        """Give up a chunk that cannot be had, and those behind it, which are of no use without it."""
        with self._condition:
            self._num_sound = min(self._num_sound, index)
            lost, self._layers[index:] = self._layers[index:], [{} for _ in self._layers[index:]]
            self._update_state()
            self._condition.notify_all()
        self._budget.release(sum(read.nbytes for layers in lost for read in layers.values()))

    def close(self) -> None:
        """Close it: nobody wants it any more. What a thread is at ends by itself."""
        with self._condition:
            if self.state is not LoadState.LOST:
                self.state = LoadState.DONE
        self.lose_from(0)
        self.leave("engine")

    def leave(self, owner: Owner) -> None:
        """Let go of it; the last closes the sources."""
        with self._condition:
            is_last = self._owners == {owner}
            self._owners.discard(owner)
        if is_last:
            for source in self.sources:
                source.close()
            self._on_closed(self)

    def add_copy(self, index: int, seconds: float) -> None:
        """Add the time that an edge took behind a read."""
        with self._condition:
            self._reads_of(index).seconds += seconds

    def read_so_far(self, edge: Edge) -> tuple[int, float, float]:
        """Bytes, chunks (a layer is a part of one) and seconds; of a lost load with the read that is under way."""
        header = self.sources[0].header
        with self._condition:
            reads = self.reads.get(edge, Reads())
            num_bytes, num_layers, seconds = reads.num_bytes, reads.num_layers, reads.seconds
            if reads.since_s is not None and self.state is LoadState.LOST:
                num_bytes += header.layer_bytes
                num_layers, seconds = num_layers + 1, seconds + self._clock() - reads.since_s
        return num_bytes, num_layers / header.layout.num_layers, seconds

    def _next_part(self) -> range | None:
        """Return what is to be read now; None: the thread has left."""
        with self._condition:
            part = next((part for part in self._parts if part.stop > self.num_read), None)
            if part is not None and part.start <= self._num_begun and part.start < self._num_sound:
                return part
            self.leave("thread")
        return None

    def _read_on(self) -> None:
        """Have a thread read its next part, if none is at it."""
        if self.state is LoadState.READING and "thread" not in self._owners:
            self._owners.add("thread")
            self._on_part(self)

    def _read_layer(self, index: int, layer: int, part: range) -> None:
        num_bytes = self.sources[index].header.layer_bytes
        if not self._budget.has(num_bytes) and not any(self._layers[: part.start]):  # of the part before
            self._set_ready(part)  # as far as it can be: it goes on when the engine takes what was read
        if not self._budget.reserve(num_bytes, lambda: index < self._num_begun, lambda: index >= self._num_sound):
            return
        read: U8Array | Miss = Miss.BUSY
        try:
            read = self._read(index, layer)
        finally:
            with self._condition:
                is_kept = not isinstance(read, Miss) and index < self._num_sound
                if is_kept and not isinstance(read, Miss):
                    self._layers[index][layer] = read
                    self._num_ahead += num_bytes
                    self._condition.notify_all()
            if not is_kept:
                self._budget.release(num_bytes)
            if isinstance(read, Miss):
                self.lose_from(index)
        if self.plan is not None and self._num_ahead >= self.plan.buffer_bytes:
            self._set_ready(part)

    def _set_ready(self, part: range) -> None:
        with self._condition:
            self._num_ready = max(self._num_ready, part.stop)
            self._update_state()

    def _update_state(self) -> None:
        if self.state in (LoadState.READING, LoadState.READY):
            is_ready = self._num_ready > self._num_begun or self._num_ready >= self._num_sound
            self.state = LoadState.READY if is_ready else LoadState.READING

    def _read(self, index: int, layer: int, num_readers: int = 1) -> U8Array | Miss:
        source, started_s = self.sources[index], self._clock()
        read: U8Array | Miss = Miss.BUSY
        with self._condition:
            reads = self._reads_of(index)
            reads.since_s = started_s
        try:
            read = source.read(layer)
        except MemoryError:
            pass
        finally:
            with self._condition:
                reads.since_s, reads.seconds = None, reads.seconds + (self._clock() - started_s) / num_readers
                if not isinstance(read, Miss):
                    reads.num_bytes += read.nbytes
                    reads.num_layers += 1
        return read

    def _reads_of(self, index: int) -> Reads:
        return self.reads.setdefault(self.sources[index].edge, Reads())
