"""Keeps a node's session logs in one SQLite database, written ahead, bounded in bytes and sessions (Pensieve 4.3).

A record is with the operating system when `append` returns: it survives the process, and with `sync` the machine too.
The database is in WAL mode: a power failure without `sync` costs the last records and never the database. An append
of a turn's record takes about 70 us (median), 40 of them the commit, and 0.3 to 0.6 ms with `sync`, on a virtual
machine with 2 EPYC cores and a network disk.

A session is a row with its small fields, and a row for each of its records, which carries a checksum: what a disk has
changed is dropped and never read. A database that is damaged is set aside under another name, and an empty one takes
its place; peers' copies and what clients send again remain. A log of which more than half is obsolete asks to be
written anew as a whole (`Appended.NEEDS_WHOLE`). Faults are counters; only a folder that cannot be used at all is
refused, at the start.

A session that was deleted leaves a *tombstone*: a row without records, newer than all that was written of it anywhere.
It is kept until every copy of the session has expired, unless tombstones fill half of the bound. So that none comes
back from a node that was down, ages count on over a halt, unlike those of chunks: by the wall clock at a start, by one
that does not jump afterwards.
"""

from __future__ import annotations

import itertools
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import xxhash

from mneme.cachetier.chunk.syscalls import FileOperations, HeldLock
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.folder import make_root
from mneme.cachetier.sessions.record import RecordFields, RecordKind, deleted, fields_of, replayed, taken_over
from mneme.cachetier.sessions.store import Appended, LogKey
from mneme.errors import ConfigError

Clock = Callable[[], float]

logger = logging.getLogger(__name__)

MAX_CLOCK_SKEW_S = 600.0  # between nodes: tombstones outlive the last copy by as much
PAGE_BYTES = 4096

_OLD_FOLDER, _OWN_FOLDER = "mneme-sessions-1", "mneme-sessions-2"
_LOCK, _DATABASE, _SET_ASIDE = "lock", "sessions.db", "sessions.damaged.db"
_SUFFIXES = ("", "-wal", "-shm")  # of a database's files
_FORMAT = 1  # of the tables, as `PRAGMA user_version`
_SMALL_BYTES = 64 << 10  # a log up to this size is not written anew for what is obsolete in it
_TOMBSTONE_BYTES = 256  # of a row and its place in the indexes, at most
_WAL_BYTES = 4 << 20  # beside the bound; a checkpoint leaves no more
_SWEEP_S, _MAX_SWEPT = 10.0, 1000  # how often expired sessions are removed, and how many at once
_PLACE_BITS = 32  # of a record's number within its session

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, owner BLOB NOT NULL, version BLOB NOT NULL,
    written_s REAL NOT NULL, ttl_s REAL, num_ids INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    num_records INTEGER NOT NULL, has_prompt INTEGER NOT NULL, is_deleted INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (is_deleted, written_s);
CREATE TABLE IF NOT EXISTS records (place INTEGER PRIMARY KEY, record BLOB NOT NULL, checksum BLOB NOT NULL);
"""  # a record's place is its session's number and its own: records of one session lie together
_ROW = "number, version, written_s, ttl_s, num_ids, num_bytes, num_records, has_prompt, is_deleted"
_READ = f"""
SELECT {_ROW}, record, checksum FROM sessions LEFT JOIN records
    ON place BETWEEN number << {_PLACE_BITS} AND (number + 1 << {_PLACE_BITS}) - 1
    WHERE name = ? AND version > ? ORDER BY place
"""


class _Session(NamedTuple):
    """One row of `sessions`."""

    number: int
    stored_version: bytes  # 16, the most significant first: they are ordered as versions are
    written_s: float
    ttl_s: float | None
    num_ids: int
    num_bytes: int  # of its records
    num_records: int
    has_prompt: int  # the last record began a turn
    is_deleted: int

    @property
    def version(self) -> int:
        return int.from_bytes(self.stored_version, "big")


class _NoRoom(Exception):
    """A log is larger than all that may be kept."""


class SessionLogs:
    """A `SessionLogStore`. Raises `ConfigError` if the folder cannot be used, or if another process uses it.

    One connection writes, under a lock; another reads, so no read waits for a disk that is synced.
    """

    def __init__(
        self,
        folder: str,
        *,
        capacity_bytes: int = 1 << 30,
        max_sessions: int = 200_000,
        ttl_s: float = 3600.0,
        sync: bool = False,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect,
    ) -> None:
        """`capacity_bytes` are the database's, without its write-ahead log; of them tombstones have half.

        `max_sessions`: as many tombstones at most beside them. `ttl_s`: since the last turn; a session's own may be
        shorter. `sync`: wait for the disk at each record. `clock` must not jump; `wall_clock` may: versions are made of
        it, and ages at the start.
        """
        self._folder, self._capacity_bytes, self._max_sessions = folder, capacity_bytes, max_sessions
        self._ttl_s, self._sync, self._connect = ttl_s, sync, connect
        self._clock, self._wall_clock = clock, wall_clock
        self._started_s = wall_clock() - clock()
        self._last_s = float("-inf")  # no two writes are at one time
        self._swept_s = self._now_s()
        self._max_pages = capacity_bytes // PAGE_BYTES
        self._max_tombstones = min(max_sessions, max(capacity_bytes // 2 // _TOMBSTONE_BYTES, 1))
        self._lock, self._read_lock = threading.Lock(), threading.Lock()  # in this order
        self._counters: Counter[str] = Counter()
        self._counts = [0, 0]  # sessions, tombstones
        self._used_pages = 0
        self._root = os.path.join(folder, _OWN_FOLDER)
        self._folder_lock = self._open_folder()
        try:
            self._open()
        except BaseException:
            self._folder_lock.close()
            raise

    def append(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        """Raises ValueError for what is no record."""
        heads = [head for head in map(fields_of, records) if head is not None]
        if not heads or len(heads) != len(records):
            raise ValueError("records: must be records of a session's log")
        return self._outcome(lambda: self._append(key, records, heads))

    def install(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        """Keep a log as another node has it, if it is sound and newer than what is here (else `STALE`)."""
        replay, head = replayed(records), fields_of(records[-1]) if records else None
        if replay is None or head is None or replay.version != head.version:
            return Appended.FAILED

        def install() -> Appended:
            row, session = self._find(key)
            if session is not None and head.version <= session.version:
                return Appended.STALE
            self._replace(key, row, records, head)
            return Appended.WRITTEN

        return self._outcome(install)

    def read(self, key: LogKey, newer_than: int = 0) -> list[bytes] | None:
        with self._errors("read_failed", lambda: self._reads), self._read_lock:
            found = self._reads.execute(_READ, (key.name, _stored(newer_than))).fetchall()
        session = _Session(*found[0][:-2]) if found else None
        if session is None or self._is_expired(session):
            return None
        self._counters["read"] += 1
        if session.is_deleted:
            return [deleted(session.version)]
        records = [record for *_, record, checksum in found if record and checksum == _checksum(key, record)]
        last = fields_of(records[-1]) if records else None
        if len(records) != session.num_records or last is None or last.version != session.version:
            self._drop_damaged(key, session)
            return None
        return records

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        """What is not known here leaves no tombstone, unless `at_least` names a version."""
        with self._errors("tombstone_failed", lambda: self._db), self._transaction():
            row, session = self._find(key)
            if session is None and not at_least:
                return False
            current = 0 if session is None else session.version
            was_there = session is not None and not session.is_deleted and session.num_ids > 0
            if session is None or not session.is_deleted or at_least > current:
                version = at_least if at_least > current else taken_over(current, self._wall_clock())
                head = fields_of(deleted(version))
                assert head is not None, "it was made here"
                self._replace(key, row, (), head)
        self._counters["deleted"] += was_there
        return was_there

    def delete_tenant(self, tenant: bytes) -> int:
        """Looks at every session."""
        with self._errors("read_failed", lambda: self._reads), self._read_lock:
            found = self._reads.execute("SELECT name FROM sessions WHERE owner = ? AND NOT is_deleted", (tenant,))
            keys = [LogKey(name, tenant) for (name,) in found]
        return sum(self.delete(key) for key in keys)

    def written_since(self, age_s: float, max_keys: int) -> list[LogKey]:
        """The last sessions that were written within so many seconds, oldest first."""
        with self._errors("read_failed", lambda: self._reads), self._read_lock:
            found = self._reads.execute(
                "SELECT name, owner FROM sessions WHERE is_deleted = 0 AND written_s >= ? "
                "ORDER BY written_s DESC LIMIT ?",
                (self._now_s() - age_s, max_keys),
            ).fetchall()
        return [LogKey(*row) for row in reversed(found)]

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges, without a look at the disk."""
        return {
            "sessions": self._counts[0],
            "tombstones": self._counts[1],
            "used_bytes": self._used_pages * PAGE_BYTES,
            "capacity_bytes": self._capacity_bytes,
            "counters": dict(self._counters),
        }

    def close(self) -> None:
        """Release the folder; nothing may be called any more."""
        with self._lock, self._read_lock:
            self._reads.close()
            self._db.close()
            self._folder_lock.close()

    def _append(self, key: LogKey, records: Sequence[bytes], heads: Sequence[RecordFields]) -> Appended:
        row, session = self._find(key)
        current, first, last = 0 if session is None else session.version, heads[0], heads[-1]
        is_whole = first.kind in (RecordKind.WHOLE, RecordKind.DELETED)
        if last.version <= current:
            return Appended.STALE
        if not is_whole and first.base != current:
            return Appended.STALE if first.version < current else Appended.NEEDS_WHOLE
        if session is None or session.is_deleted or is_whole:
            before = [deleted(current)] if session is not None and not is_whole else []  # behind a tombstone
            replay = replayed([*before, *records])
            if replay is None or replay.version != last.version:  # they go on from ids that are not here
                return Appended.NEEDS_WHOLE
            self._replace(key, row, [*before, *records], last)
            return Appended.WRITTEN
        is_run = all(head.base == before.version for before, head in itertools.pairwise(heads))
        num_bytes = session.num_bytes + sum(map(len, records))
        num_useful = 4 * (last.num_all_ids + last.num_prompt) + PAGE_BYTES
        if not is_run or first.is_from_prompt > session.has_prompt or num_bytes > max(_SMALL_BYTES, 2 * num_useful):
            return Appended.NEEDS_WHOLE
        self._write(key, session, records, last)
        return Appended.WRITTEN

    def _replace(self, key: LogKey, row: _Session | None, records: Sequence[bytes], head: RecordFields) -> None:
        """Write these in the place of whatever there is of a session; `head` is the last record's, or a tombstone's."""
        if row is not None:
            self._remove_records(row.number)
            self._counts[row.is_deleted] -= 1
        is_deleted = head.kind == RecordKind.DELETED
        self._counts[is_deleted] += 1
        empty = _Session(0 if row is None else row.number, b"", 0.0, None, 0, 0, 0, 0, is_deleted)
        self._write(key, empty, () if is_deleted else records, head)

    def _write(self, key: LogKey, session: _Session, records: Sequence[bytes], head: RecordFields) -> None:
        """Records behind those of a session, and what its row says of them; raises `_NoRoom`."""
        self._make_room(key, 4 + sum(2 + len(record) // (PAGE_BYTES - 4) for record in records), session)
        self._last_s = max(self._now_s(), self._last_s + 1e-6)
        num_bytes = sum(map(len, records))
        number = self._db.execute(
            f"INSERT OR REPLACE INTO sessions ({_ROW}, name, owner) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(session.number or None, _stored(head.version), self._last_s, head.own_ttl_s, head.num_all_ids),
                *(session.num_bytes + num_bytes, session.num_records + len(records)),
                *(head.kind == RecordKind.BEGAN, session.is_deleted, *key),
            ),
        ).lastrowid
        assert number is not None, "a row was inserted"
        place = (number << _PLACE_BITS) + session.num_records
        rows = [(at, record, _checksum(key, record)) for at, record in enumerate(records, place)]
        self._db.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
        self._counters["written_bytes"] += num_bytes

    def _make_room(self, key: LogKey, num_pages: int, session: _Session) -> None:
        """For so many pages more, and one session more if it is new, which is counted already."""
        while self._counts[1] > self._max_tombstones and self._evict_one(1, key):
            continue
        while self._pages() + num_pages > self._max_pages or self._counts[0] > self._max_sessions:
            if not self._evict_one(0, key):
                if session.is_deleted:
                    return  # a tombstone takes the place of what is larger
                raise _NoRoom

    def _evict_one(self, is_deleted: int, but: LogKey) -> bool:
        """The session, or the tombstone, that was written longest ago; False: there is none."""
        oldest = "SELECT number FROM sessions WHERE is_deleted = ? AND name != ? ORDER BY written_s LIMIT 1"
        row = self._db.execute(oldest, (is_deleted, but.name)).fetchone()
        if row is not None:
            self._remove(row[0], is_deleted, "evicted")
        return row is not None

    def _remove(self, number: int, is_deleted: int, why: str) -> None:
        self._remove_records(number)
        self._db.execute("DELETE FROM sessions WHERE number = ?", (number,))
        self._counts[is_deleted] -= 1
        self._counters[why] += 1

    def _remove_records(self, number: int) -> None:
        first = number << _PLACE_BITS
        self._db.execute("DELETE FROM records WHERE place BETWEEN ? AND ?", (first, first + (1 << _PLACE_BITS) - 1))

    def _drop_damaged(self, key: LogKey, session: _Session) -> None:
        """What was read is not what was written; unless it was replaced since."""
        logger.error("session logs: a log was damaged and is dropped")
        self._counters["damaged"] += 1
        with self._errors("read_failed", lambda: self._db), self._transaction():
            row, _ = self._find(key)
            if row == session:
                self._remove(row.number, row.is_deleted, "lost")

    def _sweep(self) -> None:
        """Sessions and tombstones that are too old, from time to time."""
        now_s = self._now_s()
        if now_s - self._swept_s < _SWEEP_S:
            return
        ttl_s = self._ttl_s
        expired = self._db.execute(
            "SELECT number, is_deleted FROM sessions WHERE ? - written_s > "
            "CASE WHEN is_deleted THEN ? ELSE min(coalesce(ttl_s, ?), ?) END LIMIT ?",
            (now_s, ttl_s + MAX_CLOCK_SKEW_S, ttl_s, ttl_s, _MAX_SWEPT),
        ).fetchall()
        for number, is_deleted in expired:
            self._remove(number, is_deleted, "expired")
        if len(expired) < _MAX_SWEPT:
            self._swept_s = now_s

    def _find(self, key: LogKey) -> tuple[_Session | None, _Session | None]:
        """A session's row, and the same unless it has expired."""
        found = self._db.execute(f"SELECT {_ROW} FROM sessions WHERE name = ?", (key.name,)).fetchone()
        row = None if found is None else _Session(*found)
        return row, None if row is None or self._is_expired(row) else row

    def _is_expired(self, session: _Session) -> bool:
        ttl_s = self._ttl_s if session.ttl_s is None else min(session.ttl_s, self._ttl_s)
        limit_s = self._ttl_s + MAX_CLOCK_SKEW_S if session.is_deleted else ttl_s
        return self._now_s() - session.written_s > limit_s

    def _now_s(self) -> float:
        """By the wall clock at the start, and then by the one that does not jump."""
        return self._started_s + self._clock()

    def _pages(self) -> int:
        """Count the database's pages that are in use."""
        (num_pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (num_free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        return int(num_pages - num_free)

    def _outcome(self, call: Callable[[], Appended]) -> Appended:
        try:
            with self._errors(Appended.FAILED.value, lambda: self._db), self._transaction():
                outcome = call()
        except _NoRoom:
            outcome = Appended.FAILED
        except OSError:
            return Appended.FAILED
        self._counters[outcome.value] += 1
        return outcome

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that is written in it, or nothing."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._sweep()
                yield
                self._used_pages = self._pages()
                self._db.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                self._after_rollback(error)
                raise

    def _after_rollback(self, error: BaseException) -> None:
        """Counts are read again; where the disk is full, the session written longest ago makes room for the next."""
        is_full = isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL
        self._counters["disk_full"] += is_full
        with suppress(sqlite3.Error):
            if is_full:
                self._evict_one(0, LogKey(b"", b""))
            self._count()

    def _count(self) -> None:
        found = dict(self._db.execute("SELECT is_deleted, count(*) FROM sessions GROUP BY is_deleted"))
        self._counts[:] = found.get(0, 0), found.get(1, 0)
        self._used_pages = self._pages()

    @contextmanager
    def _errors(self, counter: str, connection: Callable[[], sqlite3.Connection]) -> Iterator[None]:
        """What SQLite raises is an OSError, and a database that is damaged is set aside."""
        used = connection()
        try:
            yield
        except sqlite3.Error as error:
            self._counters[counter] += 1
            logger.warning("session logs: %s: %s", counter, error)
            if _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                with self._lock, self._read_lock:
                    if used is connection():  # nobody else has done so
                        self._reads.close()
                        self._db.close()
                        self._set_aside()
                        self._open()
            raise OSError(f"session logs: {error}") from error

    def _open_folder(self) -> HeldLock:
        """Makes it if there is none, for this user alone, and keeps every other process out."""
        files, path = FileOperations(), self._folder
        try:
            files.make_folder(self._root)
            lock = HeldLock(files, os.path.join(self._root, _LOCK))
            if self._sync:
                files.sync_folder(path)
        except BlockingIOError:
            raise ConfigError(f"session logs: {path} is in use by another cluster") from None
        except OSError as error:
            raise _unusable(path, error.strerror or type(error).__name__) from error
        if os.path.isdir(os.path.join(path, _OLD_FOLDER)):
            logger.warning("session logs: %s/%s is of an older version: it is not read", path, _OLD_FOLDER)
        return lock

    def _open(self) -> None:
        """Both connections; a database that is damaged is set aside before. Raises `ConfigError`."""
        try:
            try:
                self._connect_both()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._set_aside()
                self._connect_both()
        except (sqlite3.Error, OSError) as error:
            raise _unusable(self._folder, str(error)) from error

    def _connect_both(self) -> None:
        path = os.path.join(self._root, _DATABASE)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))  # for this user alone
        self._db = self._connected(path)
        try:
            self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            self._db.execute(f"PRAGMA synchronous = {'FULL' if self._sync else 'NORMAL'}")
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if found != "ok" or version not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"quick_check: {found}, format: {version}")
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT;")
            self._count()
            self._reads = self._connected(path)
        except BaseException:
            self._db.close()
            raise

    def _connected(self, path: str) -> sqlite3.Connection:
        made = self._connect(path, isolation_level=None, check_same_thread=False)
        made.execute("PRAGMA trusted_schema = OFF")
        made.execute("PRAGMA cell_size_check = ON")
        return made

    def _set_aside(self) -> None:
        """Takes the place of what was set aside before: there is one at most."""
        kept = os.path.join(self._root, _SET_ASIDE)
        logger.error("session logs: the database is damaged and is kept as %s; an empty one takes its place", kept)
        self._counters["damaged"] += 1
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                os.replace(os.path.join(self._root, _DATABASE + suffix), kept + suffix)


def open_session_logs(config: CacheConfig, ttl_s: float) -> SessionLogs | None:
    """Beside the disk tier, in its folder, which is made; None: there is none. Raises `ConfigError`."""
    if config.disk is None:
        return None
    make_root(config.disk.folder)
    return SessionLogs(
        config.disk.folder, capacity_bytes=config.session_log_bytes, ttl_s=ttl_s, sync=config.session_log_sync
    )


def _checksum(key: LogKey, record: bytes) -> bytes:
    """Finds accidents; whoever may write to the folder of a node is trusted with what logs say."""
    return xxhash.xxh3_128_digest(key.name + record)


def _stored(version: int) -> bytes:
    return version.to_bytes(16, "big")


def _code(error: sqlite3.Error) -> int:
    """SQLite's, without what it says in addition."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _unusable(path: str, reason: str) -> ConfigError:
    return ConfigError(f"session logs: {path} cannot be used ({reason})")
