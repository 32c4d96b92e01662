"""Finds the segments of exact sequences by their tree, without listing a shared page once for each sharer.

A sequence that sees its own lineage alone has a path in the forest of prefixes: every page stands behind the same pages
in all tables that have it, and its keys are rotated where they stand. With the sequences in depth-first order, sharers
of a page are neighbours. So the lengths of the common prefixes of neighbours say all: a segment is an inner node of the
Cartesian tree over them, found with a stack. `find_segments` finds the same, and does so for deltas and any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import ALL_VISIBLE, IntArray, PageTable, References, full_mask
from mneme.kernels.segments import Segment, ranges, run_starts


@dataclass(frozen=True, slots=True, eq=False)
class Lineages:
    """The page tables of exact sequences in depth-first order, one behind the other; every delta is 0.

    page_ids    int32 [N]
    masks       int64 [N]  bit i shows offset i; each shows something
    counts      int64 [S]  pages of each sequence

    Nobody checks that pages stand in one place of one tree, nor the order: where sharers are not neighbours, less is
    shared, and results are right.
    """

    page_ids: npt.NDArray[np.int32]
    masks: IntArray
    counts: IntArray

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        """Return each sequence's own table."""
        ends = np.cumsum(self.counts)[:-1]
        zeros = np.zeros(len(self.page_ids), np.int32)
        columns = (np.split(column, ends) for column in (self.page_ids, zeros, self.masks))
        return tuple(map(PageTable, *columns)) if len(self) else ()


class _Node(NamedTuple):
    """What the sequences [first, last) share, and no other: their pages at these depths, as ranges [low, high)."""

    first: int
    last: int
    depths: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class LineageSegments:
    """All segments of lineages; see `Segments`."""

    segments: tuple[Segment, ...]
    lineages: Lineages
    page_size: int
    nodes: tuple[_Node, ...]  # of each segment
    first_own: IntArray  # [S] depth from which on a sequence's pages are nobody else's

    def unshared(self, is_chosen: npt.NDArray[np.bool_]) -> References:
        """See `Segments.unshared`."""
        ends = np.cumsum(self.lineages.counts)
        starts = ends - self.lineages.counts
        begins, sizes = [starts + self.first_own], [self.lineages.counts - self.first_own]
        sequences = [np.arange(len(starts))]
        for index in np.flatnonzero(~is_chosen).tolist():
            first, last, depths = self.nodes[index]
            for low, high in depths:
                begins.append(starts[first:last] + low)
                sizes.append(np.full(last - first, high - low))
                sequences.append(sequences[0][first:last])
        begin, size, sequence = np.concatenate(begins), np.concatenate(sizes), np.concatenate(sequences)
        if len(begins) > 1:
            order = np.argsort(begin, kind="stable")  # by sequence, then in the order of its table
            begin, size, sequence = begin[order], size[order], sequence[order]
        at = ranges(begin, size)
        return References(
            np.repeat(sequence, size),
            self.lineages.page_ids[at].astype(np.int64),
            np.zeros(len(at), np.int64),
            self.lineages.masks[at] & full_mask(self.page_size),
        )


def find_lineage_segments(lineages: Lineages, page_size: int) -> LineageSegments:
    """Find what neighbours share, in time proportional to the pages of the tables, by comparing them once."""
    ids, masks, counts = lineages.page_ids, lineages.masks, lineages.counts
    starts = np.cumsum(counts) - counts
    common = _common_prefixes(ids, starts, counts)
    masked = np.flatnonzero(masks != ALL_VISIBLE)
    masked_sequence = np.searchsorted(starts, masked, side="right") - 1
    masked_depth = masked - starts[masked_sequence]
    full = full_mask(page_size)
    segments: list[Segment] = []
    nodes: list[_Node] = []
    for first, last, low, high in _inner_nodes(common.tolist()):
        page_ids = ids[starts[first] + low : starts[first] + high].astype(np.int64)
        sequences = np.arange(first, last)
        deltas = np.zeros(last - first, np.int64)
        own = slice(*np.searchsorted(masked_sequence, (first, last)).tolist())
        inside = (masked_depth[own] >= low) & (masked_depth[own] < high)
        if not inside.any():
            segments.append(Segment(page_ids, sequences, deltas, np.full((1, high - low), full)))
            nodes.append(_Node(first, last, [(low, high)]))
            continue
        shown = np.full((last - first, high - low), full)
        at = masked_sequence[own][inside] - first, masked_depth[own][inside] - low
        shown[at] = masks[masked[own][inside]] & full
        agrees = (shown == shown[0]).all(0)
        for some in (agrees, ~agrees):
            chosen = np.flatnonzero(some)
            if len(chosen):
                masks_of = shown[:1, chosen] if some is agrees else shown[:, chosen]
                segments.append(Segment(page_ids[chosen], sequences, deltas, masks_of))
                nodes.append(_Node(first, last, _as_ranges(chosen + low)))
    neighbours = np.concatenate(([0], common, [0]))
    first_own = np.maximum(neighbours[1:], neighbours[:-1]) if len(counts) else np.zeros(0, np.int64)
    return LineageSegments(tuple(segments), lineages, page_size, tuple(nodes), first_own)


def _common_prefixes(ids: npt.NDArray[np.int32], starts: IntArray, counts: IntArray) -> IntArray:
    """Return how many pages each sequence but the last begins with that its successor begins with too."""
    if len(counts) < 2:
        return np.zeros(0, np.int64)
    sizes = np.minimum(counts[1:], counts[:-1])
    some = np.flatnonzero(sizes)
    alike = np.zeros(len(sizes), bool)
    alike[some] = ids[starts[:-1][some]] == ids[starts[1:][some]]
    sizes[~alike] = 0
    ends = np.cumsum(sizes)
    theirs = ranges(starts[1:], sizes)
    differ = np.flatnonzero(ids[theirs] != ids[theirs - np.repeat(starts[1:] - starts[:-1], sizes)])
    first = np.append(differ, len(theirs))[np.searchsorted(differ, ends - sizes)]
    return np.minimum(first, ends) - (ends - sizes)


def _inner_nodes(common: list[int]) -> list[tuple[int, int, int, int]]:
    """List (first sequence, end, first depth, end) of whatever two sequences or more share, and no other has."""
    nodes = []
    open_: list[tuple[int, int]] = []  # (end of its depths, first sequence), deeper ones behind
    for sequence, depth in enumerate([*common, 0], 1):
        first = sequence - 1
        while open_ and open_[-1][0] > depth:
            high, first = open_.pop()
            nodes.append((first, sequence, max(depth, open_[-1][0] if open_ else 0), high))
        if depth and not (open_ and open_[-1][0] == depth):
            open_.append((depth, first))
    return nodes


def _as_ranges(numbers: IntArray) -> list[tuple[int, int]]:
    """Group ascending numbers to ranges [low, high)."""
    begins = run_starts(numbers - np.arange(len(numbers)))
    ends = np.append(begins[1:], len(numbers)) - 1
    return list(zip(numbers[begins].tolist(), (numbers[ends] + 1).tolist(), strict=True))

