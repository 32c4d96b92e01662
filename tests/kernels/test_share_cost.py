"""When a segment is read once for all its sharers: what must hold whatever the device's constants are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.kernels.attention import PageTable, QueryRows, build_plan
from mneme.kernels.share_cost import COMPILED_BFLOAT16, COMPILED_FLOAT32, TRITON, ShareCost

COSTS = pytest.mark.parametrize("cost", [COMPILED_BFLOAT16, COMPILED_FLOAT32, TRITON])


def pays(cost: ShareCost, rows: list[int], num_tokens: int) -> bool:
    """Of one segment, between others that have no say in it."""
    sharers = np.array([1, 1, 0, *rows, 0, 600, 0])
    begin, tokens = np.array([0, 3, 4 + len(rows)]), np.array([1, num_tokens, 20_000])
    return bool(cost.pay(sharers, begin, tokens, num_groups=4, head_dim=128)[1])


@COSTS
def test_a_system_prompt_of_many_decodes_is_shared_and_a_few_tokens_of_two_are_not(cost: ShareCost) -> None:
    assert pays(cost, [1] * 32, 2048)
    assert not pays(cost, [1, 1], 1)


@COSTS
@given(rows=st.lists(st.integers(1, 600), min_size=2, max_size=40), num_tokens=st.integers(1, 20_000))
def test_more_tokens_never_make_sharing_worse(cost: ShareCost, rows: list[int], num_tokens: int) -> None:
    assert pays(cost, rows, 2 * num_tokens) >= pays(cost, rows, num_tokens)


@COSTS
@pytest.mark.parametrize("num_groups", [1, 4, 8])
def test_one_pass_for_all_rows_never_costs_more_than_two(cost: ShareCost, num_groups: int) -> None:
    """Among few heads and among many; where few become many, packing may cost what a reading saves."""
    rows = np.arange(1, 500)
    rows = rows[(rows * num_groups >= cost.many_heads) | (2 * rows * num_groups < cost.many_heads)]
    assert (cost.pass_(2 * rows, num_groups) <= 2 * cost.pass_(rows, num_groups)).all()


@pytest.mark.parametrize(("piece", "num_shared"), [(0.0, 1), (1e12, 0)])
def test_a_plan_and_its_edits_go_by_the_cost_that_it_is_given(piece: float, num_shared: int) -> None:
    cost = ShareCost(
        many_heads=8, key_few=9.0, head_few=2.0, reread=0.0, key_many=10.0, head_many=1.0, piece=piece, merge=0.0
    )
    tables = [PageTable.own([1, 2, 3, 4, 10 + i]) for i in range(2)]
    rows = QueryRows([0, 1], [140, 140])
    plan = build_plan(tables, rows, page_size=32, num_q_heads=8, num_kv_heads=2, head_dim=64, cost=cost)
    edited = [plan.with_rows(rows), plan.append_new_pages(np.array([0]), np.array([99]))]
    assert [each.work.num_shared for each in (plan, *edited)] == [num_shared] * 3
