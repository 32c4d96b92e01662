"""Session logs on the disk and in the index at once, under a bound of bytes, with what is due to age and to faults.

All calls are made with one lock held. They let it go while they wait for the disk: the bytes of a log are then read or
written, or reach the disk. So a log may be evicted or expire in the middle of a call, which finds it gone afterwards;
no two calls for one session are made at a time.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from mneme.cachetier.sessions.folder import SessionLogFolder
from mneme.cachetier.sessions.index import BLOCK_BYTES, Log, SessionLogIndex
from mneme.cachetier.sessions.record import RecordHead, RecordKind
from mneme.cachetier.sessions.store import (
    TOMBSTONE_BYTES,
    Appended,
    LogKey,
    ParsedLog,
    frames,
    parse_log,
    tombstone_of,
)

Clock = Callable[[], float]

_logger = logging.getLogger(__name__)

_MAX_TRIES = 4  # of what may fail, in one call
_SWEEP_S = 10.0  # how often sessions with a time of their own are looked at


class SessionLogFiles:
    """`clock` must not jump."""

    def __init__(self, folder: SessionLogFolder, index: SessionLogIndex, lock: threading.Lock, clock: Clock) -> None:
        self._folder, self._lock, self._clock = folder, lock, clock
        self.index = index
        self.counters: Counter[str] = Counter()
        self._unburied: dict[bytes, Log] = {}  # tombstones that are not on the disk yet
        self._is_burying = False
        self._swept_s = clock()

    def rebuild(self, wall_s: float) -> None:
        """The index from names and times; no file is read."""
        now_s = self._clock()
        for found in self._folder.scan(self.counters):
            log = Log(found.key, found.num_bytes, now_s - max(wall_s - found.written_s, 0.0))
            log.is_deleted = found.num_bytes == TOMBSTONE_BYTES
            self.index.put(log)
        self.tidy()

    def tidy(self) -> None:
        """What is due: tombstones that could not be written, and sessions that are too old."""
        now_s = self._clock()
        is_due = now_s - self._swept_s >= _SWEEP_S
        if is_due:
            self._swept_s = now_s
        if self._unburied and not self._is_burying:  # only one call at a time waits for what others left
            self._is_burying = True
            try:
                self.write_tombstones()
            finally:
                self._is_burying = False
        for log in self.index.expired(now_s, all_times=is_due):
            self._remove(log, "expired")

    def find(self, key: LogKey) -> Log | None:
        """What is known of a session, read from its file if need be. Raises OSError."""
        log = self.index.get(key)
        if log is not None and not log.version:
            self.load(log)
            log = self.index.get(key)
        if log is not None and self.index.is_expired(log, self._clock()):
            self._remove(log, "expired")
            return None
        return log

    def extend(self, log: Log, records: Sequence[bytes], head: RecordHead) -> Appended:
        content, checksum = frames(records, log.checksum)
        if log.must_replace or log.is_too_long(len(content), head) or head.is_from_prompt > log.has_prompt:
            return Appended.NEEDS_WHOLE
        if not self._make_room(1 + len(content) // BLOCK_BYTES, log):
            return Appended.FAILED
        at = log.num_bytes
        self.index.resize(log, at + len(content))
        try:
            with self._unlocked():
                self._folder.append(log.key, content, at)
        except OSError as error:
            log.must_replace = True
            if self._is_here(log):
                self.index.resize(log, at)
            return self._failed(error, log.key)
        if not self._is_here(log):
            return Appended.FAILED
        self.index.remove(log.key)
        log.written_s = self._clock()
        log.checksum, log.version, log.num_ids, log.ttl_s = checksum, head.version, head.num_ids, head.ttl_s
        log.has_prompt = head.kind is RecordKind.BEGAN
        self.index.put(log)
        self.counters["written_bytes"] += len(content)
        return Appended.WRITTEN

    def replace(self, key: LogKey, content: bytes, parsed: ParsedLog) -> Appended:
        log, before = Log(key, len(content), self._clock()), self.index.get(key)
        log.note(parsed)
        if not self._make_room(log.num_blocks, log):
            return Appended.FAILED
        try:
            with self._unlocked():
                temporary = self._folder.write_new(key, content)
            if self.index.get(key) is not before or not self._make_room(log.num_blocks, log):
                self._folder.discard(temporary)
                return Appended.FAILED
            self._folder.rename(temporary, key)
        except OSError as error:
            return self._failed(error, key)
        self._unburied.pop(key.name, None)
        self.index.put(log)
        self.counters["written_bytes"] += len(content)
        return self._sync_name(log)

    def _sync_name(self, log: Log) -> Appended:
        try:
            with self._unlocked():
                self._folder.sync_names()
        except OSError as error:
            log.must_replace = True
            return self._failed(error, log.key)
        return Appended.WRITTEN if self._is_here(log) else Appended.FAILED

    def load(self, log: Log) -> bytes | None:
        """What is sound of a file, which is all that is known of it afterwards; None if nothing is. Raises OSError."""
        try:
            with self._unlocked():
                content = self._folder.read(log.key)
                parsed = None if content is None else parse_log(content, log.key)
                if content is not None and parsed is not None and parsed.num_bytes < len(content):
                    self._folder.cut(log.key, parsed.num_bytes)  # it counts no more
        except OSError:
            self.counters["read_failed"] += 1
            raise
        if not self._is_here(log):
            return None
        if content is None or parsed is None:
            self.counters["damaged"] += 1
            self._remove(log, "lost")
            return None
        if parsed.num_bytes != (log.num_bytes if log.version else len(content)):
            self.counters["damaged" if log.version else "torn"] += 1
        self.index.resize(log, parsed.num_bytes)
        log.note(parsed)
        return content[: parsed.num_bytes]

    def bury(self, key: LogKey, version: int) -> None:
        """The session is gone here and now; its file is replaced as soon as the disk allows."""
        log = self.index.get(key) or Log(key, 0, 0.0)
        self.index.remove(key)
        log.is_deleted, log.version, log.num_ids, log.written_s = True, version, 0, self._clock()
        self.index.put(log)
        self._unburied[key.name] = log
        self._write_tombstone(log)

    def write_tombstones(self, max_tries: int | None = _MAX_TRIES) -> None:
        """Those that are not on the disk yet, of which the ones that were tried last come last; None: all."""
        for log in list(self._unburied.values())[:max_tries]:
            if self._unburied.get(log.key.name) is log:  # its session may have begun anew while another was written
                self._write_tombstone(log)

    def _write_tombstone(self, log: Log) -> None:
        content = tombstone_of(log.key, log.version)
        parsed = parse_log(content, log.key)
        assert parsed is not None, "it was made here"
        if self.replace(log.key, content, parsed) is Appended.WRITTEN:
            return
        self.counters["tombstone_failed"] += 1
        if not self._is_here(log):
            return
        self._unburied.pop(log.key.name, None)
        self._unburied[log.key.name] = log
        with suppress(OSError):  # a full disk has no room for a tombstone; nothing is read where there is no file
            self._folder.remove(log.key)
            self.index.resize(log, 0)

    def _is_here(self, log: Log) -> bool:
        """It is not evicted, expired or replaced."""
        return self.index.get(log.key) is log

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def _make_room(self, num_blocks: int, log: Log) -> bool:
        """For so many blocks more of a session; False if there cannot be any."""
        for _ in range(_MAX_TRIES):
            while not self.index.has_room(num_blocks, log) and (victim := self.index.victim(log.key)) is not None:
                if not self._remove(victim, "evicted"):
                    break
            if self.index.has_room(num_blocks, log):
                return True
        return False

    def _remove(self, log: Log, why: str) -> bool:
        """Its file too; what cannot be removed counts on, as the one that was written last."""
        try:
            self._folder.remove(log.key)
        except OSError:
            self.counters["remove_failed"] += 1
            self.index.put(log)
            return False
        self.index.remove(log.key)
        self._unburied.pop(log.key.name, None)
        self.counters[why] += 1
        return True

    def _failed(self, error: OSError, key: LogKey) -> Appended:
        """A write; where the disk is full, the least recently used make room for the next one."""
        _logger.warning("session logs: a log could not be written: %s", error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.counters["disk_full"] += 1
            if (victim := self.index.victim(key)) is not None:
                self._remove(victim, "evicted")
        return Appended.FAILED
