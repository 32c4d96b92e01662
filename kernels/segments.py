"""Finding segments: runs of pages that one set of sequences shares, each with one delta (ChunkAttention 3.1).

The sequences need not be told apart by a tree: a page's signature is the set of its sharers, a sharer being
`(sequence, delta)`, so a sequence that uses a page twice with two deltas shares it with itself. Pages of one
signature are one segment. Masks may differ between sharers and are kept per (sharer, page); pages on whose masks all
agree are segments of their own, because a tile of such pages needs no mask. All work is on whole arrays; the only
Python loop is over segments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import IntArray, References

PRIVATE = -1  # in `Segments.segment_of_ref`: the page has one sharer
_DELTA_BITS = 32
_DELTA_BIAS = 1 << 31


class Segment(NamedTuple):
    """Pages that the same sharers see; there are two sharers or more."""

    page_ids: IntArray  # [n] in the order of the first sharer's table
    sequences: IntArray  # [c] of the sharers, ascending
    deltas: IntArray  # [c]
    masks: IntArray  # [c, n], or [1, n] where all sharers see the same of each page


class Segments(NamedTuple):
    """All segments, and which reference belongs to which."""

    segments: tuple[Segment, ...]
    segment_of_ref: IntArray  # [N] index into `segments`, or PRIVATE
    references: References  # N

    @property
    def page_ids(self) -> IntArray:
        """List the pages of all references."""
        return self.references.page_id

    def unshared(self, is_chosen: npt.NDArray[np.bool_]) -> References:
        """List the references outside the chosen segments, in the order of the tables."""
        wanted = ~np.append(is_chosen, False)[self.segment_of_ref]  # the last one is PRIVATE's
        return References(*(column[wanted] for column in self.references))


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
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])


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
