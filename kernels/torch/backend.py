"""The segment primitive in plain torch: the CPU backend, and the fallback on any device.

Phase one reads every shared segment once for all its query rows, as one batched product over the KV heads; phase two
does the private pages; partial results merge by log-sum-exp as they come (ChunkAttention 3.2, RelayAttention 3.3).
Queries are rotated, never keys: row by row to `position - delta`, so that one read of a page serves sequences that
use it at different positions. Rotating queries was published before, in LazyAttention (arXiv 2606.04302) and Hogwild!
inference (arXiv 2504.06261), where shared keys are still read once per sequence.

Scores are products of float32: keys of 16 bits are widened, tile by tile, because torch on CPU would round a product
of bfloat16 to bfloat16, which costs ten times the error of the whole (measured; at scores of standard deviation 3).
Probabilities are rounded to the values' type once, as every fused kernel does.

A plan's work is first laid out, once per step and for all layers: taken apart into groups of pieces of equal shape, for
batched products (every run of shared work is a group of its own, private runs of few rows are batched by size), each
group into blocks of query rows, each block into tiles of keys. The visibility rule is applied there, on whole blocks:
keys that no row of a block sees are left out, so that no free slot is ever read (its K and V may be NaN); tiles that
all rows see completely carry no mask at all; a tile that causality cuts carries one for its cut columns. A *turned row*
is a query row with one delta, rotated to its *effective* position, `position - delta`: the position in the frame in
which the keys were rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import torch
from mneme.kernels.page_bounds import version_of
from mneme.kernels.page_table import FREE_SLOT_POSITION, IntArray, full_mask
from mneme.kernels.plan import Plan
from mneme.kernels.rope import RopeTable, Turns, rotate
from mneme.kernels.segments import run_starts, sharer_keys, split_sharer_keys
from mneme.kernels.torch.merge import UNSEEN_SCORE, merge_into, merge_parts
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
# Up to this many elements all turned queries are rotated at once; beyond, each block rotates its own.
_ROTATE_AT_ONCE = 1 << 22


class _Pool(NamedTuple):
    """One layer's KV with pages and offsets as one axis of slots, and what changes scores."""

    keys: Tensor  # [Hkv, num_slots, D]
    values: Tensor
    num_groups: int  # G, query heads per KV head
    alibi_slopes: Tensor | None  # float32 [Hkv, 1, 1, G, 1]
    soft_cap: float | None


def attend_torch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_position: Tensor,
    rope: RopeTable | None,
    plan: Plan,
    *,
    softmax_scale: float,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`.

    Scratch beside the outputs in float32: TILE_SCORES scores and as many probabilities, one tile of keys and values,
    the rotated queries (of one block, when all are over 16 MiB), and in the plan 4 bytes per (row, key) pair of tiles
    that causality or masks cut.
    """
    layout = layout_of(plan, slot_position, window, alibi_slopes is not None)
    if not layout.blocks:  # nobody sees anything
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    turns = _turns_of(plan, layout, rope, softmax_scale)
    queries = _Queries(q, plan, layout, turns, softmax_scale)
    pool = _pool(k_pages, v_pages, plan, alibi_slopes, soft_cap)
    total = _Total(q, plan)
    for block in layout.blocks:
        total.merge(block, *_block_attention(queries.rows(block), pool, block))
    return total.finish(q.dtype, layout.unseen_rows)


class _Queries:
    """Turned queries, rotated and scaled, float32 [Hkv, U, G, D]."""

    def __init__(self, q: Tensor, plan: Plan, layout: Layout, turns: Turns | None, softmax_scale: float) -> None:
        self._q = q.view(len(q), plan.num_kv_heads, -1, plan.head_dim)
        self._query_row = layout.query_row
        self._turns = turns
        self._scale = softmax_scale
        num_turned = len(layout.effective)
        at_once = num_turned * plan.num_q_heads * plan.head_dim <= _ROTATE_AT_ONCE
        self._all = self._rotated(slice(0, num_turned)) if at_once else None

    def rows(self, block: Block) -> Tensor:
        """Return the queries of a block, [Hkv * n, R * G, D]."""
        rows = self._rotated(block.turned) if self._all is None else _select(self._all, 1, block.turned)
        return rows.reshape(len(rows) * block.num_pieces, -1, rows.shape[-1])

    def _rotated(self, turned: slice | Tensor) -> Tensor:
        query_row = turned if self._query_row is None else _select(self._query_row, 0, turned)
        x = _select(self._q, 0, query_row).float().transpose(0, 1)
        if self._turns is None:
            return (x * self._scale).contiguous()
        turns = Turns(_select(self._turns.cos, 0, turned), _select(self._turns.sin, 0, turned))
        return rotate(x, turns, self._scale).contiguous()


class _Total:
    """The merged result so far, head-major: out [Hkv, T, G, D], lse [Hkv, T, G], all float32."""

    def __init__(self, q: Tensor, plan: Plan) -> None:
        self._shape = (plan.num_kv_heads, len(q), plan.num_q_heads // plan.num_kv_heads, plan.head_dim)
        self._device = q.device
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def merge(self, block: Block, out: Tensor, lse: Tensor) -> None:
        """Merge a block's [Hkv * n, R * G, D] and [Hkv * n, R * G] into its query rows."""
        num_kv_heads, num_rows, num_groups, head_dim = self._shape
        out = out.view(num_kv_heads, -1, num_groups, head_dim)
        lse = lse.view(num_kv_heads, -1, num_groups)
        if block.repeats is not None:
            entry, num_parts, bias = block.repeats
            parts = (num_kv_heads, num_parts, -1, num_groups)
            outs = out.index_select(1, entry).view(*parts, head_dim).transpose(0, 1)
            lses = lse.index_select(1, entry).view(parts).transpose(0, 1)
            out, lse = merge_parts(outs, lses + bias.unsqueeze(1))
        if self._out is None or self._lse is None:
            if block.out_rows == slice(0, num_rows):
                self._out, self._lse = out, lse
                return
            self._out = torch.zeros(self._shape, device=self._device)
            self._lse = torch.full(self._shape[:3], UNSEEN_SCORE, device=self._device)
        rows = block.out_rows
        if isinstance(rows, slice):
            merge_into(self._out[:, rows], self._lse[:, rows], out, lse)
            return
        old_out, old_lse = self._out.index_select(1, rows), self._lse.index_select(1, rows)
        merge_into(old_out, old_lse, out, lse)
        self._out.index_copy_(1, rows, old_out)
        self._lse.index_copy_(1, rows, old_lse)

    def finish(self, dtype: torch.dtype, unseen_rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """[T, Hq, D] in the queries' type and [T, Hq]."""
        assert self._out is not None  # a layout has a block, else nothing is merged
        assert self._lse is not None
        out = self._out.transpose(0, 1).flatten(1, 2).to(dtype)
        lse = self._lse.transpose(0, 1).flatten(1, 2)
        if unseen_rows is not None:
            out.index_fill_(0, unseen_rows, 0)
            lse.index_fill_(0, unseen_rows, -torch.inf)
        return out, lse


def _block_attention(queries: Tensor, pool: _Pool, block: Block) -> tuple[Tensor, Tensor]:
    """Attend to all tiles of a block and merge them."""
    out, lse = _tile_attention(queries, pool, block, block.tiles[0])
    for tile in block.tiles[1:]:
        merge_into(out, lse, *_tile_attention(queries, pool, block, tile))
    return out, lse


def _tile_attention(queries: Tensor, pool: _Pool, block: Block, tile: Tile) -> tuple[Tensor, Tensor]:
    """Attend [Hkv * n, R * G, D] to one tile of keys: out [.., R * G, D], lse [.., R * G], float32."""
    keys, values = _select(pool.keys, 1, tile.slots), _select(pool.values, 1, tile.slots)
    if tile.is_mixed and not (_is_finite(keys) and _is_finite(values)):
        return _row_by_row(queries, pool, block, tile)
    if block.num_pieces > 1:
        by_piece = (len(queries), tile.num_keys, queries.shape[-1])
        keys, values = keys.reshape(by_piece), values.reshape(by_piece)
    scores = torch.bmm(queries, keys.float().transpose(1, 2))
    if pool.soft_cap is not None:
        scores.div_(pool.soft_cap).tanh_().mul_(pool.soft_cap)
    if pool.alibi_slopes is not None or tile.bias is not None:
        _add_bias(scores, pool, block, tile)
    probabilities = torch.softmax(scores, -1)
    # exp(max - lse) is the largest probability, so the row's lse needs no pass of its own over exponentials.
    lse = scores.amax(-1) - probabilities.amax(-1).log()
    return torch.bmm(probabilities.to(values.dtype), values).float(), lse


def _is_finite(x: Tensor) -> bool:
    return bool(x.sum(dtype=torch.float32).isfinite())


def _row_by_row(queries: Tensor, pool: _Pool, block: Block, tile: Tile) -> tuple[Tensor, Tensor]:
    """Attend each row to the keys that it sees and to no others.

    A mixed tile may hold broken numbers that some of its rows do not see: tokens of another sequence, or of positions
    to come. A weight of 0 would not keep those out (0 x NaN is NaN).
    """
    assert tile.bias is not None  # a mixed tile hides something
    num_pieces = block.num_pieces
    slots = tile.slots
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=queries.device)
    by_piece = queries.view(-1, num_pieces, *queries.shape[1:])
    parts = []
    for piece, (own, bias) in enumerate(zip(slots.view(num_pieces, -1), tile.bias[:, :, 0], strict=True)):
        for row, rows in enumerate(torch.split(by_piece[:, piece], pool.num_groups, 1)):
            seen = torch.cat((bias.new_ones(tile.bias_start, dtype=torch.bool), bias[row] == 0)).nonzero().flatten()
            parts.append(_row_alone(rows, pool, block, tile, piece, row, own, seen))
    outs, lses = (torch.stack(part, 1) for part in zip(*parts, strict=True))  # [Hkv, n * R, G, ...]
    return outs.view(queries.shape), lses.view(queries.shape[:2])


def _row_alone(
    rows: Tensor, pool: _Pool, block: Block, tile: Tile, piece: int, row: int, slots: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend one row, [Hkv, G, D], to the keys `seen` of its piece."""
    if not len(seen):
        return torch.zeros_like(rows), rows.new_full(rows.shape[:2], UNSEEN_SCORE)
    position = tile.key_position
    if position is not None:
        position = position[piece : piece + 1, row if position.shape[1] > 1 else 0][:, None, :, seen]
    effective = None if block.effective is None else block.effective[piece : piece + 1, row : row + 1]
    alone = Tile(slots[seen], len(seen), None, 0, position, is_mixed=False)
    return _tile_attention(rows, pool, block._replace(num_pieces=1, effective=effective), alone)


def _add_bias(scores: Tensor, pool: _Pool, block: Block, tile: Tile) -> None:
    per_head = scores.view(len(pool.keys), block.num_pieces, -1, pool.num_groups, tile.num_keys)
    if pool.alibi_slopes is not None and block.effective is not None and tile.key_position is not None:
        per_head.addcmul_(pool.alibi_slopes, tile.key_position - block.effective)
    if tile.bias is not None:
        per_head[..., tile.bias_start :] += tile.bias


def _pool(k_pages: Tensor, v_pages: Tensor, plan: Plan, alibi_slopes: Tensor | None, soft_cap: float | None) -> _Pool:
    slots = (plan.num_kv_heads, -1, plan.head_dim)
    num_groups = plan.num_q_heads // plan.num_kv_heads
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.float().view(plan.num_kv_heads, 1, 1, num_groups, 1)
    return _Pool(k_pages.view(slots), v_pages.view(slots), num_groups, alibi_slopes, soft_cap)


def _turns_of(plan: Plan, layout: Layout, rope: RopeTable | None, softmax_scale: float) -> Turns | None:
    """Return the rotations of a layout's turned rows with the scale in them, built by the first layer that asks."""
    if rope is None:
        return None
    key = ("turns", id(rope), softmax_scale, id(layout))
    entry = plan.prepared.get(key)
    if entry is None:  # the entry keeps both alive, so that their ids are not reused
        entry = plan.prepared[key] = (rope, layout, rope.turns(_positions(layout, rope), softmax_scale))
    turns: Turns = entry[2]
    return turns


def _positions(layout: Layout, rope: RopeTable) -> Tensor:
    """Clamp rows that see nothing into the table; one that sees a key but lies outside is refused."""
    effective = layout.effective
    beyond = layout.seen & (effective >= rope.num_positions)
    if beyond.any():
        raise ValueError(
            f"rows: a visible pair is {effective[beyond].max()} apart, the rope table ends at {rope.num_positions}"
        )
    return torch.from_numpy(effective.clip(0, rope.num_positions - 1))


def _select(x: Tensor, dim: int, index: slice | Tensor) -> Tensor:
    """Along one dimension: a view for a slice, a copy for an index."""
    if isinstance(index, slice):
        if index.start == 0 and index.stop == x.shape[dim]:
            return x
        return x.narrow(dim, index.start, index.stop - index.start)
    return x.index_select(dim, index)


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
        """Yield the blocks of a group whose rows see anything."""
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
        """Apply the visibility rule to [n, R] rows and [n, 1 or R, L] keys; note which rows see anything."""
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
        """Return a slice where the index is a range: no copy is made then."""
        if index[-1] - index[0] == len(index) - 1 and (index[1:] > index[:-1]).all():
            return slice(int(index[0]), int(index[-1]) + 1)
        return self.index(index)

    def index(self, index: IntArray) -> Tensor:
        """Return an index on the pool's device."""
        return torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(self.device)

    def _float(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(self.device)


def lay_out(plan: Plan, slot_position: Tensor, window: int | None, with_alibi: bool) -> Layout:
    """Apply the visibility rule to a plan's work."""
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
    """Return the layout for this state of `slot_position`, built by the first layer that asks for it."""
    key = ("layout", slot_position.data_ptr(), window, with_alibi)
    version = version_of(slot_position)
    # The entry keeps `slot_position` alive, so that its address is not reused.
    entry = plan.prepared.get(key)
    if entry is None or entry[1] != version:
        entry = plan.prepared[key] = (slot_position, version, lay_out(plan, slot_position, window, with_alibi))
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
    """Return a number per run; runs of one number are batched. Runs of many rows stay alone."""
    tokens = np.maximum(num_pages * page_size, _SMALLEST_BUCKET_TOKENS)
    size_class = np.ceil(np.log2(tokens)).astype(np.int64)
    alone = -1 - np.arange(len(num_rows))
    return np.where(num_rows > _MAX_BATCHED_ROWS, alone, num_rows * 64 + size_class)


def _members(labels: IntArray) -> list[IntArray]:
    """Return the indices of each label."""
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
