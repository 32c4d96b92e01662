"""Keeps a node's session logs in one SQLite database, written ahead, bounded in bytes and sessions (Pensieve 4.3).

A session has a row, and a row for each of its turns (`rows.py`). They are with the operating system when `append`
returns: they survive the process. The database is in WAL mode: a power failure costs the last turns and never the
database. The two appends of a turn take about 120 us together, a commit 20 of them (medians); to wait for the disk
would take 3.7 ms each on a virtual machine with 2 EPYC cores.

Each row carries a checksum: what a disk has changed is dropped and never read. A database of format 4 is read, and gets
what it lacks. One that is damaged, or of another format, is set aside under another name, and an empty one takes its
place; peers' copies and what clients send again remain. Rows that do not go on from what is here are answered with
`Appended.NEEDS_WHOLE`. Faults are counters; only a folder that cannot be used at all is refused, at the start.

A session that was deleted leaves a *tombstone*: its row without turns, newer than all that was written of it anywhere.
It is kept until every copy of the session has expired, unless tombstones fill half of the bound. So that none comes
back from a node that was down, ages count on over a halt, unlike those of chunks: by the wall clock at a start, by one
that does not jump afterwards.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import xxhash

from mneme.cachetier.chunk.syscalls import FileOperations, HeldLock
from mneme.cachetier.config import SESSION_LOG_BYTES, CacheConfig
from mneme.cachetier.names import Appended
from mneme.cachetier.node.folder import make_root
from mneme.cachetier.session_log.log_store import LogKey
from mneme.cachetier.session_log.rows import NO_IDS, LogRows, SessionRow, TurnRow, taken_over
from mneme.errors import ConfigError

Clock = Callable[[], float]

logger = logging.getLogger(__name__)

MAX_CLOCK_SKEW_S = 600.0  # between nodes: tombstones outlive the last copy by as much
PAGE_BYTES = 4096

_FOLDER = "mneme-sessions-2"
_LOCK, _DATABASE, _SET_ASIDE = "lock", "sessions.db", "sessions.damaged.db"
_SUFFIXES = ("", "-wal", "-shm")  # of a database's files
_FORMAT = 5  # of the tables, as `PRAGMA user_version`
_FROM_4 = "ALTER TABLE sessions ADD COLUMN forked_from BLOB;"  # rows keep checksums without it until they are written
_TOMBSTONE_BYTES = 256  # of a row and its place in the indexes, at most
_WAL_BYTES = 4 << 20  # beside the bound; a checkpoint leaves no more
_SWEEP_S, _MAX_SWEPT = 10.0, 1000  # how often expired sessions are removed, and how many at once

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, tenant BLOB NOT NULL,
    is_deleted INTEGER NOT NULL, checksum BLOB NOT NULL, written_s REAL NOT NULL,
    version BLOB NOT NULL, num_ids INTEGER NOT NULL, seen_ids BLOB, marks BLOB NOT NULL, mark_key BLOB NOT NULL,
    hits BLOB NOT NULL, num_turns INTEGER NOT NULL, num_base INTEGER NOT NULL, last_turn INTEGER, ttl_s,
    event BLOB NOT NULL, note BLOB NOT NULL, forked_from BLOB
); -- without a type a value comes back as it was written, as checksums need it
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (is_deleted, written_s);
CREATE TABLE IF NOT EXISTS turns (
    session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, turn INTEGER NOT NULL,
    start INTEGER NOT NULL, checksum BLOB NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, turn)
);
"""
_COLUMNS = ("name", "tenant", "is_deleted", "checksum", "written_s", *SessionRow._fields)
_UPSERT = f"""
INSERT INTO sessions ({", ".join(_COLUMNS)}) VALUES ({", ".join("?" * len(_COLUMNS))})
    ON CONFLICT (name) DO UPDATE SET {", ".join(f"{each} = excluded.{each}" for each in _COLUMNS[1:])}
"""
_FIND = f"SELECT id, checksum, written_s, {', '.join(SessionRow._fields)} FROM sessions WHERE name = ?"


class _Stored(NamedTuple):
    """A session's row, and what this node alone knows of it."""

    id: int
    written_s: float
    is_sound: bool  # as it was written; if not, `row` says nothing
    row: SessionRow


class _NoRoom(Exception):
    """A log is larger than all that may be kept."""


class SessionLogs:
    """A `SessionLogStore`. Raises `ConfigError` if the folder cannot be used, or if another process uses it.

    One connection writes, under a lock; another reads, so no read waits for a disk that stands still.
    """

    def __init__(
        self,
        folder: str,
        *,
        capacity_bytes: int = SESSION_LOG_BYTES,
        max_sessions: int = 200_000,
        ttl_s: float = 3600.0,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect,
    ) -> None:
        """`capacity_bytes` are the database's, without its write-ahead log; of them tombstones have half.

        `max_sessions`: as many tombstones at most beside them. `ttl_s`: since the last turn; a session's own may be
        shorter. `clock` must not jump; `wall_clock` may: versions are made of
        it, and ages at the start.
        """
        self._folder, self._capacity_bytes, self._max_sessions = folder, capacity_bytes, max_sessions
        self._ttl_s, self._connect = ttl_s, connect
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
        self._root = os.path.join(folder, _FOLDER)
        self._folder_lock = self._open_folder()
        try:
            self._open()
        except BaseException:
            self._folder_lock.close()
            raise

    def append(self, key: LogKey, rows: LogRows) -> Appended:
        """Raises ValueError for rows that lead from nothing to nothing."""
        if rows.base is None and not rows.follow(0, -1):
            raise ValueError("rows: must be all of a session's, or say from which version they go on")
        return self._outcome(lambda: self._append(key, rows))

    def read(self, key: LogKey, newer_than: int = 0) -> LogRows | None:
        with self._errors("read_failed", lambda: self._reads), self._read_lock:
            try:
                self._reads.execute("BEGIN")  # so that both answers are of one version
                stored = _found(key, self._reads)
                is_known = stored is not None and (not stored.is_sound or stored.row.version > newer_than)
                if stored is None or not is_known or self._is_expired(stored):
                    return None
                found = self._reads.execute(
                    "SELECT turn, start, ids, checksum FROM turns WHERE session = ? ORDER BY turn", (stored.id,)
                ).fetchall()
            finally:
                self._reads.rollback()
        self._counters["read"] += 1
        is_sound = stored.is_sound and all(checksum == _checksum(key, turn) for *turn, checksum in found)
        rows = LogRows(None, stored.row, tuple(TurnRow(*turn) for *turn, _ in found))
        if not is_sound or not rows.follow(0, -1):
            self._drop_damaged(key, stored)
            return None
        return rows

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        """Delete a log; one that is not known leaves no tombstone, unless `at_least` names a version."""
        with self._errors("tombstone_failed", lambda: self._db), self._transaction():
            stored, session = self._find(key)
            if session is None and not at_least:
                return False
            current = 0 if session is None else session.version
            was_there = session is not None and session.num_ids > 0
            if session is None or not session.is_deleted or at_least > current:
                version = at_least if at_least > current else taken_over(current, self._wall_clock())
                self._write(key, stored, 0, LogRows(None, SessionRow(version)))
        self._counters["deleted"] += was_there
        return was_there

    def delete_tenant(self, tenant: bytes) -> int:
        """Delete a tenant's sessions; looks at every session."""
        with self._errors("read_failed", lambda: self._reads), self._read_lock:
            found = self._reads.execute("SELECT name FROM sessions WHERE tenant = ? AND NOT is_deleted", (tenant,))
            keys = [LogKey(name, tenant) for (name,) in found]
        return sum(self.delete(key) for key in keys)

    def written_since(self, age_s: float, max_keys: int) -> list[LogKey]:
        """The last sessions that were written within so many seconds, oldest first."""
        with self._errors("read_failed", lambda: self._reads), self._read_lock:
            found = self._reads.execute(
                "SELECT name, tenant FROM sessions WHERE is_deleted = 0 AND written_s >= ? "
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

    def _append(self, key: LogKey, rows: LogRows) -> Appended:
        stored, session = self._find(key)
        before = session or SessionRow(0)
        if rows.session.version <= before.version:
            return Appended.STALE
        goes_on = rows.base == before.version and rows.follow(before.num_ids, before.num_turns)
        if rows.base is not None and not goes_on:
            return Appended.NEEDS_WHOLE
        self._write(key, stored, 0 if rows.base is None else before.num_ids, rows)
        return Appended.WRITTEN

    def _write(self, key: LogKey, stored: _Stored | None, num_ids: int, rows: LogRows) -> None:
        """Write rows behind the first `num_ids` of a session; raises `_NoRoom`."""
        row = rows.session
        self._counts[row.is_deleted] += 1
        if stored is not None:
            self._counts[stored.row.is_deleted] -= 1
            if num_ids < stored.row.num_ids:
                self._cut(key, stored.id, num_ids)
        blobs = [turn.ids for turn in rows.turns]
        blobs += [blob for blob in (row.seen_ids, row.note) if blob]
        self._make_room(key, 4 + sum(2 + len(blob) // (PAGE_BYTES - 4) for blob in blobs), row)
        self._last_s = max(self._now_s(), self._last_s + 1e-6)
        checked = (self._last_s, row.version.to_bytes(16, "big"), *row[1:])
        written = self._db.execute(_UPSERT, (*key, row.is_deleted, _checksum(key, checked), *checked))
        session_id = stored.id if stored is not None else written.lastrowid or 0
        for turn in rows.turns:
            if turn.start < num_ids:
                self._cut(key, session_id, turn.start)
            self._insert(key, session_id, turn)
            num_ids = turn.end
        self._counters["written_bytes"] += sum(map(len, blobs))

    def _insert(self, key: LogKey, session_id: int, turn: TurnRow) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO turns (session, turn, start, checksum, ids) VALUES (?, ?, ?, ?, ?)",
            (session_id, turn.turn, turn.start, _checksum(key, turn), turn.ids),
        )

    def _cut(self, key: LogKey, session_id: int, num_ids: int) -> None:
        """Keep so many ids: an edited history goes on from them."""
        self._db.execute("DELETE FROM turns WHERE session = ? AND start >= ?", (session_id, num_ids))
        last = "SELECT turn, start, ids, checksum FROM turns WHERE session = ? ORDER BY turn DESC LIMIT 1"
        for *fields, checksum in self._db.execute(last, (session_id,)).fetchall():
            turn = TurnRow(*fields)
            if checksum == _checksum(key, turn) and turn.end > num_ids:  # damage stays, and is found when it is read
                self._insert(key, session_id, turn._replace(ids=turn.ids[: NO_IDS.itemsize * (num_ids - turn.start)]))

    def _make_room(self, key: LogKey, num_pages: int, session: SessionRow) -> None:
        """Make room for so many pages more, and one session more if it is new, which is counted already."""
        while self._counts[1] > self._max_tombstones and self._evict_one(1, key):
            continue
        while self._pages() + num_pages > self._max_pages or self._counts[0] > self._max_sessions:
            if not self._evict_one(0, key):
                if session.is_deleted:
                    return  # a tombstone takes the place of what is larger
                raise _NoRoom

    def _evict_one(self, is_deleted: int, but: LogKey) -> bool:
        """The session, or the tombstone, that was written longest ago; False: there is none."""
        oldest = "SELECT id FROM sessions WHERE is_deleted = ? AND name != ? ORDER BY written_s LIMIT 1"
        found = self._db.execute(oldest, (is_deleted, but.name)).fetchone()
        if found is not None:
            self._db.execute("DELETE FROM sessions WHERE id = ?", found)
            self._counts[is_deleted] -= 1
            self._counters["evicted"] += 1
        return found is not None

    def _drop_damaged(self, key: LogKey, read: _Stored) -> None:
        """Drop a log of which what was read is not what was written, unless it was replaced since."""
        with self._errors("read_failed", lambda: self._db), self._transaction():
            stored, _ = self._find(key)
            if stored == read:
                self._drop(read.id)

    def _drop(self, session_id: int) -> None:
        logger.error("session logs: a log was damaged and is dropped")
        self._db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
        self._counters.update(("damaged", "lost"))
        self._count()

    def _sweep(self) -> None:
        """Sessions and tombstones that are too old, from time to time."""
        now_s = self._now_s()
        if now_s - self._swept_s < _SWEEP_S:
            return
        ttl_s = self._ttl_s
        num_expired = self._db.execute(
            "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE ? - written_s > "
            "CASE WHEN is_deleted THEN ? ELSE min(coalesce(ttl_s, ?), ?) END LIMIT ?)",
            (now_s, ttl_s + MAX_CLOCK_SKEW_S, ttl_s, ttl_s, _MAX_SWEPT),
        ).rowcount
        self._counters["expired"] += num_expired
        if num_expired:
            self._count()
        if num_expired < _MAX_SWEPT:
            self._swept_s = now_s

    def _find(self, key: LogKey) -> tuple[_Stored | None, SessionRow | None]:
        """A session as it is stored, and its row unless it has expired."""
        stored = _found(key, self._db)
        if stored is not None and not stored.is_sound:
            self._drop(stored.id)
            stored = None
        return stored, None if stored is None or self._is_expired(stored) else stored.row

    def _is_expired(self, stored: _Stored) -> bool:
        if not stored.is_sound:
            return False
        ttl_s = self._ttl_s if stored.row.ttl_s is None else min(stored.row.ttl_s, self._ttl_s)
        limit_s = self._ttl_s + MAX_CLOCK_SKEW_S if stored.row.is_deleted else ttl_s
        return self._now_s() - stored.written_s > limit_s

    def _now_s(self) -> float:
        """Tell the time by the wall clock at the start, and then by the one that does not jump."""
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
        """Turn what SQLite raises into an OSError, and set a damaged database aside."""
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
                        self._set_aside(error)
                        self._open()
            raise OSError(f"session logs: {error}") from error

    def _open_folder(self) -> HeldLock:
        """Makes it if there is none, for this user alone, and keeps every other process out."""
        files, path = FileOperations(), self._folder
        try:
            files.make_folder(self._root)
            lock = HeldLock(files, os.path.join(self._root, _LOCK))
        except BlockingIOError:
            raise ConfigError(f"session logs: {path} is in use by another cluster") from None
        except OSError as error:
            raise _unusable(path, error.strerror or type(error).__name__) from error
        return lock

    def _open(self) -> None:
        """Open both connections. A damaged one, or one of an unknown format, is set aside. Raises `ConfigError`."""
        try:
            try:
                self._connect_both()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._set_aside(error)
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
            self._db.execute("PRAGMA synchronous = NORMAL")
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if found != b"ok":
                raise sqlite3.DatabaseError(f"quick_check: {found.decode()}")
            if version not in (0, 4, _FORMAT):
                raise sqlite3.DatabaseError(f"format {version} is not {_FORMAT}, which this version writes")
            if version == 4:
                self._db.executescript(f"BEGIN; {_FROM_4} PRAGMA user_version = {_FORMAT}; COMMIT;")
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
        made.execute("PRAGMA foreign_keys = ON")
        made.text_factory = bytes  # rows have no text but what damage makes of them
        return made

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Takes the place of what was set aside before: there is one at most."""
        kept = os.path.join(self._root, _SET_ASIDE)
        logger.error("session logs: %s; the database is kept as %s, and an empty one takes its place", error, kept)
        self._counters["damaged"] += 1
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                os.replace(os.path.join(self._root, _DATABASE + suffix), kept + suffix)


def open_session_logs(config: CacheConfig, ttl_s: float) -> SessionLogs | None:
    """Beside the disk tier, in its folder, which is made; None: there is none. Raises `ConfigError`."""
    if config.disk is None:
        return None
    make_root(config.disk.folder)
    return SessionLogs(config.disk.folder, ttl_s=ttl_s)


def _found(key: LogKey, database: sqlite3.Connection) -> _Stored | None:
    found = database.execute(_FIND, (key.name,)).fetchone()
    if found is None:
        return None
    session_id, checksum, *checked = found
    is_of_format_4 = checked[-1] is None and checksum == _checksum(key, checked[:-1])
    if checksum != _checksum(key, checked) and not is_of_format_4:
        return _Stored(session_id, 0.0, False, SessionRow(0))
    written_s, version, *rest = checked
    return _Stored(session_id, written_s, True, SessionRow(int.from_bytes(version, "big"), *rest))


def _checksum(key: LogKey, row: Iterable[Any]) -> bytes:
    """Finds accidents; whoever may write to the folder of a node is trusted with what logs say."""
    checksum = xxhash.xxh3_128(key.name)
    for field in row:
        part = field if isinstance(field, bytes) else repr(field).encode()
        checksum.update(b"%d:" % len(part))
        checksum.update(part)
    return checksum.digest()


def _code(error: sqlite3.Error) -> int:
    """SQLite's, without what it says in addition."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _unusable(path: str, reason: str) -> ConfigError:
    return ConfigError(f"session logs: {path} cannot be used ({reason})")
