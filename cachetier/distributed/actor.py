"""The actor that owns a node's cache: one per node, detached, made again when it dies.

It answers engines of its node and other nodes. Calls that look something up never wait behind those that move bytes:
each kind has threads of its own, and puts begin when no read is under way, or after a moment. When the actor is made
again its host tier is empty, and its disk tier is what the files say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, get_args

import ray

from mneme.cachetier.admin import ADMIN_CALLS, AdminCall
from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.syscalls import LockWaitingFiles
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.distributed.announcer import Announcer
from mneme.cachetier.distributed.directory import DirectoryLink, Span, spans_of
from mneme.cachetier.distributed.nodes import NodeIdentity, Nodes, Ready
from mneme.cachetier.distributed.objects import HeldObjects, RayMemory, Refs
from mneme.cachetier.distributed.session_logs import LogCall, NodeSessionLogs
from mneme.cachetier.names import HostPut, Miss, TierName
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.disk import make_disk_tier
from mneme.cachetier.node.index import Change
from mneme.cachetier.node.node_admin import NodeAdmin
from mneme.cachetier.node.search import Located
from mneme.cachetier.session_log.log import open_session_logs
from mneme.cachetier.store import ChainQuery
from mneme.errors import ConfigError, MnemeError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_PUT_WAIT_S = 0.1  # at most, for reads that are under way
# Of the time that a question may take; the rest is for other nodes.
_OWN_SHARE, _DIRECTORY_SHARE, _PEERS_SHARE = 0.3, 0.3, 0.1


class ChainAnswer(NamedTuple):
    """Holds what a node knows of a chain."""

    here: list[Located]  # from `query.first` on
    spans: tuple[Span, ...]  # what follows, at this node and others; nothing if the chain ends here
    peers: dict[str, Any]  # actors of the nodes in `spans`
    epoch: int  # of the node's actor, see `PutAnswer`


class PutAnswer(NamedTuple):
    """Holds what a node's actor says of a chunk that was put."""

    outcome: HostPut
    has_parent: bool  # the chunk before is there
    epoch: int  # of the actor; another after it was made again, with an empty host tier


class NodeActor:
    """Serves one node's cache to engines and to other nodes; see the module. Methods raise for no fault of a tier."""

    def __init__(self, config: CacheConfig, identity: NodeIdentity, *, is_first: bool) -> None:
        """`is_first`: made by an engine that starts, not in the place of one that failed."""
        self._config, self._identity = config, identity
        self._is_first = is_first and not ray.get_runtime_context().was_current_actor_reconstructed
        self._epoch = time.time_ns()
        self._memory = RayMemory(identity.object_bytes)
        self._directory = DirectoryLink(identity.namespace)
        self._cache: NodeCache | None = None  # None until the files are listed
        self._problem = ""  # why there is no disk tier
        self._lookups, self._reads, self._puts = (ThreadPoolExecutor(n, name) for n, name in _POOLS)
        self._num_reads = 0
        self._no_reads = asyncio.Event()
        self._no_reads.set()
        self._peers = Nodes(identity.node_id, identity.namespace)
        self._logs: NodeSessionLogs | None = None  # likewise
        self._opening = asyncio.ensure_future(self._open_all())
        self._closing: asyncio.Future[None] | None = None

    async def ready(self) -> Ready:
        """Return when the node can be asked."""
        await self._opening
        return Ready((self._config, self._identity), self._problem, self._is_first and bool(self._problem))

    async def locate(self, query: ChainQuery, timeout_s: float) -> ChainAnswer:
        """Find chunks for an engine of this node."""
        cache = self._cache
        if cache is None:
            return ChainAnswer([], (), {}, self._epoch)
        here = await self._in(self._lookups, cache.locate, query, timeout_s * _OWN_SHARE)
        missing = query.keys[query.first + _num_whole(here, query) :]
        is_short = not query.keys and len(query.token_ids) > sum(each.num_usable for each in here)
        asked = [query.tail_key()] if is_short else missing  # a short document is known by its end alone
        places = await self._directory.lookup(asked, timeout_s * _DIRECTORY_SHARE)
        spans = spans_of(places, len(query.keys) - len(missing), self._identity.node_id)
        if is_short:
            spans = tuple(span._replace(num_chunks=0) for span in spans)
        peers = await self._peers.find({span.node for span in spans}, timeout_s * _PEERS_SHARE)
        return ChainAnswer(here, spans, peers, self._epoch)

    async def locate_here(self, query: ChainQuery, timeout_s: float) -> list[Located]:
        """Say to another node what this one has, without the bytes, which `read` gives."""
        if self._cache is None:
            return []
        found = await self._in(self._lookups, self._cache.locate, query, timeout_s)
        return [each._replace(held=None, path=None) for each in found]

    async def read(self, keys: Sequence[bytes]) -> list[Refs | None]:
        """Give another node objects of these chunks, which stay while they are referred to."""
        if self._cache is None:
            return [None] * len(keys)
        self._num_reads += 1
        self._no_reads.clear()
        try:
            found = await self._in(self._reads, self._cache.read, keys)
        finally:
            self._num_reads -= 1
            if not self._num_reads:
                self._no_reads.set()
        return [_refs(each) for each in found]

    async def put(self, header: ChunkHeader, refs: Refs, lineage: Lineage) -> PutAnswer:
        """Keep a chunk whose objects the caller owns; it is there when this returns."""
        cache = self._cache
        if cache is None:
            return PutAnswer(HostPut.REFUSED, False, self._epoch)
        try:
            await asyncio.wait_for(self._no_reads.wait(), _PUT_WAIT_S)
        except TimeoutError:
            logger.debug("a put begins beside reads")
        outcome = await self._in(self._puts, cache.put, header, refs, lineage)
        return PutAnswer(outcome, header.parent in cache, self._epoch)

    async def forget(self, request_ids: Collection[str]) -> None:
        if self._cache is not None:
            self._cache.forget(request_ids)

    async def loads(self) -> None:
        """An engine of this node reads its files now, and says so again while that lasts."""
        if self._cache is not None:
            self._cache.others_load()

    async def missed(self, key: bytes, tier: TierName, miss: Miss) -> None:
        """An engine that read a chunk of this node found this."""
        if self._cache is not None:
            await self._in(self._reads, self._cache.missed, key, tier, miss)

    async def not_here(self, keys: Sequence[bytes]) -> None:
        """Others believe that these are here and did not get them: what is not is announced as gone.

        The node says so, not the reader: whoever has to be quick may see less than there is.
        """
        if self._cache is not None:
            gone = [key for key in keys if key not in self._cache]
            self._announcer.changed(*(Change(key, tier, 0, False) for key in gone for tier in ("host", "disk")))

    async def not_reached(self, node: str) -> None:
        """Note that a node's actor is dead."""
        self._peers.drop(node)
        self._directory.not_reached(node)

    async def logs(self, call: LogCall, *args: Any) -> Any:
        """Session logs, for an engine of this node or another node. None: there are none, or not yet."""
        assert call in get_args(LogCall)
        return None if self._logs is None else await getattr(self._logs, call)(*args)

    async def stats(self) -> dict[str, Any]:
        logs = {} if self._logs is None else await self._logs.stats()
        tiers = {} if self._cache is None else await self._in(self._lookups, self._cache.stats)
        objects = {"used_bytes": self._memory.used_bytes, "capacity_bytes": self._memory.max_bytes}
        about = {"node": self._identity.name, "pid": os.getpid(), "disk_problem": self._problem}
        directory = {} if self._cache is None else {**self._announcer.counters, **self._directory.counters}
        return {**tiers, "objects": objects, "session_logs": logs, "directory": directory, **about}

    async def manage(self, call: AdminCall, *args: Any, **options: Any) -> Any:
        """`CacheAdmin` of this node alone; an error of ours is the answer, not raised. None: it is not up yet."""
        assert call in ADMIN_CALLS
        if self._cache is None:
            return None
        if call == "stats":
            return [await self.stats()]  # logs and the directory are the actor's, not the cache's
        try:
            return await self._in(self._reads, lambda: getattr(self._admin, call)(*args, **options))
        except MnemeError as error:
            return error

    async def flush(self, timeout_s: float) -> bool:
        """Write to disk what waits to be."""
        return self._cache is None or await self._in(self._puts, self._cache.flush, timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Write what waits and let the folder go, before the actor is ended. All callers wait for the first one's."""
        self._closing = self._closing or asyncio.ensure_future(self._close(timeout_s))
        await self._closing

    async def _close(self, timeout_s: float) -> None:
        cache, self._cache = self._cache, None
        logs, self._logs = self._logs, None
        if logs is not None:
            await logs.close()
        if cache is not None:
            self._announcer.stop()
            await self._in(self._puts, lambda: cache.close(timeout_s=timeout_s))

    async def _open_all(self) -> None:
        identity = self._identity
        if self._config.disk is not None:
            self._logs = NodeSessionLogs(
                lambda: self._unless_unusable(lambda: open_session_logs(self._config, identity.session_ttl_s)),
                self._peers,
            )
            await self._logs.open()
        await self._in(self._puts, self._open)

    def _open(self) -> None:
        config, identity = self._config, self._identity
        disk = self._unless_unusable(lambda: make_disk_tier(config, files=LockWaitingFiles()))
        self._announcer = Announcer(
            identity.node_id,
            lambda: cache.snapshot(),
            self._directory.send,
            epoch=self._epoch,
        )
        cache = NodeCache(config, self._memory, identity.host_bytes, disk, on_change=self._announcer.changed)
        self._admin = NodeAdmin(cache, identity.name)
        self._announcer.start()
        self._cache = cache

    def _unless_unusable(self, opened: Callable[[], _T | None]) -> _T | None:
        """None, and a line in the log, if the folder cannot be used: the rest of the tier goes on without."""
        try:
            return opened()
        except ConfigError as error:
            self._problem = self._problem or str(error)
            logger.error("cache tier: no disk on node=%s: %s", self._identity.name, error)
            return None

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)


_POOLS = ((4, "lookups"), (4, "reads"), (1, "puts"))  # threads of each kind of call


def _num_whole(found: Sequence[Located], query: ChainQuery) -> int:
    keys = query.keys[query.first :]
    return sum(1 for each, key in zip(found, keys, strict=False) if each.header.key == key)


def _refs(located: Located | None) -> Refs | None:
    if located is None:
        return None
    assert isinstance(located.held, HeldObjects)
    return located.held.refs
