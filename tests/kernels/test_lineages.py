"""Planning by the tree finds what planning by references finds, in work that does not grow with sharers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels.page_table import ALL_VISIBLE, PageTable, QueryRows
from mneme.kernels.plan import Plan, build_plan
from mneme.kernels.segments import Lineages, Segments
from mneme.kernels.share_cost import TRITON
from mneme.kernels.work import Share
from tests.budget import examples

PAGE_SIZE = 4
SIZES: dict[str, Any] = {"page_size": PAGE_SIZE, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "cost": TRITON}
Table = tuple[list[int], list[int]]  # page ids, masks


def random_tables(rng: np.random.Generator, num_sequences: int, max_pages: int) -> list[Table]:
    """Walk a tree of pages that grows: each walk follows a page wholly or leaves it at some offset, and may end."""
    child_by_place: dict[tuple[int, int], list[int]] = {}
    ids = iter(rng.permutation(num_sequences * max_pages).tolist())
    tables = []
    for _ in range(num_sequences):
        page, place = -1, PAGE_SIZE
        table: Table = ([], [])
        for _ in range(rng.integers(0, max_pages + 1)):
            children = child_by_place.setdefault((page, place), [])
            if not children or rng.random() < 0.3:
                children.append(next(ids))
            if place < PAGE_SIZE:
                table[1][-1] = (1 << place) - 1
            page, place = int(rng.choice(children)), int(rng.choice([1, 2, PAGE_SIZE, PAGE_SIZE, PAGE_SIZE]))
            table[0].append(page)
            table[1].append(ALL_VISIBLE)
        tables.append(table)
    return sorted(tables, key=lambda table: np.array(table[0], np.int32).tobytes())


def lineages_of(tables: list[Table]) -> Lineages:
    masks = np.array([mask for _, masks in tables for mask in masks], np.int64)
    masked = np.flatnonzero(masks != ALL_VISIBLE)
    return Lineages(
        np.array([page for pages, _ in tables for page in pages], np.int32),
        np.array([len(pages) for pages, _ in tables], np.int64),
        masked,
        masks[masked],
    )


def both(tables: list[Table], rows: QueryRows, share: Share = "auto") -> tuple[Plan, Plan]:
    """The plans by references and by the tree."""
    listed = [
        PageTable(np.array(pages, np.int32), np.zeros(len(pages), np.int32), np.array(masks, np.int64))
        for pages, masks in tables
    ]
    return build_plan(listed, rows, **SIZES, share=share), build_plan(lineages_of(tables), rows, **SIZES, share=share)


def segments_of(plan: Plan) -> set[Any]:
    found = set()
    for page_ids, sequences, deltas, masks in plan.segments.segments:
        shown = np.broadcast_to(masks, (len(sequences), len(page_ids)))
        found.add((*map(tuple, (page_ids.tolist(), sequences.tolist(), deltas.tolist(), shown.ravel().tolist())),))
    return found


def pieces_of(plan: Plan) -> tuple[list[Any], list[Any]]:
    """Shared pieces in any order, each with its runs, and private ones in theirs: rows, pages, deltas and masks."""
    work, pieces = plan.work, []
    for piece in range(work.num_pieces):
        rows = work.row[work.row_begin[piece] : work.row_begin[piece + 1]].tolist()
        runs = []
        for run in range(work.run_begin[piece], work.run_begin[piece + 1]):
            begin, end = work.page_begin[run], work.page_end[run]
            entries = slice(work.delta_begin[run], work.delta_begin[run] + len(rows))
            first = work.mask_begin[run] + work.mask_number[entries] * work.mask_stride[run]
            masks = work.mask[first[:, None] + np.arange(end - begin)]
            runs.append((work.page_id[begin:end].tolist(), work.delta[entries].tolist(), masks.tolist()))
        pieces.append((rows, sorted(runs)))
    return sorted(pieces[: work.num_shared]), pieces[work.num_shared :]


@given(seed=st.integers(0, 2**32), share=st.sampled_from(["auto", "always", "never"]))
@settings(max_examples=examples(150))
def test_the_tree_gives_the_plan_that_references_give(seed: int, share: Share) -> None:
    rng = np.random.default_rng(seed)
    num_sequences = int(rng.integers(0, 12))
    tables = random_tables(rng, num_sequences, 6)
    rows = QueryRows(np.repeat(np.arange(num_sequences), rng.integers(0, 3, num_sequences)), position=())
    rows = QueryRows(rows.sequence, np.full(len(np.asarray(rows.sequence)), 100))
    listed, by_tree = both(tables, rows, share)
    assert not isinstance(by_tree.segments, Segments)
    for step in range(3):
        assert segments_of(by_tree) == segments_of(listed)
        assert pieces_of(by_tree) == pieces_of(listed)
        assert by_tree.num_pages == listed.num_pages
        ours, theirs = by_tree.page_tables, listed.page_tables
        assert [(each.page_ids.tolist(), each.masks.tolist()) for each in ours] == [
            (each.page_ids.tolist(), each.masks.tolist()) for each in theirs
        ]
        if not num_sequences:
            return
        if rng.random() < 0.5:
            added = rng.integers(num_sequences, size=1), np.array([6 * num_sequences + step])
            grown = [plan.append_new_pages(*added) for plan in (listed, by_tree)]
            assert (grown[0] is None) == (grown[1] is None)
            listed, by_tree = grown[0] or listed, grown[1] or by_tree
        else:
            sequence_of_row = np.sort(rng.integers(0, num_sequences, rng.integers(0, 5)))
            rows = QueryRows(sequence_of_row, np.full(len(sequence_of_row), 100))
            listed, by_tree = listed.with_rows(rows), by_tree.with_rows(rows)


def test_sequences_that_are_not_neighbours_share_less_and_see_all() -> None:
    tables: list[Table] = [([1, 2], [-1, -1]), ([5], [-1]), ([1, 3], [-1, -1])]
    plan = both(tables, QueryRows([0, 1, 2], [7, 3, 7]), "always")[1]
    assert pieces_of(plan)[0] == []
    assert [runs[0][0] for _, runs in pieces_of(plan)[1]] == [[1, 2], [5], [1, 3]]


def num_calls(tables: list[Table]) -> int:
    """Count calls of Python functions and of others while a plan of decodes is built by the tree."""
    lineages, num = lineages_of(tables), 0
    rows = QueryRows(np.arange(len(tables)), np.full(len(tables), 1 << 20))

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        build_plan(lineages, rows, **SIZES)
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.parametrize("num_own", [0, 3])
def test_calls_do_not_grow_with_the_shared_prefix(num_own: int) -> None:
    """128 sequences over a prefix of 8k tokens in pages of 32, or four times that: 33,000 references, or 131,000."""

    def tables(num_sequences: int, num_shared: int) -> list[Table]:
        own = [[2000 + 10 * i + j for j in range(num_own)] for i in range(num_sequences)]
        return [([*range(num_shared), *pages], [ALL_VISIBLE] * (num_shared + num_own)) for pages in own]

    assert abs(num_calls(tables(128, 1024)) - num_calls(tables(128, 256))) < 64  # of 768 pages more; some are met first
    assert num_calls(tables(128, 1024)) < 8 * 128
    plan = both(tables(128, 256), QueryRows(np.arange(128), np.full(128, 1 << 20)))[1]
    assert len(plan.work.page_id) <= 256 + 128 * (num_own + 4)
    assert plan.segments.segments[0].masks.size == 256
