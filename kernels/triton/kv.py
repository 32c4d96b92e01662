"""Keys rotated and written with their values into the pool, in one pass on CUDA.

Every operation is rounded as the compiled code of CPUs (native/cpp/kv.cpp) and torch round it: a product and a sum are
one operation where they are one there, and nowhere else. So a page has the same bits whoever wrote it.
"""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch

import triton
import triton.language as tl
from mneme.kernels.arguments import LEAST_MAGNITUDE, KvRows
from mneme.kernels.page_table import KV_SCALE_BYTES
from mneme.kernels.triton.backend import is_interpreted
from mneme.kernels.triton.ops import num_warps_of

_TILE_ELEMENTS = 1024  # of one program: a token's heads, as many as fit
_SCALE_BYTES = tl.constexpr(KV_SCALE_BYTES)
_LEAST_MAGNITUDE = tl.constexpr(LEAST_MAGNITUDE)
_INFINITY = tl.constexpr(0x7F800000)  # as bits, which order magnitudes, infinity and NaN
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: numbers around it are whole


@triton.jit
def _multiply_add(a, b, c, INTERPRET: tl.constexpr):
    """a * b + c, rounded once; the interpreter's own rounds twice."""
    if INTERPRET:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def _greatest(x):
    """The bits of the greatest magnitude of each row, int32 [HEADS]."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _put_scale(row, greatest, wanted, HEAD_DIM: tl.constexpr):
    """Write the scales behind int8 rows; returns what their numbers are divided by them with, 0 where all are 0."""
    is_broken, magnitude = greatest >= _INFINITY, greatest.to(tl.float32, bitcast=True)
    is_flat = is_broken | (magnitude < _LEAST_MAGNITUDE)
    magnitude = tl.where(is_flat, 1.0, magnitude)
    scale = tl.where(is_flat, tl.where(is_broken, float("nan"), 0.0), tl.math.div_rn(magnitude, 127.0))
    tl.store((row + HEAD_DIM).to(tl.pointer_type(tl.float32)), scale, mask=wanted)
    return tl.where(is_flat, 0.0, tl.math.div_rn(127.0, magnitude))[:, None]


@triton.jit
def _put(at, x, steps, present, IS_INT8: tl.constexpr):
    """Store a tile of numbers, as int8 those that they are in `steps`, to the nearest, to the even one of two."""
    if IS_INT8:
        x = (tl.where(steps == 0.0, 0.0, x) * steps + _WHOLE) - _WHOLE
    tl.store(at, x.to(at.dtype.element_ty), mask=present)


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, slots_ptr, positions_ptr, k_pages_ptr, v_pages_ptr, table_ptr, num_heads, num_slots, num_positions,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Programs: (tokens, blocks of HEADS heads). HALF is rotary_dim / 2, 0 without a rotary embedding.

    Slots are those of one layer's [num_heads, num_slots, HEAD_DIM], or int8 [.., HEAD_DIM + 4]; one outside is not
    written, and a position outside the table reads its end. Bytes: 4 * T * num_heads * HEAD_DIM elements, and 8 * HALF
    of the table per token. Flops: 6 per rotated pair, and 4 per element that is rounded to int8.
    """
    is_int8: tl.constexpr = k_pages_ptr.dtype.element_ty == tl.int8
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    wanted = (heads < num_heads) & (slot >= 0) & (slot < num_slots)
    k_from = k_ptr + token * stride_k_token + (heads * stride_k_head)[:, None]
    v_from = v_ptr + token * stride_v_token + (heads * stride_v_head)[:, None]
    row = (heads.to(tl.int64) * num_slots + slot) * (HEAD_DIM + _SCALE_BYTES if is_int8 else HEAD_DIM)
    k_to, v_to = k_pages_ptr + row[:, None], v_pages_ptr + row[:, None]

    dims = tl.arange(0, DIM_BLOCK)[None, :]
    whole = wanted[:, None] & (dims < HEAD_DIM)
    values = tl.load(v_from + dims, mask=whole, other=0.0).to(tl.float32)
    steps = 1.0
    if is_int8:
        steps = _put_scale(v_pages_ptr + row, _greatest(values), wanted, HEAD_DIM)
    _put(v_to + dims, values, steps, whole, is_int8)

    greatest = tl.zeros([HEADS], tl.int32)
    if HALF > 0:
        halves = tl.arange(0, HALF_BLOCK)
        turning = wanted[:, None] & (halves < HALF)[None, :]
        position = tl.load(positions_ptr + token).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
        angles = table_ptr + position * (2 * HALF) + halves
        cos = tl.load(angles, mask=halves < HALF, other=0.0)[None, :]
        sin = tl.load(angles + HALF, mask=halves < HALF, other=0.0)[None, :]
        low = tl.load(k_from + halves[None, :], mask=turning, other=0.0).to(tl.float32)
        high = tl.load(k_from + HALF + halves[None, :], mask=turning, other=0.0).to(tl.float32)
        turned_low = _multiply_add(high, -sin, low * cos, INTERPRET)
        turned_high = _multiply_add(low, sin, high * cos, INTERPRET)
        greatest = tl.maximum(_greatest(turned_low), _greatest(turned_high))
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
        staying = wanted[:, None] & (rest < HEAD_DIM)
        tail = tl.load(k_from + rest, mask=staying, other=0.0).to(tl.float32)
        greatest = tl.maximum(greatest, _greatest(tail))
    if is_int8:
        steps = _put_scale(k_pages_ptr + row, greatest, wanted, HEAD_DIM)
    if HALF > 0:
        _put(k_to + halves[None, :], turned_low, steps, turning, is_int8)
        _put(k_to + HALF + halves[None, :], turned_high, steps, turning, is_int8)
    if 2 * HALF < HEAD_DIM:
        _put(k_to + rest, tail, steps, staying, is_int8)


def write_kv(rows: KvRows) -> None:
    """See `mneme.kernels.kv_write.write_kv`; rows of k and v may be slices of a joint projection."""
    k, v, rope = rows.k, rows.v, rows.rope
    num_rows, num_heads, head_dim = k.shape
    if not num_rows:
        return
    assert k.stride(2) == v.stride(2) == 1, "head dimensions are contiguous"
    assert rows.k_pages.is_contiguous(), "a layer's pool is contiguous"
    assert rows.v_pages.is_contiguous(), "a layer's pool is contiguous"
    assert rows.k_pages.shape[3] % 4 == 0 or rows.k_pages.dtype != torch.int8, "scales lie where float32 can be read"
    half = 0 if rope is None else rope.rotary_dim // 2
    table = k if rope is None else rope.table  # any pointer where none is read
    constants = write_constants(num_heads, head_dim, half)
    heads = constants["HEADS"]
    with torch.cuda.device(k.get_device()):
        write_kv_kernel[(num_rows, triton.cdiv(num_heads, heads))](
            k, v, rows.slots, rows.positions, rows.k_pages, rows.v_pages, table,
            num_heads, rows.k_pages.shape[1] * rows.k_pages.shape[2], 1 if rope is None else rope.num_positions,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            **constants, INTERPRET=is_interpreted(),
            num_warps=num_warps_of(heads * constants["DIM_BLOCK"]), enable_fp_fusion=False,
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
