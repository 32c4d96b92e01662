"""Writes keys and values into a layer's pool, measures how far others are from them, marks where keys are rotated."""

from __future__ import annotations

import torch
from torch import Tensor

from mneme.kernels.arguments import KvRows, dequantized, quantized
from mneme.kernels.native import kv as native_kv
from mneme.kernels.page_bounds import current_bounds
from mneme.kernels.page_table import FREE_SLOT_POSITION, MAX_ABS_POSITION
from mneme.kernels.rope import RopeTable
from mneme.kernels.triton.modules import triton_module


def write_kv(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rope: RopeTable | None,
) -> None:
    """Rotate new keys to their positions in float32, round once, and store keys and values in their slots.

    k, v              [T, num_kv_heads, head_dim]  un-rotated
    slots             int [T]  page_id * page_size + offset; no slot twice
    positions         int [T]  where the key is rotated: its position, less the delta of its reference if that
    is not 0
    k_pages, v_pages  [num_kv_heads, num_pages, page_size, head_dim]  one layer's pool, written in place; or int8
    [..., head_dim + 4], see `quantized`

    `slot_position` is for all layers; `mark_written` updates it once per step. Raises ValueError for shapes that do not
    fit and for a rope that rotates more than head_dim.
    """
    rows = KvRows(k, v, slots, positions, k_pages, v_pages, rope)
    rows.check()
    triton_kv = triton_module("kv") if k.is_cuda else None
    if triton_kv is not None:
        triton_kv.write_kv(rows)
        return
    if native_kv.can_write(rows):
        native_kv.write_kv(rows)
        return
    pool = (k_pages.shape[0], -1, k_pages.shape[3])
    rotated = k if rope is None else rope.rotate(k, positions)
    index = slots.to(torch.int64)
    for x, pages in ((rotated, k_pages), (v, v_pages)):
        stored = quantized(x) if pages.dtype == torch.int8 else x.to(pages.dtype)
        pages.view(pool).index_copy_(1, index, stored.transpose(0, 1))


def kv_deviation(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rope: RopeTable | None,
) -> Tensor:
    """Return float32 [T, 2]: squared distances of new keys and values from those in their slots, over heads and dims.

    CacheBlend selects tokens by them (section 4.3). The arguments are those of `write_kv`; the pool is only read, and a
    slot may be read for several rows. Distances of keys are the same in every frame.

    New keys are rotated in float32 and not rounded: a distance of 0 is a key that would be stored bit by bit in
    float32, and one within its rounding in bfloat16 and int8. Raises ValueError as `write_kv` does.
    """
    rows = KvRows(k, v, slots, positions, k_pages, v_pages, rope)
    rows.check()
    if native_kv.can_write(rows):
        return native_kv.kv_deviation(rows)
    index = slots.to(torch.int64)
    fresh_k = k.float() if rope is None else rope.rotate(k, positions)
    distances = [
        (fresh - dequantized(pages.flatten(1, 2)[:, index]).transpose(0, 1)).square().sum((1, 2))
        for fresh, pages in ((fresh_k, k_pages), (v.float(), v_pages))
    ]
    return torch.stack(distances, 1)


def new_slot_position(num_slots: int, device: torch.device | str = "cpu") -> Tensor:
    """Make int32 [num_slots], all free."""
    return torch.full((num_slots,), FREE_SLOT_POSITION, dtype=torch.int32, device=device)


def mark_written(slot_position: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Note where the keys of these slots are rotated; once per step, before the first layer attends.

    positions   int [T]  in [0, 2**29); others are refused with a ValueError on the CPU, and not looked at elsewhere
    """
    if positions.is_cpu and positions.numel():
        values = positions.numpy()
        least, greatest = values.min(), values.max()
        if not 0 <= least <= greatest < MAX_ABS_POSITION:
            raise ValueError(f"positions: must be in [0, {MAX_ABS_POSITION}) (got {least}..{greatest})")
    bounds = current_bounds(slot_position)
    slot_position.index_copy_(0, slots.to(torch.int64), positions.to(torch.int32))
    if bounds is not None:
        bounds.follow(slot_position, slots)


def mark_free(slot_position: Tensor, slots: Tensor) -> None:
    """Make slots invisible to everyone; to be called before a page is handed out again."""
    bounds = current_bounds(slot_position)
    slot_position.index_fill_(0, slots.to(torch.int64), FREE_SLOT_POSITION)
    if bounds is not None:
        bounds.follow(slot_position, slots)


def copy_slots(source: Tensor, target: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Copy keys and values of slots (int [n]) to other slots of one layer's pool, as they are rotated."""
    for pages in (k_pages, v_pages):
        slots = pages.view(pages.shape[0], -1, pages.shape[3])
        slots.index_copy_(1, target.to(torch.int64), slots.index_select(1, source.to(torch.int64)))
