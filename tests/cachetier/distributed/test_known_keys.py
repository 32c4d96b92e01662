"""What a process remembers of the tier's chunks."""

from __future__ import annotations

from mneme.cachetier.distributed.known_keys import KnownKeys
from tests.cachetier.nodes import Clock


def test_the_key_that_was_seen_longest_ago_is_forgotten_first() -> None:
    known = KnownKeys(2)
    known.note({b"1": b"0", b"2": b"1"})
    known.note({b"1": b"0"})
    known.note({b"3": b"2"})
    assert known.among([b"1", b"2", b"3"]) == {b"1", b"3"}


def test_what_was_seen_long_ago_is_put_again() -> None:
    """Who has a chunk on its device does not ask for it: to put it is what keeps it from expiring."""
    clock = Clock()
    known = KnownKeys(max_age_s=10, clock=clock)
    known.note({b"1": b"0", b"2": b"1"})
    clock.now_s += 9
    assert known.among([b"1", b"2"]) == {b"1", b"2"}
    known.note({b"1": b"0"})
    clock.now_s += 9
    assert known.among([b"1", b"2"]) == {b"1"}


def test_what_is_gone_is_not_known() -> None:
    known = KnownKeys()
    known.note({b"1": b"0", b"2": b"1"})
    known.drop([b"1", b"never seen"])
    assert known.among([b"1", b"2"]) == {b"2"}
    known.clear()
    assert not known.among([b"2"])


def test_a_chain_is_dropped_up_to_what_is_not_known_anyway() -> None:
    known = KnownKeys()
    known.note({b"1": b"0", b"3": b"2", b"4": b"3", b"5": b"4", b"x": b"3"})
    known.drop_chain(b"4")
    assert known.among([b"1", b"3", b"4", b"5", b"x"]) == {b"1", b"5", b"x"}
