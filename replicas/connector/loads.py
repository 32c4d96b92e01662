"""Begins the loads of one engine, and has the threads that ask the store and read ahead for them."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from mneme.cachetier.config import READ_BUFFER_BYTES
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.load_controller import Loadable, LoadController, LoadPlan
from mneme.cachetier.store import ChainQuery, ChunkSource, ChunkStore
from mneme.primitives import Workers
from mneme.replicas.load import Load, LoadState, ReadBudget
from mneme.replicas.report import GivenUp

logger = logging.getLogger(__name__)

_NUM_THREADS = 2  # of each kind: who asks never waits behind who reads
_CLOSE_S = 1.0  # how long a close waits for what the threads are at

MakeWorkers = Callable[[str, int], Workers]  # name, number of threads


class Loads:
    """The loads of one engine, whose thread calls it."""

    def __init__(
        self,
        store: ChunkStore,
        controller: LoadController,
        costs: CostModel,
        *,
        clock: Callable[[], float],
        make_workers: MakeWorkers | None = None,
    ) -> None:
        self.budget = ReadBudget(READ_BUFFER_BYTES)
        self.on_answer: Callable[[], None] = lambda: None  # some load may be ready; called on any thread
        self._store, self._controller, self._costs, self._clock = store, controller, costs, clock
        make = make_workers or Workers
        self._lookers, self._readers = make("kv-look", _NUM_THREADS), make("kv-read", _NUM_THREADS)
        self.num_given_up: Counter[GivenUp] = Counter()
        self._lock = threading.Lock()
        self._open: set[Load] = set()

    @property
    def num_open(self) -> int:
        """Loads that hold something, or are about to."""
        return len(self._open)

    def begin(self, query: ChainQuery, num_resident: int, *, num_stored: int = 0, is_alone: bool = True) -> Load:
        """Begin to load a sequence of which the engine has the first `num_resident` tokens.

        num_stored  tokens behind these that its session had before
        is_alone    nothing else runs or waits
        """
        num_tokens = len(query.token_ids)
        timeout_s = self._controller.lookup_timeout_s(num_resident, num_tokens, num_stored)
        load = Load(
            query, num_resident, self.budget, self._clock,
            wait_s=self._controller.lookup_wait_s(num_resident, num_tokens, num_stored), timeout_s=timeout_s,
            num_stored=num_stored, is_alone=is_alone,
            on_part=self._read_on, on_closed=self._closed, on_given_up=self._given_up,
        )  # fmt: skip
        with self._lock:
            self._open.add(load)
        asked_s = self._clock()
        self._lookers.run(lambda: self._ask(load, timeout_s, asked_s))
        return load

    def abandon(self) -> None:
        """Close all of them: nobody wants what they read."""
        with self._lock:
            loads = list(self._open)
        for load in loads:
            load.close()

    def close(self) -> None:
        """Give up whatever is under way; the threads end after their current task."""
        self.abandon()
        for workers in (self._readers, self._lookers):
            workers.close(_CLOSE_S)

    def _closed(self, load: Load) -> None:
        """Learn how fast the edges were; the request waits no longer."""
        with self._lock:
            self._open.discard(load)
            waiting = {each.query.request_id for each in self._open}
        if load.state is not LoadState.LOST:
            self._learn_edges(load)
        if load.query.request_id not in waiting:
            self._lookers.run(lambda: self._store.forget([load.query.request_id]))

    def _given_up(self, load: Load, what: GivenUp) -> None:
        """Learn how slow the edges are at once: while a read hangs, all that come would wait as long."""
        self.num_given_up[what] += 1
        self._learn_edges(load)

    def _learn_edges(self, load: Load) -> None:
        for edge in list(load.reads):  # a load thread may still read
            self._costs.learn_edge(edge, *load.read_so_far(edge))

    def _ask(self, load: Load, timeout_s: float, asked_s: float) -> None:
        is_far = False
        try:
            if load.is_asking:
                is_far = self._find(load, timeout_s, asked_s)
        except Exception:  # the edge of a thread: the prompt is computed
            logger.exception("looking for chunks failed request_id=%s", load.query.request_id)
            load.close()
        finally:
            if is_far:
                self._read_on(load)
            else:
                load.leave("thread")
            self.on_answer()

    def _find(self, load: Load, timeout_s: float, asked_s: float) -> bool:
        """Ask the store and plan the load; returns whether some is to be read."""
        sources = self._store.locate(load.query, timeout_s)
        self._costs.learn_lookup(self._clock() - asked_s)
        self._costs.learn_found([source.edge for source in sources])
        if not load.num_stored:
            num_found = sum(source.num_usable for source in sources)
            self._controller.learn_answer(num_found, len(load.query.token_ids) - load.num_resident)
        try:
            sources = load.skip_computed(sources)
            plan = self._controller.plan(
                load.num_resident,
                len(load.query.token_ids),
                _loadable(load, sources),
                num_stored=load.num_stored,
                is_alone=load.is_alone,
            )
        except BaseException:
            for source in sources:
                source.close()
            raise
        return load.found(sources, *self._in_parts(load, sources, plan))

    def _in_parts(self, load: Load, sources: list[ChunkSource], plan: LoadPlan) -> tuple[LoadPlan, Sequence[range]]:
        """Beside others read in parts that fit the read buffer what that is too small to hide behind computing.

        Each part is in memory before it is loaded, so no stream waits for what is read: beside a history of 16k tokens
        on a disk of 114 MB/s its longest pause was 72 ms (695 with nothing read ahead: benchmarks/results, 2026-11-24).
        """
        ends, num_bytes = list[int](), 0
        for index, source in enumerate(sources[: plan.num_chunks]):
            size = 0 if source.edge == "host" else source.header.payload_bytes
            if num_bytes and num_bytes + size > self.budget.num_bytes:
                ends.append(index)
                num_bytes = 0
            num_bytes += size
        if load.is_alone or not ends or plan.buffer_bytes <= self.budget.num_bytes:
            return plan, [range(plan.num_chunks)]
        edges = [0, *ends, plan.num_chunks]
        return replace(plan, buffer_bytes=math.inf), [range(a, b) for a, b in pairwise(edges)]

    def _read_on(self, load: Load) -> None:
        self._readers.run(lambda: self._read_ahead(load))

    def _read_ahead(self, load: Load) -> None:
        try:
            load.read_ahead()
        except Exception:  # the edge of a thread: what was not read is computed
            logger.exception("reading chunks failed request_id=%s", load.query.request_id)
        finally:
            self.on_answer()


def _loadable(load: Load, sources: list[ChunkSource]) -> list[Loadable]:
    """Return what each chunk would add to what the engine has."""
    loadable, start = [], load.query.first * load.query.chunk_tokens
    for source in sources:
        num_new = start + source.num_usable - max(start, load.num_resident)
        num_bytes = source.header.payload_bytes
        loadable.append(Loadable(max(num_new, 0), num_bytes, source.edge))
        start += source.header.num_tokens
    return loadable
