"""The segment primitive in plain torch: the CPU backend, and the fallback on any device.

Phase one reads every shared segment once for all its query rows, as one batched product over the KV heads; phase two
does the private pages; partial results merge by log-sum-exp as they come (ChunkAttention 3.2, RelayAttention 3.3).
Queries are rotated, never keys: row by row to `position - delta`, so that one read of a page serves sequences that
use it at different positions. Rotating queries was published before, in LazyAttention (arXiv 2606.04302) and Hogwild!
inference (arXiv 2504.06261), where shared keys are still read once per sequence.

Scores are products of float32: keys of 16 bits are widened, tile by tile, because torch on CPU would round a product
of bfloat16 to bfloat16, which costs ten times the error of the whole (measured; at scores of standard deviation 3).
Probabilities are rounded to the values' type once, as every fused kernel does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from mneme.kernels.plan import Plan
from mneme.kernels.rope import RopeTable, Turns, rotate
from mneme.kernels.torch.layout import Block, Layout, Tile, layout_of
from mneme.kernels.torch.merge import UNSEEN_SCORE, merge_into, merge_parts
from torch import Tensor

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
        """The queries of a block, [Hkv * n, R * G, D]."""
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
    """All tiles of a block, merged."""
    out, lse = _tile_attention(queries, pool, block, block.tiles[0])
    for tile in block.tiles[1:]:
        merge_into(out, lse, *_tile_attention(queries, pool, block, tile))
    return out, lse


def _tile_attention(queries: Tensor, pool: _Pool, block: Block, tile: Tile) -> tuple[Tensor, Tensor]:
    """queries [Hkv * n, R * G, D] over one tile of keys: out [.., R * G, D], lse [.., R * G], float32."""
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
    """Each row over the keys that it sees and no others.

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
    """One row's [Hkv, G, D] over the keys `seen` of its piece."""
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
    """The rotations of a layout's turned rows with the scale in them, built by the first layer that asks."""
    if rope is None:
        return None
    key = ("turns", id(rope), softmax_scale, id(layout))
    entry = plan.prepared.get(key)
    if entry is None:  # the entry keeps both alive, so that their ids are not reused
        entry = plan.prepared[key] = (rope, layout, rope.turns(_positions(layout, rope), softmax_scale))
    turns: Turns = entry[2]
    return turns


def _positions(layout: Layout, rope: RopeTable) -> Tensor:
    """Rows that see nothing are clamped into the table; one that sees a key but lies outside is refused."""
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
