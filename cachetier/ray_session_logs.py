"""Session logs of a Ray cluster: on the disk of the node that wrote them, with a copy on one peer.

A node's actor has its own logs and asks others. A record is with the operating system of the own node when `append`
returns; the copy follows, on the peer that comes first for this session in an order that all nodes agree on. Whoever
reads asks the own node and its peers at once, and the newest version counts, so a session goes on wherever its next
turn runs, also when the node is gone where it ran. A deletion is told to all nodes that live; one that was away then
has a copy that is older than the tombstone, and expires before that does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from ray.exceptions import RayError

from mneme.cachetier.cache_config import CacheConfig
from mneme.cachetier.disk_folder import make_root
from mneme.cachetier.ray_log_peers import LogPeers
from mneme.cachetier.ray_peers import Peers
from mneme.cachetier.session_log_index import SessionLogConfig
from mneme.cachetier.session_log_store import Appended, LogKey, parse_log
from mneme.cachetier.session_logs import SessionLogs
from mneme.cachetier.session_record import taken_over

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

READ_S, APPEND_S, DELETE_S = 0.15, 0.5, 3.0  # how long an engine's process waits for its node's actor
DELETE_OWNED_S = 5.0  # each session of a tenant gets a tombstone
_PEER_SHARE = 0.8  # of that time, for answers of peers
_MAX_ASKED = 8  # peers that are asked for a log; of more, those that come first for it
_MAX_COPIES = 1024  # sessions whose copies wait; of more the oldest have none until their next record
_MAX_COPY_RECORDS = 8  # of one session, until its copy is made anew
_COPY_S = 2.0
_ANY = LogKey(bytes(16), bytes(8))


class LogRead(NamedTuple):
    """What a node, or all that could be asked, know of a log."""

    content: bytes | None
    is_sure: bool  # that there is nothing newer


class NodeSessionLogs:
    """In a node's actor; lives on its event loop. `logs`: None where the node has no folder for them."""

    def __init__(self, logs: SessionLogs | None, node_id: str, namespace: str) -> None:
        self._logs = logs
        self._peers = LogPeers(node_id, namespace)
        self._threads = ThreadPoolExecutor(4, "session-logs")
        self._copies: OrderedDict[LogKey, list[bytes]] = OrderedDict()  # records by session; none: all of its log
        self._has_copies = asyncio.Event()
        self._counters: Counter[str] = Counter()
        self._tasks = [asyncio.ensure_future(self._join()), asyncio.ensure_future(self._copy_all())]

    async def append(self, key: LogKey, records: Sequence[bytes], *, is_copy: bool = False) -> Appended:
        """See `SessionLogStore`; a copy is not copied again."""
        if self._logs is None:
            return Appended.FAILED
        outcome = await self._in(self._logs.append, key, records)
        if outcome is Appended.WRITTEN and not is_copy:
            self._note_copy(key, records)
        return outcome

    async def install(self, key: LogKey, content: bytes) -> bool:
        """A copy of another node's log."""
        return self._logs is not None and await self._in(self._logs.install, key, content)

    async def read_here(self, key: LogKey, newer_than: int) -> LogRead:
        """Of this node alone."""
        if self._logs is None:
            return LogRead(None, True)
        try:
            return LogRead(await self._in(self._logs.read, key, newer_than), True)
        except OSError:
            return LogRead(None, False)

    async def read(self, key: LogKey, newer_than: int, timeout_s: float) -> LogRead:
        """The newest of this node's and its peers'."""
        peers = (await self._peers.of(key))[:_MAX_ASKED]
        asked = [self._ask(peer, "read_log_here", key, newer_than, timeout_s=timeout_s) for peer in peers]
        own, *answers = await asyncio.gather(self.read_here(key, newer_than), *asked)
        found = [own, *(LogRead(None, False) if each is None else each for each in answers)]
        newest = max((each.content for each in found if each.content), key=lambda c: _version(c, key), default=None)
        is_sure = newest is not None or all(each.is_sure for each in found)
        return LogRead(newest, is_sure)

    async def delete_here(self, key: LogKey, at_least: int) -> bool:
        return self._logs is not None and await self._in(self._logs.delete, key, at_least)

    async def delete(self, key: LogKey, at_least: int, timeout_s: float) -> bool | None:
        """On all nodes; whether there was a session. None: some node has not answered."""
        read = await self.read(key, 0, timeout_s)
        was_there = read.content is not None and _num_ids(read.content, key) > 0
        if read.content is not None:
            version = _version(read.content, key)
            at_least = at_least if at_least > version else taken_over(version, time.time())
        elif not at_least:
            return False if read.is_sure else None
        self._copies.pop(key, None)
        peers = await self._peers.of(key)
        asked = [self._ask(peer, "delete_log_here", key, at_least, timeout_s=timeout_s) for peer in peers]
        _, *answers = await asyncio.gather(self.delete_here(key, at_least), *asked)
        return None if any(answer is None for answer in answers) else was_there

    async def delete_owned_here(self, owner: bytes) -> int:
        return 0 if self._logs is None else await self._in(self._logs.delete_owned, owner)

    async def delete_owned(self, owner: bytes, timeout_s: float) -> int | None:
        """On all nodes; how many logs there were. None: some node has not answered."""
        for key in [key for key in self._copies if key.owner == owner]:
            del self._copies[key]
        peers = await self._peers.of(_ANY)
        asked = [self._ask(peer, "delete_owned_logs_here", owner, timeout_s=timeout_s) for peer in peers]
        answers = await asyncio.gather(self.delete_owned_here(owner), *asked)
        return None if any(answer is None for answer in answers) else sum(answers)

    def node_joined(self) -> None:
        """There is a node that others may not know of yet."""
        self._peers.look_again(is_new=True)

    def stats(self) -> dict[str, Any]:
        figures = {} if self._logs is None else self._logs.stats()
        return {**figures, "copies": dict(self._counters), "copies_waiting": len(self._copies)}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._logs is not None:
            await self._in(self._logs.close)

    def _note_copy(self, key: LogKey, records: Sequence[bytes]) -> None:
        """A session whose copies wait already has all of its log sent once its records are too many."""
        is_new = key not in self._copies
        waiting = self._copies.setdefault(key, [])
        if is_new or waiting:
            waiting += records
        if len(waiting) > _MAX_COPY_RECORDS:
            waiting.clear()
        if len(self._copies) > _MAX_COPIES:
            self._copies.popitem(last=False)
            self._counters["copy_dropped"] += 1
        self._has_copies.set()

    async def _join(self) -> None:
        for peer in await self._peers.of(_ANY):
            await self._ask(peer, "log_node_joined", timeout_s=_COPY_S)

    async def _copy_all(self) -> None:
        while True:
            await self._has_copies.wait()
            self._has_copies.clear()
            while self._copies:
                key, records = self._copies.popitem(last=False)
                try:
                    self._counters[await self._copy(key, records)] += 1
                except Exception:  # it must outlive any copy
                    _logger.exception("a session's log could not be copied")

    async def _copy(self, key: LogKey, records: Sequence[bytes]) -> str:
        """To the first peer in the session's order; how that ended, as a counter's name."""
        peers = await self._peers.of(key)
        if not peers:
            return "copy_alone"
        outcome = Appended.NEEDS_WHOLE
        if records:
            outcome = await self._ask(peers[0], "append_log", key, records, True, timeout_s=_COPY_S)
        if outcome in (Appended.WRITTEN, Appended.STALE):
            return "copied"
        own = await self.read_here(key, 0)
        if own.content is None:
            return "copy_gone"
        is_there = await self._ask(peers[0], "install_log", key, own.content, timeout_s=_COPY_S)
        return "copy_failed" if is_there is None else "copied_whole"

    async def _ask(self, peer: Any, method: str, *args: Any, timeout_s: float) -> Any:
        """None if it does not answer."""
        try:
            return await asyncio.wait_for(getattr(peer, method).remote(*args), timeout_s)
        except (TimeoutError, RayError) as error:
            self._counters["peer_failed"] += 1
            self._peers.look_again()
            _logger.debug("a peer did not answer %s: %s", method, type(error).__name__)
            return None

    async def _in(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


class RaySessionLogs:
    """A `SessionLogStore` in an engine's process. `connect` gives the actor of its node, made if there is none."""

    def __init__(self, node_id: str, connect: Callable[[], Any]) -> None:
        self._node_id, self._connect = node_id, connect
        self._node = connect()
        self._calls = Peers(lambda _node: self._lost())
        self._reconnecting = threading.Lock()

    def append(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        outcome = self._ask("append_log", key, list(records), timeout_s=APPEND_S)
        return Appended.FAILED if outcome is None else Appended(outcome)

    def read(self, key: LogKey, newer_than: int = 0) -> bytes | None:
        read: LogRead | None = self._ask("read_log", key, newer_than, READ_S * _PEER_SHARE, timeout_s=READ_S)
        if read is None or not read.is_sure:
            raise TimeoutError("not all nodes that may have a session's log have answered")
        return read.content

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        was_there: bool | None = self._ask("delete_log", key, at_least, DELETE_S * _PEER_SHARE / 2, timeout_s=DELETE_S)
        if was_there is None:
            raise TimeoutError("not all nodes that may have a session's log have answered")
        return was_there

    def delete_owned(self, owner: bytes) -> int:
        timeout_s = DELETE_OWNED_S * _PEER_SHARE
        num_deleted: int | None = self._ask("delete_owned_logs", owner, timeout_s, timeout_s=DELETE_OWNED_S)
        if num_deleted is None:
            raise TimeoutError("not all nodes that may have a tenant's logs have answered")
        return num_deleted

    def close(self) -> None:
        """The node's actor stays."""

    def stats(self) -> dict[str, int]:
        return dict(self._calls.counters)

    def _ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        call = self._calls.call(self._node_id, method, getattr(self._node, method), *args)
        return self._calls.answers([call], time.monotonic() + timeout_s)[0]

    def _lost(self) -> None:
        """The actor is dead for good."""
        if self._reconnecting.acquire(blocking=False):
            threading.Thread(target=self._reconnect, name="session-logs-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        try:
            self._node = self._connect()
        except Exception:  # the thread's edge; the next call that fails begins another
            _logger.exception("session logs: the node's actor could not be made again")
        finally:
            self._reconnecting.release()


def open_node_logs(config: CacheConfig, ttl_s: float) -> SessionLogs | None:
    """None without a disk; its folder is made if there is none. Raises `ConfigError` if it cannot be used."""
    if config.disk is None:
        return None
    folder, capacity_bytes, sync = config.disk.folder, config.session_log_bytes, config.session_log_sync
    make_root(folder)
    return SessionLogs(SessionLogConfig(folder=folder, capacity_bytes=capacity_bytes, ttl_s=ttl_s, sync=sync))


def _version(content: bytes, key: LogKey) -> int:
    parsed = parse_log(content, key)
    return -1 if parsed is None else parsed.replay.version


def _num_ids(content: bytes, key: LogKey) -> int:
    parsed = parse_log(content, key)
    return 0 if parsed is None else parsed.replay.num_ids
