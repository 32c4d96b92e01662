"""Where session logs are kept, as an engine sees it, and what a log is as bytes.

A log is a header and frames: the length of a record, the record, a checksum over it and the checksum before. So a frame
stands only behind those that it was written behind, and what a crash or a bad sector leaves is cut off where it begins.
Checksums (XXH3, 128 bits) find accidents; whoever may write to the folder of a node is trusted with what logs say.

| bytes | what |
|---|---|
| 8, u32 | magic `MnemeSL\\0`, version of the format |
| 16, 8, 16 | name, owner, checksum of all before |
| u32, n, 16 | each frame: bytes of the record, the record (`sessions/record.py`), checksum |
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple, Protocol

import xxhash

from mneme.cachetier.chunk.header import CHECKSUM_BYTES
from mneme.cachetier.chunk.keys import OWNER_BYTES, owner_of
from mneme.cachetier.sessions.record import FIXED_BYTES, MAX_RECORD_BYTES, deleted
from mneme.cachetier.sessions.replay import Replay

NAME_BYTES = 16
MAX_LOG_BYTES = 1 << 29

_MAGIC, _VERSION = b"MnemeSL\x00", 1
_HEADER = struct.Struct(f"<8sI{NAME_BYTES}s{OWNER_BYTES}s")
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + CHECKSUM_BYTES
FRAME_BYTES = _LENGTH.size + CHECKSUM_BYTES  # beside the record
TOMBSTONE_BYTES = HEADER_BYTES + FRAME_BYTES + FIXED_BYTES


class LogKey(NamedTuple):
    """Which session's log; says neither whose nor which to whoever does not know the tenant's salt."""

    name: bytes  # 16
    owner: bytes  # 8; the tenant, as `keys.owner_of` says it


class Appended(Enum):
    """What became of records; the values are the names of counters."""

    WRITTEN = "appended"
    NEEDS_WHOLE = "needs_whole"  # the log is not what they go on from, or has grown too long: send all of it
    STALE = "stale"  # the session went on, or was deleted, elsewhere
    FAILED = "append_failed"  # the log is as before


class SessionLogStore(Protocol):
    """Calls end in bounded time; several threads make them, never one that runs an engine's steps."""

    def append(self, key: LogKey, records: Sequence[bytes]) -> Appended:
        """Records that go on from the log, or begin with one that does not need it; in order, all or none."""

    def read(self, key: LogKey, newer_than: int = 0) -> bytes | None:
        """The log, also of a session that was deleted; None if there is none newer than this version.

        Raises OSError (TimeoutError too) if that cannot be known now.
        """

    def delete(self, key: LogKey, at_least: int = 0) -> bool:
        """Nothing of it is read any more, nor what is older than version `at_least`; whether there was a session."""

    def delete_owned(self, owner: bytes) -> int:
        """Likewise all logs of a tenant; how many there were, copies too. Raises OSError if that is not sure."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ParsedLog:
    """The part of a log that is sound."""

    replay: Replay
    num_bytes: int
    checksum: bytes  # of its last frame


def log_key(model: bytes, salt: str, session_id: str) -> LogKey:
    """`model` says whose token ids they are: another model must not take them for its own."""
    secret = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"mneme logs").digest()
    hasher = blake2b(digest_size=NAME_BYTES, key=secret, person=b"mneme session")
    for part in (model, session_id.encode("utf-8", "surrogatepass")):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return LogKey(hasher.digest(), owner_of(salt))


def log_header(key: LogKey) -> bytes:
    header = _HEADER.pack(_MAGIC, _VERSION, *key)
    return header + _checksum(b"", header)


def frames(records: Sequence[bytes], before: bytes) -> tuple[bytes, bytes]:
    """The records as they follow a checksum, and the last of their own."""
    parts: list[bytes] = []
    for record in records:
        before = _checksum(before, record)
        parts += (_LENGTH.pack(len(record)), record, before)
    return b"".join(parts), before


def log_of(key: LogKey, records: Sequence[bytes]) -> bytes:
    """A new log."""
    header = log_header(key)
    return header + frames(records, header[-CHECKSUM_BYTES:])[0]


def tombstone_of(key: LogKey, version: int) -> bytes:
    """The log of a session that was deleted."""
    return log_of(key, [deleted(version)])


def parse_log(content: bytes, key: LogKey) -> ParsedLog | None:
    """Up to the first frame that is not sound; None if even the header is not, or no frame is."""
    if content[:HEADER_BYTES] != log_header(key):
        return None
    replay, view = Replay(), memoryview(content)
    at, before = HEADER_BYTES, content[HEADER_BYTES - CHECKSUM_BYTES : HEADER_BYTES]
    while (record := _record_at(view, at)) is not None:
        following = _checksum(before, record)
        end = at + FRAME_BYTES + len(record)
        if following != content[end - CHECKSUM_BYTES : end] or replay.apply(record) is None:
            break
        at, before = end, following
    return ParsedLog(replay, at, before) if at > HEADER_BYTES else None


def _record_at(view: memoryview, at: int) -> memoryview | None:
    if at + FRAME_BYTES > len(view):
        return None
    (num_bytes,) = _LENGTH.unpack_from(view, at)
    if num_bytes > min(MAX_RECORD_BYTES, len(view) - at - FRAME_BYTES):
        return None
    return view[at + _LENGTH.size : at + _LENGTH.size + num_bytes]


def _checksum(before: bytes, record: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128(before)
    hasher.update(record)
    return hasher.digest()
