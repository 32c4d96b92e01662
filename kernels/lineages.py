"""Finds the segments of exact sequences by their tree, without listing a shared page once for each sharer.

A sequence that sees its own lineage alone has a path in the forest of prefixes: every page stands behind the same pages
in all tables that have it, and its keys are rotated where they stand. With the sequences in depth-first order, sharers
of a page are neighbours. So the lengths of the common prefixes of neighbours say all: a segment is an inner node of the
Cartesian tree over them, found with a stack. `find_segments` finds the same, and does so for deltas and any order.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import ALL_VISIBLE, IntArray, PageTable, References, full_mask
from mneme.kernels.segments import Segment, ranges


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

    @property
    def page_ids(self) -> IntArray:
        """List every page, those that are shared once."""
        own = ranges(np.cumsum(self.lineages.counts) - self.lineages.counts + self.first_own, self._num_own)
        return np.concatenate([*(each.page_ids for each in self.segments), self.lineages.page_ids[own]])

    @property
    def _num_own(self) -> IntArray:
        return self.lineages.counts - self.first_own

    def unshared(self, is_chosen: npt.NDArray[np.bool_]) -> References:
        """See `Segments.unshared`."""
        ends = np.cumsum(self.lineages.counts)
        starts = ends - self.lineages.counts
        begins, sizes = [starts + self.first_own], [self._num_own]
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
    if ids.min(initial=0) < 0:
        raise ValueError(f"page_tables: page ids must be in [0, 2**31) (got {ids.min()})")
    starts = np.cumsum(counts) - counts
    common = _common_prefixes(ids, starts, counts)
    masked = np.flatnonzero(masks != ALL_VISIBLE)
    owners = np.searchsorted(starts, masked, side="right") - 1
    all_masked = list(zip((masked - starts[owners]).tolist(), owners.tolist(), masks[masked].tolist(), strict=True))
    masked_owners: list[int] = owners.tolist()
    full = full_mask(page_size)
    segments: list[Segment] = []
    nodes: list[_Node] = []
    for first, last, low, high in _inner_nodes(common.tolist()):
        page_ids = ids[starts[first] + low : starts[first] + high].astype(np.int64)
        sequences, deltas = np.arange(first, last), np.zeros(last - first, np.int64)
        near = all_masked[bisect_left(masked_owners, first) : bisect_left(masked_owners, last)]
        masks_by_page: dict[int, IntArray] = {}
        for depth, owner, mask in near:
            if low <= depth < high:
                masks_by_page.setdefault(depth - low, np.full(last - first, full))[owner - first] = mask & full
        alike, apart = np.full((1, high - low), full), list[int]()
        for page, shown in sorted(masks_by_page.items()):
            if (shown == shown[0]).all():
                alike[0, page] = shown[0]
            else:
                apart.append(page)
        depths = _between(apart, high - low)
        if depths:
            rest = np.concatenate([np.arange(*some) for some in depths]) if apart else slice(None)
            segments.append(Segment(page_ids[rest], sequences, deltas, alike[:, rest]))
            nodes.append(_Node(first, last, [(low + begin, low + end) for begin, end in depths]))
        if apart:
            columns = np.stack([masks_by_page[page] for page in apart], 1)
            segments.append(Segment(page_ids[apart], sequences, deltas, columns))
            nodes.append(_Node(first, last, [(low + page, low + page + 1) for page in apart]))
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
    common: IntArray = np.minimum(first, ends) - (ends - sizes)
    return common


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


def _between(places: list[int], end: int) -> list[tuple[int, int]]:
    """List the ranges of [0, end) that these places, in order, leave."""
    edges = zip([-1, *places], [*places, end], strict=True)
    return [(before + 1, after) for before, after in edges if before + 1 < after]
