"""Compiled moves of keys and values on the CPU: new ones into their slots, tokens out of a pool into chunks and back.

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
from mneme.kernels.native.library import (
    COUNT,
    DTYPE_NUMBERS,
    KV_DTYPE_NUMBERS,
    NUMBER,
    POINTER,
    library,
    native_function,
    num_threads,
)
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
        ("kv_dtype", NUMBER),
        ("kv_stride", NUMBER),
    )


def can_write(rows: KvRows) -> bool:
    """Tell whether the compiled code takes keys and values like these for a pool like this."""
    k, v, _, _, k_pages, v_pages, _ = rows
    if not k.is_cpu or k.dtype not in DTYPE_NUMBERS or library() is None:
        return False
    is_typed = v.dtype is k.dtype and k_pages.dtype in (k.dtype, torch.int8) and v_pages.dtype is k_pages.dtype
    return is_typed and k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.shape == v_pages.shape


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
    k, v, slots, positions, k_pages, v_pages, rope = rows
    if not (v.is_cpu and slots.is_cpu and positions.is_cpu and k_pages.is_cpu and v_pages.is_cpu):
        raise ValueError("k, v, slots, positions, k_pages, v_pages: must be on one device")
    if rope is not None and not rope.table.is_cpu:
        raise ValueError(f"rope: must be on the device of k, cpu (got {rope.table.device})")
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    slots, positions = slots.to(torch.int64).contiguous(), positions.to(torch.int64).contiguous()
    num_kv_heads, num_pages, page_size, kv_stride = k_pages.shape
    write = _Write(
        k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        slots.data_ptr(), positions.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(),
        None if rope is None else rope.table.data_ptr(),
        k.shape[0], num_pages * page_size, 0 if rope is None else rope.num_positions,
        num_kv_heads, k.shape[2], 0 if rope is None else rope.rotary_dim // 2, DTYPE_NUMBERS[k.dtype],
        num_threads(), KV_DTYPE_NUMBERS[k_pages.dtype], kv_stride,
    )  # fmt: skip
    row = native_function(name)(ctypes.byref(write), *more)
    if row >= 0:
        raise ValueError(f"slots, positions: row {row} is out of range (got {int(slots[row])}, {int(positions[row])})")


def scatter_chunk(chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor) -> None:
    """Copy a chunk's tokens into slots of a layer's pool; those in no run are left alone.

    chunk    uint8 [2 * num_kv_heads * num_tokens * head_dim * bytes of an element]  as [K and V, head, token, dim]; may
    lie in read-only memory; or [num_chunks, so many] of several
    runs     int64 [num_runs, 4]  page id, first offset in that page, how many tokens (at least 1), first in the chunk,
    counted over all chunks; no slot twice
    k_pages  [num_kv_heads, num_pages, page_size, head_dim]  any dtype; a chunk has its bytes. int8: [..., head_dim + 4]
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
    num_chunks = len(chunk) if chunk.ndim == 2 else 1
    if library() is None:
        bad_run = _copy_tokens_in_numpy(chunk, num_chunks, num_tokens, runs, k_pages, v_pages, into_pool)
    else:
        num_kv_heads, num_pages, page_size, head_dim = k_pages.shape
        bad_run = native_function("mneme_copy_tokens")(
            k_pages.data_ptr(), v_pages.data_ptr(), chunk.ctypes.data, runs.ctypes.data, len(runs), num_chunks,
            num_tokens, num_kv_heads, num_pages, page_size, head_dim * k_pages.element_size(), into_pool,
        )  # fmt: skip
    if bad_run >= 0:
        rule = f"must be in {tuple(k_pages.shape)} pages and {num_tokens} tokens"
        raise ValueError(f"runs: run {bad_run} {rule} (got {runs[bad_run].tolist()})")


def _copy_tokens_in_numpy(
    chunk: U8Array,
    num_chunks: int,
    num_tokens: int,
    runs: IntArray,
    k_pages: Tensor,
    v_pages: Tensor,
    into_pool: bool,
) -> int:
    """Return the first run that is out of range, or -1. Torch's copies would take all cores."""
    num_kv_heads, num_pages, page_size, _ = k_pages.shape
    for index, (page_id, offset, count, first) in enumerate(runs.tolist()):
        is_in_page = 0 <= page_id < num_pages and 0 <= offset < offset + count <= page_size
        if not (is_in_page and 0 <= first < num_chunks * num_tokens and first % num_tokens + count <= num_tokens):
            return index
    chunks = chunk.reshape(num_chunks, 2, num_kv_heads, num_tokens, -1)
    for kind, pages in enumerate((k_pages, v_pages)):
        pool = pages.view(torch.uint8).numpy()
        for page_id, offset, count, first in runs.tolist():
            number, first_token = divmod(first, num_tokens)
            slots = pool[:, page_id, offset : offset + count]
            side_by_side = chunks[number, kind, :, first_token : first_token + count]
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
    is_fit = chunk.dtype == np.uint8 and chunk.ndim in (1, 2) and chunk.shape[-1] == chunk_bytes
    if num_tokens < 1 or not is_fit or not chunk.flags.c_contiguous:
        rule = f"must be {chunk_bytes} contiguous bytes for {num_tokens} tokens, at least one"
        raise ValueError(f"chunk: {rule} (got {chunk.dtype}, {chunk.shape})")
    if runs.dtype != np.int64 or runs.ndim != 2 or runs.shape[1] != 4 or not runs.flags.c_contiguous:
        raise ValueError(f"runs: must be contiguous int64 [num_runs, 4] (got {runs.dtype}, {runs.shape})")
