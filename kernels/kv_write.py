"""Writing keys and values into a layer's pool, and keeping the positions at which slots were rotated."""

from __future__ import annotations

import torch
from torch import Tensor

from mneme.kernels.native import kv as native_kv
from mneme.kernels.page_bounds import following
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
    k_pages, v_pages  [num_kv_heads, num_pages, page_size, head_dim]  one layer's pool, written in place

    `slot_position` is for all layers; `mark_written` updates it once per step. Raises ValueError for shapes that do not
    fit and for a rope that rotates more than head_dim.
    """
    check_rows(k, v, slots, positions, k_pages, rope)
    triton_kv = triton_module("kv") if k.is_cuda else None
    if triton_kv is not None:
        triton_kv.write_kv(k, v, slots, positions, k_pages, v_pages, rope)
        return
    if native_kv.can_write(k, v, k_pages, v_pages):
        native_kv.write_kv(k, v, slots, positions, k_pages, v_pages, rope)
        return
    pool = (k_pages.shape[0], -1, k_pages.shape[3])
    rotated = k if rope is None else rope.rotate(k, positions)
    index = slots.to(torch.int64)
    k_pages.view(pool).index_copy_(1, index, rotated.to(k_pages.dtype).transpose(0, 1))
    v_pages.view(pool).index_copy_(1, index, v.to(v_pages.dtype).transpose(0, 1))


def check_rows(k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, k_pages: Tensor, rope: RopeTable | None) -> None:
    """Raise ValueError where rows of keys and values do not fit a pool, or a rope does not fit a head."""
    if k.shape != v.shape or k.shape[1:] != (k_pages.shape[0], k_pages.shape[3]):
        raise ValueError(f"k, v: must fit the pool {tuple(k_pages.shape)} (got {tuple(k.shape)}, {tuple(v.shape)})")
    if slots.shape != k.shape[:1] or positions.shape != k.shape[:1]:
        raise ValueError(f"slots, positions: one each for {len(k)} rows (got {len(slots)}, {len(positions)})")
    if rope is not None and rope.rotary_dim > k.shape[2]:
        raise ValueError(f"rope: rotates {rope.rotary_dim} dimensions, head_dim is {k.shape[2]}")


def new_slot_position(num_slots: int, device: torch.device | str = "cpu") -> Tensor:
    """Make int32 [num_slots], all free."""
    return torch.full((num_slots,), FREE_SLOT_POSITION, dtype=torch.int32, device=device)


def mark_written(slot_position: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Note where the keys of these slots are rotated; once per step, before the first layer attends.

    positions   int [T]  in [0, 2**29); others are refused with a ValueError on the CPU, and not looked at elsewhere
    """
    if positions.is_cpu and positions.numel():
        least, greatest = (int(bound) for bound in positions.aminmax())
        if not 0 <= least <= greatest < MAX_ABS_POSITION:
            raise ValueError(f"positions: must be in [0, {MAX_ABS_POSITION}) (got {least}..{greatest})")
    with following(slot_position, slots):
        slot_position.index_copy_(0, slots.to(torch.int64), positions.to(torch.int32))


def mark_free(slot_position: Tensor, slots: Tensor) -> None:
    """Make slots invisible to everyone; to be called before a page is handed out again."""
    with following(slot_position, slots):
        slot_position.index_fill_(0, slots.to(torch.int64), FREE_SLOT_POSITION)


def copy_slots(source: Tensor, target: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Copy keys and values of slots (int [n]) to other slots of one layer's pool, as they are rotated."""
    for pages in (k_pages, v_pages):
        slots = pages.view(pages.shape[0], -1, pages.shape[3])
        slots.index_copy_(1, target.to(torch.int64), slots.index_select(1, source.to(torch.int64)))
