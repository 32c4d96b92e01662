"""Arguments that compiled code would read or write beyond, wrongly typed or wrongly laid out: refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mneme.kernels.attention import PageRef, PageTable, QueryRows, RopeTable, attend, build_plan, write_kv
from mneme.kernels.work import _int32

SIZES: dict[str, Any] = {"page_size": 8, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16}


def attend_once(**changes: Any) -> tuple[Tensor, Tensor]:
    """One row over one page, with some arguments replaced."""
    pages = torch.randn(1, 4, 8, 16)
    arguments: dict[str, Any] = {
        "q": torch.randn(1, 2, 16),
        "k_pages": pages,
        "v_pages": pages,
        "slot_position": torch.arange(32, dtype=torch.int32),
        "rope": None,
        "plan": build_plan([[PageRef(1)]], QueryRows([0], [20]), **SIZES),
        "softmax_scale": 0.3,
    }
    return attend(**(arguments | changes))


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_slot_positions_must_lie_one_behind_the_other(backend: str) -> None:
    positions = torch.arange(32, dtype=torch.int32)
    every_second = torch.stack((positions, positions), 1)[:, 0]
    same = torch.zeros(1, dtype=torch.int32).expand(32)
    for strided in (every_second, same):
        with pytest.raises(ValueError, match=r"^slot_position: .*contiguous"):
            attend_once(slot_position=strided, backend=backend)


def test_a_pool_has_fewer_slots_than_32_bits_count() -> None:
    pages = torch.empty(1, 2**28, 8, 16, device="meta")
    position = torch.empty(2**31, dtype=torch.int32, device="meta")
    q = torch.empty(1, 2, 16, device="meta")
    with pytest.raises(ValueError, match=r"^k_pages: a pool has at most"):
        attend_once(q=q, k_pages=pages, v_pages=pages, slot_position=position)


def test_a_write_rotates_no_more_than_a_key_has() -> None:
    pool, key, one = torch.zeros(2, 1, 4, 8, 16), torch.ones(1, 1, 16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^rope: rotates 64 dimensions, head_dim is 16"):
        write_kv(key, key, one, one, pool[0], pool[1], RopeTable.from_theta(100.0, 64, 16))
    assert not pool.any()


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros(8, 3, 4, dtype=torch.float64),
        torch.zeros(8, 3, 4, dtype=torch.bfloat16),
        torch.zeros(8, 3),
        torch.zeros(8, 2, 4),
        torch.zeros(8, 4, 3).transpose(1, 2),
    ],
)
def test_a_rope_table_is_of_one_type_and_layout(table: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^table: must be float32"):
        RopeTable(table, 4)


def test_the_least_delta_does_not_slip_through() -> None:
    """Its negative is itself in 64 bits."""
    table = PageTable(np.array([0]), np.array([-(2**63)]), np.array([-1]))
    with pytest.raises(ValueError, match=r"^page_tables: deltas"):
        build_plan([table], QueryRows([0], [3]), **SIZES)
    with pytest.raises(ValueError, match=r"^page_tables: "):
        _int32(np.array([-(2**63)]))


def test_slopes_lie_on_the_device_of_q() -> None:
    with pytest.raises(ValueError, match=r"^alibi_slopes: must be on the device of q, cpu \(got meta\)"):
        attend_once(alibi_slopes=torch.ones(2, device="meta"))
