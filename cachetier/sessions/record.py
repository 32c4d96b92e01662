"""What a session's log says: a state, and records of which each leads from one state to the next (Pensieve 4.3).

    BEGAN    a turn runs: its prompt's ids; the conversation itself is as before
    ENDED    the turn is part of the conversation
    WHOLE    all of it, whatever was before
    DELETED  nothing is left

A record says from which version of the log it goes on, so that it is never applied to another. Versions are ordered
over all replicas: the first half, the epoch, is the time at which a replica took the session over from its log, but
later than the epoch before whatever the clock says, and the second is the record's time. So what a replica still writes
of a session that went on elsewhere is older than that. A turn that brought all of its text begins an epoch when it has
ended, named by when it began: it stands also where the log could not be read, behind whatever was written before, as
far as clocks agree. Until then it is written behind what is known of the log, and does not replace what is not.

Records come from disks and from other nodes: every field is bounded before it is used, and decides neither how much is
allocated nor what is executed. Token ids are little-endian, 4 bytes each.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from enum import IntEnum
from math import isfinite
from typing import NamedTuple

import numpy as np

MARK_BYTES, MAX_MARKS = 16, 8
HIT_BYTES, MAX_HITS = 8, 4
MARK_KEY_BYTES = 16
MAX_RECORD_BYTES = 1 << 28
MAX_TTL_S = 1e9

_HALF = 64  # bits of each half of a version
_TTL, _LAST_TURN, _SEEN, _FROM_PROMPT = 1, 2, 4, 8  # flags
# kind, flags, marks, hits, version, version it goes on from, turns, ids before the last turn, ids, ids that are seen,
# last turn, ttl_s, first id that is not as before, ids that follow, the same two of what is seen, key of the marks
_FIXED = struct.Struct("<BBBBQQQQIIIIQdIIII16s")
FIXED_BYTES = _FIXED.size

assert sys.byteorder == "little", "the format is written as memory is"


class RecordKind(IntEnum):
    """The values are part of the format."""

    BEGAN = 1
    ENDED = 2
    WHOLE = 3
    DELETED = 4


NO_IDS: array[int] = array("i")


class SessionState(NamedTuple):
    """A conversation between two turns. Arrays are never changed, only replaced; a tuple, as engines make many."""

    version: int = 0  # 0: nothing is known of it
    ids: array[int] = NO_IDS  # empty: there is none, or no more
    seen_ids: array[int] | None = None  # what a truncated conversation goes on from; None: all ids
    marks: bytes = b""  # 16 each
    mark_key: bytes = bytes(MARK_KEY_BYTES)  # of the digests in the marks
    hits: bytes = b""  # 8 each
    num_turns: int = 0
    num_base: int = 0  # ids there were before the last turn, which has begun and may not have ended
    last_turn: int | None = None  # its name, 64 bits
    ttl_s: float | None = None  # the session's own


class RecordFields(NamedTuple):
    """A record's fixed fields: what is known of it without applying it."""

    kind: int  # a `RecordKind`
    flags: int
    num_marks: int
    num_hits: int
    epoch: int
    time: int
    base_epoch: int
    base_time: int
    num_turns: int
    num_base: int
    num_ids: int
    num_seen: int
    last_turn: int
    ttl_s: float
    ids_start: int
    ids_count: int
    seen_start: int
    seen_count: int
    mark_key: bytes

    @property
    def version(self) -> int:
        return (self.epoch << _HALF) + self.time

    @property
    def base(self) -> int:
        """The version it goes on from."""
        return (self.base_epoch << _HALF) + self.base_time

    @property
    def num_all_ids(self) -> int:
        """Ids of the state that it leads to, those seen of a truncated one too."""
        return self.num_ids + self.num_seen

    @property
    def num_prompt(self) -> int:
        """Ids beside these, of the turn that it begins."""
        return self.ids_count if self.kind == RecordKind.BEGAN else 0

    @property
    def own_ttl_s(self) -> float | None:
        return self.ttl_s if self.flags & _TTL else None

    @property
    def own_last_turn(self) -> int | None:
        return self.last_turn if self.flags & _LAST_TURN else None

    @property
    def is_truncated(self) -> bool:
        return bool(self.flags & _SEEN)

    @property
    def is_from_prompt(self) -> bool:
        """Whether it goes on from the prompt of a BEGAN right before it."""
        return bool(self.flags & _FROM_PROMPT)

    @property
    def num_bytes(self) -> int:
        """Size of the whole record."""
        return (
            FIXED_BYTES
            + 4 * (self.ids_count + self.seen_count)
            + MARK_BYTES * self.num_marks
            + HIT_BYTES * self.num_hits
        )


class Delta(NamedTuple):
    """`ids` follow the first `start` ids of what was there."""

    start: int
    ids: array[int]


def next_version(version: int, now_s: float) -> int:
    """Version of the next record, by whoever wrote or took over `version`; `now_s` is a wall clock's time."""
    return max(version + 1, (version >> _HALF << _HALF) + _micros(now_s))


def taken_over(version: int, now_s: float) -> int:
    """Version of a log that goes on somewhere else: newer than all that is still written where it was."""
    return (max((version >> _HALF) + 1, _micros(now_s)) << _HALF) + _micros(now_s)


def began(state: SessionState, base: int, start: int, prompt: array[int]) -> bytes:
    """A turn runs the first `start` ids of `state` and then `prompt`; `state` has its name and `num_base` already."""
    return _packed(RecordKind.BEGAN, state, base, ids=Delta(start, prompt))


def ended(before: SessionState, state: SessionState, num_prompt: int | None) -> bytes:
    """From `before` to `state`; `num_prompt`: ids of the prompt that the record before this one was about, if any."""
    start = common_prefix(before.ids, state.ids) if num_prompt is None else num_prompt
    seen = None
    if state.seen_ids is not None:
        seen_start = common_prefix(before.seen_ids or NO_IDS, state.seen_ids)
        seen = Delta(seen_start, state.seen_ids[seen_start:])
    return _packed(
        RecordKind.ENDED,
        state,
        before.version,
        ids=Delta(start, state.ids[start:]),
        seen=seen,
        flags=0 if num_prompt is None else _FROM_PROMPT,
    )


def whole(state: SessionState) -> bytes:
    seen = None if state.seen_ids is None else Delta(0, state.seen_ids)
    return _packed(RecordKind.WHOLE, state, 0, ids=Delta(0, state.ids), seen=seen)


def deleted(version: int) -> bytes:
    return _packed(RecordKind.DELETED, SessionState(version=version), 0, ids=Delta(0, NO_IDS))


def replayed(records: Sequence[bytes]) -> Replay | None:
    """A log's records as far as each follows the one before; None if not even the first is one."""
    replay = Replay()
    for record in records:
        if not replay.apply(record):
            break
    return replay if replay.version else None


def common_prefix(one: array[int], other: array[int]) -> int:
    """How many ids both begin with."""
    limit = min(len(one), len(other))
    if not limit:
        return 0
    differs = np.frombuffer(one, np.int32, limit) != np.frombuffer(other, np.int32, limit)
    return int(differs.argmax()) if differs.any() else limit


def _packed(
    kind: RecordKind, state: SessionState, base: int, *, ids: Delta, seen: Delta | None = None, flags: int = 0
) -> bytes:
    is_began = kind is RecordKind.BEGAN
    marks, hits = (b"", b"") if is_began else (state.marks, state.hits)
    flags |= _SEEN if state.seen_ids is not None and not is_began else 0
    flags |= (_TTL if state.ttl_s is not None else 0) | (_LAST_TURN if state.last_turn is not None else 0)
    seen = seen or Delta(0, array("i"))
    fixed = _FIXED.pack(
        kind, flags, len(marks) // MARK_BYTES, len(hits) // HIT_BYTES,
        *_halves(state.version), *_halves(base),
        state.num_turns, state.num_base,
        len(state.ids), len(state.seen_ids or ()) if not is_began else 0,
        state.last_turn or 0, state.ttl_s or 0.0,
        ids.start, len(ids.ids), seen.start, len(seen.ids), state.mark_key,
    )  # fmt: skip
    return b"".join((fixed, ids.ids.tobytes(), seen.ids.tobytes(), marks, hits))


def fields_of(record: bytes) -> RecordFields | None:
    """None if a field is out of its bounds, or the record is not as long as it says."""
    if not FIXED_BYTES <= len(record) <= MAX_RECORD_BYTES:
        return None
    fields = RecordFields(*_FIXED.unpack_from(record))
    if fields.kind not in RecordKind.__members__.values() or fields.flags & ~15 or fields.num_bytes != len(record):
        return None
    if fields.num_marks > MAX_MARKS or fields.num_hits > MAX_HITS:
        return None
    if not isfinite(fields.ttl_s) or not 0 <= fields.ttl_s <= MAX_TTL_S:
        return None
    if fields.num_seen and not fields.flags & _SEEN:
        return None
    return fields


class Replay:
    """Applies records; one that does not fit leaves everything as it was."""

    def __init__(self) -> None:
        self._ids, self._seen = array("i"), array("i")
        self._is_truncated = False
        self._prompt: Delta | None = None  # of the turn that the last record began
        self._last = SessionState()  # without ids

    @property
    def version(self) -> int:
        return self._last.version

    def state(self) -> SessionState:
        """As of the last record; it has no more of the turn that runs than its name."""
        return self._last._replace(ids=self._ids[:], seen_ids=self._seen[:] if self._is_truncated else None)

    def apply(self, record: bytes) -> bool:
        """False, and nothing has changed, if it is no record that follows those before it."""
        fields = fields_of(record)
        if fields is None or fields.version <= self.version:
            return False
        if fields.kind in (RecordKind.WHOLE, RecordKind.DELETED):
            return self._replace(fields, record)
        if fields.base != self.version:
            return False
        return self._begin(fields, record) if fields.kind == RecordKind.BEGAN else self._end(fields, record)

    def _begin(self, fields: RecordFields, record: bytes) -> bool:
        if fields.ids_start > len(self._ids):
            return False
        self._prompt = Delta(fields.ids_start, _array(record, FIXED_BYTES, fields.ids_count))
        self._last = self._last._replace(
            version=fields.version,
            num_base=fields.num_base,
            last_turn=fields.own_last_turn,
            ttl_s=fields.own_ttl_s,
        )
        return True

    def _end(self, fields: RecordFields, record: bytes) -> bool:
        prompt = self._prompt if fields.is_from_prompt else Delta(len(self._ids), array("i"))
        if prompt is None:
            return False
        seen = self._seen if self._is_truncated else array("i")
        num_before = prompt.start + len(prompt.ids)
        is_whole = fields.num_ids == fields.ids_start + fields.ids_count and fields.ids_start <= num_before
        if not is_whole or fields.num_seen != fields.seen_start + fields.seen_count or fields.seen_start > len(seen):
            return False
        del self._ids[prompt.start :]
        self._ids.extend(prompt.ids)
        self._take(fields, record)
        return True

    def _replace(self, fields: RecordFields, record: bytes) -> bool:
        is_whole = (fields.ids_start, fields.seen_start) == (0, 0)
        if not is_whole or (fields.num_ids, fields.num_seen) != (fields.ids_count, fields.seen_count):
            return False
        if fields.kind == RecordKind.DELETED and fields.num_bytes != FIXED_BYTES:
            return False
        self._take(fields, record)
        return True

    def _take(self, fields: RecordFields, record: bytes) -> None:
        """The ids behind those that stay, and all the rest."""
        seen_at = FIXED_BYTES + 4 * fields.ids_count
        marks_at = seen_at + 4 * fields.seen_count
        hits_at = marks_at + MARK_BYTES * fields.num_marks
        self._is_truncated = fields.is_truncated
        del self._ids[fields.ids_start :]
        del self._seen[fields.seen_start :]
        self._ids.extend(_array(record, FIXED_BYTES, fields.ids_count))
        self._seen.extend(_array(record, seen_at, fields.seen_count))
        self._prompt = None
        self._last = SessionState(
            version=fields.version,
            marks=record[marks_at:hits_at],
            mark_key=fields.mark_key,
            hits=record[hits_at:],
            num_turns=fields.num_turns,
            num_base=fields.num_base,
            last_turn=fields.own_last_turn,
            ttl_s=fields.own_ttl_s,
        )


def _array(record: bytes, at: int, count: int) -> array[int]:
    ids = array("i")
    ids.frombytes(record[at : at + 4 * count])
    return ids


def _halves(version: int) -> tuple[int, int]:
    return version >> _HALF, version & (1 << _HALF) - 1


def _micros(now_s: float) -> int:
    return max(int(now_s * 1e6), 1)
