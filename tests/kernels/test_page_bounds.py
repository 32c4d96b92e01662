"""Page bounds follow what is marked, and notice what is changed behind their back."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mneme.kernels.attention import mark_free, mark_written, new_slot_position
from mneme.kernels.page_bounds import PageBounds, page_bounds
from mneme.kernels.page_table import FREE_SLOT_POSITION

PAGE_SIZE, NUM_PAGES = 4, 6


def is_true(bounds: PageBounds, slot_position: Tensor) -> bool:
    by_page = slot_position.view(-1, bounds.page_size)
    first, last = (torch.from_numpy(array) for array in (bounds.first, bounds.last))
    return torch.equal(first, by_page.amin(1)) and torch.equal(last, by_page.amax(1))


slot_sets = st.lists(st.integers(0, PAGE_SIZE * NUM_PAGES - 1), unique=True, max_size=8)


@given(changes=st.lists(st.tuples(st.sampled_from(["write", "free", "behind"]), slot_sets), max_size=8))
def test_bounds_are_those_of_a_fresh_look_after_any_changes(changes: list[tuple[str, list[int]]]) -> None:
    slot_position = new_slot_position(PAGE_SIZE * NUM_PAGES)
    page_bounds(slot_position, PAGE_SIZE)
    for number, (kind, chosen) in enumerate(changes):
        slots = torch.tensor(chosen, dtype=torch.int64)
        if kind == "write":
            mark_written(slot_position, slots, torch.arange(len(slots)) + 10 * number)
        elif kind == "free":
            mark_free(slot_position, slots)
        else:
            slot_position[slots] = number
        assert is_true(page_bounds(slot_position, PAGE_SIZE), slot_position)


def test_each_pool_and_page_size_has_its_own() -> None:
    one, other = new_slot_position(8), new_slot_position(8)
    mark_written(one, torch.arange(8), torch.arange(8))
    assert page_bounds(one, 4).last.tolist() == [3, 7]
    assert page_bounds(one, 8).last.tolist() == [7]
    assert page_bounds(other, 4).first.tolist() == [FREE_SLOT_POSITION] * 2


def test_inference_tensors_count_no_changes_and_are_looked_at_each_time() -> None:
    with torch.inference_mode():
        slot_position = new_slot_position(8)
        assert page_bounds(slot_position, 4).first.tolist() == [FREE_SLOT_POSITION] * 2
        slot_position[:4] = torch.arange(4, dtype=torch.int32)
        assert np.array_equal(page_bounds(slot_position, 4).first, [0, FREE_SLOT_POSITION])
