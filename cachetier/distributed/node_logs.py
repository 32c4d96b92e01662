"""Session logs of a Ray cluster: on the disk of the node that wrote them, with a copy on one peer.

A node's actor has its own logs and asks others. A record is with the operating system of the own node when `append`
returns; the copy follows (`distributed/log_copies.py`). Whoever reads asks the own node and its peers at once, and the
newest version counts, so a session goes on wherever its next turn runs, also when the node is gone where it ran. It is
sure to be the newest once all nodes that live have answered: a copy may lack what was written last. A deletion is told
to all nodes that live; one that was away has a copy that is older than the tombstone, and expires before that does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from mneme.cachetier.distributed.log_copies import MAX_COPIES, LogCopies
from mneme.cachetier.distributed.log_peers import LogPeers
from mneme.cachetier.sessions.log import SessionLogs
from mneme.cachetier.sessions.record import RecordFields, fields_of, taken_over
from mneme.cachetier.sessions.store import Appended, LogKey

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NUM_THREADS = 16  # some of them may wait for the disk
_JOIN_S = 2.0
_LAST_S = 60.0  # copies of what was written so shortly before the actor began may not have been made
_OPEN_AGAIN_S, _MAX_OPEN_AGAIN_S = 0.5, 30.0  # pauses before a folder that could not be used is tried again
_UNKNOWN_S = 60.0  # how long nobody is told what such a folder does not hold; then it counts as lost
_ANY = LogKey(bytes(16), bytes(8))


class LogRead(NamedTuple):
    """What a node, or all that could be asked, know of a log."""

    records: list[bytes] | None
    is_sure: bool  # that there is nothing newer

    @property
    def head(self) -> RecordFields | None:
        """The last record's."""
        return fields_of(self.records[-1]) if self.records else None


class NodeSessionLogs:
    """In a node's actor; lives on its event loop. `open_logs`: None where its folder cannot be used."""

    def __init__(self, open_logs: Callable[[], SessionLogs | None], node_id: str, namespace: str) -> None:
        self._open_logs = open_logs
        self._logs: SessionLogs | None = None
        self._unknown_until_s = time.monotonic() + _UNKNOWN_S
        self._peers = LogPeers(node_id, namespace)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "session-logs")
        self._copies = LogCopies(self._peers, self._read_own)
        self._tasks = [asyncio.ensure_future(self._join()), asyncio.ensure_future(self._copies.run())]

    async def open(self) -> None:
        """What cannot be opened now is tried again from time to time."""
        await self._open()
        self._tasks.append(asyncio.ensure_future(self._open_again()))

    async def append(self, key: LogKey, records: Sequence[bytes], *, is_copy: bool = False) -> Appended:
        """See `SessionLogStore`; a copy is not copied again."""
        if self._logs is None:
            return Appended.FAILED
        outcome = await self._in(self._logs.append, key, records)
        if outcome is Appended.WRITTEN and not is_copy:
            self._copies.note(key, records)
        return outcome

    async def install(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        """A copy of another node's log."""
        return Appended.FAILED if self._logs is None else await self._in(self._logs.install, key, records)

    async def read_here(self, key: LogKey, newer_than: int) -> LogRead:
        """Of this node alone."""
        if self._logs is None:
            return LogRead(None, not self._is_unknown)
        try:
            return LogRead(await self._in(self._logs.read, key, newer_than), True)
        except OSError:
            return LogRead(None, False)

    async def read(self, key: LogKey, newer_than: int, timeout_s: float) -> LogRead:
        """The newest of this node's and its peers'; each may be the one that wrote last, and no copy knows that."""
        peers = await self._peers.of(key)
        asked = [self._peers.ask(peer, "read_log_here", key, newer_than, timeout_s=timeout_s) for peer in peers]
        own, *answers = await asyncio.gather(self.read_here(key, newer_than), *asked)
        found = [own, *(LogRead(None, False) if each is None else each for each in answers)]
        newest = max(found, key=lambda each: each.head.version if each.head else -1)
        return LogRead(newest.records, all(each.is_sure for each in found))

    async def delete_here(self, key: LogKey, at_least: int) -> bool | None:
        """None: what is here is not known yet, or cannot be written."""
        if self._logs is None:
            return None if self._is_unknown else False
        try:
            return await self._in(self._logs.delete, key, at_least)
        except OSError:
            return None

    async def delete(self, key: LogKey, at_least: int, timeout_s: float) -> bool | None:
        """On all nodes; whether there was a session. None: some node has not answered."""
        read = await self.read(key, 0, timeout_s)
        was_there = read.head is not None and read.head.num_all_ids > 0
        if read.head is not None:
            at_least = at_least if at_least > read.head.version else taken_over(read.head.version, time.time())
        elif not at_least:
            return False if read.is_sure else None
        self._copies.forget([key])
        peers = await self._peers.of(key)
        asked = [self._peers.ask(peer, "delete_log_here", key, at_least, timeout_s=timeout_s) for peer in peers]
        answers = await asyncio.gather(self.delete_here(key, at_least), *asked)
        return None if any(answer is None for answer in answers) else was_there

    async def delete_owned_here(self, owner: bytes) -> int | None:
        """None: what is here is not known yet, or cannot be written."""
        if self._logs is None:
            return None if self._is_unknown else 0
        try:
            return await self._in(self._logs.delete_owned, owner)
        except OSError:
            return None

    async def delete_owned(self, owner: bytes, timeout_s: float) -> int | None:
        """On all nodes; how many logs there were. None: some node has not answered."""
        self._copies.forget_owned(owner)
        peers = await self._peers.of(_ANY)
        asked = [self._peers.ask(peer, "delete_owned_logs_here", owner, timeout_s=timeout_s) for peer in peers]
        answers = await asyncio.gather(self.delete_owned_here(owner), *asked)
        return None if None in answers else sum(answers)

    def node_joined(self) -> None:
        """There is a node that others may not know of yet."""
        self._peers.look_again(is_new=True)
        self._copies.note_alone()

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
        """Its folder could not be opened yet, and may hold anything."""
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
                    self._copies.note(key)

    async def _join(self) -> None:
        for peer in await self._peers.of(_ANY):
            await self._peers.ask(peer, "log_node_joined", timeout_s=_JOIN_S)

    async def _read_own(self, key: LogKey) -> list[bytes] | None:
        return (await self.read_here(key, 0)).records

    async def _in(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
