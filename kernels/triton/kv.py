"""Keys rotated and written with their values into the pool, in one pass on CUDA."""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch

import triton
import triton.language as tl
from mneme.kernels.arguments import KvRows
from mneme.kernels.triton.ops import num_warps_of

_TILE_ELEMENTS = 1024  # of one program: a token's heads, as many as fit


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, slots_ptr, positions_ptr, k_pages_ptr, v_pages_ptr, table_ptr, num_heads, num_slots, num_positions,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: (tokens, blocks of HEADS heads). HALF is rotary_dim / 2, 0 without a rotary embedding.

    Slots are those of one layer's [num_heads, num_slots, HEAD_DIM]; one outside is not written, and a position outside
    the table reads its end. Bytes: 4 * T * num_heads * HEAD_DIM elements, and 8 * HALF of the table per token.
    Flops: 6 per rotated pair.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    wanted = (heads < num_heads) & (slot >= 0) & (slot < num_slots)
    k_from = k_ptr + token * stride_k_token + (heads * stride_k_head)[:, None]
    v_from = v_ptr + token * stride_v_token + (heads * stride_v_head)[:, None]
    to = ((heads.to(tl.int64) * num_slots + slot) * HEAD_DIM)[:, None]

    dims = tl.arange(0, DIM_BLOCK)[None, :]
    whole = wanted[:, None] & (dims < HEAD_DIM)
    values = tl.load(v_from + dims, mask=whole)
    tl.store(v_pages_ptr + to + dims, values.to(v_pages_ptr.dtype.element_ty), mask=whole)

    if HALF > 0:
        halves = tl.arange(0, HALF_BLOCK)
        turning = wanted[:, None] & (halves < HALF)[None, :]
        position = tl.load(positions_ptr + token).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
        row = table_ptr + position * (2 * HALF) + halves
        cos = tl.load(row, mask=halves < HALF, other=0.0)[None, :]
        sin = tl.load(row + HALF, mask=halves < HALF, other=0.0)[None, :]
        low = tl.load(k_from + halves[None, :], mask=turning, other=0.0).to(tl.float32)
        high = tl.load(k_from + HALF + halves[None, :], mask=turning, other=0.0).to(tl.float32)
        turned_low = (low * cos - high * sin).to(k_pages_ptr.dtype.element_ty)
        turned_high = (high * cos + low * sin).to(k_pages_ptr.dtype.element_ty)
        tl.store(k_pages_ptr + to + halves[None, :], turned_low, mask=turning)
        tl.store(k_pages_ptr + to + HALF + halves[None, :], turned_high, mask=turning)
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
        staying = wanted[:, None] & (rest < HEAD_DIM)
        tail = tl.load(k_from + rest, mask=staying)
        tl.store(k_pages_ptr + to + rest, tail.to(k_pages_ptr.dtype.element_ty), mask=staying)


def write_kv(rows: KvRows) -> None:
    """See `mneme.kernels.kv_write.write_kv`; rows of k and v may be slices of a joint projection."""
    k, v, rope = rows.k, rows.v, rows.rope
    num_rows, num_heads, head_dim = k.shape
    if not num_rows:
        return
    assert k.stride(2) == v.stride(2) == 1, "head dimensions are contiguous"
    assert rows.k_pages.is_contiguous(), "a layer's pool is contiguous"
    assert rows.v_pages.is_contiguous(), "a layer's pool is contiguous"
    half = 0 if rope is None else rope.rotary_dim // 2
    table = k if rope is None else rope.table  # any pointer where none is read
    constants = write_constants(num_heads, head_dim, half)
    heads = constants["HEADS"]
    with torch.cuda.device(k.get_device()):
        write_kv_kernel[(num_rows, triton.cdiv(num_heads, heads))](
            k, v, rows.slots, rows.positions, rows.k_pages, rows.v_pages, table,
            num_heads, rows.k_pages.shape[1] * rows.k_pages.shape[2], 1 if rope is None else rope.num_positions,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            **constants, num_warps=num_warps_of(heads * constants["DIM_BLOCK"]),
        )  # fmt: skip


def write_constants(num_heads: int, head_dim: int, half: int) -> dict[str, int]:
    """Return the kernel's constants that follow from a model; `half` is rotary_dim / 2."""
    dim_block = triton.next_power_of_2(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HEADS": min(triton.next_power_of_2(num_heads), max(1, _TILE_ELEMENTS // dim_block)),
        "HALF_BLOCK": triton.next_power_of_2(max(half, 1)),
        "TAIL_BLOCK": triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        "DIM_BLOCK": dim_block,
    }
