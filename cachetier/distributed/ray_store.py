"""The cache tier of a Ray cluster as one engine's process sees it.

A question goes to the actor of the engine's own node, which has the directory asked for what is not there, and then to
the nodes that are said to have the rest, all at once. What this node has is read here: objects without a copy, files by
this process. All calls are bounded in time; a node that does not answer is left alone for a while.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any, NamedTuple

from ray.exceptions import RayError

from mneme.cachetier.chunk.header import Chunk, ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.distributed.actor import ChainAnswer, PutAnswer
from mneme.cachetier.distributed.directory import Span, query_of
from mneme.cachetier.distributed.nodes import Nodes
from mneme.cachetier.distributed.objects import (
    HeldObjects,
    LoadNotices,
    ObjectLayers,
    PeerReads,
    Refs,
    put_runs,
    runs_of,
)
from mneme.cachetier.distributed.ray_admin import RayCacheAdmin
from mneme.cachetier.names import Edge, HostPut, Miss
from mneme.cachetier.node.search import Located, usable
from mneme.cachetier.node.sources import DiskSource, HostSource
from mneme.cachetier.store import ChainQuery, ChunkSource
from mneme.primitives import Bounded

_SourceAndHeader = tuple[ChunkSource, ChunkHeader]

_PUT_WAIT_S = 5.0  # for the node, which may wait for its disk
_CLOSE_TIMEOUT_S = 5.0
_MAX_WAITING = 4096  # requests whose nodes are remembered
_MAX_KEYS = 1 << 16  # that are known: 20 MB


class RayChunkStore:
    """See `ChunkStore`."""

    def __init__(self, nodes: Nodes, *, put_bytes: int, ttl_s: float = math.inf) -> None:
        """`put_bytes` may be under way to the actor; `ttl_s`: of a chunk without a use."""
        self.admin = RayCacheAdmin(nodes)
        self._nodes = nodes
        self._known = KnownKeys(max_age_s=ttl_s / 2)
        self._epoch = 0  # of the node's actor, as it last said
        self._puts = PutsUnderWay(put_bytes, _PUT_WAIT_S, self._put_done)
        self._load_notices = LoadNotices(lambda: self._nodes.own.loads.remote())
        self._lock = threading.Lock()
        self._asked = Bounded[str, list[Any]](_MAX_WAITING)  # by request: the actors that it waits at
        self._counters: Counter[str] = Counter()

    def locate(self, query: ChainQuery, timeout_s: float) -> list[ChunkSource]:
        start_s = time.monotonic()
        found = self._ask_own(query, timeout_s, start_s + timeout_s)
        if found is None:
            return []
        self._check_epoch(found.epoch)
        sources = [self._own_source(each) for each in found.here]
        headers = [each.header for each in found.here]
        if found.spans:
            num_whole = found.spans[0].first - query.first
            further = self._ask_spans(query, found, start_s + timeout_s)
            if further:
                del sources[num_whole:], headers[num_whole:]  # a chunk that is usable in part
                sources += [source for source, _ in further]
                headers += [header for _, header in further]
        self._known.drop(query.keys[query.first :])  # what is not there any more is put again
        self._known.add({header.key: header.parent for header in headers})
        self._counters["located"] += len(sources)
        return sources

    def forget(self, request_ids: Collection[str]) -> None:
        by_actor: dict[Any, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                for actor in self._asked.pop(request_id, ()):
                    by_actor.setdefault(actor, []).append(request_id)
        for actor, ids in by_actor.items():
            actor.forget.remote(ids)

    def known(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return self._known.among(keys)

    def put(self, chunk: Chunk, lineage: Lineage) -> bool:
        """Hand a chunk over; what becomes of it is learned later: one that was refused is not known any more."""
        header = chunk.header
        self._known.add({header.key: header.parent})  # first: the answer may come before `put` returns
        is_put = False
        try:
            is_put = self._nodes.is_up() and self._puts.put(self._nodes.own, chunk, lineage)
        finally:
            if not is_put:
                self._known.drop([header.key])
        return is_put

    def stats(self) -> dict[str, int]:
        return {**self._counters, **self._nodes.counters, **self._puts.stats()}

    def flush(self, timeout_s: float) -> bool:
        return self._puts.flush(timeout_s)

    def close(self) -> None:
        """Close nothing: the node's actor stays."""
        self._puts.flush(_CLOSE_TIMEOUT_S)

    def _ask_own(self, query: ChainQuery, timeout_s: float, deadline_s: float) -> ChainAnswer | None:
        call = self._nodes.call(self._nodes.own_node, "locate", self._nodes.own.locate, query, timeout_s)
        if call is not None:
            self._remember(query.request_id, self._nodes.own)  # an answer that comes too late has it wait there as well
        found: ChainAnswer | None = self._nodes.answers([call], deadline_s)[0]
        return found

    def _ask_spans(self, query: ChainQuery, found: ChainAnswer, deadline_s: float) -> list[_SourceAndHeader]:
        """Sources and headers of what other calls than the first give, as far as there is no gap."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            self._counters["peer_locate_too_late"] += 1
            return []
        calls = []
        for span in found.spans:
            peer, is_last = found.peers[span.node], span is found.spans[-1]
            question = query_of(query, span, is_last=is_last)
            call = peer and self._nodes.call(span.node, "peer_locate", peer.locate_here, question, left_s)
            calls.append(call)
            if call:
                self._remember(query.request_id, peer)
        sources: list[_SourceAndHeader] = []
        reads = PeerReads()
        for span, chunks in zip(found.spans, self._nodes.answers(calls, deadline_s), strict=True):
            sound = _expected(query, span, chunks or [])
            sources += self._peer_sources(reads, found.peers[span.node], span, sound)
            num_whole = sum(each.num_usable == query.chunk_tokens for each in sound)
            if chunks is not None and num_whole < span.num_chunks:
                self._counters["directory_ghosts"] += 1
                found.peers[span.node].not_here.remote([query.keys[span.first + num_whole]])
            if num_whole < span.num_chunks:
                break
        return sources

    def _own_source(self, located: Located) -> ChunkSource:
        header, tier = located.header, located.tier

        def on_miss(miss: Miss) -> None:
            self._missed(tier, header.key, miss)
            self._nodes.own.missed.remote(header.key, tier, miss)

        if located.path is not None:
            return DiskSource(header, located.num_usable, located.path, on_miss, loading=self._load_notices)
        held = located.held
        assert isinstance(held, HeldObjects)
        return HostSource(header, located.num_usable, ObjectLayers(header, lambda: held.refs), on_miss)

    def _peer_sources(
        self, reads: PeerReads, peer: Any, span: Span, found: Sequence[Located]
    ) -> list[_SourceAndHeader]:
        sources: list[_SourceAndHeader] = []
        for tier, chunks in groupby(found, key=lambda each: each.tier):
            neighbours = list(chunks)
            headers = [each.header for each in neighbours]
            first = reads.add(peer, headers, lambda: self._nodes.lost(span.node), is_ready=tier == "host")
            for index, each in enumerate(neighbours, first):
                sources.append((self._peer_source(reads, index, each, peer), each.header))
        return sources

    def _peer_source(self, reads: PeerReads, index: int, located: Located, peer: Any) -> ChunkSource:
        edge: Edge = "peer_host" if located.tier == "host" else "peer_disk"
        key = located.header.key

        def on_miss(miss: Miss) -> None:
            self._missed(edge, key, miss)
            if miss is Miss.ABSENT:
                peer.not_here.remote([key])

        layers = ObjectLayers(located.header, lambda: reads.fetch(index), lambda number: reads.pull(index, number))
        return HostSource(located.header, located.num_usable, layers, on_miss, edge, lambda: reads.drop(index))

    def _missed(self, edge: str, key: bytes, miss: Miss) -> None:
        self._counters[f"{edge}_miss_{miss.value}"] += 1
        self._known.drop([key])

    def _put_done(self, header: ChunkHeader, answer: PutAnswer | None) -> None:
        """A chunk that was refused as what it follows went has all of its chain put again."""
        if answer is not None:
            self._check_epoch(answer.epoch)
        if answer is None or answer.outcome is HostPut.REFUSED:
            self._known.drop([header.key])
            if answer is not None and not answer.has_parent:
                self._known.drop_chain(header.parent)

    def _check_epoch(self, epoch: int) -> None:
        """An actor that was made again has an empty host tier, whatever the one before had."""
        with self._lock:
            is_new, self._epoch = self._epoch not in (0, epoch), epoch
        if is_new:
            self._known.clear()
            self._counters["node_restarted"] += 1

    def _remember(self, request_id: str, actor: Any) -> None:
        if not request_id:
            return
        with self._lock:
            self._asked.setdefault(request_id, []).append(actor)


def _expected(query: ChainQuery, span: Span, found: Sequence[Located]) -> list[Located]:
    """Return what another node found, as far as it is what was asked for."""
    sound: list[Located] = []
    for place, located in enumerate(found, span.first):
        num_usable = usable(located.header, query, place)
        if isinstance(num_usable, Miss) or not num_usable:
            break
        sound.append(located._replace(num_usable=num_usable))
        if num_usable < query.chunk_tokens:
            break
    return sound


class _KnownChunk(NamedTuple):
    parent: bytes
    time_s: float


class KnownKeys:
    """Remembers chunks that this process has seen in the tier, so that few are put twice; thread-safe.

    Of too many the one that was seen longest ago goes first.
    """

    def __init__(self, *, max_age_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        """Forget what was seen `max_age_s` ago: to put it again is the use that keeps it there."""
        self._max_age_s, self._clock = max_age_s, clock
        self._lock = threading.Lock()
        self._seen = Bounded[bytes, _KnownChunk](_MAX_KEYS)

    def among(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        since_s = self._clock() - self._max_age_s
        with self._lock:
            return frozenset(key for key in keys if key in self._seen and self._seen[key].time_s > since_s)

    def add(self, parents: Mapping[bytes, bytes]) -> None:
        """Remember that the tier has these chunks, each with its parent's key."""
        now_s = self._clock()
        with self._lock:
            for key, parent in parents.items():
                self._seen[key] = _KnownChunk(parent, now_s)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget them: the tier does not have them."""
        with self._lock:
            for key in keys:
                self._seen.pop(key, None)

    def drop_chain(self, key: bytes) -> None:
        """Forget a chunk and those before it in its chain, up to one that is not known anyway."""
        with self._lock:
            while (seen := self._seen.pop(key, None)) is not None:
                key = seen.parent

    def clear(self) -> None:
        with self._lock:
            self._seen.clear()


class PutsUnderWay:
    """Sends chunks to this node's actor, bounded in bytes; nobody waits for the answers.

    `done` hears of each put once, on a thread of Ray's: its header, and the answer; None: there is none. An actor that
    hangs holds up as many bytes as may be under way, and no more is put.
    """

    def __init__(self, max_bytes: int, wait_s: float, done: Callable[[ChunkHeader, PutAnswer | None], None]) -> None:
        self._max_bytes, self._wait_s, self._done = max_bytes, wait_s, done
        self._changed = threading.Condition()
        self._answers: set[Future[PutAnswer]] = set()
        self._num_bytes = 0
        self._counters: Counter[str] = Counter()

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {"put_bytes_under_way": self._num_bytes, **self._counters}

    def put(self, node: Any, chunk: Chunk, lineage: Lineage) -> bool:
        """False if too much is under way for longer than a put may wait, or the store is full."""
        num_bytes = sum(layer.nbytes for layer in chunk.layers)
        if not self._reserve(num_bytes):
            return False
        answer: Future[PutAnswer] | None = None
        try:
            refs = put_runs(runs_of(chunk.layers))
            answer = node.put.remote(chunk.header, refs, lineage).future()
        except (MemoryError, RayError):
            return False
        finally:
            if answer is None:
                self._release(num_bytes, "put_failed")
        with self._changed:
            self._answers.add(answer)
        answer.add_done_callback(lambda each: self._finish(each, chunk.header, refs, num_bytes))
        return True

    def flush(self, timeout_s: float) -> bool:
        """Return whether all that was under way when this was called was answered in time."""
        with self._changed:
            before = set(self._answers)
            return self._changed.wait_for(lambda: before.isdisjoint(self._answers), timeout_s)

    def _reserve(self, num_bytes: int) -> bool:
        """Room for one more: there always is when nothing is under way."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes, self._wait_s
            )
            if has_room:
                self._num_bytes += num_bytes
            else:
                self._counters["put_dropped"] += 1
            return has_room

    def _release(self, num_bytes: int, counter: str) -> None:
        with self._changed:
            self._num_bytes -= num_bytes
            self._counters[counter] += 1
            self._changed.notify_all()

    def _finish(self, answer: Future[PutAnswer], header: ChunkHeader, refs: Refs, num_bytes: int) -> None:
        """`refs` kept the objects alive until now."""
        said = None if answer.exception() else answer.result()
        try:
            self._done(header, said)
        finally:
            self._answers.discard(answer)
            self._release(num_bytes, "put_lost" if said is None else f"put_{said.outcome.value}")
