"""What each edit of a plan reuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mneme.kernels.page_table import PageTable, QueryRows
from mneme.kernels.plan import Plan, build_plan

SIZES: dict[str, Any] = {"page_size": 4, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def two_sharers(**changes: Any) -> Plan:
    """Two sequences on the pages 1 and 2, each with a page of its own; one row each."""
    tables = [PageTable.own([1, 2, 10]), PageTable.own([1, 2, 11])]
    return build_plan(tables, QueryRows([0, 1], [9, 9]), **(SIZES | {"share": "always"} | changes))


def grow(plan: Plan, page_by_sequence: dict[int, int]) -> Plan:
    grown = plan.append_new_pages(np.array([*page_by_sequence]), np.array([*page_by_sequence.values()]))
    assert grown is not None
    return grown


def page_ids(plan: Plan) -> list[list[int]]:
    return [table.page_ids.tolist() for table in plan.page_tables]


def rows(plan: Plan) -> list[tuple[int, int]]:
    return list(zip(plan.sequence.tolist(), plan.position.tolist(), strict=True))


def test_a_decode_step_reuses_all_work() -> None:
    plan = two_sharers()
    stepped = plan.with_rows(QueryRows([0, 1], [10, 10]))
    assert stepped.work is plan.work
    assert rows(stepped) == [(0, 10), (1, 10)]
    assert rows(plan) == [(0, 9), (1, 9)]


def test_other_rows_reuse_the_segments() -> None:
    plan = two_sharers()
    stepped = plan.with_rows(QueryRows([1, 1], [8, 9]))
    assert stepped.segments is plan.segments
    assert stepped.work.num_shared == 0


def private_pages(plan: Plan) -> list[list[int]]:
    work = plan.work
    runs = range(work.run_begin[work.num_shared], len(work.page_begin))
    return [work.page_id[work.page_begin[run] : work.page_end[run]].tolist() for run in runs]


def test_a_new_page_is_appended_without_looking_for_segments_again() -> None:
    plan = two_sharers()
    grown = grow(plan, {1: 13, 0: 12})
    assert grown.segments is plan.segments
    assert grown.work.page_id is plan.work.page_id
    assert page_ids(grown) == [[1, 2, 10, 12], [1, 2, 11, 13]]
    assert page_ids(plan) == [[1, 2, 10], [1, 2, 11]]
    assert grown.num_pages == 14
    assert private_pages(grown) == [[10, 12], [11, 13]]
    assert private_pages(plan) == [[10], [11]]


def test_room_that_one_plan_filled_is_not_another_plans() -> None:
    plan = two_sharers()
    one = grow(plan, {0: 12})
    assert plan.append_new_pages(np.array([0]), np.array([13])) is None
    assert [private_pages(one), private_pages(plan)] == [[[10, 12], [11]], [[10], [11]]]


def test_a_plan_grows_page_by_page_up_to_its_room() -> None:
    plan = two_sharers()
    for page in range(20, 24):
        plan = grow(plan, {0: page, 1: 100 + page})
    assert plan.append_new_pages(np.array([0]), np.array([24])) is None
    assert private_pages(plan) == [[10, *range(20, 24)], [11, *range(120, 124)]]
    assert page_ids(plan)[1] == [1, 2, 11, *range(120, 124)]
    again = build_plan(plan.page_tables, plan.rows, **SIZES, share="always")
    for ours, built in zip(runs_of(plan), runs_of(again), strict=True):
        assert ours == built


def runs_of(plan: Plan) -> list[tuple[list[int], list[int]]]:
    work = plan.work
    ranges = zip(work.page_begin, work.page_end, work.mask_begin, strict=True)
    return [
        (work.page_id[begin:end].tolist(), work.mask[mask : mask + end - begin].tolist()) for begin, end, mask in ranges
    ]


def test_a_sequence_that_gets_two_pages_needs_another_plan() -> None:
    assert two_sharers().append_new_pages(np.array([0, 0]), np.array([12, 13])) is None


def test_new_pages_come_with_the_next_rows_positions() -> None:
    plan = two_sharers()
    grown = plan.append_new_pages(np.array([1]), np.array([13]), np.array([11, 12]))
    assert grown is not None
    assert rows(grown) == [(0, 11), (1, 12)]
    assert private_pages(grown) == [[10], [11, 13]]
    with pytest.raises(ValueError, match="rows: position must be in"):
        grown.append_new_pages(np.array([0]), np.array([14]), np.array([-1, 12]))


def test_a_page_behind_one_that_is_seen_in_part_is_seen_wholly() -> None:
    tables = [PageTable(np.array([1], np.int32), np.zeros(1, np.int32), np.array([0b0011], np.int64))]
    grown = grow(build_plan(tables, QueryRows([0], [9]), **SIZES), {0: 2})
    assert runs_of(grown) == [([1, 2], [0b0011, 0b1111])]
