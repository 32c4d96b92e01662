"""How a step's work is laid out."""

from __future__ import annotations

from typing import Any

from mneme.kernels.page_table import PageRef, PageTable, QueryRows
from mneme.kernels.plan import Plan, build_plan
from mneme.kernels.work import WorkList

SIZES: dict[str, Any] = {"page_size": 32, "num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64}


def plan_of(tables: list[Any], sequences: list[int], positions: list[int], **changes: Any) -> Plan:
    return build_plan(tables, QueryRows(sequences, positions), **(SIZES | changes))


def decode_tables(num_sequences: int, num_shared: int, num_private: int) -> list[PageTable]:
    return [
        PageTable.own([*range(num_shared), *range(100 * (i + 1), 100 * (i + 1) + num_private)])
        for i in range(num_sequences)
    ]


def rows_of(work: WorkList, piece: int) -> list[int]:
    return work.row[work.row_begin[piece] : work.row_begin[piece + 1]].tolist()


def pages_of(work: WorkList, run: int) -> list[int]:
    return work.page_id[work.page_begin[run] : work.page_end[run]].tolist()


def deltas_of(work: WorkList, run: int, num_rows: int) -> list[int]:
    return work.delta[work.delta_begin[run] :][:num_rows].tolist()


def test_a_shared_prefix_is_one_piece_and_so_are_the_pages_of_each_sequence() -> None:
    work = plan_of(decode_tables(8, 16, 2), list(range(8)), [550] * 8).work
    assert (work.num_shared, work.num_pieces) == (1, 9)
    assert rows_of(work, 0) == list(range(8))
    assert pages_of(work, 0) == list(range(16))
    assert work.mask_stride[0] == 0
    assert [rows_of(work, 1 + i) for i in range(8)] == [[i] for i in range(8)]
    assert pages_of(work, 1) == [100, 101]


def test_only_sequences_with_rows_count_as_sharers() -> None:
    work = plan_of(decode_tables(8, 16, 2), [3], [550]).work
    assert (work.num_shared, work.num_pieces) == (0, 1)
    assert pages_of(work, 0)[:16] == list(range(16))


def test_rows_follow_their_order_in_q() -> None:
    work = plan_of(decode_tables(3, 16, 1), [2, 0, 0, 1], [550, 540, 541, 550], share="always").work
    assert rows_of(work, 0) == [0, 1, 2, 3]
    assert [rows_of(work, piece) for piece in (1, 2, 3)] == [[1, 2], [3], [0]]


def test_a_row_stands_once_per_delta() -> None:
    tables = [[PageRef(7, 10), PageRef(7, 50), PageRef(1)], [PageRef(7, 20)]]
    work = plan_of(tables, [0, 1], [90, 90], share="always").work
    assert rows_of(work, 0) == [0, 0, 1]
    assert deltas_of(work, 0, 3) == [10, 50, 20]


def test_documents_in_any_order_are_runs_of_one_piece() -> None:
    """Three sequences that see the same documents at other places: their rows go through them in one program."""
    tables = [[PageRef(7, 10), PageRef(8, 40)], [PageRef(8, 10), PageRef(7, 40)], [PageRef(7, 1), PageRef(8, 2)]]
    work = plan_of(tables, [0, 1, 2], [90] * 3, share="always").work
    assert (work.num_shared, work.num_pieces) == (1, 1)
    assert work.run_begin.tolist() == [0, 2]
    runs = sorted((pages_of(work, run), deltas_of(work, run, 3)) for run in (0, 1))
    assert runs == [([7], [10, 40, 1]), ([8], [40, 10, 2])]


def test_the_private_pages_of_a_sequence_are_one_piece_with_a_run_per_delta() -> None:
    tables = [[PageRef(1), PageRef(2, 5), PageRef(3), PageRef(4, 5)]]
    work = plan_of(tables, [0, 0], [80, 81]).work
    assert work.run_begin.tolist() == [0, 2]
    assert [pages_of(work, 0), pages_of(work, 1)] == [[1, 3], [2, 4]]
    assert [deltas_of(work, 0, 2), deltas_of(work, 1, 2)] == [[0, 0], [5, 5]]


def test_differing_masks_are_read_by_row() -> None:
    tables = [[PageRef(7)], [PageRef(7, 0, 1)], [PageRef(7, 3)]]
    work = plan_of(tables, [0, 1, 1, 2], [90, 90, 91, 90], share="always").work
    assert work.mask_number[:4].tolist() == [0, 1, 1, 2]
    assert work.mask_stride.tolist() == [1]
    assert work.mask[:3].tolist() == [2**32 - 1, 1, 2**32 - 1]
