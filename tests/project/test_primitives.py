from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.primitives import Bounded, LazyHeap


def test_a_bounded_map_keeps_what_was_set_last() -> None:
    bounded = Bounded[str, int](2)
    bounded.update(zip("abca", range(4), strict=True))
    assert list(bounded.items()) == [("c", 2), ("a", 3)]
    assert bounded.setdefault("c", 9) == 2
    assert copy.deepcopy(bounded) == bounded
    assert bounded.pop("a", None) == 3
    none = Bounded[str, int](0)
    none["a"] = 1
    assert not none


@given(st.lists(st.tuples(st.sampled_from(["push", "discard", "take"]), st.integers(0, 8), st.integers(0, 5))))
def test_a_heap_is_a_dictionary_of_ranks_in_order(calls: list[tuple[str, int, int]]) -> None:
    heap, ranks = LazyHeap[int](), dict[int, float]()
    for call, key, rank in calls:
        if call == "take":
            taken = list(heap.pop_below(rank))
            assert taken == sorted((each for each in ranks if ranks[each] < rank), key=ranks.__getitem__)
            for each in taken:
                del ranks[each]
            continue
        ranks.pop(key, None)
        if call == "push":
            heap.push(key, rank)
            ranks[key] = rank
        else:
            heap.discard(key)
        in_order = sorted(ranks, key=ranks.__getitem__)  # stable: of equal ranks the first that came
        assert len(heap) == len(ranks)
        assert not ranks or heap.first() == (ranks[in_order[0]], in_order[0])
        assert heap.first_but({1, 2}) == next((each for each in in_order if each not in {1, 2}), None)


def test_a_heap_keeps_few_stale_entries() -> None:
    heap = LazyHeap[int]()
    for index in range(10_000):
        heap.push(index % 100, float(index))
        heap.discard(index % 100 - 5)
        assert heap.num_entries <= 2 * len(heap) + 64 + 1
    for key in range(100):
        heap.discard(key)
    with pytest.raises(IndexError):
        heap.first()
