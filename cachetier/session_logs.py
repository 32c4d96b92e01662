"""Token logs of sessions on a node's disk, written ahead, under a bound of bytes and one of sessions (Pensieve 4.3).

A record is with the operating system when `append` returns: it survives the process, and with `sync` the machine too. A
log of which more than half is obsolete, or that a fault has hit, asks to be written anew as a whole
(`Appended.NEEDS_WHOLE`). Faults are counters; only a folder that cannot be used at all is refused, at the start.

A session that was deleted leaves a *tombstone*: a log without ids, newer than all that was written of it anywhere. It
is kept until every copy of the session has expired. So that none comes back from a node that was down, ages count on
over a halt, unlike those of chunks: by the wall clock at a start, by one that does not jump afterwards.

One lock is held during calls to the file system: what they read and write is a few KB in the page cache.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from mneme.cachetier.file_operations import FileOperations
from mneme.cachetier.session_log_folder import SessionLogFolder
from mneme.cachetier.session_log_index import BLOCK_BYTES, Log, SessionLogConfig, SessionLogIndex
from mneme.cachetier.session_log_store import (
    TOMBSTONE_BYTES,
    Appended,
    LogKey,
    ParsedLog,
    frames,
    log_of,
    parse_log,
    tombstone_of,
)
from mneme.cachetier.session_record import RecordHead, RecordKind, deleted, head_of, taken_over

Clock = Callable[[], float]

_logger = logging.getLogger(__name__)

_MAX_TRIES = 4  # of what may fail, in one call
_SWEEP_S = 10.0  # how often sessions with a time of their own are looked at


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
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._index = SessionLogIndex(config.capacity_bytes, config.max_sessions, config.ttl_s)
        self._unburied: dict[bytes, Log] = {}  # tombstones that are not on the disk yet
        self._swept_s = clock()
        self._folder = SessionLogFolder(config.folder, files or FileOperations(), sync=config.sync)
        self._rebuild(wall_clock())

    def append(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        """See `SessionLogStore`. Raises ValueError for what is no record."""
        heads = [head for head in map(head_of, records) if head is not None]
        if not heads or len(heads) != len(records):
            raise ValueError("records: must be records of a session's log")
        with self._lock:
            self._tidy()
            outcome = self._append(key, records, heads)
            self._counters[outcome.value] += 1
            return outcome

    def read(self, key: LogKey, newer_than: int = 0) -> bytes | None:
        """See `SessionLogStore`."""
        with self._lock:
            self._tidy()
            log = self._find(key)
            if log is None or log.version <= newer_than:
                return None
            if log.is_deleted:
                return tombstone_of(key, log.version)
            content = self._load(log)
            self._counters["read"] += 1
            return content if content is not None and log.version > newer_than else None

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        """See `SessionLogStore`; what is not known here leaves no tombstone, unless `at_least` names a version."""
        with self._lock:
            self._tidy()
            try:
                log = self._find(key)
            except OSError:  # it is there and cannot be read: all the more
                log = self._index.get(key)
            if log is None and not at_least:
                return False
            current = 0 if log is None else log.version
            was_there = log is not None and not log.is_deleted and (log.num_ids > 0 or log.version == 0)
            if log is None or not log.is_deleted or at_least > current:
                self._bury(key, at_least if at_least > current else taken_over(current, self._wall_clock()))
            self._counters["deleted"] += was_there
            return was_there

    def install(self, key: LogKey, content: bytes) -> Appended:
        """Keep a log as another node has it, if it is sound and newer than what is here (else `STALE`)."""
        parsed = parse_log(content, key)
        if parsed is None or parsed.num_bytes != len(content):
            return Appended.FAILED
        with self._lock:
            self._tidy()
            try:
                log = self._find(key)
            except OSError:
                return Appended.FAILED
            if log is not None and parsed.replay.version <= log.version:
                return Appended.STALE
            return self._replace(key, content, parsed)

    def delete_owned(self, owner: bytes) -> int:
        """See `SessionLogStore`; looks at every session."""
        with self._lock:
            keys = [log.key for log in self._index.sessions.values() if log.key.owner == owner]
        return sum(self.delete(key) for key in keys)

    def written_since(self, age_s: float, max_keys: int) -> list[LogKey]:
        """The last sessions that were written within so many seconds, oldest first."""
        with self._lock:
            latest = islice(reversed(self._index.sessions.values()), max_keys)
            return [log.key for log in latest if self._clock() - log.written_s <= age_s][::-1]

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "sessions": len(self._index.sessions),
                "tombstones": len(self._index.tombstones),
                "used_bytes": self._index.num_blocks * BLOCK_BYTES,
                "capacity_bytes": self._config.capacity_bytes,
                "counters": dict(self._counters),
            }

    def close(self) -> None:
        """Let the folder go; nothing may be called any more."""
        with self._lock:
            self._write_tombstones()
            self._folder.close()

    def _append(self, key: LogKey, records: Sequence[bytes], heads: list[RecordHead]) -> Appended:
        try:
            log = self._find(key)
        except OSError:
            return Appended.FAILED
        current = 0 if log is None else log.version
        if heads[-1].version <= current:
            return Appended.STALE
        is_whole = heads[0].kind in (RecordKind.WHOLE, RecordKind.DELETED)
        if not is_whole and heads[0].base != current:
            return Appended.STALE if heads[0].version < current else Appended.NEEDS_WHOLE
        if log is not None and not is_whole and not log.is_deleted:
            return self._extend(log, records, heads[-1])
        if log is not None and not is_whole:  # behind a tombstone
            records = [deleted(log.version), *records]
        content = log_of(key, records)
        parsed = parse_log(content, key)
        if parsed is None or parsed.num_bytes != len(content):  # they go on from ids that are not here
            return Appended.NEEDS_WHOLE
        return self._replace(key, content, parsed)

    def _extend(self, log: Log, records: Sequence[bytes], head: RecordHead) -> Appended:
        content, checksum = frames(records, log.checksum)
        if log.must_replace or log.is_too_long(len(content)) or head.is_from_prompt > log.has_prompt:
            return Appended.NEEDS_WHOLE
        if not self._make_room(1 + len(content) // BLOCK_BYTES, log.key):
            return Appended.FAILED
        try:
            self._folder.append(log.key, content, log.num_bytes)
        except OSError as error:
            log.must_replace = True
            return self._failed(error, log.key)
        self._index.remove(log.key)
        log.num_bytes, log.written_s = log.num_bytes + len(content), self._clock()
        log.checksum, log.version, log.num_ids, log.ttl_s = checksum, head.version, head.num_ids, head.ttl_s
        log.has_prompt = head.kind is RecordKind.BEGAN
        self._index.put(log)
        self._counters["written_bytes"] += len(content)
        return Appended.WRITTEN

    def _replace(self, key: LogKey, content: bytes, parsed: ParsedLog) -> Appended:
        log = Log(key, len(content), self._clock())
        log.note(parsed)
        if not self._make_room(log.num_blocks, key):
            return Appended.FAILED
        try:
            self._folder.replace(key, content)
        except OSError as error:
            return self._failed(error, key)
        self._unburied.pop(key.name, None)
        self._index.put(log)
        self._counters["written_bytes"] += len(content)
        return Appended.WRITTEN

    def _find(self, key: LogKey) -> Log | None:
        """What is known of a session, read from its file if need be. Raises OSError."""
        log = self._index.get(key)
        if log is not None and not log.version:
            self._load(log)
            log = self._index.get(key)
        if log is not None and self._index.is_expired(log, self._clock()):
            self._remove(log, "expired")
            return None
        return log

    def _load(self, log: Log) -> bytes | None:
        """What is sound of a file, which is all that is known of it afterwards; None if nothing is. Raises OSError."""
        try:
            content = self._folder.read(log.key)
        except OSError:
            self._counters["read_failed"] += 1
            raise
        parsed = None if content is None else parse_log(content, log.key)
        if content is None or parsed is None:
            self._counters["damaged"] += 1
            self._remove(log, "lost")
            return None
        if parsed.num_bytes != (log.num_bytes if log.version else len(content)):
            self._counters["damaged" if log.version else "torn"] += 1
        self._index.resize(log, parsed.num_bytes)
        log.note(parsed)
        return content[: parsed.num_bytes]

    def _bury(self, key: LogKey, version: int) -> None:
        """The session is gone here and now; its file is replaced as soon as the disk allows."""
        log = self._index.get(key) or Log(key, 0, 0.0)
        self._index.remove(key)
        log.is_deleted, log.version, log.num_ids, log.written_s = True, version, 0, self._clock()
        self._index.put(log)
        self._unburied[key.name] = log
        self._write_tombstones()

    def _write_tombstones(self) -> None:
        for log in list(self._unburied.values())[:_MAX_TRIES]:
            content = tombstone_of(log.key, log.version)
            parsed = parse_log(content, log.key)
            assert parsed is not None, "it was made here"
            if self._replace(log.key, content, parsed) is Appended.WRITTEN:
                continue
            self._counters["tombstone_failed"] += 1
            with suppress(OSError):  # a full disk has no room for a tombstone; nothing is read where there is no file
                self._folder.remove(log.key)
                self._index.resize(log, 0)

    def _make_room(self, num_blocks: int, key: LogKey) -> bool:
        """For so many blocks more of a session; False if there cannot be any."""
        for _ in range(_MAX_TRIES):
            while not self._index.has_room(num_blocks) and (victim := self._index.victim(key)) is not None:
                if not self._remove(victim, "evicted"):
                    break
            if self._index.has_room(num_blocks):
                return True
        return False

    def _remove(self, log: Log, why: str) -> bool:
        """Its file too; what cannot be removed counts on, as the one that was written last."""
        try:
            self._folder.remove(log.key)
        except OSError:
            self._counters["remove_failed"] += 1
            self._index.put(log)
            return False
        self._index.remove(log.key)
        self._unburied.pop(log.key.name, None)
        self._counters[why] += 1
        return True

    def _failed(self, error: OSError, key: LogKey) -> Appended:
        """A write; where the disk is full, the least recently used make room for the next one."""
        _logger.warning("session logs: a log could not be written: %s", error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._counters["disk_full"] += 1
            if (victim := self._index.victim(key)) is not None:
                self._remove(victim, "evicted")
        return Appended.FAILED

    def _tidy(self) -> None:
        """What is due: tombstones that could not be written, and sessions that are too old."""
        now_s = self._clock()
        is_due = now_s - self._swept_s >= _SWEEP_S
        if is_due:
            self._swept_s = now_s
        if self._unburied:
            self._write_tombstones()
        for log in self._index.expired(now_s, all_times=is_due):
            self._remove(log, "expired")

    def _rebuild(self, wall_s: float) -> None:
        """The index from names and times; no file is read."""
        now_s = self._clock()
        for found in self._folder.scan(self._counters):
            log = Log(found.key, found.num_bytes, now_s - max(wall_s - found.written_s, 0.0))
            log.is_deleted = found.num_bytes == TOMBSTONE_BYTES
            self._index.put(log)
        self._tidy()
