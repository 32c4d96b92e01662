"""The directory: what it believes, what it asks for anew, what it forgets, and how little memory it takes."""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.cachetier.distributed.announcer import BATCH_CHANGES
from mneme.cachetier.distributed.directory import (
    FORGOTTEN_S,
    SILENT_S,
    Announcement,
    Directory,
    Place,
    Reply,
    Span,
    query_of,
    spans_of,
)
from mneme.cachetier.names import TierName
from mneme.cachetier.node.index import Change
from mneme.cachetier.store import ChainQuery
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, LINEAGE
from tests.cachetier.nodes import Clock

KEYS = [bytes([number, *range(14), number % 3]) for number in range(6)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    return Directory(clock)


def added(key: bytes, tier: TierName = "host", num_bytes: int = 100) -> Change:
    return Change(key, tier, num_bytes, True)


def removed(key: bytes, tier: TierName = "host") -> Change:
    return Change(key, tier, 0, False)


def tell(
    directory: Directory,
    seq: int,
    *changes: Change,
    node: str = "a",
    epoch: int = 1,
    first: bool = False,
    last: bool = False,
) -> Reply:
    said = Announcement(node=node, epoch=epoch, seq=seq, changes=changes, is_first=first, is_last=last)
    return directory.announce(said)


def tell_all(directory: Directory, seq: int, *changes: Change, node: str = "a", epoch: int = 1) -> Reply:
    return tell(directory, seq, *changes, node=node, epoch=epoch, first=True, last=True)


def test_a_new_epoch_voids_the_old_and_an_old_one_is_told_so(directory: Directory) -> None:
    tell_all(directory, 0, added(KEYS[0]))
    assert tell(directory, 0, epoch=2).wants_all
    assert directory.lookup(KEYS[:1]) == [()]
    assert tell_all(directory, 1, added(KEYS[1])) == Reply(False, 2)
    assert directory.lookup(KEYS[:2]) == [(), ()]


def test_a_gap_asks_for_everything_and_what_was_said_before_goes_with_the_last_part(directory: Directory) -> None:
    tell_all(directory, 0, added(KEYS[0]), added(KEYS[1]))
    assert tell(directory, 2, added(KEYS[2])).wants_all
    assert tell(directory, 3).wants_all
    assert not tell(directory, 4, added(KEYS[1]), first=True).wants_all
    assert [bool(places) for places in directory.lookup(KEYS[:3])] == [True, True, False]
    tell(directory, 5, added(KEYS[3]), last=True)
    assert [bool(places) for places in directory.lookup(KEYS[:4])] == [False, True, False, True]


def test_a_delayed_or_repeated_announcement_changes_nothing(directory: Directory) -> None:
    tell_all(directory, 0, added(KEYS[0]))
    tell(directory, 1, removed(KEYS[0]))
    assert tell_all(directory, 0, added(KEYS[0])) == Reply(False, 1)
    assert directory.lookup(KEYS[:1]) == [()]


def test_a_silent_node_is_not_offered_then_forgotten(directory: Directory, clock: Clock) -> None:
    tell_all(directory, 0, added(KEYS[0]))
    clock.now_s += SILENT_S + 0.1
    assert directory.lookup(KEYS[:1]) == [()]
    assert not tell(directory, 1).wants_all
    assert directory.lookup(KEYS[:1]) != [()]
    clock.now_s += FORGOTTEN_S + 0.1
    for seq in range(200):
        tell_all(directory, seq, node="b")
    assert directory.stats()["num_keys"] == 0
    assert tell(directory, 2).wants_all


def test_a_node_found_dead_is_offered_again_when_it_speaks(directory: Directory) -> None:
    tell_all(directory, 0, added(KEYS[0]))
    directory.not_reached("a")
    assert directory.lookup(KEYS[:1]) == [()]
    tell(directory, 1)
    assert directory.lookup(KEYS[:1]) != [()]


def test_nodes_that_are_gone_for_good_are_not_gone_through(directory: Directory, clock: Clock) -> None:
    """A node that joins again has another name."""
    for number in range(100):
        tell_all(directory, 0, added(KEYS[0]), node=str(number))
        clock.now_s += FORGOTTEN_S
    assert len(directory._nodes) < 20
    assert tell(directory, 1, added(KEYS[1]), node="0").wants_all  # one that comes back after all
    assert not tell_all(directory, 2, added(KEYS[1]), node="0").wants_all
    assert directory.lookup(KEYS[:2])[1] == (Place("0", "host", 100),)


def test_restarts_without_end_use_up_nothing(directory: Directory) -> None:
    tracemalloc.start()
    try:
        for epoch in range(3000):
            tell_all(directory, 0, *map(added, KEYS), epoch=epoch)
            if epoch == 1000:
                before = tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert directory.stats()["num_keys"] == len(KEYS)
    assert grown < 2000 * 50


@pytest.mark.parametrize("num_holders", [1, 2])
def test_a_chunk_takes_at_most_200_bytes(num_holders: int) -> None:
    num_keys = 110_000
    tracemalloc.start()
    try:
        directory = Directory()
        keys = [os.urandom(16) for _ in range(num_keys)]
        for holder in range(num_holders):
            for seq, start in enumerate(range(0, num_keys, BATCH_CHANGES)):
                changes = [added(key, "host", 2**25 + seq % 3) for key in keys[start : start + BATCH_CHANGES]]
                assert not tell(directory, seq, *changes, node=str(holder), first=seq == 0).wants_all
        del changes
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - keys.__sizeof__()
    finally:
        tracemalloc.stop()
    assert directory.stats()["num_keys"] == num_keys
    assert used / num_keys <= 200


HOST_A, HOST_B, DISK_C = Place("a", "host", 1), Place("b", "host", 1), Place("c", "disk", 1)

places_drawn = st.lists(st.lists(st.sampled_from([HOST_A, HOST_B, DISK_C]), unique=True).map(tuple), max_size=12)


def test_a_node_is_asked_for_as_much_as_it_has() -> None:
    assert spans_of([(HOST_A,), (HOST_A, HOST_B), (HOST_B,)], 4, "own") == (Span("a", 4, 2), Span("b", 6, 1))


def test_memory_goes_before_disk_and_more_of_the_chain_before_less() -> None:
    assert spans_of([(DISK_C, HOST_A)], 0, "own") == (Span("a", 0, 1),)
    assert spans_of([(HOST_A, HOST_B), (HOST_B,)], 0, "own") == (Span("b", 0, 2),)


def test_the_own_node_goes_before_others() -> None:
    assert spans_of([(HOST_A, DISK_C)], 0, "c") == (Span("c", 0, 1),)


@given(places_drawn, st.integers(0, 5))
def test_spans_have_no_gap_and_each_chunk_is_at_its_node(places: list[tuple[Place, ...]], first: int) -> None:
    spans = spans_of(places, first, "own")
    asked = [(span.node, index) for span in spans for index in range(span.first, span.end)]
    assert [index for _, index in asked] == list(range(first, first + len(asked)))
    for node, index in asked:
        assert node in {place.node for place in places[index - first]}
    until_gap = next((i for i, choices in enumerate(places) if not choices), len(places))
    assert len(asked) == until_gap or len(spans) == 8


def test_only_the_last_node_is_asked_for_what_is_behind() -> None:
    ids = list(range(1, 3 * CHUNK_TOKENS + 4))
    query = ChainQuery.of(LINEAGE, FINGERPRINT.digest, ids, CHUNK_TOKENS, request_id="r")
    inner = query_of(query, Span("a", 1, 1), is_last=False)
    assert (inner.first, inner.keys, len(inner.token_ids)) == (1, query.keys[:2], 2 * CHUNK_TOKENS)
    last = query_of(query, Span("a", 1, 1), is_last=True)
    assert (last.first, last.keys, len(last.token_ids)) == (1, query.keys, len(ids))
