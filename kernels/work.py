"""From segments and query rows to work: which keys are read once for which query rows.

A backend sees groups. A group is `n` equal-shaped pieces of work: each piece has the same number of query rows and
(up to padding) of pages. Shared segments come first, one group each (phase one); private pages follow (phase two),
those of short rows batched by size. A *turned row* is a query row with one delta: the same query, rotated to
`position - delta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import IntArray, References
from mneme.kernels.segments import Segment, Segments, run_lengths, run_starts, sharer_keys, split_sharer_keys

Share = Literal["auto", "always", "never"]

# Private work of up to this many rows per sequence is batched with that of other sequences.
_MAX_BATCHED_ROWS = 8
# Batched pieces are padded to the longest; buckets of powers of two, and none smaller than this many tokens.
_SMALLEST_BUCKET_TOKENS = 128
# A backend goes over the keys once for about this many rows of one group.
_ROWS_PER_READING = 64
# What a segment of its own costs in every layer (20 small operations, a merge), as elements of K that could be read
# and multiplied instead. Measured on one CPU core with 8 query heads, 4 KV heads of 64: sharing breaks even at 250 to
# 450 saved tokens in float32 and 500 to 900 in bfloat16.
_BREAK_EVEN_ELEMENTS = 512 * 4 * 64


class Group(NamedTuple):
    """`n` pieces of work of one shape.

    A piece reads the pages `page_ids[i]` for the turned rows `turned[i]`. Row r of the piece sees offset o of page p
    iff bit o of `masks[i, mask_of_row[r], p]` is set and the visibility rule holds. Padding pages have mask 0.
    """

    turned: IntArray  # [n, R] indices of turned rows
    page_ids: IntArray  # [n, P]
    masks: IntArray  # [n, m, P]
    mask_of_row: IntArray | None  # [R] which of the m masks a row reads; None: there is one


class Work(NamedTuple):
    """All of a step's work."""

    turned_row: IntArray  # [U] the query row of each turned row, ascending
    turned_delta: IntArray  # [U]
    shared: tuple[Group, ...]
    private: tuple[Group, ...]


class _RowSpans(NamedTuple):
    start: IntArray  # [num_sequences] first row of each sequence
    num_rows: IntArray  # [num_sequences] 0 for a sequence without rows


class _Piece(NamedTuple):
    """A group whose turned rows are still (row, delta)."""

    row: IntArray  # [n, R]
    delta: IntArray  # [n, R]
    page_ids: IntArray
    masks: IntArray
    mask_of_row: IntArray | None


def worth_sharing(rows_per_sharer: IntArray, num_tokens: int, kv_width: int) -> bool:
    """Whether a pass of its own over a segment costs less than reading it for every sharer.

    Rows of a long prefill gain nothing: they fill a reading by themselves. `kv_width` is the size of a token's key.
    """
    readings_apart = np.ceil(rows_per_sharer / _ROWS_PER_READING).sum()
    readings_shared = np.ceil(rows_per_sharer.sum() / _ROWS_PER_READING)
    return bool((readings_apart - readings_shared) * num_tokens * kv_width >= _BREAK_EVEN_ELEMENTS)


def row_spans(sequence: IntArray, num_sequences: int) -> _RowSpans:
    """First row and number of rows of each sequence; refuses rows out of order or of unknown sequences."""
    start, count = np.zeros(num_sequences, np.int64), np.zeros(num_sequences, np.int64)
    if not len(sequence):
        return _RowSpans(start, count)
    if sequence.min() < 0 or sequence.max() >= num_sequences:
        raise ValueError(f"rows: sequence must be in [0, {num_sequences}) (got {sequence.min()}..{sequence.max()})")
    starts = run_starts(sequence)
    heads = sequence[starts]
    count[heads] = run_lengths(starts, len(sequence))
    start[heads] = starts
    if count.sum() != len(sequence):
        raise ValueError("rows: the rows of one sequence must be contiguous")
    return _RowSpans(start, count)


def arrange(
    refs: References,
    found: Segments,
    sequence: IntArray,
    num_sequences: int,
    *,
    page_size: int,
    kv_width: int,
    share: Share,
) -> Work:
    """Decide for each segment whether it is shared, and lay out all work for the given rows."""
    spans = row_spans(sequence, num_sequences)
    chosen = np.zeros(len(found.segments) + 1, bool)  # the last one is PRIVATE's
    shared = []
    for index, segment in enumerate(found.segments):
        rows = spans.num_rows[segment.sequences]
        rows = rows[rows > 0]
        pays = share == "always" or worth_sharing(rows, len(segment.page_ids) * page_size, kv_width)
        if share != "never" and len(rows) > 1 and pays:
            chosen[index] = True
            shared.append(_shared_piece(segment, spans))
    private = _private_pieces(refs, ~chosen[found.segment_of_ref], spans, page_size)
    return _turn(shared, private)


def _shared_piece(segment: Segment, spans: _RowSpans) -> _Piece:
    active = np.flatnonzero(spans.num_rows[segment.sequences])
    active = active[np.argsort(spans.start[segment.sequences[active]], kind="stable")]  # query order
    counts = spans.num_rows[segment.sequences[active]]
    row = _ranges(spans.start[segment.sequences[active]], counts)
    delta = np.repeat(segment.deltas[active], counts)
    masks = segment.masks[active]
    if (masks == masks[0]).all():
        return _Piece(row[None], delta[None], segment.page_ids[None], masks[None, :1], None)
    mask_of_row = np.repeat(np.arange(len(active)), counts)
    return _Piece(row[None], delta[None], segment.page_ids[None], masks[None], mask_of_row)


def _private_pieces(
    refs: References, is_private: npt.NDArray[np.bool_], spans: _RowSpans, page_size: int
) -> list[_Piece]:
    """One part per (sequence, delta), in buckets of similar size."""
    wanted = np.flatnonzero(is_private & (spans.num_rows[refs.sequence] > 0))
    if not len(wanted):
        return []
    keys = sharer_keys(refs.sequence[wanted], refs.delta[wanted])
    if (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys, kind="stable")
        wanted, keys = wanted[order], keys[order]
    starts = run_starts(keys)
    lengths = run_lengths(starts, len(keys))
    sequences, deltas = split_sharer_keys(keys[starts])
    bucket = _buckets(spans.num_rows[sequences], lengths, page_size)
    pages, masks = refs.page_id[wanted], refs.mask[wanted]
    pieces = []
    for parts in _members(bucket):
        lanes = np.arange(lengths[parts].max())
        valid = lanes < lengths[parts][:, None]
        entry = np.where(valid, starts[parts][:, None] + lanes, starts[parts][:, None])
        num_rows = spans.num_rows[sequences[parts[0]]]
        row = spans.start[sequences[parts]][:, None] + np.arange(num_rows)
        delta = np.broadcast_to(deltas[parts][:, None], row.shape)
        pieces.append(_Piece(row, delta, pages[entry], np.where(valid, masks[entry], 0)[:, None], None))
    return pieces


def _buckets(num_rows: IntArray, num_pages: IntArray, page_size: int) -> IntArray:
    """A number per part; parts of one number are batched. Parts of many rows stay alone."""
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


def _turn(shared: list[_Piece], private: list[_Piece]) -> Work:
    """Number the distinct (row, delta) pairs."""
    pieces = shared + private
    if not pieces:
        empty = np.zeros(0, np.int64)
        return Work(empty, empty, (), ())
    keys = np.concatenate([sharer_keys(piece.row, piece.delta).ravel() for piece in pieces])
    distinct, inverse = np.unique(keys, return_inverse=True)
    row, delta = split_sharer_keys(distinct)
    ends = np.cumsum([piece.row.size for piece in pieces])
    groups = [
        Group(turned.reshape(piece.row.shape), piece.page_ids, piece.masks, piece.mask_of_row)
        for piece, turned in zip(pieces, np.split(inverse, ends[:-1]), strict=True)
    ]
    return Work(row, delta, tuple(groups[: len(shared)]), tuple(groups[len(shared) :]))


def _ranges(starts: Sequence[int] | IntArray, counts: IntArray) -> IntArray:
    """start, start + 1, ... for each range, one behind the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
