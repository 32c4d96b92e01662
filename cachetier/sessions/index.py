"""What is known of the session logs in a folder without reading them: their order, sizes, ages. No files, no locks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from mneme.cachetier.sessions.record import RecordHead
from mneme.cachetier.sessions.store import TOMBSTONE_BYTES, LogKey, ParsedLog
from mneme.config import check_range

BLOCK_BYTES = 4096
MAX_CLOCK_SKEW_S = 600.0  # between nodes: tombstones outlive the last copy by as much

_SMALL_BYTES = 64 << 10  # a log up to this size is not written anew for what is obsolete in it


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLogConfig:
    """Of one node."""

    folder: str
    capacity_bytes: int = 1 << 30
    max_sessions: int = 200_000  # tombstones are as many at most, and have half of the bytes
    ttl_s: float = 3600.0  # since the last turn; a session's own may be shorter
    sync: bool = False  # wait for the disk at each record

    def __post_init__(self) -> None:
        check_range("capacity_bytes", self.capacity_bytes, 0, 2**60)
        check_range("max_sessions", self.max_sessions, 0, 2**32)
        check_range("ttl_s", self.ttl_s, 0, 1e9)


@dataclass(slots=True, eq=False)
class Log:
    """One file."""

    key: LogKey
    num_bytes: int  # of it, that are sound
    written_s: float
    is_deleted: bool = False  # a tombstone
    version: int = 0  # 0: it was not read since the start
    checksum: bytes = b""  # of its last frame
    num_ids: int = 0
    ttl_s: float | None = None  # the session's own
    has_prompt: bool = False  # its last record began a turn
    must_replace: bool = False  # what is in the file is not what is known here: a write failed

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // BLOCK_BYTES)

    def is_too_long(self, num_more: int, head: RecordHead) -> bool:
        """More than half of it would be obsolete behind records that end so."""
        num_ids = head.num_ids + head.num_prompt
        return self.num_bytes + num_more > max(_SMALL_BYTES, 2 * (4 * num_ids + BLOCK_BYTES))

    def note(self, parsed: ParsedLog) -> None:
        """What its file holds."""
        replay = parsed.replay
        self.num_bytes, self.checksum, self.version = parsed.num_bytes, parsed.checksum, replay.version
        self.num_ids, self.ttl_s, self.has_prompt = replay.num_ids, replay.ttl_s, replay.has_prompt
        self.is_deleted = parsed.num_bytes == TOMBSTONE_BYTES and not replay.num_ids


class SessionLogIndex:
    """Sessions and tombstones, each least recently written first."""

    def __init__(self, capacity_bytes: int, max_sessions: int, ttl_s: float) -> None:
        self.sessions: OrderedDict[bytes, Log] = OrderedDict()
        self.tombstones: OrderedDict[bytes, Log] = OrderedDict()
        self.num_blocks = 0
        self._max_blocks, self._max_sessions, self._ttl_s = capacity_bytes // BLOCK_BYTES, max_sessions, ttl_s
        self._max_tombstones = min(max_sessions, max(self._max_blocks // 2, 1))  # of a block each

    def __iter__(self) -> Iterator[Log]:
        yield from self.sessions.values()
        yield from self.tombstones.values()

    def get(self, key: LogKey) -> Log | None:
        log = self.sessions.get(key.name) or self.tombstones.get(key.name)
        return log if log is not None and log.key == key else None

    def put(self, log: Log) -> None:
        """As the one that was written last, in the place of what has its name."""
        self.remove(log.key)
        (self.tombstones if log.is_deleted else self.sessions)[log.key.name] = log
        self.num_blocks += log.num_blocks

    def remove(self, key: LogKey) -> None:
        log = self.sessions.pop(key.name, None) or self.tombstones.pop(key.name, None)
        self.num_blocks -= 0 if log is None else log.num_blocks

    def resize(self, log: Log, num_bytes: int) -> None:
        self.num_blocks -= log.num_blocks
        log.num_bytes = num_bytes
        self.num_blocks += log.num_blocks

    def has_room(self, num_more: int, log: Log) -> bool:
        """For so many blocks more of a log, which may be a new one."""
        num_sessions = len(self.sessions) + (not log.is_deleted and log.key.name not in self.sessions)
        is_few = num_sessions <= self._max_sessions and len(self.tombstones) <= self._max_tombstones
        return is_few and self.num_blocks + num_more <= self._max_blocks

    def victim(self, but: LogKey) -> Log | None:
        """The session to go first, or a tombstone where there are too many."""
        if len(self.tombstones) > self._max_tombstones:
            return next(iter(self.tombstones.values()))
        return next((log for log in islice(self.sessions.values(), 2) if log.key != but), None)

    def is_expired(self, log: Log, now_s: float) -> bool:
        ttl_s = self._ttl_s if log.ttl_s is None else min(log.ttl_s, self._ttl_s)
        return now_s - log.written_s > (self._ttl_s + MAX_CLOCK_SKEW_S if log.is_deleted else ttl_s)

    def expired(self, now_s: float, *, all_times: bool) -> list[Log]:
        """Without `all_times` only those that are due by the time that all have: that costs nothing but for them."""
        found: list[Log] = []
        for logs in (self.sessions, self.tombstones):
            for log in logs.values():
                if self.is_expired(log, now_s):
                    found.append(log)
                elif not all_times:
                    break
        return found
