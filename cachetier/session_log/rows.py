"""The rows of a session's log: one that says what the session is, and one for each turn with the ids it added.

A turn's row stands by itself: its ids follow the first `start` ids of what was said before it, so a turn that goes on
from an edited history says where it goes on. All else (marks, hits, what a truncated conversation sees, which turn
runs) counts only as it was last, and stands in the session's row.

Rows say from which version of the log they go on, so that they never join another's. Versions are ordered over all
replicas: the first half, the epoch, is the time at which a replica took the session over from its log, but later than
the epoch before whatever the clock says, and the second is the time of writing. So what a replica still writes of a
session that went on elsewhere is older than that. A turn that brought all of its text begins an epoch when it has
ended, named by when it began: it stands also where the log could not be read, behind whatever was written before, as
far as clocks agree. Until then it is written behind what is known of the log, and does not replace what is not.
"""

from __future__ import annotations

import sys
from array import array
from typing import NamedTuple

import numpy as np

NO_IDS: array[int] = array("i")

_HALF = 64  # bits of each half of a version

assert sys.byteorder == "little", "ids are written as memory is"


class SessionState(NamedTuple):
    """A conversation between two turns. Arrays are never changed, only replaced; a tuple, as engines make many."""

    version: int = 0  # 0: nothing is known of it
    ids: array[int] = NO_IDS  # empty: there is none, or no more
    seen_ids: array[int] | None = None  # what a truncated conversation goes on from; None: all ids
    marks: bytes = b""  # 16 each
    mark_key: bytes = b""  # of the digests in the marks
    hits: bytes = b""  # 8 each
    num_turns: int = 0  # that have ended
    num_base: int = 0  # ids there were before the last turn, which has begun and may not have ended
    last_turn: int | None = None  # its name, 64 bits
    ttl_s: float | None = None  # the session's own
    event: bytes = b""  # under which the cache tier may have the KV of what is seen, where that is approximate
    note: bytes = b""  # what an API keeps with the session; nothing here reads it
    forked_from: bytes | None = None  # the id of the session whose past it began with


class SessionRow(NamedTuple):
    """A session but for its ids: fields as in `SessionState`, arrays as bytes. With a version alone: a tombstone."""

    version: int
    num_ids: int = 0
    seen_ids: bytes | None = None
    marks: bytes = b""
    mark_key: bytes = b""
    hits: bytes = b""
    num_turns: int = 0
    num_base: int = 0
    last_turn: int | None = None
    ttl_s: float | None = None
    event: bytes = b""
    note: bytes = b""
    forked_from: bytes | None = None

    @property
    def is_deleted(self) -> bool:
        return not self.num_ids and self.last_turn is None


class TurnRow(NamedTuple):
    """Holds what a turn added to the ids."""

    turn: int  # its number: larger than those of all turns before it
    start: int  # of the ids before it, how many it goes on from
    ids: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // NO_IDS.itemsize


class LogRows(NamedTuple):
    """A session's row and rows of turns: all of them, or those since the version `base`."""

    base: int | None  # None: all, whatever was before
    session: SessionRow
    turns: tuple[TurnRow, ...] = ()

    def follow(self, num_ids: int, last_turn: int) -> bool:
        """Return whether the turns lead from so many ids, the last turn's, to those that the session has."""
        for turn in self.turns:
            if turn.turn <= last_turn or turn.start > num_ids:
                return False
            num_ids, last_turn = turn.end, turn.turn
        return num_ids == self.session.num_ids

    def then(self, later: LogRows) -> LogRows | None:
        """Both as one; None: `later` does not go on from these."""
        if later.base is None:
            return later
        if later.base != self.session.version:
            return None
        return LogRows(self.base, later.session, self.turns + later.turns)

    def state(self) -> SessionState:
        """The conversation, of which these are all rows."""
        ids = array("i")
        for turn in self.turns:
            del ids[turn.start :]
            ids.frombytes(turn.ids)
        seen_ids = None if self.session.seen_ids is None else array("i", self.session.seen_ids)
        return SessionState(self.session.version, ids, seen_ids, *self.session[3:])


def rows_of(state: SessionState, before: SessionState | None = None) -> LogRows:
    """Return what leads from `before` to `state`; None: from anything."""
    start = 0 if before is None else common_prefix(before.ids, state.ids)
    seen_ids = None if state.seen_ids is None else state.seen_ids.tobytes()
    session = SessionRow(state.version, len(state.ids), seen_ids, *state[3:])
    is_new = start < len(state.ids) or (before is not None and start < len(before.ids))
    turns = (TurnRow(state.num_turns, start, state.ids[start:].tobytes()),) if is_new else ()
    return LogRows(None if before is None else before.version, session, turns)


def next_version(version: int, now_s: float) -> int:
    """Version of the next rows, by whoever wrote or took over `version`; `now_s` is a wall clock's time."""
    return max(version + 1, (version >> _HALF << _HALF) + _micros(now_s))


def taken_over(version: int, now_s: float) -> int:
    """Version of a log that goes on somewhere else: newer than all that is still written where it was."""
    return (max((version >> _HALF) + 1, _micros(now_s)) << _HALF) + _micros(now_s)


def common_prefix(one: array[int], other: array[int]) -> int:
    """Return how many ids both begin with."""
    limit = min(len(one), len(other))
    if not limit:
        return 0
    differs = np.frombuffer(one, np.int32, limit) != np.frombuffer(other, np.int32, limit)
    return int(differs.argmax()) if differs.any() else limit


def _micros(now_s: float) -> int:
    return max(int(now_s * 1e6), 1)
