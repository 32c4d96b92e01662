"""Cutting a step's work list into tiles, one per Triton program and KV head; numpy only.

A tile is a block of a piece's rows over a range of the piece's pages. Rows are counted as entries times query heads
per KV head. Long pieces are cut into several ranges, so that the programs fill the GPU; that leaves a row with
several partial results, which cost memory and a merge, so `_range_pages` weighs one against the other. Tiles do not
depend on positions, and stay right when pages are appended: the range that reaches a run's end is open.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.work import Int32Array, WorkList

TILE_WORDS = 8
OPEN_END = 2**31 - 1  # of a range that goes on to wherever its run ends
# What a program costs besides its keys (start, queries, results), and a merge, as keys that could be read instead.
_TOKENS_PER_PROGRAM = 64
_TOKENS_PER_MERGE = 96
_SHORTEST_RANGE_TOKENS = 256
_PREFILL_ROWS = 128  # query rows of prompts times heads per KV head of a piece that has many
_LONGEST_RANGE_TOKENS = 1 << 17

_IntArray = npt.NDArray[np.int64]


class Grid(NamedTuple):
    """Holds what the cut depends on beside the work."""

    page_size: int
    num_groups: int  # query heads per KV head
    num_kv_heads: int
    narrow_m: int  # rows of a tile, for pieces that fit into one such
    wide_m: int  # for all others
    num_at_once: int  # programs that run at the same time on the whole device
    max_split_slots: int  # cutting for parallelism must not leave more partial results than this
    is_apart: bool = False  # tiles of more rows than narrow_m get a launch of their own


class Tiles(NamedTuple):
    """Tiles in the order in which they should start, those that stand apart behind the others, and where rows with
    several parts find them.

    tile        int32 [n, TILE_WORDS]  first entry (index into `row`), number of entries, first entry's number in its
    piece, first run, end of runs, first page in the first run, end of pages in the last run, slot of the first
    entry's partial result
    """

    tile: Int32Array
    num_parts: Int32Array  # [T] partial results of each query row; 1 means that there is nothing to merge, 0 no keys
    merged_row: Int32Array  # query rows with more parts than 1
    part_begin: Int32Array  # [len(merged_row) + 1] row i has the slots part[part_begin[i]:part_begin[i + 1]]
    part: Int32Array
    num_slots: int
    num_apart: int
    is_prefill: bool  # pieces with many rows of prompts have more keys to read: look for those that rows can see


class _Pieces(NamedTuple):
    """Holds what is to be cut; one entry per piece."""

    num_rows: _IntArray
    rows_per_tile: _IntArray
    num_blocks: _IntArray
    num_pages: _IntArray
    first_page: _IntArray  # counted over the pages of all runs


def cut(work: WorkList, sequence: _IntArray, grid: Grid) -> Tiles:
    """Cut a work list into tiles; `sequence`: of each of its query rows."""
    page_counts = (work.page_end - work.page_begin).astype(np.int64)
    page_ends = np.cumsum(page_counts)
    pieces = _pieces(work, page_counts, page_ends, grid)
    range_pages = _range_pages(pieces, grid)
    num_ranges = _num_ranges(pieces.num_pages, range_pages)
    counts = num_ranges * pieces.num_blocks
    piece = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    number = within // np.maximum(pieces.num_blocks, 1)[piece]
    # Later rows of a prefill see more keys and start first.
    block = pieces.num_blocks[piece] - 1 - within % np.maximum(pieces.num_blocks, 1)[piece]
    start = number * range_pages
    is_last: npt.NDArray[np.bool_] = number == num_ranges[piece] - 1
    stop = np.where(is_last, pieces.num_pages[piece], start + range_pages)
    order = _longest_first(stop - start, range_pages)
    piece, block, start, stop, is_last = piece[order], block[order], start[order], stop[order], is_last[order]
    first_entry = block * pieces.rows_per_tile[piece]
    num_entries = np.minimum(pieces.rows_per_tile[piece], pieces.num_rows[piece] - first_entry)
    is_apart = grid.is_apart & (num_entries * grid.num_groups > grid.narrow_m)
    order = np.argsort(is_apart, kind="stable")
    piece, start, stop, is_last = piece[order], start[order], stop[order], is_last[order]
    first_entry, num_entries = first_entry[order], num_entries[order]
    tile = np.empty((len(piece), TILE_WORDS), np.int32)
    tile[:, 0] = work.row_begin[piece] + first_entry
    tile[:, 1] = num_entries
    tile[:, 2] = first_entry
    tile[:, 3:7] = _page_ranges(work, page_counts, page_ends, piece, pieces.first_page[piece], start, stop, is_last)
    num_apart = int(is_apart.sum())
    is_prefill = _is_prefill(work, pieces, sequence, grid)
    return _with_parts(tile, work.row, len(sequence), num_apart=num_apart, is_prefill=is_prefill)


def _is_prefill(work: WorkList, pieces: _Pieces, sequence: _IntArray, grid: Grid) -> bool:
    """Rows of sequences that have several count: many decodes over what they share see all of it."""
    is_prompt = np.bincount(sequence)[sequence] > 1
    before = np.concatenate(([0], np.cumsum(is_prompt[work.row])))
    num_rows = (before[work.row_begin[1:]] - before[work.row_begin[:-1]]) * grid.num_groups
    is_large, num_blocks = num_rows >= _PREFILL_ROWS, -(-num_rows // _PREFILL_ROWS)
    return bool((pieces.num_pages * num_blocks)[is_large].sum() > pieces.num_pages[~is_large].sum())


def _pieces(work: WorkList, page_counts: _IntArray, page_ends: _IntArray, grid: Grid) -> _Pieces:
    num_rows = np.diff(work.row_begin).astype(np.int64)
    before = np.concatenate(([0], page_ends))
    first_page = before[work.run_begin[:-1]]
    num_pages = before[work.run_begin[1:]] - first_page
    is_wide = num_rows * grid.num_groups > grid.narrow_m
    rows_per_tile = np.where(is_wide, grid.wide_m // grid.num_groups, grid.narrow_m // grid.num_groups)
    num_blocks = -(-num_rows // rows_per_tile) * (num_pages > 0)
    return _Pieces(num_rows, rows_per_tile, num_blocks, num_pages, first_page)


def _num_ranges(num_pages: _IntArray, range_pages: int) -> _IntArray:
    """The last range takes from half to one and a half of the others' length."""
    return np.maximum(1, (num_pages + range_pages // 2) // range_pages)


def _range_pages(pieces: _Pieces, grid: Grid) -> int:
    """Choose the length of ranges with the least estimated time.

    Programs are dealt out longest first, `num_at_once` at a time, and a round takes as long as its longest. Only
    powers of two are tried, so that tiles seldom change while contexts grow.
    """
    longest = int(pieces.num_pages.max(initial=1))
    shortest = max(1, _SHORTEST_RANGE_TOKENS // grid.page_size)
    best, best_cost = longest, np.inf
    candidate = 1 << max(0, (_LONGEST_RANGE_TOKENS // grid.page_size).bit_length() - 1)
    while candidate >= shortest:
        if candidate < 2 * longest:
            num_ranges = _num_ranges(pieces.num_pages, candidate)
            num_slots = int((pieces.num_rows * num_ranges * (num_ranges > 1)).sum())
            cost = _cost(pieces, num_ranges, candidate, grid)
            if cost < best_cost and num_slots <= grid.max_split_slots:
                best, best_cost = candidate, cost
        candidate //= 2
    return best


def _cost(pieces: _Pieces, num_ranges: _IntArray, range_pages: int, grid: Grid) -> float:
    """Estimate the time, in keys read by one program."""
    whole = np.repeat(range_pages, int((pieces.num_blocks * (num_ranges - 1)).sum()))
    last = np.repeat(pieces.num_pages - (num_ranges - 1) * range_pages, pieces.num_blocks)
    loads = np.sort(np.concatenate((whole, last)))[::-1]
    firsts = np.arange(0, len(loads) * grid.num_kv_heads, grid.num_at_once) // grid.num_kv_heads
    merge = _TOKENS_PER_MERGE if (num_ranges > 1).any() else 0
    return float((loads[firsts] * grid.page_size + _TOKENS_PER_PROGRAM).sum() + merge)


def _longest_first(lengths: _IntArray, range_pages: int) -> _IntArray:
    """Order tiles by falling length in quarters of a range; tiles of one length keep their order, for the L2 cache."""
    quarters = -(-4 * lengths // range_pages)
    order: _IntArray = np.argsort(-quarters, kind="stable")
    return order


def _page_ranges(
    work: WorkList,
    page_counts: _IntArray,
    page_ends: _IntArray,
    piece: _IntArray,
    first_page: _IntArray,
    start: _IntArray,
    stop: _IntArray,
    is_last: npt.NDArray[np.bool_],
) -> _IntArray:
    """Return first run, end of runs, first page and end of pages [n, 4] of ranges counted in pages of their pieces."""
    first_run = np.searchsorted(page_ends, first_page + start, side="right")
    last_run = np.searchsorted(page_ends, first_page + stop - 1, side="right")
    begins = page_ends - page_counts
    from_page = work.page_begin[first_run] + (first_page + start - begins[first_run])
    to_page = work.page_begin[last_run] + (first_page + stop - begins[last_run])
    is_open = is_last | (to_page == work.page_end[last_run])
    run_end = np.where(is_last, work.run_begin[piece + 1], last_run + 1)
    return np.stack((first_run, run_end, from_page, np.where(is_open, OPEN_END, to_page)), 1)


def _with_parts(tile: Int32Array, row: Int32Array, num_rows: int, *, num_apart: int, is_prefill: bool) -> Tiles:
    """Number the partial results of rows that have several."""
    num_entries = tile[:, 1].astype(np.int64)
    tile_of_entry = np.repeat(np.arange(len(tile)), num_entries)
    within = np.arange(len(tile_of_entry)) - np.repeat(np.cumsum(num_entries) - num_entries, num_entries)
    row_of_entry = row[tile[:, 0][tile_of_entry] + within]
    num_parts = np.bincount(row_of_entry, minlength=num_rows)
    is_part = num_parts[row_of_entry] > 1
    needs_slots = np.bincount(tile_of_entry[is_part], minlength=len(tile)) > 0
    num_slots = num_entries * needs_slots
    tile[:, 7] = np.cumsum(num_slots) - num_slots
    slot = tile[:, 7][tile_of_entry] + within
    parts = slot[is_part][np.argsort(row_of_entry[is_part], kind="stable")]
    merged_row = np.flatnonzero(num_parts > 1)
    part_begin = np.concatenate(([0], np.cumsum(num_parts[merged_row])))
    return Tiles(
        tile=tile,
        num_parts=num_parts.astype(np.int32),
        merged_row=merged_row.astype(np.int32),
        part_begin=part_begin.astype(np.int32),
        part=parts.astype(np.int32),
        num_slots=int(num_slots.sum()),
        num_apart=num_apart,
        is_prefill=is_prefill,
    )
