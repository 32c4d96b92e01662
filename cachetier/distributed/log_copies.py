"""Copies of a node's session logs on its peers: one of each, on the first peer in the session's order that takes it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from mneme.cachetier.distributed.log_peers import LogPeers
from mneme.cachetier.sessions.store import Appended, LogKey

_logger = logging.getLogger(__name__)

MAX_COPIES = 1024  # sessions whose copies wait; of more the oldest have none until their next record
_MAX_COPY_RECORDS = 8  # of one session, until its copy is made anew
_MAX_PEERS = 3  # that are tried for a copy, one after the other
_COPY_S = 2.0
_AGAIN_S = 1.0  # pause after a copy that none of them took


class LogCopies:
    """Lives on an event loop. `read_own` gives all of a log of this node; None: it has none, or cannot read it."""

    def __init__(self, peers: LogPeers, read_own: Callable[[LogKey], Awaitable[list[bytes] | None]]) -> None:
        self._peers, self._read_own = peers, read_own
        self._waiting: OrderedDict[LogKey, list[bytes]] = OrderedDict()  # records by session; none: all of its log
        self._alone: OrderedDict[LogKey, None] = OrderedDict()  # sessions that wait for a peer to be there
        self._is_some = asyncio.Event()
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        """Sessions whose copies wait."""
        return len(self._waiting)

    def note(self, key: LogKey, records: Sequence[bytes] = ()) -> None:
        """Records that were written; without any, all of the log is sent, as it is once they are too many."""
        is_new = key not in self._waiting
        waiting = self._waiting.setdefault(key, [])
        if is_new or waiting:
            waiting += records
        if not records or len(waiting) > _MAX_COPY_RECORDS:
            waiting.clear()
        if len(self._waiting) > MAX_COPIES:
            self._waiting.popitem(last=False)
            self.counters["copy_dropped"] += 1
        self._is_some.set()

    def note_alone(self) -> None:
        """There may be a peer now."""
        alone, self._alone = self._alone, OrderedDict()
        for key in alone:
            self.note(key)

    def forget(self, keys: Iterable[LogKey]) -> None:
        for key in keys:
            self._waiting.pop(key, None)
            self._alone.pop(key, None)

    def forget_owned(self, owner: bytes) -> None:
        self.forget([key for key in (*self._waiting, *self._alone) if key.owner == owner])

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._is_some.wait()
            self._is_some.clear()
            while self._waiting:
                key, records = self._waiting.popitem(last=False)
                try:
                    await self._copy(key, records)
                except Exception:  # it must outlive any copy
                    _logger.exception("a session's log could not be copied")

    async def _copy(self, key: LogKey, records: Sequence[bytes]) -> None:
        outcome = await self._outcome(key, records)
        self.counters[outcome] += 1
        if outcome == "copy_failed":
            self.note(key)
            await asyncio.sleep(_AGAIN_S)

    async def _outcome(self, key: LogKey, records: Sequence[bytes]) -> str:
        """How that ended, as a counter's name."""
        peers = (await self._peers.of(key))[:_MAX_PEERS]
        if not peers:
            self._leave_alone(key)
            return "copy_alone"
        self.note_alone()
        if records and await self._is_taken(peers[0], "append_log", key, records, True):
            return "copied"
        content = await self._read_own(key)
        if content is None:
            return "copy_gone"
        for peer in peers:
            if await self._is_taken(peer, "install_log", key, content):
                return "copied_whole"
        return "copy_failed"

    def _leave_alone(self, key: LogKey) -> None:
        self._alone[key] = None
        self._alone.move_to_end(key)
        if len(self._alone) > MAX_COPIES:
            self._alone.popitem(last=False)

    async def _is_taken(self, peer: Any, method: str, *args: Any) -> bool:
        """Whether the peer has this now, or what is newer."""
        outcome = await self._peers.ask(peer, method, *args, timeout_s=_COPY_S)
        return outcome in (Appended.WRITTEN, Appended.STALE)
