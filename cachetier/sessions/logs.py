"""Token logs of sessions on a node's disk, written ahead, under a bound of bytes and one of sessions (Pensieve 4.3).

A record is with the operating system when `append` returns: it survives the process, and with `sync` the machine too. A
log of which more than half is obsolete, or that a fault has hit, asks to be written anew as a whole
(`Appended.NEEDS_WHOLE`). Faults are counters; only a folder that cannot be used at all is refused, at the start.

A session that was deleted leaves a *tombstone*: a log without ids, newer than all that was written of it anywhere. It
is kept until every copy of the session has expired, unless tombstones fill half of the bound. So that none comes back
from a node that was down, ages count on over a halt, unlike those of chunks: by the wall clock at a start, by one that
does not jump afterwards.

Calls for one session are one after the other; for others, they do not wait while bytes are read, written or synced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.disk_folder import make_root
from mneme.cachetier.sessions.files import Clock, SessionLogFiles
from mneme.cachetier.sessions.folder import SessionLogFolder
from mneme.cachetier.sessions.index import BLOCK_BYTES, SessionLogConfig, SessionLogIndex
from mneme.cachetier.sessions.record import RecordHead, RecordKind, deleted, head_of, taken_over
from mneme.cachetier.sessions.store import Appended, LogKey, log_of, parse_log, tombstone_of

_NUM_LOCKS = 64  # by names of sessions


class SessionLogs:
    """A `SessionLogStore`. Raises `ConfigError` if the folder cannot be used, or if another process uses it."""

    def __init__(
        self,
        config: SessionLogConfig,
        *,
        files: FileOperations | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        """`clock` must not jump; `wall_clock` may: versions are made of it, and ages at the start."""
        self._config, self._clock, self._wall_clock = config, clock, wall_clock
        self._lock = threading.Lock()  # taken behind the session's
        self._session_locks = [threading.Lock() for _ in range(_NUM_LOCKS)]
        self._folder = SessionLogFolder(config.folder, files or FileOperations(), sync=config.sync)
        index = SessionLogIndex(config.capacity_bytes, config.max_sessions, config.ttl_s)
        self._files = SessionLogFiles(self._folder, index, self._lock, clock)
        self._files.rebuild(wall_clock())

    def append(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        """See `SessionLogStore`. Raises ValueError for what is no record."""
        heads = [head for head in map(head_of, records) if head is not None]
        if not heads or len(heads) != len(records):
            raise ValueError("records: must be records of a session's log")
        with self._one(key):
            self._files.tidy()
            outcome = self._append(key, records, heads)
            self._files.counters[outcome.value] += 1
            return outcome

    def read(self, key: LogKey, newer_than: int = 0) -> bytes | None:
        """See `SessionLogStore`."""
        with self._one(key):
            self._files.tidy()
            log = self._files.find(key)
            if log is None or log.version <= newer_than:
                return None
            if log.is_deleted:
                return tombstone_of(key, log.version)
            content = self._files.load(log)
            self._files.counters["read"] += 1
            return content if content is not None and log.version > newer_than else None

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        """See `SessionLogStore`; what is not known here leaves no tombstone, unless `at_least` names a version."""
        with self._one(key):
            self._files.tidy()
            try:
                log = self._files.find(key)
            except OSError:  # it is there and cannot be read: all the more
                log = self._files.index.get(key)
            if log is None and not at_least:
                return False
            current = 0 if log is None else log.version
            was_there = log is not None and not log.is_deleted and (log.num_ids > 0 or log.version == 0)
            if log is None or not log.is_deleted or at_least > current:
                self._files.bury(key, at_least if at_least > current else taken_over(current, self._wall_clock()))
            self._files.counters["deleted"] += was_there
            return was_there

    def install(self, key: LogKey, content: bytes) -> Appended:
        """Keep a log as another node has it, if it is sound and newer than what is here (else `STALE`)."""
        parsed = parse_log(content, key)
        if parsed is None or parsed.num_bytes != len(content):
            return Appended.FAILED
        with self._one(key):
            self._files.tidy()
            try:
                log = self._files.find(key)
            except OSError:
                return Appended.FAILED
            if log is not None and parsed.replay.version <= log.version:
                return Appended.STALE
            return self._files.replace(key, content, parsed)

    def delete_owned(self, owner: bytes) -> int:
        """See `SessionLogStore`; looks at every session."""
        with self._lock:
            keys = [log.key for log in self._files.index.sessions.values() if log.key.owner == owner]
        return sum(self.delete(key) for key in keys)

    def written_since(self, age_s: float, max_keys: int) -> list[LogKey]:
        """The last sessions that were written within so many seconds, oldest first."""
        with self._lock:
            latest = islice(reversed(self._files.index.sessions.values()), max_keys)
            return [log.key for log in latest if self._clock() - log.written_s <= age_s][::-1]

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "sessions": len(self._files.index.sessions),
                "tombstones": len(self._files.index.tombstones),
                "used_bytes": self._files.index.num_blocks * BLOCK_BYTES,
                "capacity_bytes": self._config.capacity_bytes,
                "counters": dict(self._files.counters),
            }

    def close(self) -> None:
        """Let the folder go; nothing may be called any more."""
        with self._lock:
            self._files.write_tombstones(None)
            self._folder.close()

    @contextmanager
    def _one(self, key: LogKey) -> Iterator[None]:
        """No other call for this session is under way."""
        with self._session_locks[key.name[0] % _NUM_LOCKS], self._lock:
            yield

    def _append(self, key: LogKey, records: Sequence[bytes], heads: list[RecordHead]) -> Appended:
        try:
            log = self._files.find(key)
        except OSError:
            return Appended.FAILED
        current = 0 if log is None else log.version
        is_whole = heads[0].kind in (RecordKind.WHOLE, RecordKind.DELETED)
        is_again = is_whole and log is not None and log.must_replace and heads[-1].version == current
        if heads[-1].version <= current and not is_again:
            return Appended.STALE
        if not is_whole and heads[0].base != current:
            return Appended.STALE if heads[0].version < current else Appended.NEEDS_WHOLE
        if log is not None and not is_whole and not log.is_deleted:
            return self._files.extend(log, records, heads[-1])
        if log is not None and not is_whole:  # behind a tombstone
            records = [deleted(log.version), *records]
        content = log_of(key, records)
        parsed = parse_log(content, key)
        if parsed is None or parsed.num_bytes != len(content):  # they go on from ids that are not here
            return Appended.NEEDS_WHOLE
        return self._files.replace(key, content, parsed)


def open_session_logs(config: CacheConfig, ttl_s: float) -> SessionLogs | None:
    """Beside the disk tier, in its folder, which is made; None: there is none. Raises `ConfigError`."""
    if config.disk is None:
        return None
    make_root(config.disk.folder)
    return SessionLogs(
        SessionLogConfig(
            folder=config.disk.folder,
            capacity_bytes=config.session_log_bytes,
            ttl_s=ttl_s,
            sync=config.session_log_sync,
        )
    )
