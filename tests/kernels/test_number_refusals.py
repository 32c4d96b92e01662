"""Numbers of another kind, or in another form, in tables, plans, options and positions: refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mneme.kernels.attention import (
    PageRef,
    PageTable,
    Plan,
    QueryRows,
    attend,
    build_plan,
    mark_written,
    new_slot_position,
)

SIZES: dict[str, Any] = {"page_size": 8, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16}


def plan_of_three_rows() -> Plan:
    return build_plan([[PageRef(1)]], QueryRows([0, 0, 0], [20, 21, 22]), **SIZES)


@pytest.mark.parametrize(
    ("name", "page_ids", "deltas", "masks"),
    [
        ("page_ids", [1], np.zeros(1, np.int32), np.zeros(1, np.int64)),
        ("page_ids", 1, np.zeros(1, np.int32), np.zeros(1, np.int64)),
        ("page_ids", np.zeros((), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)),
        ("page_ids", np.zeros(1, np.int8), np.zeros(1, np.int32), np.zeros(1, np.int64)),
        ("deltas", np.zeros(1, np.int32), [0], np.zeros(1, np.int64)),
        ("deltas", np.zeros(1, np.int32), np.zeros(1, np.int16), np.zeros(1, np.int64)),
        ("masks", np.zeros(1, np.int32), np.zeros(1, np.int32), [-1]),
        ("masks", np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)),
    ],
)
def test_a_table_is_of_wide_integer_vectors(name: str, page_ids: Any, deltas: Any, masks: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must be a numpy vector"):
        PageTable(page_ids, deltas, masks)


@pytest.mark.parametrize("ref", [PageRef(1.7, 0), PageRef(1, 0.5), PageRef(1, 0, 1.0), PageRef(None)])  # type: ignore[arg-type]
def test_a_reference_is_of_integers(ref: PageRef) -> None:
    with pytest.raises(ValueError, match=r"^page_tables: "):
        PageTable.from_refs([ref])


def test_what_is_appended_to_a_table_fits_it() -> None:
    table = PageTable.own([1])
    with pytest.raises(ValueError, match=r"^page_ids: must fit int32"):
        table.append(np.array([2**31]), [0], [-1])
    with pytest.raises(ValueError, match=r"^deltas: must be integers"):
        table.append([1], [0.5], [-1])
    with pytest.raises(ValueError, match=r"^page_ids: must be integers"):
        PageTable.own([1.7])
    with pytest.raises(ValueError, match=r"^page_ids: must fit int32"):
        PageTable.own(np.array([2**32 + 1]))


@pytest.mark.parametrize("rows", [[0.7], [True], [True] * 4, [[0]], np.zeros((3, 1), bool), 0])
def test_rows_that_stay_are_indices_or_one_bool_each(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"^rows: "):
        plan_of_three_rows().restrict(rows)
    assert plan_of_three_rows().restrict([]).num_rows == 0
    assert plan_of_three_rows().restrict([True, False, True]).position.tolist() == [20, 22]


@pytest.mark.parametrize("name", list(SIZES))
def test_sizes_are_integers(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must be an integer"):
        build_plan([[PageRef(1)]], QueryRows([0], [1]), **(SIZES | {name: float(SIZES[name])}))


def test_pages_are_appended_as_numbers_or_vectors_of_one_length() -> None:
    plan = plan_of_three_rows()
    with pytest.raises(ValueError, match=r"^page_id: must be a number or a vector"):
        plan.append_page(0, [[3]])
    with pytest.raises(ValueError, match=r"^page_id: must be a number or a vector"):
        plan.append_page([0, 0, 0], [3, 4])
    with pytest.raises(ValueError, match=r"^positions: must be a number or a vector"):
        plan.join([PageRef(2)], [[3]])
    assert plan.append_page([], []).num_pages == plan.num_pages


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 2.5),
        ("window", 0),
        ("soft_cap", math.nan),
        ("soft_cap", math.inf),
        ("softmax_scale", math.inf),
        ("softmax_scale", math.nan),
    ],
)
def test_options_are_finite_and_of_their_kind(name: str, value: float, backend: str) -> None:
    pages, position = torch.randn(1, 4, 8, 16), torch.arange(32, dtype=torch.int32)
    options: Any = {"softmax_scale": 0.3, "backend": backend, name: value}
    with pytest.raises(ValueError, match=rf"^{name}: must be"):
        attend(torch.randn(3, 2, 16), pages, pages, position, None, plan_of_three_rows(), **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("position", [-1, -(2**31), 2**29])
def test_keys_are_rotated_to_positions_that_rows_can_have(position: int, dtype: torch.dtype) -> None:
    slot_position, slots = new_slot_position(4), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"^positions: must be in"):
        mark_written(slot_position, slots, torch.tensor([5, position], dtype=dtype))
    assert torch.equal(slot_position, new_slot_position(4))
    mark_written(slot_position, slots[:0], torch.tensor([], dtype=dtype))
    mark_written(slot_position, slots, torch.tensor([0, 2**29 - 1], dtype=dtype))
    assert slot_position[1:3].tolist() == [0, 2**29 - 1]
