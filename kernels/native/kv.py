"""Compiled moves of keys and values on the CPU: new ones into their slots, pages out of a pool and back.

`can_write` says whether the compiled code takes these tensors; `gather_pages` and `scatter_pages` always work, in numpy
where there is no library. They give the interpreter lock back while they copy.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mneme.kernels.native.library import COUNT, DTYPE_NUMBERS, NUMBER, POINTER, library, native_function, num_threads
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


def gather_pages(pages: Tensor, page_ids: Tensor, packed: Tensor, packed_ids: Tensor | None = None) -> None:
    """Copy pages of a layer's pool to rows of another buffer, in the calling thread alone.

    pages       [num_kv_heads, num_pages, page_size, head_dim]
    page_ids    int64 [n]
    packed      [rows, num_kv_heads, page_size, head_dim]  n rows where there are no packed_ids
    packed_ids  int64 [n]  the row of each page, none twice; None: side by side
    """
    _copy_pages(pages, page_ids, packed, packed_ids, into_pool=False)


def scatter_pages(packed: Tensor, page_ids: Tensor, pages: Tensor, packed_ids: Tensor | None = None) -> None:
    """The inverse of `gather_pages`; no page twice."""
    _copy_pages(pages, page_ids, packed, packed_ids, into_pool=True)


def _copy_pages(pages: Tensor, page_ids: Tensor, packed: Tensor, packed_ids: Tensor | None, *, into_pool: bool) -> None:
    _check_pages(pages, page_ids, packed, packed_ids)
    if library() is None:
        _copy_in_numpy(pages, page_ids, packed, packed_ids, into_pool)
        return
    num_kv_heads, num_pages, page_size, head_dim = pages.shape
    page_bytes = page_size * head_dim * pages.element_size()
    native_function("mneme_copy_pages")(
        pages.data_ptr(), packed.data_ptr(), page_ids.data_ptr(), None if packed_ids is None else packed_ids.data_ptr(),
        len(page_ids), num_kv_heads, num_pages, page_bytes, into_pool,
    )  # fmt: skip


def _copy_in_numpy(pages: Tensor, page_ids: Tensor, packed: Tensor, packed_ids: Tensor | None, into_pool: bool) -> None:
    """Not in torch: its copies take all cores, whichever thread asks, and a tier copies beside a forward pass."""
    pool, rows = (x.view(torch.uint8).numpy() for x in (pages, packed))
    columns = page_ids.numpy()
    index = slice(None) if packed_ids is None else packed_ids.numpy()
    if into_pool:
        pool[:, columns] = rows[index].swapaxes(0, 1)
    else:
        rows[index] = pool[:, columns].swapaxes(0, 1)


def _check_pages(pages: Tensor, page_ids: Tensor, packed: Tensor, packed_ids: Tensor | None) -> None:
    num_kv_heads, num_pages, *page = pages.shape
    num_rows = len(page_ids) if packed_ids is None else len(packed)
    wanted = (num_rows, num_kv_heads, *page)
    if packed.shape != wanted or packed.dtype != pages.dtype:
        raise ValueError(
            f"packed pages: must be {pages.dtype} of shape {wanted} (got {packed.dtype}, {tuple(packed.shape)})"
        )
    if not (pages.is_contiguous() and packed.is_contiguous()):
        raise ValueError("pages: all tensors must be contiguous")
    if not (pages.is_cpu and packed.is_cpu and page_ids.is_cpu):
        raise ValueError("pages: all tensors must be on the CPU")
    _check_ids("page_ids", page_ids, num_pages)
    if packed_ids is not None:
        _check_ids("packed_ids", packed_ids, num_rows)
        if len(packed_ids) != len(page_ids):
            raise ValueError(f"packed_ids: one for each of {len(page_ids)} pages (got {len(packed_ids)})")


def _check_ids(name: str, ids: Tensor, end: int) -> None:
    if ids.dtype != torch.int64 or ids.ndim != 1 or not ids.is_contiguous() or not ids.is_cpu:
        got = f"{ids.dtype}, {ids.ndim} dimensions, {ids.device}"
        raise ValueError(f"{name}: must be a contiguous int64 vector on the CPU (got {got})")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < end:
        raise ValueError(f"{name}: must be in [0, {end})")
