"""Session logs of a Ray cluster: on the disk of the node that wrote them, with a copy on one peer.

A node's actor has its own logs and asks others. A turn is with the operating system of the own node when `append`
returns; the copy follows, on the first peer in the session's order that takes it. Whoever reads asks the own node and
its peers at once, and the newest version counts, so a session goes on wherever its next turn runs, also when the node
is gone where it ran. It is sure to be the newest once all nodes that live have answered: a copy may lack what was
written last. A deletion is told to all nodes that live; one that was away has a copy that is older than the tombstone,
and expires before that does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

from mneme.cachetier.distributed.nodes import Nodes
from mneme.cachetier.names import Appended
from mneme.cachetier.session_log.log import SessionLogs
from mneme.cachetier.session_log.log_store import LogKey
from mneme.cachetier.session_log.rows import LogRows, SessionRow, taken_over
from mneme.primitives import Bounded

logger = logging.getLogger(__name__)

READ_S, APPEND_S, DELETE_S = 0.15, 0.5, 3.0  # how long an engine's process waits for its node's actor
DELETE_TENANT_S = 5.0  # each session of a tenant gets a tombstone
MAX_COPIES = 1024  # sessions whose copies wait; of more the oldest have none until their next turn

_PEER_SHARE = 0.8  # of an engine's time, for answers of peers
_NUM_THREADS = 16  # some of them may wait for the disk
_JOIN_S = 2.0
_LAST_S = 60.0  # copies of what was written so shortly before the actor began may not have been made
_OPEN_AGAIN_S, _MAX_OPEN_AGAIN_S = 0.5, 30.0  # pauses before a folder that could not be used is tried again
_UNKNOWN_S = 60.0  # how long nobody is told what such a folder does not hold; then it counts as lost
_MAX_COPY_TURNS = 8  # of one session, until its copy is made anew
_MAX_PEERS = 3  # that are tried for a copy, one after the other
_COPY_S = 2.0
_AGAIN_S = 1.0  # pause after a copy that none of them took

_T = TypeVar("_T")

# Methods of `NodeSessionLogs`, as `NodeActor.logs` calls them. `_here`: of one node alone, for other nodes.
LogCall = Literal[
    "append",
    "append_here",
    "read",
    "read_here",
    "delete",
    "delete_here",
    "delete_tenant",
    "delete_tenant_here",
    "node_joined",
]


class LogRead(NamedTuple):
    """Holds what a node, or all that could be asked, know of a log."""

    rows: LogRows | None
    is_sure: bool  # that there is nothing newer

    @property
    def session(self) -> SessionRow:
        """Return a session, of version 0 if there is none."""
        return SessionRow(0) if self.rows is None else self.rows.session


class RaySessionLogs:
    """A `SessionLogStore` in an engine's process: the actor of its node is asked."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def append(self, key: LogKey, rows: LogRows) -> Appended:
        outcome = self._ask("append", key, rows, timeout_s=APPEND_S)
        return Appended.FAILED if outcome is None else Appended(outcome)

    def read(self, key: LogKey, newer_than: int = 0) -> LogRows | None:
        read: LogRead | None = self._ask("read", key, newer_than, READ_S * _PEER_SHARE, timeout_s=READ_S)
        if read is None or not read.is_sure:
            raise TimeoutError("not all nodes that may have a session's log have answered")
        return read.rows

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        was_there: bool | None = self._ask("delete", key, at_least, DELETE_S * _PEER_SHARE / 2, timeout_s=DELETE_S)
        if was_there is None:
            raise TimeoutError("not all nodes that may have a session's log have answered")
        return was_there

    def delete_tenant(self, tenant: bytes) -> int:
        timeout_s = DELETE_TENANT_S * _PEER_SHARE
        num_deleted: int | None = self._ask("delete_tenant", tenant, timeout_s, timeout_s=DELETE_TENANT_S)
        if num_deleted is None:
            raise TimeoutError("not all nodes that may have a tenant's logs have answered")
        return num_deleted

    def close(self) -> None:
        """Close nothing: the node's actor stays."""

    def stats(self) -> dict[str, int]:
        return dict(self._nodes.counters)

    def _ask(self, call: LogCall, *args: Any, timeout_s: float) -> Any:
        return self._nodes.ask_own(call, "logs", call, *args, timeout_s=timeout_s)


class NodeSessionLogs:
    """Keeps the session logs of a node, on its actor's event loop.

    `open_logs`: None where its folder cannot be used.
    """

    def __init__(self, open_logs: Callable[[], SessionLogs | None], peers: Nodes) -> None:
        self._open_logs = open_logs
        self._logs: SessionLogs | None = None
        self._unknown_until_s = time.monotonic() + _UNKNOWN_S
        self._peers = peers
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "session-logs")
        self._copies = LogCopies(self._peers, self._read_own)
        self._tasks = [asyncio.ensure_future(self._join()), asyncio.ensure_future(self._copies.run())]

    async def open(self) -> None:
        """Open the log; what cannot be opened now is tried again from time to time."""
        await self._open()
        self._tasks.append(asyncio.ensure_future(self._open_again()))

    async def append(self, key: LogKey, rows: LogRows) -> Appended:
        """See `SessionLogStore`."""
        outcome = await self.append_here(key, rows)
        if outcome is Appended.WRITTEN:
            self._copies.add(key, rows)
        return outcome

    async def append_here(self, key: LogKey, rows: LogRows) -> Appended:
        """An engine's rows, or the same as another node has them."""
        return Appended.FAILED if self._logs is None else await self._in(self._logs.append, key, rows)

    async def read_here(self, key: LogKey, newer_than: int) -> LogRead:
        """Read what this node alone has."""
        if self._logs is None:
            return LogRead(None, not self._is_unknown)
        try:
            return LogRead(await self._in(self._logs.read, key, newer_than), True)
        except OSError:
            return LogRead(None, False)

    async def read(self, key: LogKey, newer_than: int, timeout_s: float) -> LogRead:
        """The newest of this node's and its peers'; each may be the one that wrote last, and no copy knows that."""
        asked = await self._ask_peers(key.name, "read_here", key, newer_than, timeout_s=timeout_s)
        answers = await asyncio.gather(self.read_here(key, newer_than), *asked)
        found = [LogRead(None, False) if each is None else each for each in answers]
        newest = max(found, key=lambda each: each.session.version)
        return LogRead(newest.rows, all(each.is_sure for each in found))

    async def delete_here(self, key: LogKey, at_least: int) -> bool | None:
        """None: what is here is not known yet, or cannot be written."""
        return await self._delete("delete", key, at_least, nothing=False)

    async def delete(self, key: LogKey, at_least: int, timeout_s: float) -> bool | None:
        """Delete a session on all nodes; returns whether there was one. None: some node has not answered."""
        read = await self.read(key, 0, timeout_s)
        was_there, version = read.session.num_ids > 0, read.session.version
        if read.rows is not None:
            at_least = at_least if at_least > version else taken_over(version, time.time())
        elif not at_least:
            return False if read.is_sure else None
        self._copies.forget([key])
        asked = await self._ask_peers(key.name, "delete_here", key, at_least, timeout_s=timeout_s)
        answers = await asyncio.gather(self.delete_here(key, at_least), *asked)
        return None if None in answers else was_there

    async def delete_tenant_here(self, tenant: bytes) -> int | None:
        """None: what is here is not known yet, or cannot be written."""
        return await self._delete("delete_tenant", tenant, nothing=0)

    async def delete_tenant(self, tenant: bytes, timeout_s: float) -> int | None:
        """Delete a tenant's logs on all nodes; returns how many there were. None: some node has not answered."""
        self._copies.forget_tenant(tenant)
        asked = await self._ask_peers(b"", "delete_tenant_here", tenant, timeout_s=timeout_s)
        answers = await asyncio.gather(self.delete_tenant_here(tenant), *asked)
        return None if None in answers else sum(answers)

    async def node_joined(self) -> None:
        """There is a node that others may not know of yet."""
        self._peers.look_again(is_new=True)
        self._copies.retry_alone()

    async def stats(self) -> dict[str, Any]:
        figures = {} if self._logs is None else await self._in(self._logs.stats)
        copies = {**self._copies.counters, **self._peers.counters}
        return {**figures, "copies": copies, "copies_waiting": len(self._copies)}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._logs is not None:
            await self._in(self._logs.close)

    @property
    def _is_unknown(self) -> bool:
        """Return whether the folder could not be opened yet, and may hold anything."""
        return self._logs is None and time.monotonic() < self._unknown_until_s

    async def _open_again(self) -> None:
        pause_s = _OPEN_AGAIN_S
        while self._logs is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_OPEN_AGAIN_S)
            await self._open()

    async def _open(self) -> None:
        """Copies that waited when the actor before this one ended are made now."""
        self._logs = await self._in(self._open_logs)
        if self._logs is not None:
            with suppress(OSError):
                for key in await self._in(self._logs.written_since, _LAST_S, MAX_COPIES):
                    self._copies.add(key)

    async def _join(self) -> None:
        for peer in await self._peers.in_order(b""):
            await self._peers.ask(peer, "logs", "node_joined", timeout_s=_JOIN_S)

    async def _read_own(self, key: LogKey) -> LogRows | None:
        return (await self.read_here(key, 0)).rows

    async def _ask_peers(self, name: bytes, call: LogCall, *args: Any, timeout_s: float) -> list[Awaitable[Any]]:
        """A call to each, to be awaited together; None for one that does not answer."""
        peers = await self._peers.in_order(name)
        return [self._peers.ask(peer, "logs", call, *args, timeout_s=timeout_s) for peer in peers]

    async def _delete(self, call: Literal["delete", "delete_tenant"], *args: Any, nothing: _T) -> _T | None:
        """Return what `SessionLogs` answers, `nothing` where there is none; None: not known, or not writable."""
        if self._logs is None:
            return None if self._is_unknown else nothing
        try:
            found: _T = await self._in(getattr(self._logs, call), *args)
        except OSError:
            return None
        return found

    async def _in(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


class LogCopies:
    """Makes copies of this node's logs on its peers, on an event loop.

    `read_own` gives all of a log; None: there is none, or it cannot be read.
    """

    def __init__(self, peers: Nodes, read_own: Callable[[LogKey], Awaitable[LogRows | None]]) -> None:
        self._peers, self._read_own = peers, read_own
        self._waiting: OrderedDict[LogKey, LogRows | None] = OrderedDict()  # None: all of the log
        self._alone = Bounded[LogKey, None](MAX_COPIES)  # sessions that wait for a peer to be there
        self._is_some = asyncio.Event()
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        """Sessions whose copies wait."""
        return len(self._waiting)

    def add(self, key: LogKey, rows: LogRows | None = None) -> None:
        """Rows that were written; without any, all of the log is sent, as it is once they are too many."""
        if rows is not None and key in self._waiting:
            waiting = self._waiting[key]
            rows = None if waiting is None else waiting.then(rows)
        self._waiting[key] = None if rows is None or len(rows.turns) > _MAX_COPY_TURNS else rows
        if len(self._waiting) > MAX_COPIES:
            self._waiting.popitem(last=False)
            self.counters["copy_dropped"] += 1
        self._is_some.set()

    def retry_alone(self) -> None:
        """Look for peers again: there may be one now."""
        while self._alone:
            self.add(self._alone.popitem(last=False)[0])

    def forget(self, keys: Iterable[LogKey]) -> None:
        for key in keys:
            self._waiting.pop(key, None)
            self._alone.pop(key, None)

    def forget_tenant(self, tenant: bytes) -> None:
        self.forget([key for key in (*self._waiting, *self._alone) if key.tenant == tenant])

    async def run(self) -> None:
        """Make the copies that wait, one after the other, until it is cancelled."""
        while True:
            await self._is_some.wait()
            self._is_some.clear()
            while self._waiting:
                key, rows = self._waiting.popitem(last=False)
                try:
                    await self._copy(key, rows)
                except Exception:  # it must outlive any copy
                    logger.exception("a session's log could not be copied")

    async def _copy(self, key: LogKey, rows: LogRows | None) -> None:
        outcome = await self._outcome(key, rows)
        self.counters[outcome] += 1
        if outcome == "copy_failed":
            self.add(key)
            await asyncio.sleep(_AGAIN_S)

    async def _outcome(self, key: LogKey, rows: LogRows | None) -> str:
        """Return how that ended, as a counter's name."""
        peers = (await self._peers.in_order(key.name))[:_MAX_PEERS]
        if not peers:
            self._alone[key] = None
            return "copy_alone"
        self.retry_alone()
        if rows is not None and await self._is_taken(peers[0], key, rows):
            return "copied"
        found = await self._read_own(key)
        if found is None:
            return "copy_gone"
        for peer in peers:
            if await self._is_taken(peer, key, found):
                return "copied_whole"
        return "copy_failed"

    async def _is_taken(self, peer: Any, key: LogKey, rows: LogRows) -> bool:
        """Return whether the peer has this now, or what is newer."""
        outcome = await self._peers.ask(peer, "logs", "append_here", key, rows, timeout_s=_COPY_S)
        return outcome in (Appended.WRITTEN, Appended.STALE)
