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


def test_documents_in_any_order_are_runs_of_one_piece() -> None:
    """Three sequences that see the same documents at other places: their rows go through them in one program."""
    tables = [[PageRef(7, 10), PageRef(8, 40)], [PageRef(8, 10), PageRef(7, 40)], [PageRef(7, 1), PageRef(8, 2)]]
    work = plan_of(tables, [0, 1, 2], [90] * 3, share="always").work
    assert (work.num_shared, work.num_pieces) == (1, 1)
    assert work.run_begin.tolist() == [0, 2]
    runs = sorted((pages_of(work, run), deltas_of(work, run, 3)) for run in (0, 1))
    assert runs == [([7], [10, 40, 1]), ([8], [40, 10, 2])]
