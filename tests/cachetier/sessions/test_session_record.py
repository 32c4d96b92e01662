"""A session's log as bytes: what was said and nothing else comes out, whatever became of them."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.sessions.record import (
    SessionState,
    common_prefix,
    deleted,
    ended,
    fields_of,
    head_of,
    next_version,
    taken_over,
    whole,
)
from mneme.cachetier.sessions.replay import Replay
from mneme.cachetier.sessions.store import (
    FRAME_BYTES,
    HEADER_BYTES,
    TOMBSTONE_BYTES,
    log_key,
    log_of,
    parse_log,
    tombstone_of,
)
from tests.cachetier.session_records import KEY, conversation, ids_of

STEPS = conversation(4)
LOG = log_of(KEY, [record for record, _ in STEPS])
STATES = [state for _, state in STEPS]


def parsed_state(content: bytes) -> SessionState | None:
    parsed = parse_log(content, KEY)
    return None if parsed is None else parsed.replay.state()


def frame_ends() -> list[int]:
    ends, at = [], HEADER_BYTES
    for record, _ in STEPS:
        at += FRAME_BYTES + len(record)
        ends.append(at)
    return ends


def test_what_was_written_is_read() -> None:
    assert parsed_state(LOG) == STATES[-1]
    assert parsed_state(log_of(KEY, [whole(STATES[-1])])) == STATES[-1]
    assert len(tombstone_of(KEY, 7)) == TOMBSTONE_BYTES


def test_a_log_that_is_cut_anywhere_has_the_whole_records_before_the_cut() -> None:
    ends = frame_ends()
    for size in range(len(LOG) + 1):
        num_whole = sum(end <= size for end in ends)
        assert parsed_state(LOG[:size]) == (STATES[num_whole - 1] if num_whole else None)


def test_a_bit_that_flips_anywhere_costs_its_record_and_those_behind_it() -> None:
    ends = frame_ends()
    for place in range(len(LOG)):
        damaged = bytearray(LOG)
        damaged[place] ^= 1 << place % 8
        num_whole = sum(end <= place for end in ends) if place >= HEADER_BYTES else 0
        assert parsed_state(bytes(damaged)) == (STATES[num_whole - 1] if num_whole else None), place


def test_frames_of_another_log_or_another_place_do_not_stand() -> None:
    first, second = (record for record, _ in STEPS[:2])
    other = log_of(log_key(b"model", "salt", "public:t"), [first, second])
    assert parsed_state(other) is None
    assert parsed_state(LOG[:HEADER_BYTES] + other[HEADER_BYTES:]) is None
    end = frame_ends()[0]
    assert parsed_state(LOG[:end] + LOG[HEADER_BYTES:]) == STATES[0]  # the same frame twice


@given(st.integers(0, 90), st.binary(min_size=1, max_size=8))
def test_a_hostile_record_is_refused_or_applies_within_its_bounds(place: int, change: bytes) -> None:
    """Its checksum is right: whoever wrote it meant it."""
    records = [record for record, _ in STEPS]
    hostile = bytearray(records[-1])
    hostile[place : place + len(change)] = change
    parsed = parse_log(log_of(KEY, [*records[:-1], bytes(hostile)]), KEY)
    assert parsed is not None
    state = parsed.replay.state()
    assert len(state.ids) <= len(STATES[-1].ids) + len(hostile) // 4
    if head_of(bytes(hostile)) is None:
        assert state == STATES[-2]


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32 - 1])
def test_lengths_beyond_the_file_end_it(length: int) -> None:
    end = frame_ends()[2]
    assert parsed_state(LOG[:end] + struct.pack("<I", length) + LOG[end + 4 :]) == STATES[2]


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
            assert replay.apply(other) is None
        assert replay.apply(record) is not None
        assert replay.state() == state
    assert replay.apply(deleted(STATES[-1].version)) is None
    assert replay.apply(deleted(STATES[-1].version + 1)) is not None
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
    assert replay.apply(whole(old)) is not None
    record = ended(old, new, None)
    assert replay.apply(record) is not None
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
    assert len({key.owner for key in keys}) == 2
    assert ids_of(1, 2) == array("i", [1000, 1001])
