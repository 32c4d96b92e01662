"""The oracle: attention over page tables in float64, one query row at a time, straight from the visibility
rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mneme.kernels.arguments import AttendArgs, dequantized
from mneme.kernels.page_table import FREE_SLOT_POSITION, PageTable
from mneme.kernels.rope import RopeTable


class _Keys(NamedTuple):
    slots: Tensor  # int64 [L]
    positions: Tensor  # int64 [L] where each key was rotated
    deltas: Tensor  # int64 [L]
    shown: Tensor  # bool [L] the mask's bit


def attend_reference(args: AttendArgs) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.attention.attend`; segments are ignored, only tables and rows are read."""
    args.check_reach()
    q, slot_position, plan = args.q, args.slot_position, args.plan
    num_groups = plan.num_q_heads // plan.num_kv_heads
    pools = (args.k_pages, args.v_pages)
    keys_all, values_all = (
        dequantized(pages.flatten(1, 2)).double().repeat_interleave(num_groups, 0) for pages in pools
    )
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    tables = [_keys_of(table, plan.page_size, slot_position) for table in plan.page_tables]
    for row, (sequence, position) in enumerate(zip(*plan.rows.arrays(), strict=True)):
        keys = tables[sequence]
        effective = int(position) - keys.deltas  # the query's position in the frame of each key
        visible = keys.shown & (keys.positions < FREE_SLOT_POSITION) & (keys.positions <= effective)
        if args.window is not None:
            visible &= keys.positions > effective - args.window
        if not visible.any():
            continue
        slots, effective = keys.slots[visible], effective[visible]
        queries = _rotated(q[row].double(), effective, args.rope)
        scores = torch.einsum("hld,hld->hl", queries, keys_all[:, slots]) * args.softmax_scale
        if args.soft_cap is not None:
            scores = args.soft_cap * torch.tanh(scores / args.soft_cap)
        lse[row] = torch.logsumexp(scores, -1)
        out[row] = torch.einsum("hl,hld->hd", torch.softmax(scores, -1), values_all[:, slots])
    return out.to(q.dtype), lse.float()


def _keys_of(table: PageTable, page_size: int, slot_position: Tensor) -> _Keys:
    device = slot_position.device
    offsets = torch.arange(page_size, device=device)
    page_ids, deltas, masks = (
        torch.as_tensor(array.astype("int64"), device=device)[:, None]
        for array in (table.page_ids, table.deltas, table.masks)
    )
    slots = (page_ids * page_size + offsets).flatten()
    shown = ((masks >> offsets) & 1).flatten() == 1
    return _Keys(slots, slot_position[slots].long(), deltas.expand(-1, page_size).flatten(), shown)


def _rotated(query: Tensor, effective: Tensor, rope: RopeTable | None) -> Tensor:
    """Return the query row once per visible key, rotated to its position in that key's frame: [H, L, D]."""
    if rope is None:
        return query[:, None].expand(-1, len(effective), -1)
    cos, sin = rope.cos[effective].double(), rope.sin[effective].double()
    half = cos.shape[-1]
    first, second, rest = query[:, None, :half], query[:, None, half : 2 * half], query[:, None, 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest.expand(-1, len(effective), -1)]
    return torch.cat(rotated, -1)
