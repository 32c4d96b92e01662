"""What the torch backend derives from a plan once per step and reads in every layer.

A work list is taken apart into groups of pieces of equal shape, for batched products: every run of shared work is a
group of its own, private runs of few rows are batched by size. A *turned row* is a query row with one delta: the same
query, rotated to `position - delta`.

A group of work becomes blocks of query rows, a block becomes tiles of keys. The visibility rule is applied here, on
whole blocks: keys that no row of a block sees are left out, so that no free slot is ever read (its K and V may be
NaN); tiles that all rows see completely carry no mask at all; a tile that causality cuts carries one for its cut
columns. Query positions are *effective*: `position - delta`, the position in the frame in which the keys were
rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import torch
from mneme.kernels.page_table import FREE_SLOT_POSITION, IntArray, full_mask
from mneme.kernels.plan import Plan
from mneme.kernels.segments import run_starts, sharer_keys, split_sharer_keys
from mneme.kernels.torch.merge import UNSEEN_SCORE
from mneme.kernels.work import WorkList
from torch import Tensor

BoolArray = npt.NDArray[np.bool_]
PositionArray = npt.NDArray[np.int32]

# Scratch of one tile: at most this many float32 scores (times two, for the probabilities), unless one query row over
# one tile of keys is more.
TILE_SCORES = 1 << 20
TILE_KEYS = 1024
# Pieces are batched up to this many elements of gathered keys (and as many of values), unless one piece is more.
TILE_KV = 1 << 20
# Causality cuts a block of rows along its diagonal; what is computed above it is wasted, so blocks stay short.
BLOCK_ROWS = 64
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


class Tile(NamedTuple):
    """Keys that the rows of a block read together."""

    slots: slice | Tensor  # int64 [n * L] or the range of one piece's contiguous slots
    num_keys: int  # L
    bias: Tensor | None  # float32 [n, R, 1, L - bias_start]: 0 or UNSEEN_SCORE; None: all pairs are visible
    bias_start: int  # columns before this one are visible to every row
    key_position: Tensor | None  # float32 [n, 1 or R, 1, L]; for ALiBi only
    is_mixed: bool  # a key is hidden from one row of a piece and visible to another


class Repeats(NamedTuple):
    """Merges the results of a block in which a row stands more than once, with several deltas."""

    entry: Tensor  # int64 [distinct rows * P] index into the block's rows
    num_parts: int  # P
    bias: Tensor  # float32 [P, distinct rows, 1] 0, or UNSEEN_SCORE for padding


class Block(NamedTuple):
    """Query rows that go through the same tiles: n pieces of R rows."""

    num_pieces: int
    turned: slice | Tensor  # int64 [n * R] indices of turned rows
    out_rows: slice | Tensor  # the (distinct) query rows
    repeats: Repeats | None
    effective: Tensor | None  # float32 [n, R, 1, 1]; for ALiBi only
    tiles: tuple[Tile, ...]


class Layout(NamedTuple):
    """A step's blocks, shared ones first."""

    blocks: tuple[Block, ...]
    query_row: Tensor | None  # int64 [U] of each turned row; None: turned row t is query row t
    effective: PositionArray  # [U] of each turned row
    seen: BoolArray  # [U] whether the turned row sees any key
    unseen_rows: Tensor | None  # int64 query rows that see no key at all


class _Builder:
    """Builds the blocks of one layout; holds what all groups have in common."""

    def __init__(self, plan: Plan, slot_position: Tensor, window: int | None, with_alibi: bool) -> None:
        self.plan = plan
        self.device = slot_position.device
        self.slot_position = slot_position.cpu().numpy()
        self.window = None if window is None else min(window, FREE_SLOT_POSITION)
        self.with_alibi = with_alibi
        # int32 as slot positions are; |effective| < 2 * MAX_ABS_POSITION
        self.groups = groups_of(plan.work, plan.page_size)
        effective = plan.position[self.groups.turned_row] - self.groups.turned_delta
        self.effective = effective.astype(np.int32)
        self.seen = np.zeros(len(self.effective), bool)

    def blocks(self, group: Group) -> Iterator[Block]:
        """All blocks of a group whose rows see anything."""
        slots, key_position = self._keys(group)
        num_pieces, num_rows = group.turned.shape
        num_keys = min(slots.shape[1], TILE_KEYS)
        row_scores = self.plan.num_q_heads * num_keys
        if num_pieces == 1:
            step = max(1, min(BLOCK_ROWS, TILE_SCORES // row_scores))
            for start in range(0, num_rows, step):
                rows = slice(start, start + step)
                which = 0 if group.mask_of_row is None else group.mask_of_row[rows]
                positions = key_position[0][which].reshape(1, -1, slots.shape[1])
                yield from self._one_piece(group.turned[:, rows], slots, positions)
        else:
            piece_kv = self.plan.num_kv_heads * self.plan.head_dim * num_keys
            step = max(1, min(TILE_SCORES // (row_scores * num_rows), TILE_KV // piece_kv))
            for start in range(0, num_pieces, step):
                pieces = slice(start, start + step)
                yield from self._pieces(group.turned[pieces], slots[pieces], key_position[pieces])

    def _keys(self, group: Group) -> tuple[IntArray, PositionArray]:
        """Slots [n, L] and, where the mask shows them, the positions of their keys [n, m, L]."""
        offsets = np.arange(self.plan.page_size)
        num_pieces = len(group.page_ids)
        slots = (group.page_ids[:, :, None] * self.plan.page_size + offsets).reshape(num_pieces, -1)
        positions = self.slot_position[slots][:, None]
        if not (group.masks == group.masks.flat[0]).all() or group.masks.flat[0] != full_mask(self.plan.page_size):
            shown = (group.masks[..., None] >> offsets) & 1 == 1
            positions = np.where(shown.reshape(num_pieces, -1, slots.shape[1]), positions, FREE_SLOT_POSITION)
        return slots, positions

    def _visible(self, turned: IntArray, key_position: PositionArray) -> BoolArray:
        """The visibility rule for [n, R] rows against [n, 1 or R, L] keys; notes which rows see anything."""
        effective = self.effective[turned][:, :, None]
        visible: BoolArray = key_position <= effective
        if self.window is not None:
            visible &= key_position > effective - self.window
        self.seen[turned] |= visible.any(2)
        return visible

    def _one_piece(self, turned: IntArray, slots: IntArray, key_position: PositionArray) -> Iterator[Block]:
        visible = self._visible(turned, key_position)
        columns = np.flatnonzero(visible.any((0, 1)))
        if not len(columns):
            return
        if len(columns) < slots.shape[1]:
            slots, visible = slots[:, columns], visible[..., columns]
            key_position = key_position[..., columns]
        yield self._block(turned, slots, key_position, visible)

    def _pieces(self, turned: IntArray, slots: IntArray, key_position: PositionArray) -> Iterator[Block]:
        visible = self._visible(turned, key_position)
        read = np.logical_or.reduce(visible, axis=1)
        columns = np.flatnonzero(read.any(0))
        if not len(columns):
            return
        trim = slice(columns[0], columns[-1] + 1)
        alive = read.any(1)
        if not alive.all():
            turned, slots, key_position = turned[alive], slots[alive], key_position[alive]
            visible, read = visible[alive], read[alive]
        # A piece reads a slot of its own in place of those that it does not see.
        own = slots[np.arange(len(slots)), read.argmax(1)]
        slots = np.where(read, slots, own[:, None])
        yield self._block(turned, slots[:, trim], key_position[..., trim], visible[..., trim])

    def _block(self, turned: IntArray, slots: IntArray, key_position: PositionArray, visible: BoolArray) -> Block:
        out_rows, repeats = self._out_rows(self.groups.turned_row[turned.ravel()])
        effective = None
        if self.with_alibi:
            effective = self._float(self.effective[turned][:, :, None, None])
        cuts = (slice(start, start + TILE_KEYS) for start in range(0, slots.shape[1], TILE_KEYS))
        tiles = tuple(self._tile(slots[:, cut], key_position[..., cut], visible[..., cut]) for cut in cuts)
        return Block(len(turned), self._selector(turned.ravel()), out_rows, repeats, effective, tiles)

    def _tile(self, slots: IntArray, key_position: PositionArray, visible: BoolArray) -> Tile:
        bias, start = None, 0
        whole_columns = visible.all((0, 1))
        if not whole_columns.all():
            start = int(whole_columns.argmin())
            bias = self._float(np.where(visible[:, :, None, start:], np.float32(0), np.float32(UNSEEN_SCORE)))
        positions = self._float(key_position[:, :, None]) if self.with_alibi else None
        is_mixed = bias is not None and bool((visible.any(1) & ~visible.all(1)).any())
        return Tile(self._selector(slots.ravel()), slots.shape[1], bias, start, positions, is_mixed)

    def _out_rows(self, rows: IntArray) -> tuple[slice | Tensor, Repeats | None]:
        if (rows[1:] > rows[:-1]).all():
            return self._selector(rows), None
        distinct, inverse, counts = np.unique(rows, return_inverse=True, return_counts=True)
        if len(distinct) == len(rows):
            return self._selector(rows), None
        entries = np.argsort(inverse, kind="stable")
        lanes = np.arange(counts.max())
        valid = lanes < counts[:, None]
        first = np.cumsum(counts) - counts
        table = entries[np.where(valid, first[:, None] + lanes, first[:, None])].T  # [P, distinct]
        bias = np.where(valid.T, np.float32(0), np.float32(UNSEEN_SCORE))[..., None]
        repeats = Repeats(self.index(table.ravel()), len(lanes), self._float(bias))
        return self._selector(distinct), repeats

    def _selector(self, index: IntArray) -> slice | Tensor:
        """A slice where the index is a range: no copy is made then."""
        if index[-1] - index[0] == len(index) - 1 and (index[1:] > index[:-1]).all():
            return slice(int(index[0]), int(index[-1]) + 1)
        return self.index(index)

    def index(self, index: IntArray) -> Tensor:
        """An index on the pool's device."""
        return torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(self.device)

    def _float(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(self.device)


def lay_out(plan: Plan, slot_position: Tensor, window: int | None, with_alibi: bool) -> Layout:
    """Apply the visibility rule to a plan's work; cached by `layout_of`."""
    builder = _Builder(plan, slot_position, window, with_alibi)
    blocks = tuple(block for group in builder.groups.groups for block in builder.blocks(group))
    turned_row = builder.groups.turned_row
    row_seen = np.zeros(plan.num_rows, bool)
    row_seen[turned_row[builder.seen]] = True
    unseen = np.flatnonzero(~row_seen)
    is_identity = np.array_equal(turned_row, np.arange(plan.num_rows))
    return Layout(
        blocks=blocks,
        query_row=None if is_identity else builder.index(turned_row),
        effective=builder.effective,
        seen=builder.seen,
        unseen_rows=builder.index(unseen) if len(unseen) else None,
    )


def layout_of(plan: Plan, slot_position: Tensor, window: int | None, with_alibi: bool) -> Layout:
    """The layout for this state of `slot_position`, built by the first layer that asks for it."""
    key = ("layout", slot_position.data_ptr(), window, with_alibi)
    # Inference tensors count no versions; there the caller keeps the rule that a plan belongs to one step.
    version = None if slot_position.is_inference() else slot_position._version
    # The entry keeps `slot_position` alive, so that its address is not reused.
    entry = plan.prepared.get(key)
    if entry is None or entry[1] != version:
        entry = plan.prepared[key] = (
            slot_position,
            version,
            lay_out(plan, slot_position, window, with_alibi),
        )
    layout: Layout = entry[2]
    return layout


def groups_of(work: WorkList, page_size: int) -> Groups:
    """Return the groups of a work list; they are kept with it."""
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
