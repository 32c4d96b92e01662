"""Finding segments: runs of pages that one set of sequences shares, each with one delta (ChunkAttention 3.1).

The sequences need not be told apart by a tree: a page's signature is the set of its sharers, a sharer being
`(sequence, delta)`, so a sequence that uses a page twice with two deltas shares it with itself. Pages of one
signature are one segment. Masks may differ between sharers and are kept per (sharer, page); pages on whose masks all
agree are segments of their own, because a tile of such pages needs no mask. All work is on whole arrays; the only
Python loop is over segments.

Sequences that see their own lineages alone are told apart by their tree (`Lineages`): every page stands behind the same
pages in all tables that have it, and its keys are rotated where they stand. In depth-first order sharers of a page are
neighbours, so the lengths of the common prefixes of neighbours say all, and no shared page is listed once for each
sharer: a segment is an inner node of the Cartesian tree over these lengths, found with a stack.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import ALL_VISIBLE, IntArray, PageTable, References, full_mask

PRIVATE = -1  # in `Segments.segment_of_ref`: the page has one sharer
_DELTA_BITS = 32
_DELTA_BIAS = 1 << 31


class Segment(NamedTuple):
    """Pages that the same sharers see; there are two sharers or more."""

    page_ids: IntArray  # [n] in the order of the first sharer's table
    sequences: IntArray  # [c] of the sharers, ascending
    deltas: IntArray  # [c]
    masks: IntArray  # [c, n], or [1, n] where all sharers see the same of each page


class OwnRuns(NamedTuple):
    """Lists what each sequence reads by itself, by (sequence, delta), ascending; pages in the order of its table."""

    sequence: IntArray  # [n]
    delta: IntArray  # [n]
    num_pages: IntArray  # [n] one at least
    page_id: npt.NDArray[np.integer[Any]]
    masked: IntArray  # [m] which of page_id are not seen wholly, ascending
    mask: IntArray  # [m]


class Segments(NamedTuple):
    """All segments, and which reference belongs to which."""

    segments: tuple[Segment, ...]
    segment_of_ref: IntArray  # [N] index into `segments`, or PRIVATE
    references: References  # N

    @property
    def page_ids(self) -> IntArray:
        """List the pages of all references."""
        return self.references.page_id

    def unshared(self, is_chosen: npt.NDArray[np.bool_], full: int) -> OwnRuns:
        """List the pages outside the chosen segments; `full`: the mask that shows a whole page."""
        wanted = np.flatnonzero(~np.append(is_chosen, False)[self.segment_of_ref])  # the last one is PRIVATE's
        keys = sharer_keys(self.references.sequence[wanted], self.references.delta[wanted])
        if (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys, kind="stable")
            wanted, keys = wanted[order], keys[order]
        starts = run_starts(keys)
        sequence, delta = split_sharer_keys(keys[starts])
        num_pages = run_lengths(starts, len(keys))
        mask = self.references.mask[wanted]
        masked = np.flatnonzero(mask != full)
        return OwnRuns(sequence, delta, num_pages, self.references.page_id[wanted], masked, mask[masked])


class _Runs(NamedTuple):
    """References sorted by (page, sharer), one run for each page with two sharers or more."""

    ref: IntArray  # [M] index of the reference
    sharer: IntArray  # [M]
    start: IntArray  # [R] of each run
    length: IntArray  # [R]


def sharer_keys(sequence: IntArray, delta: IntArray) -> IntArray:
    """Put (sequence, delta) into one sortable integer."""
    return (sequence << _DELTA_BITS) + (delta + _DELTA_BIAS)


def split_sharer_keys(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Undo `sharer_keys`."""
    return keys >> _DELTA_BITS, (keys & ((1 << _DELTA_BITS) - 1)) - _DELTA_BIAS


def run_starts(values: IntArray) -> IntArray:
    """Find where runs of equal neighbours begin."""
    if not len(values):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))


def run_lengths(starts: IntArray, total: int) -> IntArray:
    """Return the length of each run."""
    return np.diff(starts, append=total)


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """List start, start + 1, ... of each range, one behind the other."""
    if not len(counts):
        return np.zeros(0, np.int64)
    ends = np.cumsum(counts)
    values = np.repeat(starts - (ends - counts), counts)
    values += np.arange(ends[-1])  # in place: a large array that is new may cost page faults
    return values


def unite_repeats(refs: References) -> References:
    """Unite references of one (sequence, page, delta) with disjoint masks; a slot shown twice is refused."""
    keys = np.stack((refs.page_id, sharer_keys(refs.sequence, refs.delta)))
    order = np.lexsort(keys[::-1])
    ordered = keys[:, order]
    repeats = (ordered[:, 1:] == ordered[:, :-1]).all(0)
    if not repeats.any():
        return refs
    starts = np.flatnonzero(np.concatenate(([True], ~repeats)))
    masks = refs.mask[order].view(np.uint64)
    united = np.bitwise_or.reduceat(masks, starts)
    shown = np.add.reduceat(np.bitwise_count(masks).astype(np.int64), starts)
    twice = np.flatnonzero(np.bitwise_count(united) != shown)
    if len(twice):
        first = order[starts[twice[0]]]
        raise ValueError(
            f"page_tables: sequence {refs.sequence[first]} shows a slot of page {refs.page_id[first]} "
            f"with delta {refs.delta[first]} twice"
        )
    kept = order[starts]  # the first of each, because lexsort is stable
    mask = refs.mask.copy()
    mask[kept] = united.view(np.int64)
    kept.sort()
    return References(refs.sequence[kept], refs.page_id[kept], refs.delta[kept], mask[kept])


def find_segments(refs: References) -> Segments:
    """Group the pages by who shares them; `refs` hold no (sequence, page, delta) twice."""
    segment_of_ref = np.full(len(refs.page_id), PRIVATE, np.int64)
    sharer_key, sharer = _sharers(refs)
    runs = _shared_runs(refs.page_id, sharer, len(sharer_key))
    if not len(runs.start):
        return Segments((), segment_of_ref, refs)
    segment_of_run = _group_equal_runs(runs) * 2 + _masks_agree(refs.mask, runs)
    by_segment = np.lexsort((runs.ref[runs.start], segment_of_run))  # table order within a segment
    bounds = run_starts(segment_of_run[by_segment])
    segments: list[Segment] = []
    for members in np.split(by_segment, bounds[1:]):
        entries = runs.start[members][:, None] + np.arange(runs.length[members[0]])  # [n, c]
        sequences, deltas = split_sharer_keys(sharer_key[runs.sharer[entries[0]]])
        in_segment = runs.ref[entries]
        segment_of_ref[in_segment] = len(segments)
        masks_of = in_segment[:, :1] if segment_of_run[members[0]] % 2 else in_segment
        segments.append(Segment(refs.page_id[in_segment[:, 0]], sequences, deltas, refs.mask[masks_of].T))
    return Segments(tuple(segments), segment_of_ref, refs)


def _sharers(refs: References) -> tuple[IntArray, IntArray]:
    """Return the sorted keys of all sharers, and every reference's index into them."""
    keys = sharer_keys(refs.sequence, refs.delta)
    starts = run_starts(keys)  # tables have long runs of one delta, so sort run heads only
    sharer_key, sharer_of_run = np.unique(keys[starts], return_inverse=True)
    return sharer_key, np.repeat(sharer_of_run, run_lengths(starts, len(keys)))


def _shared_runs(page_id: IntArray, sharer: IntArray, num_sharers: int) -> _Runs:
    order = np.argsort(page_id * max(num_sharers, 1) + sharer)
    starts = run_starts(page_id[order])
    counts = run_lengths(starts, len(order))
    shared = counts > 1
    ref = order[np.repeat(shared, counts)]
    count = counts[shared]
    return _Runs(ref, sharer[ref], np.cumsum(count) - count, count)


def _group_equal_runs(runs: _Runs) -> IntArray:
    """Return a number per run, equal for runs with equal sharers. Found by hash, then verified exactly."""
    signature = np.add.reduceat(_scrambled(runs.sharer), runs.start)
    _, leader, group = np.unique(signature, return_index=True, return_inverse=True)
    leader_of_run = leader[group]
    same_count = runs.length == runs.length[leader_of_run]
    offset = np.arange(len(runs.sharer)) - np.repeat(runs.start, runs.length)
    counterpart = np.repeat(runs.start[leader_of_run], runs.length) + offset
    differs = runs.sharer != runs.sharer[np.minimum(counterpart, len(runs.sharer) - 1)]
    collides = ~same_count | np.logical_or.reduceat(differs, runs.start)
    if collides.any():  # a run that only looks like its leader's stands alone
        group = np.where(collides, len(leader) + np.arange(len(group)), group)
    return group


def _masks_agree(mask: IntArray, runs: _Runs) -> npt.NDArray[np.bool_]:
    """Tell for each run whether all its references carry one mask."""
    agrees = mask[runs.ref] == np.repeat(mask[runs.ref[runs.start]], runs.length)
    return np.logical_and.reduceat(agrees, runs.start)


def _scrambled(values: IntArray) -> npt.NDArray[np.uint64]:
    """splitmix64: sums of these tell sets of small integers apart."""
    x = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, eq=False)
class Lineages:
    """The page tables of exact sequences in depth-first order, one behind the other; every delta is 0.

    page_ids    int32 [N]
    counts      int64 [S]  pages of each sequence
    masked      int64 [M]  which of page_ids are not seen wholly, ascending
    masks       int64 [M]  bit i shows offset i; each shows something

    Nobody checks that pages stand in one place of one tree, nor the order: where sharers are not neighbours, less is
    shared, and results are right.
    """

    page_ids: npt.NDArray[np.int32]
    counts: IntArray
    masked: IntArray
    masks: IntArray

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        """Return each sequence's own table."""
        ends = np.cumsum(self.counts)[:-1]
        zeros = np.zeros(len(self.page_ids), np.int32)
        masks = np.full(len(self.page_ids), ALL_VISIBLE)
        masks[self.masked] = self.masks
        columns = (np.split(column, ends) for column in (self.page_ids, zeros, masks))
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
    nodes: tuple[_Node, ...]  # of each segment
    first_own: IntArray  # [S] depth from which on a sequence's pages are nobody else's

    @property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """List the pages of all references."""
        return self.lineages.page_ids

    def unshared(self, is_chosen: npt.NDArray[np.bool_], full: int) -> OwnRuns:
        """See `Segments.unshared`."""
        ids, counts = self.lineages.page_ids, self.lineages.counts
        masked, masks = self.lineages.masked, self.lineages.masks & full
        starts, sequence = np.cumsum(counts) - counts, np.arange(len(counts))
        begin, size, own = starts + self.first_own, counts - self.first_own, sequence
        rest = [self.nodes[index] for index in np.flatnonzero(~is_chosen).tolist()]
        if rest:
            parts = [(sequence[first:last], low, high) for first, last, depths in rest for low, high in depths]
            begin = np.concatenate([begin, *(starts[some] + low for some, low, _ in parts)])
            size = np.concatenate([size, *(np.full(len(some), high - low) for some, low, high in parts)])
            own = np.concatenate([own, *(some for some, _, _ in parts)])
            order = np.argsort(begin, kind="stable")  # by sequence, then in the order of its table
            begin, size, own = begin[order], size[order], own[order]
        if size.sum() < len(ids):
            at = ranges(begin, size)
            places = np.searchsorted(at, masked)
            is_own = np.append(at, -1)[places] == masked
            ids, masked, masks = ids[at], places[is_own], masks[is_own]
        num_pages = size
        if rest:
            num_pages = np.zeros(len(counts), np.int64)
            np.add.at(num_pages, own, size)
        has_any = np.flatnonzero(num_pages)
        return OwnRuns(sequence[has_any], np.zeros_like(has_any), num_pages[has_any], ids, masked, masks)


def find_lineage_segments(lineages: Lineages, page_size: int) -> LineageSegments:
    """Find what neighbours share, in time proportional to the pages of the tables, by comparing them once."""
    ids, counts, masked, masks = lineages.page_ids, lineages.counts, lineages.masked, lineages.masks
    if ids.min(initial=0) < 0:
        raise ValueError(f"page_tables: page ids must be in [0, 2**31) (got {ids.min()})")
    starts = np.cumsum(counts) - counts
    common = _common_prefixes(ids, starts, counts)
    owners = np.searchsorted(starts, masked, side="right") - 1
    all_masked = list(zip((masked - starts[owners]).tolist(), owners.tolist(), masks.tolist(), strict=True))
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
    return LineageSegments(tuple(segments), lineages, tuple(nodes), first_own)


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
