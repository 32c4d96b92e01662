"""From the records of a session's log to what the session is."""

from __future__ import annotations

from array import array

from mneme.cachetier.sessions.record import (
    FIXED_BYTES,
    MARK_BYTES,
    Delta,
    RecordFields,
    RecordHead,
    RecordKind,
    SessionState,
    fields_of,
)


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

    @property
    def num_ids(self) -> int:
        return len(self._ids) + len(self._seen)

    @property
    def has_prompt(self) -> bool:
        """The last record began a turn."""
        return self._prompt is not None

    @property
    def ttl_s(self) -> float | None:
        return self._last.ttl_s

    def state(self) -> SessionState:
        """As of the last record; it has no more of the turn that runs than its name."""
        return self._last._replace(ids=self._ids[:], seen_ids=self._seen[:] if self._is_truncated else None)

    def apply(self, record: bytes | memoryview) -> RecordHead | None:
        """None, and nothing has changed, if it is no record that follows those before it."""
        fields = fields_of(record)
        if fields is None:
            return None
        head = fields.head
        is_next = head.version > self.version and head.base == self.version
        if head.kind is RecordKind.BEGAN:
            return head if is_next and self._begin(fields, record) else None
        if head.kind is RecordKind.ENDED:
            return head if is_next and self._end(fields, record) else None
        return head if head.version > self.version and self._replace(fields, record) else None

    def _begin(self, fields: RecordFields, record: bytes | memoryview) -> bool:
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

    def _end(self, fields: RecordFields, record: bytes | memoryview) -> bool:
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

    def _replace(self, fields: RecordFields, record: bytes | memoryview) -> bool:
        is_whole = (fields.ids_start, fields.seen_start) == (0, 0)
        if not is_whole or (fields.num_ids, fields.num_seen) != (fields.ids_count, fields.seen_count):
            return False
        if fields.kind == RecordKind.DELETED and fields.num_bytes != FIXED_BYTES:
            return False
        self._take(fields, record)
        return True

    def _take(self, fields: RecordFields, record: bytes | memoryview) -> None:
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
            marks=bytes(record[marks_at:hits_at]),
            mark_key=fields.mark_key,
            hits=bytes(record[hits_at:]),
            num_turns=fields.num_turns,
            num_base=fields.num_base,
            last_turn=fields.own_last_turn,
            ttl_s=fields.own_ttl_s,
        )


def _array(record: bytes | memoryview, at: int, count: int) -> array[int]:
    ids = array("i")
    ids.frombytes(record[at : at + 4 * count])
    return ids
