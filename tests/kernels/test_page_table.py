"""Tables, rows and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mneme.kernels.page_table import PageRef, PageTable, QueryRows, full_mask, references_of


def test_a_list_of_references_becomes_arrays() -> None:
    table = PageTable.from_refs([PageRef(3), PageRef(4, -7, 0b101)])
    assert table.page_ids.tolist() == [3, 4]
    assert table.deltas.tolist() == [0, -7]
    assert table.masks.tolist() == [-1, 0b101]
    assert (table.page_ids.dtype, table.deltas.dtype, table.masks.dtype) == (np.int32, np.int32, np.int64)
    assert PageTable.from_refs(table) is table
    assert len(PageTable.from_refs([])) == 0


def test_an_unsigned_64_bit_mask_is_the_same_as_its_twos_complement() -> None:
    table = PageTable.from_refs([PageRef(0, 0, 2**64 - 1), PageRef(1, 0, 2**63)])
    assert table.masks.tolist() == [-1, -(2**63)]


def test_own_pages_show_everything_at_delta_0() -> None:
    table = PageTable.own([5, 6]).append([7], [2], [1])
    assert list(zip(table.page_ids, table.deltas, table.masks, strict=True)) == [(5, 0, -1), (6, 0, -1), (7, 2, 1)]


def test_bits_behind_the_page_are_ignored_and_empty_masks_dropped() -> None:
    tables = [PageTable.from_refs([PageRef(1), PageRef(2, 0, 0b10000)]), PageTable.from_refs([PageRef(1, 9, 0b0110)])]
    refs = references_of(tables, 4)
    assert refs.sequence.tolist() == [0, 1]
    assert refs.page_id.tolist() == [1, 1]
    assert refs.mask.tolist() == [0b1111, 0b0110]
    assert full_mask(64) == -1


@pytest.mark.parametrize(
    "refs",
    [[PageRef(-1)], [PageRef(0, 2**29)], [PageRef(0, -(2**29))], [PageRef(2**31)], [PageRef(0, 0, 2**64)]],
)
def test_references_out_of_range_are_refused(refs: list[PageRef]) -> None:
    with pytest.raises(ValueError, match=r"^page_tables: "):
        references_of([PageTable.from_refs(refs)], 4)


def test_arrays_of_other_shapes_or_types_are_refused() -> None:
    ids = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match=r"^deltas: "):
        PageTable(ids, np.zeros(3, np.int32), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"^masks: "):
        PageTable(ids, ids, np.zeros(2, np.uint64))


def test_rows_come_as_lists_arrays_or_tensors() -> None:
    for rows in (QueryRows([0, 0], [4, 5]), QueryRows(torch.tensor([0, 0]), torch.tensor([4, 5], dtype=torch.int32))):
        sequence, position = rows.arrays()
        assert sequence.tolist() == [0, 0]
        assert position.tolist() == [4, 5]


@pytest.mark.parametrize("rows", [QueryRows([0], [1, 2]), QueryRows([[0]], [[1]]), QueryRows([0.5], [1])])
def test_rows_of_other_shapes_or_types_are_refused(rows: QueryRows) -> None:
    with pytest.raises(ValueError, match=r"^rows: "):
        rows.arrays()
