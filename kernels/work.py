"""Lays out a step's work from segments and query rows: which pages are read once for which query rows.

A `WorkList` is flat arrays, which compiled kernels read as they are.
A *piece* is a set of query rows that read the same pages. Its pages come in *runs*: within a run every row uses all
pages with one delta, so a kernel rotates its rows once per run; segments of the same sharers are runs of one piece,
and so are a sequence's own pages under several deltas, so that a row has few partial results. Pieces of shared
segments come first; of the pieces behind them, each query row is in one at most.

Row i of piece p, in run r, uses the key in slot s of page j with `d = delta[delta_begin[r] + i]`: it sees the key iff
its mask bit is set and `slot_position[s] + d <= position[row]` (and `> position[row] - window`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import IntArray, full_mask
from mneme.kernels.segments import LineageSegments, OwnRuns, Segment, Segments, ranges, run_lengths, run_starts
from mneme.kernels.share_cost import ShareCost

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Share = Literal["auto", "always", "never"]

_NO_RUN = -1
# Room behind each private run for pages that a sequence begins later: a plan is laid out anew once in this many pages.
_SPARE_PAGES = 4


class WorkList(NamedTuple):
    """P pieces with R runs in all. Ranges are half-open; those of pages leave gaps for pages to come."""

    num_shared: int  # pieces [0, num_shared) are shared segments, the others private pages
    row_begin: Int32Array  # [P + 1] piece p has the rows row[row_begin[p]:row_begin[p + 1]]
    row: Int32Array  # query rows; one may stand twice in a shared piece, with two deltas
    run_begin: Int32Array  # [P + 1] piece p has the runs [run_begin[p], run_begin[p + 1])
    page_begin: Int32Array  # [R] run r has the pages page_id[page_begin[r]:page_end[r]]
    page_end: Int32Array  # [R]
    page_id: Int32Array
    delta_begin: Int32Array  # [R] the i-th row of the piece has delta[delta_begin[r] + i]
    delta: Int32Array
    mask_number: Int32Array  # parallel to delta: which of the run's masks the row reads
    mask_begin: Int32Array  # [R] mask m of page j is mask[mask_begin[r] + m * mask_stride[r] + j - page_begin[r]]
    mask_stride: Int32Array  # [R] 0 where all rows read one mask
    mask: Int64Array  # bit i shows offset i; bits at and behind page_size are clear
    run_of_sequence: Int64Array  # [S] the private run with delta 0 of each sequence; _NO_RUN where it has none
    room_end: Int32Array  # [R] pages up to here fit before the next run begins
    filled_end: Int32Array  # [R] how far any list with these arrays has filled its run
    # What a backend derives from the work and reads in every step that has it, by the backend's own key.
    derived: dict[Any, Any]

    @property
    def num_pieces(self) -> int:
        """Count the pieces, P."""
        return len(self.run_begin) - 1

    def append(self, sequence: IntArray, page_id: IntArray) -> WorkList | None:
        """Add a private page, all in view, to each of these sequences, in time proportional to their number (and the
        number of runs); None where a page has no run to join or no room, or another list took that room.

        The array of pages is this list's own, filled behind what it reads.
        """
        runs = self.run_of_sequence[sequence]
        found = set(runs.tolist())
        if len(found) < len(runs) or _NO_RUN in found:
            return None
        at = self.page_end[runs]
        if ((self.filled_end[runs] != at) | (at == self.room_end[runs])).any():
            return None
        self.page_id[at] = page_id
        page_end = self.page_end.copy()
        page_end[runs] = self.filled_end[runs] = at + 1
        return self._replace(page_end=page_end, derived={})


class _RowSpans(NamedTuple):
    start: IntArray  # [num_sequences] first row of each sequence
    num_rows: IntArray  # [num_sequences] 0 for a sequence without rows


class _SharedRun(NamedTuple):
    row: IntArray  # [n] query rows, in query order
    delta: IntArray  # [n]
    mask_number: IntArray  # [n] 0 where there is one mask
    page_ids: IntArray  # [c]
    masks: IntArray  # [m, c]


class _Runs(NamedTuple):
    """Runs laid out flat; begins count from 0."""

    row_counts: IntArray  # [P] rows of each piece
    row: IntArray
    run_counts: IntArray  # [P] runs of each piece
    page_counts: IntArray  # [R]
    page_id: npt.NDArray[np.integer[Any]]
    entry_counts: IntArray  # [R] rows of the run's piece
    delta: IntArray
    mask_number: IntArray
    mask_begin: IntArray  # [R]
    mask_stride: IntArray  # [R]
    mask: IntArray


def row_spans(sequence: IntArray, num_sequences: int) -> _RowSpans:
    """Find first row and number of rows of each sequence; refuse rows out of order or of unknown sequences."""
    each = np.arange(num_sequences)
    if np.array_equal(sequence, each):  # decodes
        return _RowSpans(each, np.ones_like(each))
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
    found: Segments | LineageSegments,
    sequence: IntArray,
    num_sequences: int,
    *,
    page_size: int,
    num_groups: int,
    head_dim: int,
    share: Share,
    cost: ShareCost,
) -> WorkList:
    """Decide for each segment whether it is shared, and lay out all work for the given rows."""
    spans = row_spans(sequence, num_sequences)
    chosen = np.zeros(len(found.segments), bool)
    if len(chosen) and share != "never":
        counts = np.array([len(segment.sequences) for segment in found.segments])
        begin = np.cumsum(counts) - counts
        rows = spans.num_rows[np.concatenate([segment.sequences for segment in found.segments])]
        chosen = np.add.reduceat(rows > 0, begin, dtype=np.int64) > 1
        if share == "auto":
            num_tokens = page_size * np.array([len(segment.page_ids) for segment in found.segments])
            chosen &= cost.pay(rows, begin, num_tokens, num_groups=num_groups, head_dim=head_dim)
    pieces: dict[bytes, list[_SharedRun]] = {}
    for index in np.flatnonzero(chosen).tolist():
        run = _shared_run(found.segments[index], spans)
        pieces.setdefault(run.row.tobytes(), []).append(run)
    shared = _shared_runs(list(pieces.values())) if pieces else None
    full = full_mask(page_size)
    private, runs = _private_runs(found.unshared(chosen, full), spans, num_sequences, full)
    return _work_list(shared, private, runs)


def _shared_run(segment: Segment, spans: _RowSpans) -> _SharedRun:
    active = np.flatnonzero(spans.num_rows[segment.sequences])
    active = active[np.argsort(spans.start[segment.sequences[active]], kind="stable")]  # query order
    counts = spans.num_rows[segment.sequences[active]]
    row = ranges(spans.start[segment.sequences[active]], counts)
    delta = np.repeat(segment.deltas[active], counts)
    masks = segment.masks if len(segment.masks) == 1 else segment.masks[active]
    if len(masks) == 1 or (masks == masks[0]).all():
        return _SharedRun(row, delta, np.zeros(len(row), np.int64), segment.page_ids, masks[:1])
    return _SharedRun(row, delta, np.repeat(np.arange(len(active)), counts), segment.page_ids, masks)


def _shared_runs(pieces: list[list[_SharedRun]]) -> _Runs:
    """Runs of equal rows are one piece."""
    runs = [run for piece in pieces for run in piece]
    page_counts = np.array([len(run.page_ids) for run in runs], np.int64)
    mask_sizes = np.array([run.masks.size for run in runs], np.int64)
    return _Runs(
        row_counts=np.array([len(piece[0].row) for piece in pieces], np.int64),
        row=_joined([piece[0].row for piece in pieces]),
        run_counts=np.array([len(piece) for piece in pieces], np.int64),
        page_counts=page_counts,
        page_id=_joined([run.page_ids for run in runs]),
        entry_counts=np.array([len(run.row) for run in runs], np.int64),
        delta=_joined([run.delta for run in runs]),
        mask_number=_joined([run.mask_number for run in runs]),
        mask_begin=np.cumsum(mask_sizes) - mask_sizes,
        mask_stride=np.where(mask_sizes > page_counts, page_counts, 0),
        mask=_joined([run.masks.ravel() for run in runs]),
    )


def _private_runs(own: OwnRuns, spans: _RowSpans, num_sequences: int, full: int) -> tuple[_Runs, IntArray]:
    """One piece per sequence, one run per delta with room for more pages; and which run each sequence has at delta 0.

    Runs whose pages are all seen wholly, as pages to come are, read one row of masks.
    """
    has_rows = spans.num_rows[own.sequence] > 0
    if not has_rows.all():
        pages = np.repeat(has_rows, own.num_pages)
        columns = (own.sequence[has_rows], own.delta[has_rows], own.num_pages[has_rows])
        kept = pages[own.masked]
        masked = (np.cumsum(pages) - 1)[own.masked[kept]]
        own = OwnRuns(*columns, own.page_id[pages], masked, own.mask[kept])
    sequences, deltas, lengths = own.sequence, own.delta, own.num_pages
    piece_starts = run_starts(sequences)
    owners = sequences[piece_starts]
    entry_counts = spans.num_rows[sequences]
    ends = np.cumsum(lengths)
    mask_begin, mask = np.zeros_like(lengths), np.full(lengths.max(initial=0) + _SPARE_PAGES, full)
    if len(own.masked):
        at = np.searchsorted(ends, own.masked, side="right")
        sizes = np.zeros_like(lengths)
        sizes[at] = lengths[at] + _SPARE_PAGES
        mask_begin = np.where(sizes, len(mask) + np.cumsum(sizes) - sizes, 0)
        mask = np.append(mask, np.full(sizes.sum(), full))
        mask[(mask_begin - ends + lengths)[at] + own.masked] = own.mask
    run_of_sequence = np.full(num_sequences, _NO_RUN)
    is_appended = deltas == 0
    run_of_sequence[sequences[is_appended]] = np.flatnonzero(is_appended)
    runs = _Runs(
        row_counts=spans.num_rows[owners],
        row=ranges(spans.start[owners], spans.num_rows[owners]),
        run_counts=run_lengths(piece_starts, len(sequences)),
        page_counts=lengths,
        page_id=_with_room(own.page_id, ends),
        entry_counts=entry_counts,
        delta=np.repeat(deltas, entry_counts),
        mask_number=np.zeros(int(entry_counts.sum()), np.int64),
        mask_begin=mask_begin,
        mask_stride=np.zeros_like(lengths),
        mask=mask,
    )
    return runs, run_of_sequence


def _with_room(page_id: npt.NDArray[Any], ends: IntArray) -> npt.NDArray[Any]:
    """Put room for pages to come behind each run. Runs are copied as a whole, which takes less than indices."""
    view, room = page_id.data, bytes(_SPARE_PAGES * page_id.itemsize)
    parts: list[memoryview | bytes] = []
    for begin, end in pairwise([0, *ends.tolist()]):
        parts += (view[begin:end], room)
    return np.frombuffer(bytearray().join(parts), page_id.dtype)


def _work_list(shared: _Runs | None, private: _Runs, run_of_sequence: IntArray) -> WorkList:
    both, num_shared_runs = private, 0
    if shared is not None:
        num_shared_runs = len(shared.page_counts)
        private.mask_begin[:] += len(shared.mask)
        run_of_sequence[run_of_sequence != _NO_RUN] += num_shared_runs
        both = _Runs(*(np.concatenate(pair) for pair in zip(shared, private, strict=True)))
    room = both.page_counts.copy()
    room[num_shared_runs:] += _SPARE_PAGES
    places = _bounds(room)
    page_begin = places[:-1]
    page_end = (page_begin + both.page_counts).astype(np.int32)
    return WorkList(
        num_shared=0 if shared is None else len(shared.row_counts),
        row_begin=_bounds(both.row_counts),
        row=_int32(both.row),
        run_begin=_bounds(both.run_counts),
        page_begin=page_begin,
        page_end=page_end,
        page_id=_int32(both.page_id),
        delta_begin=_bounds(both.entry_counts)[:-1],
        delta=_int32(both.delta),
        mask_number=both.mask_number.astype(np.int32),
        mask_begin=_int32(both.mask_begin),
        mask_stride=both.mask_stride.astype(np.int32),
        mask=both.mask,
        run_of_sequence=run_of_sequence,
        room_end=places[1:],
        filled_end=page_end.copy(),
        derived={},
    )


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _bounds(counts: IntArray) -> Int32Array:
    """[0, counts[0], counts[0] + counts[1], ...]"""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    if bounds[-1] >= 2**31:
        raise ValueError(f"page_tables: {bounds[-1]} entries of work are too many")
    return bounds.astype(np.int32)


def _int32(array: npt.NDArray[np.integer[Any]]) -> Int32Array:
    if array.dtype != np.int32 and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise ValueError(f"page_tables: {array.size} entries of work are too many")
    return array.astype(np.int32, copy=False)
