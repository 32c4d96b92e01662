"""A session's rows: what was said and nothing else comes out of them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.session_log.log_store import log_key
from mneme.cachetier.session_log.rows import LogRows, SessionState, common_prefix, next_version, rows_of, taken_over
from tests.cachetier.session_records import conversation

STEPS = conversation(4)


def joined(*each: LogRows) -> LogRows | None:
    all_rows, *rest = each
    for later in rest:
        if (found := all_rows.then(later)) is None:
            return None
        all_rows = found
    return all_rows


def test_rows_of_turns_are_joined_and_read_as_what_was_said() -> None:
    for number, (_, state) in enumerate(STEPS):
        rows = joined(*(rows for rows, _ in STEPS[: number + 1]))
        assert rows is not None
        assert rows.follow(0, -1)
        assert rows.state() == rows_of(state).state() == state


def test_rows_that_are_missing_or_come_twice_are_no_whole_log() -> None:
    first, *rest = [rows for rows, _ in STEPS]
    assert joined(first, first, *rest) is None
    for number in range(len(rest) - 1):
        assert joined(first, *rest[:number], *rest[number + 1 :]) is None
    assert not STEPS[-1][0].follow(0, -1)
    assert joined(first, rows_of(STEPS[-1][1])) == rows_of(STEPS[-1][1])


ids = st.lists(st.integers(0, 3), max_size=20).map(lambda each: array("i", each))


@given(ids, ids, st.none() | ids)
def test_a_turn_may_replace_any_of_what_was_said(
    before: array[int], after: array[int], seen: array[int] | None
) -> None:
    old = SessionState(version=5, ids=before, seen_ids=seen, num_turns=1)
    new = SessionState(version=6, ids=after, seen_ids=before, num_turns=2)
    turn = rows_of(new, old)
    rows = joined(rows_of(old), turn)
    assert rows is not None
    assert rows.follow(0, -1)
    assert rows.state() == new
    assert sum(len(each.ids) for each in turn.turns) == 4 * (len(after) - common_prefix(before, after))


@given(ids, ids)
def test_the_common_prefix(one: array[int], other: array[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_prefix(one, other) == expected


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
