"""What a process remembers of the tier's chunks."""

from __future__ import annotations

from mneme.cachetier.known_keys import KnownKeys


def test_the_key_that_was_seen_longest_ago_is_forgotten_first() -> None:
    known = KnownKeys(2)
    known.note([b"1", b"2"])
    known.note([b"1"])
    known.note([b"3"])
    assert known.among([b"1", b"2", b"3"]) == {b"1", b"3"}


def test_what_is_gone_is_not_known() -> None:
    known = KnownKeys()
    known.note([b"1", b"2"])
    known.drop([b"1", b"never seen"])
    assert known.among([b"1", b"2"]) == {b"2"}
    known.clear()
    assert not known.among([b"2"])
