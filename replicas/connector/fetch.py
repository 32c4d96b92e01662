"""Looks up what the cache tier has of a sequence, and brings it into memory, while the engine runs others.

A `Fetch` goes from *looking* (the store is asked; its sequence may compute its first rows meanwhile) over *bringing*
(bytes that are not in this node's memory are read, first layers first) to *there*. It may stop at any time: what did
not come is computed. At most one
worker thread owns a fetch, until it calls `rest`; sources are closed once nobody wants it and no thread owns it.

Policy and threads only: no tensors.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from mneme.cachetier.chunk.header import I32Array, U8Array
from mneme.cachetier.names import Edge, Miss
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.load_controller import Loadable, LoadController, LoadPlan
from mneme.cachetier.store import ChainQuery, ChunkSource, ChunkStore
from mneme.primitives import Workers
from mneme.replicas.report import GivenUp
from mneme.replicas.request import Source

logger = logging.getLogger(__name__)

SOURCE_BY_EDGE: dict[Edge, Source] = {"host": "host", "disk": "disk", "peer_host": "peer", "peer_disk": "peer"}

ASK_AGAIN_S = 0.5  # since the last question for a request that waits
_OVERDUE_CHUNKS = 16  # computed in the time of an answer: it is overdue
_NUM_THREADS = 2  # of each kind: who looks never waits behind who reads
_CLOSE_S = 1.0  # how long a close waits for what the threads are at

MakeWorkers = Callable[[str, int], Workers]  # name, number of threads


class ReadBudget:
    """Bounds the bytes that an engine's fetches read ahead together (the read buffer of AttentionStore 3.2.1).

    What is urgent is let in above the bound: somebody waits for it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_used = 0
        self._num_bytes = num_bytes
        self._condition = threading.Condition()

    def has(self, num_bytes: int) -> bool:
        return self.num_used + num_bytes <= self._num_bytes

    def take(self, num_bytes: int, is_urgent: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        """Wait for room, unless it is urgent. False if nobody wants these bytes any more.

        Whoever changes what the two say calls `wake`.
        """
        with self._condition:
            self._condition.wait_for(lambda: is_over() or is_urgent() or self.has(num_bytes))
            if is_over():
                return False
            self.num_used += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
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


class LoadClock:
    """Says how long one fetch may still take of the time that it costs the request.

    Time counts while the sequence could run but for its chunks. What is brought while it waits for its turn, for pages
    or for an earlier request costs nothing, and layers that are in memory when they are loaded are due from then. What
    a step loads for several sequences comes layer by layer of all, so each may take as long as the others' loads do,
    too, and as the step computes others' rows between its layers. What was read ahead is not late any more: a copy is
    left, and where that takes long (a busy machine, pages of the pool that were never written), computing would too.
    All of it is due when the last layer is, and as much later as computing it then would take.

    The engine's thread calls it, but for `begin_bringing` and `num_brought`.
    """

    def __init__(self, plan: LoadPlan, num_layers: int, clock: Callable[[], float]) -> None:
        self.num_brought = 0  # layers of which all is in memory
        self._plan, self._num_layers, self._clock = plan, num_layers, clock
        self._spent_s = 0.0  # before the clock was last stopped
        self._since_s: float | None = None  # when it was started; None: it stands
        self._waited_s: float | None = None  # what was spent before a thread began to bring; None: none has
        self._num_ready, self._load_began_s = 0, 0.0  # layers that were in memory when the load began
        self._beside_s = 0.0  # the step's other loads

    def start(self) -> None:
        """Start the clock: the sequence waits for nothing else."""
        if self._since_s is None:
            self._since_s = self._clock()

    def stop(self) -> None:
        """Stop the clock: the sequence waits for something else, or for nothing."""
        self._spent_s, self._since_s = self._so_far_s(), None

    def begin_bringing(self) -> None:
        self._waited_s = self._so_far_s()

    def begin_load(self, beside_s: float = 0.0) -> None:
        """Begin a load into pages taken for all or a part of it; the step's other loads should take so long."""
        self.start()
        self._num_ready, self._load_began_s, self._beside_s = self.num_brought, self._clock(), beside_s

    @property
    def is_all_brought(self) -> bool:
        return self.num_brought == self._num_layers

    def left_to_wait_s(self) -> float:
        """Return the seconds, beside others, until the next layer must be in memory, or somebody must begin to read."""
        self.start()
        if self._waited_s is None:
            return self._plan.slack_s - self._so_far_s()
        return self._due_s(self.num_brought, is_alone=False) - self._so_far_s()

    def left_s(self, layer: int, computed_s: float = 0.0) -> float:
        """Return the seconds until a layer must be in its pages.

        `computed_s`: of the step, in which it waited for no load: the rows of others cost as much without this one.
        """
        beside_s = self._beside_s * (layer + 1) / self._num_layers
        beside_s += max(computed_s - self._plan.first_s * layer / self._num_layers, 0.0)
        paced = layer
        if self._waited_s is not None and layer < self.num_brought:  # who reads was in time, and a copy is left
            paced = self._num_layers - 1
            beside_s += self._plan.predicted_recompute_s
        if layer < self._num_ready:
            return self._plan.due_s(paced, self._num_layers) + beside_s - (self._clock() - self._load_began_s)
        return self._due_s(paced, is_alone=True) + beside_s - self._so_far_s()

    def _due_s(self, layer: int, *, is_alone: bool) -> float:
        return self._plan.due_s(layer, self._num_layers, waited_s=self._waited_s or 0.0, is_alone=is_alone)

    def _so_far_s(self) -> float:
        return self._spent_s + (0.0 if self._since_s is None else self._clock() - self._since_s)


class Fetch:
    """Chunks that one sequence may load. `is_ready`, `spans` and `close` never block: the engine calls them."""

    def __init__(
        self,
        query: ChainQuery,
        num_resident: int,
        look_until_s: float,
        budget: ReadBudget,
        clock: Callable[[], float],
        *,
        num_first_rows: int = 0,
        rows_within: Callable[[float], float] = lambda seconds: math.inf,
        num_stored: int = 0,
        is_alone: bool = True,
        on_closed: Callable[[Fetch], None] = lambda fetch: None,
        on_given_up: Callable[[GivenUp], None] = lambda what: None,
    ) -> None:
        """See `LoadController.first_rows` and `plan`, and `CostModel.rows_within`.

        `on_given_up` is called once at most, on the engine's thread.
        """
        self.query, self.num_resident = query, num_resident
        self.sources: list[ChunkSource] = []  # those that are to be loaded, in order
        self.plan: LoadPlan | None = None
        self.reads: dict[Edge, Reads] = {}  # so far
        self.num_stored, self.is_alone = num_stored, is_alone
        self.following: Fetch | None = None  # the next part of what was found, to be read when this one is in pages
        self.is_begun = True  # else it is such a part, and another is read before
        self._hands_over = False  # who wanted this wants that one now
        self.is_given_up = False  # as it took too long
        self.num_readers = 1  # threads that take at once: what each is at counts for a part of the time
        self._asked_s = clock()
        self._look_until_s, self._num_first_rows, self._rows_within = look_until_s, num_first_rows, rows_within
        self._times: LoadClock | None = None  # once it was found
        self.num_layers, self._layer_bytes = 1, 0  # of a full chunk's layer
        self._num_ahead = 0  # bytes that were brought
        self._num_sound = 0  # sources, before the first of which something could not be brought
        self._budget, self._clock = budget, clock
        self._on_closed, self._on_given_up = on_closed, on_given_up
        self._condition = threading.Condition()
        self._layers: list[dict[int, U8Array]] = []  # by chunk: what was brought and not yet taken
        self._is_busy = True  # a thread looks or reads, or is about to
        self._has_looked = self._is_there = self._is_closed = self._is_urgent = self._is_ended = False

    @property
    def is_closed(self) -> bool:
        """Return whether nobody wants it any more."""
        return self._is_closed

    @property
    def is_looking(self) -> bool:
        """Return whether it is not known yet what there is."""
        return not (self._has_looked or self._is_there or self._is_closed)

    def rotated(self, index: int) -> I32Array:
        """Return where the keys of a chunk's tokens are rotated."""
        return self.sources[index].header.slot_position

    def has_all(self, num_tokens: int) -> bool:
        """Whether nothing of so many tokens is missing but the end that is shorter than a chunk."""
        return self.end >= num_tokens // self.query.chunk_tokens * self.query.chunk_tokens

    def is_outdated(self, num_resident: int, num_tokens: int) -> bool:
        """Return whether the store may have more of a sequence by now than is coming.

        The engine lost what is before it; or, after a while, nothing is coming, or not all, and nothing of it was read
        or is about to be, so that asking again costs no more than the question: no place among those who read, and no
        time that it has waited.
        """
        if self.is_looking or self.is_given_up:
            return False
        spans = self.spans
        if num_resident < (spans[0][0] if spans else self.num_resident):
            return True
        if self._clock() - self._asked_s < ASK_AGAIN_S:
            return False
        return not (self.has_all(num_tokens) or self.reads or self._is_busy) if spans else self.is_settled

    def num_rows_before(self, num_tokens: int) -> int:
        """Count the rows behind so many tokens that a step may compute while it is looking: to where a chunk ends.

        As many as an answer takes, as long as it may come soon, and then as many as take the time that was waited: what
        is found is loaded behind them.
        """
        now_s = self._clock()
        is_late = now_s >= self._look_until_s
        num_rows = self._rows_within(now_s - self._asked_s) if is_late else self._num_first_rows
        return max(int(min(num_rows, self.query.chunk_tokens - num_tokens % self.query.chunk_tokens)), 1)

    @property
    def is_overdue(self) -> bool:
        """Return whether an answer takes so long that a prompt need not wait for it, though others are computed."""
        return self._rows_within(self._clock() - self._asked_s) >= _OVERDUE_CHUNKS * self.query.chunk_tokens

    def skip_computed(self, sources: list[ChunkSource]) -> list[ChunkSource]:
        """Close the sources of which the sequence has all by now; the rest begins at `start_of(0)`."""
        num_skipped = max(self.num_resident // self.query.chunk_tokens - self.query.first, 0)
        self.query = replace(self.query, first=self.query.first + num_skipped)
        for source in sources[:num_skipped]:
            source.close()
        return sources[num_skipped:]

    @property
    def is_settled(self) -> bool:
        """Return whether nobody need wait for it: all is in memory, or nothing is to come."""
        return self._is_closed or self._is_there

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

    @property
    def end(self) -> int:
        """The position behind the last token that it has, and what follows has."""
        if self.following is not None and not self.following.is_closed and self._num_sound == len(self.sources):
            return self.following.end
        return max((end for _, end in self.spans), default=0)

    def hand_over(self) -> Fetch | None:
        """Return the next part, which goes on when this one is closed; None: this was all."""
        self._hands_over = True
        return self.following

    def source_of(self, index: int) -> Source:
        return SOURCE_BY_EDGE[self.sources[index].edge]

    @property
    def step_chunks(self) -> int | None:
        """Return how many one step loads beside others; None: not planned yet."""
        return None if self.plan is None else self.plan.step_chunks

    @property
    def is_in_memory(self) -> bool:
        """Return whether a load of it would not wait for what is read."""
        return self._times is not None and self._times.is_all_brought

    def begin_load(self, beside_s: float = 0.0) -> None:
        """Begin to load into pages taken for it; the step's other loads are predicted to take so long."""
        assert self._times is not None
        self._times.begin_load(beside_s)

    def left_s(self, layer: int, computed_s: float = 0.0) -> float:
        """Return the seconds until a layer must have come, or the rest is given up; see `LoadClock.left_s`."""
        assert self._times is not None
        return self._times.left_s(layer, computed_s)

    def is_ready(self, *, is_alone: bool) -> bool:
        """Return whether the sequence, which could run, need not wait for it any longer.

        All is in memory, nothing was found, it is too late, or what there is will be said while rows are computed.

        Alone, it can be computed layer by layer as its chunks come; beside others it would hold them up.
        """
        with self._condition:  # all that `found` sets, or nothing: a clock without what it is of gives up at once
            is_settled, has_looked, times = self.is_settled, self._has_looked, self._times
        if is_settled or (has_looked and self.is_begun and is_alone):
            self.pause()
            return True
        if times is None:
            return self._num_first_rows > 0 or self._clock() >= self._look_until_s
        if times.left_to_wait_s() > 0:
            return False
        self.give_up("waiting")
        self.close()
        return True

    def pause(self) -> None:
        """Stop the clock until it is asked for again: the sequence waits for something else, or for nothing."""
        if self._times is not None:
            self._times.stop()

    def give_up(self, what: GivenUp) -> None:
        """Give up as it took too long."""
        if not self.is_given_up:
            self.is_given_up = True
            self._on_given_up(what)

    def found(self, sources: list[ChunkSource], plan: LoadPlan) -> bool:
        """Keep what the plan wants of what the store has, close the rest; returns whether some is to be brought."""
        with self._condition:
            self._is_busy = self.is_begun
            wanted = [] if self._is_closed else sources[: plan.num_chunks]
            self.sources, self.plan, self._num_sound = wanted, plan, len(wanted)
            self._layers = [{} for _ in wanted]
            if wanted:
                layout = wanted[0].header.layout
                self.num_layers, self._layer_bytes = layout.num_layers, wanted[0].header.layer_bytes
            times = LoadClock(plan, self.num_layers, self._clock)
            times.num_brought = 0 if self._far else self.num_layers
            # In this order, for who reads one of them without the lock: what is there has been looked at, and is timed.
            self._times, self._has_looked, self._is_there = times, True, not self._far
        for source in sources[len(wanted) :]:
            source.close()
        return bool(self._far)

    def bring(self) -> None:
        """Read what is not in this node's memory, layer by layer; on a thread of its own."""
        times = self._times
        assert times is not None
        times.begin_bringing()
        for layer in range(self.num_layers):
            for index in self._far:
                if index < self._num_sound and not self._bring(index, layer):
                    return
            times.num_brought = layer + 1

    def rest(self) -> None:
        """Let go of it: no thread works on it from now on."""
        with self._condition:
            self._is_busy, self._is_there = False, True
            self._condition.notify_all()
            is_closed = self._is_closed
        if is_closed:
            self._end()

    def take(self, index: int, layer: int) -> U8Array | Miss:
        """Return the bytes of a chunk's layer, checked; waits for those being read. Each is taken once."""
        if index not in self._far:
            return self._read(index, layer, self.num_readers)
        self._is_urgent = True
        self._budget.wake()
        with self._condition:
            self._condition.wait_for(lambda: layer in self._layers[index] or self._is_lost(index))
            brought = self._layers[index].pop(layer, None)
        if brought is None:
            return Miss.ABSENT
        self._budget.give(brought.nbytes)
        return brought

    def note_copy(self, index: int, seconds: float) -> None:
        """Add the time that an edge took behind a read."""
        with self._condition:
            self._reads_of(index).seconds += seconds

    def read_so_far(self, edge: Edge) -> tuple[int, float, float]:
        """Bytes, chunks (a layer is a part of one) and seconds, with the read that was given up."""
        with self._condition:
            reads = self.reads.get(edge, Reads())
            num_bytes, num_layers, seconds = reads.num_bytes, reads.num_layers, reads.seconds
            if reads.since_s is not None and self.is_given_up:
                num_bytes += self._layer_bytes
                num_layers, seconds = num_layers + 1, seconds + self._clock() - reads.since_s
        return num_bytes, num_layers / self.num_layers, seconds

    def abandon(self) -> None:
        """Tell whoever waits for bytes that there are none; the sources are closed later."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._budget.wake()

    def close(self) -> None:
        """Close it: nobody wants it any more. What a thread is at ends by itself."""
        self.abandon()
        if self.following is not None and not self._hands_over:
            self.following.close()
        if not self._is_busy:
            self._end()

    def begin_part(self) -> bool:
        """Begin to read a later part; False if nobody wants it any more, or nothing of it is to be read."""
        with self._condition:
            self.is_begun, self._is_busy = True, bool(self._far) and not self._is_closed
        return self._is_busy

    def _reads_of(self, index: int) -> Reads:
        return self.reads.setdefault(self.sources[index].edge, Reads())

    @property
    def _far(self) -> list[int]:
        return [index for index, source in enumerate(self.sources) if source.edge != "host"]

    def _is_lost(self, index: int) -> bool:
        """Return whether nothing more of a chunk is brought."""
        return self._is_closed or not self._is_busy or index >= self._num_sound

    def _bring(self, index: int, layer: int) -> bool:
        """False when nobody wants any more of it."""
        source = self.sources[index]
        if not self._budget.has(source.header.layer_bytes):
            self._is_there = True  # as far as it can be: it goes on when the engine takes what was read
        if not self._budget.take(source.header.layer_bytes, lambda: self._is_urgent, lambda: self._is_closed):
            return False
        read: U8Array | Miss = Miss.BUSY
        try:
            read = self._read(index, layer)
        finally:
            if isinstance(read, Miss):
                self._budget.give(source.header.layer_bytes)
                self.lose_from(index)
        if not isinstance(read, Miss):
            with self._condition:
                self._layers[index][layer] = read
                self._num_ahead += read.nbytes
                self._is_there |= self._num_ahead >= self.plan.buffer_bytes if self.plan is not None else False
                self._condition.notify_all()
        return True

    def lose_from(self, index: int) -> None:
        """Give up a chunk that cannot be had, and those behind it, which are of no use without it."""
        with self._condition:
            self._num_sound = min(self._num_sound, index)
            brought, self._layers[index:] = self._layers[index:], [{} for _ in self._layers[index:]]
            self._condition.notify_all()
        self._give_back(brought)

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
            self._note(reads, read, (self._clock() - started_s) / num_readers)
        return read

    def _note(self, reads: Reads, read: U8Array | Miss, seconds: float) -> None:
        with self._condition:
            reads.since_s, reads.seconds = None, reads.seconds + seconds
            if not isinstance(read, Miss):
                reads.num_bytes += read.nbytes
                reads.num_layers += 1

    def _give_back(self, brought: list[dict[int, U8Array]]) -> None:
        self._budget.give(sum(read.nbytes for layers in brought for read in layers.values()))

    def _end(self) -> None:
        with self._condition:
            if self._is_ended:
                return
            self._is_ended = True
            layers, self._layers = self._layers, [{} for _ in self.sources]
        self._give_back(layers)
        for source in self.sources:
            source.close()
        self._on_closed(self)


class Fetches:
    """The fetches of one engine, whose thread calls it, and the threads that look and read for them."""

    def __init__(
        self,
        store: ChunkStore,
        controller: LoadController,
        costs: CostModel,
        *,
        read_buffer_bytes: int,
        clock: Callable[[], float],
        make_workers: MakeWorkers | None = None,
    ) -> None:
        self.budget, self._part_bytes = ReadBudget(read_buffer_bytes), read_buffer_bytes
        self.on_answer: Callable[[], None] = lambda: None  # some fetch may be ready; called on any thread
        self._store, self._controller, self._costs, self._clock = store, controller, costs, clock
        make = make_workers or Workers
        self._lookers, self._readers = make("kv-look", _NUM_THREADS), make("kv-read", _NUM_THREADS)
        self.num_given_up: Counter[GivenUp] = Counter()
        self._lock = threading.Lock()
        self._open: set[Fetch] = set()

    @property
    def num_open(self) -> int:
        """Fetches that hold something, or are about to."""
        return len(self._open)

    def begin(self, query: ChainQuery, num_resident: int, *, num_history: int = 0, is_alone: bool = True) -> Fetch:
        """Look for a sequence of which the engine has the first `num_resident` tokens.

        num_history  tokens that its session had before: where the engine lacks full chunks of them, they were stored
        is_alone     nothing else runs or waits
        """
        num_tokens = len(query.token_ids)
        num_stored = num_history - num_resident if num_history - num_resident >= query.chunk_tokens else 0
        timeout_s = self._controller.lookup_timeout_s(num_resident, num_tokens, num_stored)
        asked_s = self._clock()
        look_until_s = asked_s + self._controller.lookup_wait_s(num_resident, num_tokens, num_stored)
        num_first_rows = self._controller.first_rows(num_resident, num_stored)
        fetch = Fetch(
            query, num_resident, look_until_s, self.budget, self._clock,
            num_first_rows=num_first_rows, rows_within=partial(self._costs.rows_within, context=num_resident),
            num_stored=num_stored, is_alone=is_alone, on_closed=self._ended,
            on_given_up=self._given_up,
        )  # fmt: skip
        with self._lock:
            self._open.add(fetch)
        self._lookers.run(lambda: self._look(fetch, timeout_s, asked_s))
        return fetch

    def abandon(self) -> None:
        """Close all of them: nobody wants what they bring."""
        with self._lock:
            fetches = list(self._open)
        for fetch in fetches:
            fetch.close()

    def close(self) -> None:
        """Give up whatever is under way; the threads end after their current task."""
        self.abandon()
        for workers in (self._readers, self._lookers):
            workers.close(_CLOSE_S)

    def _ended(self, fetch: Fetch) -> None:
        """Note how fast the edges were, also where it was given up, and that the request waits no longer."""
        with self._lock:
            self._open.discard(fetch)
            waiting = {each.query.request_id for each in self._open}
        for edge in list(fetch.reads):  # a load thread may still read
            num_bytes, num_chunks, seconds = fetch.read_so_far(edge)
            self._costs.note_edge(edge, num_bytes, num_chunks, seconds)
        following, request_id = fetch.following, fetch.query.request_id
        if request_id not in waiting:
            self._lookers.run(lambda: self._store.forget([request_id]))
        elif following is not None and following.begin_part():
            self._readers.run(lambda: self._bring(following))

    def _given_up(self, what: GivenUp) -> None:
        self.num_given_up[what] += 1

    def _look(self, fetch: Fetch, timeout_s: float, asked_s: float) -> None:
        is_reading = False
        try:
            if not fetch.is_closed:
                is_reading = self._find(fetch, timeout_s, asked_s)
        except Exception:  # the edge of a thread: the prompt is computed
            logger.exception("looking for chunks failed request_id=%s", fetch.query.request_id)
            fetch.close()
        finally:
            if not is_reading:
                fetch.rest()
            self.on_answer()

    def _find(self, fetch: Fetch, timeout_s: float, asked_s: float) -> bool:
        """Ask the store and plan the load; returns whether chunks are being brought."""
        sources = self._store.locate(fetch.query, timeout_s)
        self._costs.note_lookup(self._clock() - asked_s)
        self._costs.note_found([source.edge for source in sources])
        try:
            sources = fetch.skip_computed(sources)
            chunks, num_tokens = _loadable(fetch, sources), len(fetch.query.token_ids)
            plan = self._controller.plan(
                fetch.num_resident, num_tokens, chunks, num_stored=fetch.num_stored, is_alone=fetch.is_alone
            )
        except BaseException:
            for source in sources:
                source.close()
            raise
        if not self._found(fetch, sources, plan):
            return False
        self._readers.run(lambda: self._bring(fetch))
        return True

    def _found(self, fetch: Fetch, sources: list[ChunkSource], plan: LoadPlan) -> bool:
        """Give a fetch what was found; beside others in parts that fit the read buffer, where that is too small to hide
        what is read behind what is computed. See `Fetch.found`."""
        far = accumulate(0 if each.edge == "host" else each.header.payload_bytes for each in sources)
        num_first = max(bisect_right([*far], self._part_bytes), 1)
        if fetch.is_alone or num_first >= plan.num_chunks or plan.buffer_bytes <= self._part_bytes:
            return fetch.found(sources, plan)
        query = replace(fetch.query, first=fetch.query.first + num_first)
        following = Fetch(
            query, fetch.num_resident, 0.0, self.budget, self._clock,
            is_alone=False, on_closed=self._ended, on_given_up=self._given_up,
        )  # fmt: skip
        following.is_begun = False
        with self._lock:
            self._open.add(following)
        self._found(following, sources[num_first:], plan.part(plan.num_chunks - num_first))
        fetch.following = following
        is_brought = fetch.found(sources[:num_first], plan.part(num_first))
        if fetch.is_closed:
            following.close()
        return is_brought

    def _bring(self, fetch: Fetch) -> None:
        try:
            fetch.bring()
        except Exception:  # the edge of a thread: what was not brought is computed
            logger.exception("reading chunks failed request_id=%s", fetch.query.request_id)
        finally:
            fetch.rest()
            self.on_answer()


def _loadable(fetch: Fetch, sources: list[ChunkSource]) -> list[Loadable]:
    """Return what each chunk would add to what the engine has."""
    loadable, start = [], fetch.query.first * fetch.query.chunk_tokens
    for source in sources:
        num_new = start + source.num_usable - max(start, fetch.num_resident)
        num_bytes = source.header.payload_bytes
        loadable.append(Loadable(max(num_new, 0), num_bytes, source.edge))
        start += source.header.num_tokens
    return loadable
