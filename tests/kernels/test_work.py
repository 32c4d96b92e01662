"""What is shared, and how private work is batched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mneme.kernels.page_table import PageRef, PageTable, QueryRows
from mneme.kernels.plan import Plan, build_plan
from mneme.kernels.work import worth_sharing

SIZES: dict[str, Any] = {"page_size": 32, "num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64}


def plan_of(tables: list[Any], sequences: list[int], positions: list[int], **changes: Any) -> Plan:
    return build_plan(tables, QueryRows(sequences, positions), **(SIZES | changes))


def decode_tables(num_sequences: int, num_shared: int, num_private: int) -> list[PageTable]:
    return [
        PageTable.own([*range(num_shared), *range(100 * (i + 1), 100 * (i + 1) + num_private)])
        for i in range(num_sequences)
    ]


@pytest.mark.parametrize(
    ("rows_per_sharer", "num_tokens", "pays"),
    [
        ([1, 1], 256, False),
        ([1, 1], 512, True),
        ([1] * 8, 64, False),
        ([1] * 8, 128, True),
        ([256, 256], 4096, False),  # two long prefills: each fills its readings alone
        ([768, *[1] * 8], 128, True),  # decodes beside a prefill gain
    ],
)
def test_sharing_pays_by_the_readings_it_saves(rows_per_sharer: list[int], num_tokens: int, pays: bool) -> None:
    assert worth_sharing(np.array(rows_per_sharer), num_tokens, 4 * 64) is pays


def test_a_shared_prefix_is_one_group_and_private_pages_one_batch() -> None:
    plan = plan_of(decode_tables(8, 16, 2), list(range(8)), [550] * 8)
    (shared,) = plan.work.shared
    (private,) = plan.work.private
    assert shared.turned.tolist() == [list(range(8))]
    assert shared.page_ids.tolist() == [list(range(16))]
    assert shared.mask_of_row is None
    assert private.turned.tolist() == [[row] for row in range(8)]
    assert private.page_ids.tolist()[0] == [100, 101]
    assert plan.work.turned_row.tolist() == list(range(8))


def test_only_sequences_with_rows_count_as_sharers() -> None:
    plan = plan_of(decode_tables(8, 16, 2), [3], [550])
    assert not plan.work.shared
    (private,) = plan.work.private
    assert private.page_ids[0, :16].tolist() == list(range(16))


def test_rows_follow_their_order_in_q() -> None:
    plan = plan_of(decode_tables(3, 16, 1), [2, 0, 0, 1], [550, 540, 541, 550], share="always")
    assert plan.work.shared[0].turned.tolist() == [[0, 1, 2, 3]]


def test_a_row_stands_once_per_delta() -> None:
    tables = [[PageRef(7, 10), PageRef(7, 50), PageRef(1)], [PageRef(7, 20)]]
    plan = plan_of(tables, [0, 1], [90, 90], share="always")
    assert plan.work.turned_row.tolist() == [0, 0, 0, 1]
    assert plan.work.turned_delta.tolist() == [0, 10, 50, 20]
    assert plan.work.shared[0].turned.tolist() == [[1, 2, 3]]


def test_differing_masks_are_read_by_row() -> None:
    tables = [[PageRef(7)], [PageRef(7, 0, 1)], [PageRef(7, 3)]]
    plan = plan_of(tables, [0, 1, 1, 2], [90, 90, 91, 90], share="always")
    (group,) = plan.work.shared
    assert group.mask_of_row is not None
    assert group.mask_of_row.tolist() == [0, 1, 1, 2]
    assert group.masks[0, :, 0].tolist() == [2**32 - 1, 1, 2**32 - 1]


def test_batches_hold_parts_of_similar_size() -> None:
    """Beyond the smallest bucket, padding never doubles what is read."""
    tables = [PageTable.own(range(100 * i, 100 * i + count)) for i, count in enumerate([1, 2, 4, 5, 8, 60])]
    plan = plan_of(tables, list(range(6)), [3000] * 6)
    sizes = sorted(group.page_ids.shape for group in plan.work.private)
    assert sizes == [(1, 60), (2, 8), (3, 4)]


def test_parts_of_many_rows_stay_alone() -> None:
    plan = plan_of(decode_tables(2, 0, 3), [0] * 20 + [1] * 20, [*range(70, 90)] * 2)
    assert [group.turned.shape for group in plan.work.private] == [(1, 20), (1, 20)]


@pytest.mark.parametrize("sequences", [[0, 1, 0], [0, 2, 2], [-1, 0, 0]])
def test_rows_out_of_order_or_of_no_sequence_are_refused(sequences: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^rows: "):
        plan_of(decode_tables(2, 1, 1), sequences, [5, 5, 6])
