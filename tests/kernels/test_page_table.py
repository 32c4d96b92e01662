"""Tables and rows as arrays."""

from __future__ import annotations

import torch

from mneme.kernels.page_table import PageRef, PageTable, QueryRows, full_mask, references_of


def test_an_unsigned_64_bit_mask_is_the_same_as_its_twos_complement() -> None:
    table = PageTable.from_refs([PageRef(0, 0, 2**64 - 1), PageRef(1, 0, 2**63)])
    assert table.masks.tolist() == [-1, -(2**63)]


def test_bits_behind_the_page_are_ignored_and_empty_masks_dropped() -> None:
    tables = [PageTable.from_refs([PageRef(1), PageRef(2, 0, 0b10000)]), PageTable.from_refs([PageRef(1, 9, 0b0110)])]
    refs = references_of(tables, 4)
    assert refs.sequence.tolist() == [0, 1]
    assert refs.page_id.tolist() == [1, 1]
    assert refs.mask.tolist() == [0b1111, 0b0110]
    assert full_mask(64) == -1


def test_rows_come_as_lists_arrays_or_tensors() -> None:
    for rows in (QueryRows([0, 0], [4, 5]), QueryRows(torch.tensor([0, 0]), torch.tensor([4, 5], dtype=torch.int32))):
        sequence, position = rows.arrays()
        assert sequence.tolist() == [0, 0]
        assert position.tolist() == [4, 5]
