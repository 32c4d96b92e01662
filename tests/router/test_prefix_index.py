"""The prefix index: longest match, bounded, and no ghosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mneme.router.prefix_index import SENT_S, PrefixIndex

CHAINS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=30)


def hashes(path: list[int]) -> list[int]:
    """A chain's hashes: each stands for the whole path up to it."""
    return [hash(tuple(path[: i + 1])) for i in range(len(path))]


@given(CHAINS, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_matches_the_longest_chain_of_each_replica(chains: list[list[int]], asked: list[int]) -> None:
    index = PrefixIndex()
    expected: dict[str, int] = {}
    for i, chain in enumerate(chains):
        replica = f"r{i % 3}"
        index.record(hashes(chain), replica)
        common = next((k for k, (x, y) in enumerate(zip(chain, asked, strict=False)) if x != y), None)
        length = min(len(chain), len(asked)) if common is None else common
        if length:
            expected[replica] = max(expected.get(replica, 0), length)
    assert index.match(hashes(asked)).blocks == expected


@given(CHAINS, st.integers(1, 20))
def test_stays_bounded_and_loses_tails_first(chains: list[list[int]], bound: int) -> None:
    index = PrefixIndex(max_blocks=bound)
    for chain in chains:
        index.record(hashes(chain), "r")
        assert len(index) <= bound
        assert index.match(hashes(chain)).blocks == {"r": min(len(chain), bound)}


def test_a_successor_has_nothing_of_the_dead_whatever_was_recorded_meanwhile() -> None:
    """What is recorded again while bits are swept away moves to where no sweep comes any more."""
    index, chain = PrefixIndex(), list(range(1, 1001))
    for replica in ("dead", "alive"):
        index.record(chain, replica)
    index.forget("dead")
    for turn in range(1, 40):
        index.match([], SENT_S * turn)
        index.record(chain[:100], "alive")
    index.record([5000], "successor")
    assert index.match(chain).blocks == {"alive": 1000}


def test_a_successor_has_nothing_of_what_was_sent_to_the_dead() -> None:
    """That is forgotten by its age, so bits come free later than those of what is held."""
    index, chain = PrefixIndex(), list(range(1, 101))
    index.record_sent(chain, "dead", 0.0)
    index.forget("dead")
    for turn in range(5):
        now_s = SENT_S * turn
        index.record([9000 + turn], "alive")  # the sweep goes on
        index.record([5000], f"successor {turn}")
        assert index.match(chain, now_s).blocks == {}
