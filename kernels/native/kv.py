"""Compiled moves of keys and values on the CPU: new ones into their slots, pages and chunks out of a pool and back.

`can_write` says whether the compiled code takes these tensors; gathers and scatters always work, in numpy where there
is no library, in the calling thread alone. They give the interpreter lock back while they copy. All numbers are checked
before a byte moves. Bytes: what is moved, read and written once; no flops but the rotation of new keys.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mneme.kernels.arguments import KvRows
from mneme.kernels.native.library import COUNT, DTYPE_NUMBERS, NUMBER, POINTER, library, native_function, num_threads
from mneme.kernels.page_table import IntArray

U8Array = npt.NDArray[np.uint8]


class _Write(ctypes.Structure):
    """Mirrors cpp/kv.cpp: Write."""

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


def can_write(rows: KvRows) -> bool:
    """Tell whether the compiled code takes keys and values like these for a pool like this."""
    k, k_pages, v_pages = rows.k, rows.k_pages, rows.v_pages
    if not k.is_cpu or k.dtype not in DTYPE_NUMBERS or library() is None:
        return False
    same_type = rows.v.dtype is k.dtype and k_pages.dtype is k.dtype and v_pages.dtype is k.dtype
    return same_type and k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.shape == v_pages.shape


def write_kv(rows: KvRows) -> None:
    """See `mneme.kernels.kv_write.write_kv`; rows of k and v may be slices of a joint projection.

    Raises ValueError for a slot or position out of range, before anything is written.
    """
    _call("mneme_write_kv", rows)


def kv_deviation(rows: KvRows) -> Tensor:
    """See `mneme.kernels.kv_write.kv_deviation`; takes and refuses what `write_kv` does."""
    deviation = torch.empty(len(rows.k), 2)
    _call("mneme_kv_deviation", rows, deviation.data_ptr())
    return deviation


def _call(name: str, rows: KvRows, *more: int) -> None:
    rope = rows.rope
    is_here = rows.v.is_cpu and rows.slots.is_cpu and rows.positions.is_cpu
    if not (is_here and rows.k_pages.is_cpu and rows.v_pages.is_cpu):
        raise ValueError("k, v, slots, positions, k_pages, v_pages: must be on one device")
    if rope is not None and not rope.table.is_cpu:
        raise ValueError(f"rope: must be on the device of k, cpu (got {rope.table.device})")
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (rows.k, rows.v))
    slots, positions = rows.slots.to(torch.int64).contiguous(), rows.positions.to(torch.int64).contiguous()
    num_kv_heads, num_pages, page_size, head_dim = rows.k_pages.shape
    write = _Write(
        k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        slots.data_ptr(), positions.data_ptr(), rows.k_pages.data_ptr(), rows.v_pages.data_ptr(),
        None if rope is None else rope.table.data_ptr(),
        k.shape[0], num_pages * page_size, 0 if rope is None else rope.num_positions,
        num_kv_heads, head_dim, 0 if rope is None else rope.rotary_dim // 2, DTYPE_NUMBERS[k.dtype],
        num_threads(),
    )  # fmt: skip
    row = native_function(name)(ctypes.byref(write), *more)
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
        _copy_pages_in_numpy(pages, page_ids, packed, packed_ids, into_pool)
        return
    num_kv_heads, num_pages, page_size, head_dim = pages.shape
    page_bytes = page_size * head_dim * pages.element_size()
    native_function("mneme_copy_pages")(
        pages.data_ptr(), packed.data_ptr(), page_ids.data_ptr(), None if packed_ids is None else packed_ids.data_ptr(),
        len(page_ids), num_kv_heads, num_pages, page_bytes, into_pool,
    )  # fmt: skip


def _copy_pages_in_numpy(
    pages: Tensor, page_ids: Tensor, packed: Tensor, packed_ids: Tensor | None, into_pool: bool
) -> None:
    """Copy without torch, whose copies take all cores: a tier copies beside a forward pass."""
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


def scatter_chunk(chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor) -> None:
    """Copy a chunk's tokens into slots of a layer's pool; those in no run are left alone.

    chunk    uint8 [2 * num_kv_heads * num_tokens * head_dim * bytes of an element]  as [K and V, head, token, dim]; may
    lie in read-only memory
    runs     int64 [num_runs, 4]  page id, first offset in that page, how many tokens (at least 1), first in the chunk;
    no slot twice
    k_pages  [num_kv_heads, num_pages, page_size, head_dim]  any dtype; a chunk has its bytes
    v_pages  like k_pages

    Raises ValueError for what does not fit, before anything is written.
    """
    _copy_tokens(chunk, num_tokens, runs, k_pages, v_pages, into_pool=True)


def gather_chunk(k_pages: Tensor, v_pages: Tensor, runs: IntArray, num_tokens: int, chunk: U8Array) -> None:
    """The inverse of `scatter_chunk`; no token of the chunk twice, but a slot may be read for several."""
    if not chunk.flags.writeable:
        raise ValueError("chunk: must be writable")
    _copy_tokens(chunk, num_tokens, runs, k_pages, v_pages, into_pool=False)


def _copy_tokens(
    chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor, *, into_pool: bool
) -> None:
    _check_arrays(chunk, num_tokens, runs, k_pages, v_pages)
    if library() is None:
        bad_run = _copy_tokens_in_numpy(chunk, num_tokens, runs, k_pages, v_pages, into_pool)
    else:
        num_kv_heads, num_pages, page_size, head_dim = k_pages.shape
        bad_run = native_function("mneme_copy_tokens")(
            k_pages.data_ptr(), v_pages.data_ptr(), chunk.ctypes.data, runs.ctypes.data,
            len(runs), num_tokens, num_kv_heads, num_pages, page_size, head_dim * k_pages.element_size(), into_pool,
        )  # fmt: skip
    if bad_run >= 0:
        rule = f"must be in {tuple(k_pages.shape)} pages and {num_tokens} tokens"
        raise ValueError(f"runs: run {bad_run} {rule} (got {runs[bad_run].tolist()})")


def _copy_tokens_in_numpy(
    chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor, into_pool: bool
) -> int:
    """Return the first run that is out of range, or -1. Torch's copies would take all cores."""
    num_kv_heads, num_pages, page_size, _ = k_pages.shape
    for index, (page_id, offset, count, first) in enumerate(runs.tolist()):
        is_in_page = 0 <= page_id < num_pages and 0 <= offset < offset + count <= page_size
        if not (is_in_page and 0 <= first < first + count <= num_tokens):
            return index
    tokens = chunk.reshape(2, num_kv_heads, num_tokens, -1)
    for pages, part in zip((k_pages, v_pages), tokens, strict=True):
        pool = pages.view(torch.uint8).numpy()
        for page_id, offset, count, first in runs.tolist():
            slots, side_by_side = pool[:, page_id, offset : offset + count], part[:, first : first + count]
            if into_pool:
                slots[...] = side_by_side
            else:
                side_by_side[...] = slots
    return -1


def _check_arrays(chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor) -> None:
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages, v_pages: must be alike, [num_kv_heads, num_pages, page_size, head_dim] "
            f"(got {k_pages.dtype}, {tuple(k_pages.shape)} and {v_pages.dtype}, {tuple(v_pages.shape)})"
        )
    if not all(pages.is_cpu and pages.is_contiguous() for pages in (k_pages, v_pages)):
        raise ValueError("k_pages, v_pages: must be contiguous and on the CPU")
    num_kv_heads, _, _, head_dim = k_pages.shape
    chunk_bytes = 2 * num_kv_heads * num_tokens * head_dim * k_pages.element_size()
    if num_tokens < 1 or chunk.dtype != np.uint8 or chunk.shape != (chunk_bytes,) or not chunk.flags.c_contiguous:
        rule = f"must be {chunk_bytes} contiguous bytes for {num_tokens} tokens, at least one"
        raise ValueError(f"chunk: {rule} (got {chunk.dtype}, {chunk.shape})")
    if runs.dtype != np.int64 or runs.ndim != 2 or runs.shape[1] != 4 or not runs.flags.c_contiguous:
        raise ValueError(f"runs: must be contiguous int64 [num_runs, 4] (got {runs.dtype}, {runs.shape})")
