"""A work list as the torch backend takes it: groups of equal-shaped pieces for batched products.

A group is `n` pieces of work, each with the same number of rows and (up to padding) of pages. Every run of shared work
is a group of its own; private runs of few rows are batched by size. A *turned row* is a query row with one delta: the
same query, rotated to `position - delta`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mneme.kernels.page_table import IntArray
from mneme.kernels.segments import run_starts, sharer_keys, split_sharer_keys
from mneme.kernels.work_list import WorkList

# Private work of up to this many rows per sequence is batched with that of other sequences.
_MAX_BATCHED_ROWS = 8
# Batched pieces are padded to the longest; buckets of powers of two, and none smaller than this many tokens.
_SMALLEST_BUCKET_TOKENS = 128


class Group(NamedTuple):
    """`n` pieces of work of one shape.

    A piece reads the pages `page_ids[i]` for the turned rows `turned[i]`. Row r of the piece sees offset o of page p
    iff bit o of `masks[i, mask_of_row[r], p]` is set and the visibility rule holds. Padding pages have mask 0.
    """

    turned: IntArray  # [n, R] indices of turned rows
    page_ids: IntArray  # [n, P]
    masks: IntArray  # [n, m, P]
    mask_of_row: IntArray | None  # [R] which of the m masks a row reads; None: there is one


class Groups(NamedTuple):
    """All of a step's work, shared groups first."""

    turned_row: IntArray  # [U] the query row of each turned row, ascending
    turned_delta: IntArray  # [U]
    groups: tuple[Group, ...]


class _Entries(NamedTuple):
    """A group whose turned rows are still (row, delta)."""

    keys: IntArray  # [n, R] sharer_keys(row, delta)
    page_ids: IntArray
    masks: IntArray
    mask_of_row: IntArray | None


def groups_of(work: WorkList, page_size: int) -> Groups:
    """The groups of a work list; kept with it."""
    groups: Groups | None = work.derived.get("groups")
    if groups is None:
        num_shared_runs = int(work.run_begin[work.num_shared])
        piece_of_run = np.repeat(np.arange(work.num_pieces), np.diff(work.run_begin))
        shared = [_shared_entries(work, run, piece_of_run[run]) for run in range(num_shared_runs)]
        groups = work.derived["groups"] = _turn(shared + _private_entries(work, piece_of_run, page_size))
    return groups


def _shared_entries(work: WorkList, run: int, piece: int) -> _Entries:
    rows = work.row[work.row_begin[piece] : work.row_begin[piece + 1]]
    entries = slice(work.delta_begin[run], work.delta_begin[run] + len(rows))
    keys = sharer_keys(rows.astype(np.int64), work.delta[entries].astype(np.int64))
    page_ids = work.page_id[work.page_begin[run] : work.page_end[run]].astype(np.int64)
    numbers, stride = work.mask_number[entries], int(work.mask_stride[run])
    num_masks = int(numbers.max()) + 1
    start = work.mask_begin[run] + stride * np.arange(num_masks)
    masks = work.mask[start[:, None] + np.arange(len(page_ids))]
    return _Entries(keys[None], page_ids[None], masks[None], numbers.astype(np.int64) if stride else None)


def _private_entries(work: WorkList, piece_of_run: IntArray, page_size: int) -> list[_Entries]:
    """Private runs in buckets of similar size."""
    runs = np.arange(work.run_begin[work.num_shared], len(work.page_begin))
    if not len(runs):
        return []
    lengths = (work.page_end - work.page_begin).astype(np.int64)[runs]
    num_rows = np.diff(work.row_begin).astype(np.int64)[piece_of_run[runs]]
    entries = []
    for members in _members(_buckets(num_rows, lengths, page_size)):
        parts, longest, rows = runs[members], lengths[members].max(), np.arange(num_rows[members[0]])
        row = work.row[work.row_begin[piece_of_run[parts]][:, None] + rows].astype(np.int64)
        delta = work.delta[work.delta_begin[parts][:, None] + rows].astype(np.int64)
        lanes = np.arange(longest)
        valid = lanes < lengths[members][:, None]
        pages = work.page_id[np.where(valid, work.page_begin[parts][:, None] + lanes, work.page_begin[parts][:, None])]
        masks = work.mask[np.where(valid, work.mask_begin[parts][:, None] + lanes, work.mask_begin[parts][:, None])]
        masks = np.where(valid, masks, 0)[:, None]
        entries.append(_Entries(sharer_keys(row, delta), pages.astype(np.int64), masks, None))
    return entries


def _buckets(num_rows: IntArray, num_pages: IntArray, page_size: int) -> IntArray:
    """A number per run; runs of one number are batched. Runs of many rows stay alone."""
    tokens = np.maximum(num_pages * page_size, _SMALLEST_BUCKET_TOKENS)
    size_class = np.ceil(np.log2(tokens)).astype(np.int64)
    alone = -1 - np.arange(len(num_rows))
    return np.where(num_rows > _MAX_BATCHED_ROWS, alone, num_rows * 64 + size_class)


def _members(labels: IntArray) -> list[IntArray]:
    """The indices of each label."""
    if (labels == labels[0]).all() and labels[0] >= 0:
        return [np.arange(len(labels))]
    order = np.argsort(labels, kind="stable")
    return np.split(order, run_starts(labels[order])[1:])


def _turn(pieces: list[_Entries]) -> Groups:
    """Number the distinct (row, delta) pairs."""
    if not pieces:
        empty = np.zeros(0, np.int64)
        return Groups(empty, empty, ())
    distinct, inverse = np.unique(np.concatenate([piece.keys.ravel() for piece in pieces]), return_inverse=True)
    row, delta = split_sharer_keys(distinct)
    ends = np.cumsum([piece.keys.size for piece in pieces])
    groups = [
        Group(turned.reshape(piece.keys.shape), piece.page_ids, piece.masks, piece.mask_of_row)
        for piece, turned in zip(pieces, np.split(inverse, ends[:-1]), strict=True)
    ]
    return Groups(row, delta, tuple(groups))
