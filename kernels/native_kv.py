"""Compiled moves of keys and values on the CPU: new ones into their slots, pages out of a pool and back.

`can_write` says whether the compiled code takes these tensors; `gather_pages` and `scatter_pages` always work, in torch
where there is no library.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mneme.kernels.native_call import COUNT, DTYPE_NUMBERS, NUMBER, POINTER, native_function
from mneme.kernels.native_library import library, num_threads
from mneme.kernels.rope import RopeTable


class _Write(ctypes.Structure):
    """native_kv.cpp: Write."""

    _fields_ = (
        ("k", POINTER),
        ("v", POINTER),
        ("k_row_stride", COUNT),
        ("k_head_stride", COUNT),
        ("v_row_stride", COUNT),
        ("v_head_stride", COUNT),
        ("slots", POINTER),
        ("positions", POINTER),
        ("k_pages", POINTER),
        ("v_pages", POINTER),
        ("rope", POINTER),
        ("num_rows", COUNT),
        ("num_slots", COUNT),
        ("num_positions", COUNT),
        ("num_kv_heads", NUMBER),
        ("head_dim", NUMBER),
        ("rotary_half", NUMBER),
        ("dtype", NUMBER),
        ("num_threads", NUMBER),
    )


def can_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether `write_kv` takes keys and values like these for a pool like this."""
    if not k.is_cpu or k.dtype not in DTYPE_NUMBERS or library() is None:
        return False
    dtype = k.dtype
    same_type = v.dtype is dtype and k_pages.dtype is dtype and v_pages.dtype is dtype
    return same_type and k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.shape == v_pages.shape


def write_kv(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rope: RopeTable | None,
) -> None:
    """See `mneme.kernels.kv_write.write_kv`; rows of k and v may be slices of a joint projection.

    Raises ValueError for a slot or position out of range, before anything is written.
    """
    if not (v.is_cpu and slots.is_cpu and positions.is_cpu and k_pages.is_cpu and v_pages.is_cpu):
        raise ValueError("k, v, slots, positions, k_pages, v_pages: must be on one device")
    if rope is not None and not rope.table.is_cpu:
        raise ValueError(f"rope: must be on the device of k, cpu (got {rope.table.device})")
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    slots, positions = slots.to(torch.int64).contiguous(), positions.to(torch.int64).contiguous()
    num_kv_heads, num_pages, page_size, head_dim = k_pages.shape
    write = _Write(
        k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        slots.data_ptr(), positions.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(),
        None if rope is None else rope.table.data_ptr(),
        k.shape[0], num_pages * page_size, 0 if rope is None else rope.num_positions,
        num_kv_heads, head_dim, 0 if rope is None else rope.rotary_dim // 2, DTYPE_NUMBERS[k.dtype],
        num_threads(),
    )  # fmt: skip
    row = native_function("mneme_write_kv")(ctypes.byref(write))
    if row >= 0:
        raise ValueError(f"slots, positions: row {row} is out of range (got {int(slots[row])}, {int(positions[row])})")


def gather_pages(pages: Tensor, page_ids: Tensor, out: Tensor) -> None:
    """Copy pages of a layer's pool, side by side.

    pages       [num_kv_heads, num_pages, page_size, head_dim]
    page_ids    int64 [n]
    out         [n, num_kv_heads, page_size, head_dim]
    """
    _check_pages(pages, page_ids, out)
    if library() is None:
        out.copy_(pages[:, page_ids].transpose(0, 1))
    else:
        _copy_pages(pages, out, page_ids, into_pool=False)


def scatter_pages(packed: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    """The inverse of `gather_pages`; no page twice."""
    _check_pages(pages, page_ids, packed)
    if library() is None:
        pages[:, page_ids] = packed.transpose(0, 1)
    else:
        _copy_pages(pages, packed, page_ids, into_pool=True)


def _copy_pages(pages: Tensor, packed: Tensor, page_ids: Tensor, *, into_pool: bool) -> None:
    num_kv_heads, num_pages, page_size, head_dim = pages.shape
    page_bytes = page_size * head_dim * pages.element_size()
    native_function("mneme_copy_pages")(
        pages.data_ptr(), packed.data_ptr(), page_ids.data_ptr(), len(page_ids), num_kv_heads, num_pages, page_bytes,
        into_pool,
    )  # fmt: skip


def _check_pages(pages: Tensor, page_ids: Tensor, packed: Tensor) -> None:
    num_kv_heads, num_pages, *page = pages.shape
    wanted = (len(page_ids), num_kv_heads, *page)
    if packed.shape != wanted or packed.dtype != pages.dtype:
        raise ValueError(
            f"packed pages: must be {pages.dtype} of shape {wanted} (got {packed.dtype}, {tuple(packed.shape)})"
        )
    if not (pages.is_contiguous() and packed.is_contiguous() and page_ids.is_contiguous()):
        raise ValueError("pages: all tensors must be contiguous")
    if not (pages.is_cpu and packed.is_cpu and page_ids.is_cpu):
        raise ValueError("pages: all tensors must be on the CPU")
    if page_ids.dtype != torch.int64 or page_ids.ndim != 1:
        raise ValueError(f"page_ids: must be an int64 vector (got {page_ids.dtype}, {page_ids.ndim} dimensions)")
    if len(page_ids) and not 0 <= int(page_ids.min()) <= int(page_ids.max()) < num_pages:
        raise ValueError(f"page_ids: must be in [0, {num_pages})")
