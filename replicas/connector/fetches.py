"""The fetches of one engine, and the threads that look and read for them. Policy and threads only: no tensors."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.load_controller import Loadable, LoadController
from mneme.cachetier.store import ChainQuery, ChunkSource, ChunkStore
from mneme.replicas.connector.fetch import Fetch, GivenUp
from mneme.replicas.connector.read_room import ReadRoom
from mneme.replicas.connector.workers import Workers

log = logging.getLogger(__name__)

_NUM_THREADS = 2  # of each kind: who looks never waits behind who reads
_SLOWER = 1.1  # than predicted: that is noise
_CLOSE_S = 1.0  # how long a close waits for what the threads are at

MakeWorkers = Callable[[str, int], Workers]  # name, number of threads


class Fetches:
    """Of all sequences of one engine, whose thread calls it."""

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
        self.room = ReadRoom(read_buffer_bytes)
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

    def begin(self, query: ChainQuery, num_resident: int, *, is_alone: bool = True) -> Fetch:
        """Look for a sequence of which the engine has the first `num_resident` tokens.

        `is_alone`: nothing else runs or waits.
        """
        num_tokens = len(query.token_ids)
        timeout_s = self._controller.lookup_timeout_s(num_resident, num_tokens)
        look_until_s = self._clock() + self._controller.lookup_wait_s(num_resident, num_tokens)
        fetch = Fetch(
            query, num_resident, look_until_s, self.room, self._clock,
            is_alone=is_alone, on_closed=self._ended, on_given_up=self._given_up,
        )  # fmt: skip
        with self._lock:
            self._open.add(fetch)
        self._lookers.run(lambda: self._look(fetch, timeout_s))
        return fetch

    def abandon(self) -> None:
        """Nobody wants any of them."""
        with self._lock:
            fetches = list(self._open)
        for fetch in fetches:
            fetch.close()

    def close(self) -> None:
        """Whatever is under way is given up; the threads end after what they are at."""
        self.abandon()
        for workers in (self._readers, self._lookers):
            workers.close(_CLOSE_S)

    def _ended(self, fetch: Fetch) -> None:
        """What it read says how fast the edges are, also where it was given up. The request waits no longer."""
        with self._lock:
            self._open.discard(fetch)
        for edge in list(fetch.reads):  # a load thread may still read
            num_bytes, num_chunks, seconds = fetch.read_so_far(edge)
            is_late = edge == fetch.late_edge and seconds > _SLOWER * self._costs.edge_s(edge, num_bytes, num_chunks)
            self._costs.note_edge(edge, num_bytes, num_chunks, seconds, is_complete=not is_late)
        self._lookers.run(lambda: self._store.forget([fetch.query.request_id]))

    def _given_up(self, what: GivenUp) -> None:
        self.num_given_up[what] += 1

    def _look(self, fetch: Fetch, timeout_s: float) -> None:
        is_reading = False
        try:
            if not fetch.is_closed:
                is_reading = self._find(fetch, timeout_s)
        except Exception:  # the edge of a thread: the prompt is computed
            log.exception("looking for chunks failed request_id=%s", fetch.query.request_id)
            fetch.close()
        finally:
            if not is_reading:
                fetch.rest()
            self.on_answer()

    def _find(self, fetch: Fetch, timeout_s: float) -> bool:
        """Whether chunks are being brought."""
        sources = self._store.locate(fetch.query, timeout_s)
        try:
            sources = fetch.skip_computed(sources)
            chunks, num_tokens = _loadable(fetch, sources), len(fetch.query.token_ids)
            plan = self._controller.plan(fetch.num_resident, num_tokens, chunks, is_alone=fetch.is_alone)
        except BaseException:
            for source in sources:
                source.close()
            raise
        if not fetch.found(sources, plan):
            return False
        self._readers.run(lambda: self._bring(fetch))
        return True

    def _bring(self, fetch: Fetch) -> None:
        try:
            fetch.bring()
        except Exception:  # the edge of a thread: what was not brought is computed
            log.exception("reading chunks failed request_id=%s", fetch.query.request_id)
        finally:
            fetch.rest()
            self.on_answer()


def _loadable(fetch: Fetch, sources: list[ChunkSource]) -> list[Loadable]:
    """What each chunk would add to what the engine has."""
    loadable, start = [], fetch.query.first * fetch.query.chunk_tokens
    for source in sources:
        num_new = start + source.num_usable - max(start, fetch.num_resident)
        num_bytes = source.header.payload_bytes
        loadable.append(Loadable(max(num_new, 0), num_bytes, source.edge))
        start += source.header.num_tokens
    return loadable
