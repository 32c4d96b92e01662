"""A session's records: what was said and nothing else comes out, whatever became of them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.sessions.record import (
    Replay,
    SessionState,
    common_prefix,
    deleted,
    ended,
    fields_of,
    next_version,
    replayed,
    taken_over,
    whole,
)
from mneme.cachetier.sessions.store import log_key
from tests.cachetier.session_records import conversation, ids_of

STEPS = conversation(4)
RECORDS = [record for record, _ in STEPS]
STATES = [state for _, state in STEPS]


def state_of(records: list[bytes]) -> SessionState | None:
    replay = replayed(records)
    return None if replay is None else replay.state()


def test_what_was_written_is_read() -> None:
    for number, state in enumerate(STATES):
        assert state_of(RECORDS[: number + 1]) == state
    assert state_of([whole(STATES[-1])]) == STATES[-1]
    assert state_of([]) is None


def test_records_that_are_missing_or_come_twice_cost_those_behind_them() -> None:
    assert state_of([RECORDS[0], RECORDS[0], *RECORDS[1:]]) == STATES[0]
    for number in range(len(RECORDS)):
        expected = STATES[number - 1] if number else None
        assert state_of(RECORDS[:number] + RECORDS[number + 1 :]) == expected


@given(st.integers(0, 90), st.binary(min_size=1, max_size=8))
def test_a_hostile_record_is_refused_or_applies_within_its_bounds(place: int, change: bytes) -> None:
    hostile = bytearray(RECORDS[-1])
    hostile[place : place + len(change)] = change
    state = state_of([*RECORDS[:-1], bytes(hostile)])
    assert state is not None
    assert len(state.ids) <= len(STATES[-1].ids) + len(hostile) // 4
    if fields_of(bytes(hostile)) is None:
        assert state == STATES[-2]


def test_counts_beyond_the_record_make_it_none() -> None:
    record = STEPS[-1][0]
    for place in range(len(record)):
        for value in (0xFF, 0x7F):
            changed = bytearray(record)
            changed[place] = value
            fields = fields_of(bytes(changed))
            assert fields is None or fields.num_bytes == len(record)
    assert fields_of(record[:-1]) is None
    assert fields_of(record + b"\0") is None


def test_a_record_is_applied_to_the_version_that_it_goes_on_from_only() -> None:
    replay = Replay()
    for number, (record, state) in enumerate(STEPS):
        for other, _ in [*STEPS[:number], *STEPS[number + 1 :]]:
            assert not replay.apply(other)
        assert replay.apply(record)
        assert replay.state() == state
    assert not replay.apply(deleted(STATES[-1].version))
    assert replay.apply(deleted(STATES[-1].version + 1))
    assert replay.state() == SessionState(version=STATES[-1].version + 1)


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_the_common_prefix(one: list[int], other: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_prefix(array("i", one), array("i", other)) == expected


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.booleans())
def test_a_turn_may_replace_any_of_what_was_said(before: list[int], after: list[int], has_seen: bool) -> None:
    old = SessionState(version=5, ids=array("i", before), seen_ids=array("i", after) if has_seen else None)
    new = old._replace(version=6, ids=array("i", after), seen_ids=array("i", before))
    replay = Replay()
    assert replay.apply(whole(old))
    record = ended(old, new, None)
    assert replay.apply(record)
    assert replay.state() == new


def test_versions_grow_whatever_the_clock_does_and_more_where_the_session_is_taken_over() -> None:
    version = next_version(0, 100.0)
    assert next_version(version, 50.0) == version + 1
    later = next_version(version, 200.0)
    elsewhere = taken_over(version, 1.0)
    assert version < later < elsewhere < taken_over(elsewhere, 0.0)
    assert next_version(later, 1e12) < elsewhere  # what the first replica still writes


def test_names_tell_sessions_tenants_and_models_apart() -> None:
    keys = [log_key(m, s, i) for m in (b"m", b"n") for s in ("", "x") for i in ("public:a", "public:b", "public:ab")]
    assert len({key.name for key in keys}) == len(keys)
    assert len({key.tenant for key in keys}) == 2
    assert ids_of(1, 2) == array("i", [1000, 1001])
