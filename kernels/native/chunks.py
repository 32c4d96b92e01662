"""Compiled moves of tokens between a layer of a chunk and the pages of a pool on the CPU, in the calling thread alone.

    chunk    uint8 [2 * num_kv_heads * num_tokens * head_dim * bytes of an element]  as [K and V, head, token, dim]
    k_pages  [num_kv_heads, num_pages, page_size, head_dim]  any dtype; a chunk has its bytes
    v_pages  like k_pages
    runs     int64 [num_runs, 4]  page id, first offset in that page, how many tokens (at least 1), first in the chunk

Tokens of a chunk that are in no run are left alone, on both sides. All numbers are checked before a byte moves. The
compiled code gives the interpreter lock back while it copies; without a library numpy does the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mneme.kernels.native.library import library, native_function

U8Array = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]


def scatter_chunk(chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor) -> None:
    """Copy a chunk's tokens into slots, no slot twice; the chunk may lie in read-only memory.

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
        bad_run = _copy_in_numpy(chunk, num_tokens, runs, k_pages, v_pages, into_pool)
    else:
        num_kv_heads, num_pages, page_size, head_dim = k_pages.shape
        bad_run = native_function("mneme_copy_tokens")(
            k_pages.data_ptr(), v_pages.data_ptr(), chunk.ctypes.data, runs.ctypes.data,
            len(runs), num_tokens, num_kv_heads, num_pages, page_size, head_dim * k_pages.element_size(), into_pool,
        )  # fmt: skip
    if bad_run >= 0:
        rule = f"must be in {tuple(k_pages.shape)} pages and {num_tokens} tokens"
        raise ValueError(f"runs: run {bad_run} {rule} (got {runs[bad_run].tolist()})")


def _copy_in_numpy(
    chunk: U8Array, num_tokens: int, runs: IntArray, k_pages: Tensor, v_pages: Tensor, into_pool: bool
) -> int:
    """The first run that is out of range, or -1. Not in torch: its copies take all cores, whichever thread asks."""
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
