"""The decoder's row-wise operations on CUDA: one launch each, no intermediate in memory.

All are bound by memory: a row is read once, computed in float32 in registers and rounded once. Shapes as in
`mneme.kernels.ops`.
"""

# Arguments of kernels are tensors, pointers or numbers; Triton has no types for them.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

_TILE_ELEMENTS = 1024  # of a program that takes several short rows, such as heads
_GATED_BLOCK = 1024
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, heads, width, stride_token, stride_head, eps, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r is head `r % heads` of token `r // heads`; out is contiguous.

    Bytes: 2 * num_rows * width elements, and the weight from cache. Flops: 4 per element.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    start = (rows // heads) * stride_token + (rows % heads) * stride_head
    x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    normed = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    width,
    stride_hidden,
    stride_delta,
    eps,
    BLOCK: tl.constexpr,
):
    """hidden += delta, in place; out is the norm of the rounded sum, contiguous. One program per row.

    Bytes: 4 * num_rows * width elements. Flops: 5 per element.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    hidden = tl.load(hidden_ptr + row * stride_hidden + columns, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + row * stride_delta + columns, mask=inside, other=0.0)
    total = (hidden.to(tl.float32) + delta.to(tl.float32)).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + row * stride_hidden + columns, total, mask=inside)
    x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid(x):
    """Without a power that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, width, stride_row, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [0, width) of a row are gates, [width, 2 width) ups. Programs: (rows, blocks of columns).

    Bytes: 3 * num_rows * width elements. Flops: about 15 per output element.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * stride_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_row + width + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = gate * _sigmoid(gate)
    elif ACTIVATION == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # 0.5 (1 + tanh z) = sigmoid(2 z)
        active = gate * _sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))
    tl.store(out_ptr + row * width + columns, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mneme.kernels.ops.rms_norm`; x has 2 or 3 dimensions, the last contiguous."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    if not out.numel():
        return out
    tokens, heads = (x.shape[0], 1) if x.ndim == 2 else x.shape[:2]
    stride_head = x.stride(1) if x.ndim == 3 else 0
    assert x.stride(-1) == 1, "columns are contiguous"
    block = triton.next_power_of_2(width)
    rows = rows_per_tile(block)
    with torch.cuda.device(x.get_device()):
        rms_norm_kernel[(triton.cdiv(tokens * heads, rows),)](
            x, weight, out, tokens * heads, heads, width, x.stride(0), stride_head, eps,
            ROWS=rows, BLOCK=block, num_warps=num_warps_of(rows * block),
        )  # fmt: skip
    return out


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `mneme.kernels.ops.add_rms_norm`; `hidden` is written in place."""
    out = torch.empty(hidden.shape, dtype=weight.dtype, device=hidden.device)
    if not out.numel():
        return hidden, out
    assert hidden.stride(1) == delta.stride(1) == 1, "columns are contiguous"
    width = hidden.shape[1]
    block = triton.next_power_of_2(width)
    with torch.cuda.device(hidden.get_device()):
        add_rms_norm_kernel[(len(hidden),)](
            hidden, delta, weight, out, width, hidden.stride(0), delta.stride(0), eps,
            BLOCK=block, num_warps=num_warps_of(block),
        )  # fmt: skip
    return hidden, out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """See `mneme.kernels.ops.gated`."""
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    assert gate_up.stride(1) == 1, "columns are contiguous"
    with torch.cuda.device(gate_up.get_device()):
        gated_kernel[(num_rows, triton.cdiv(width, _GATED_BLOCK))](
            gate_up, out, width, gate_up.stride(0),
            ACTIVATION=_ACTIVATIONS[activation], BLOCK=_GATED_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def rows_per_tile(block: int) -> int:
    """Count the rows of one program of `rms_norm_kernel`."""
    return max(1, _TILE_ELEMENTS // block)


def num_warps_of(num_elements: int) -> int:
    """Choose the warps of a program that holds so many elements: up to 16 in each thread, and 16 warps."""
    return min(max(num_elements // 512, 1), 16)
