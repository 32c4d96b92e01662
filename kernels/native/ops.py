"""The decoder's row-wise operations in compiled code (cpp/ops.cpp), for CPU tensors in float32 or bfloat16."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from mneme.kernels.native.library import library, native_function, num_threads

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def can_compute(x: Tensor) -> bool:
    """Tell whether there is compiled code for such a tensor."""
    return x.is_cpu and (x.dtype is torch.bfloat16 or x.dtype is torch.float32) and library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    count = weight.shape[0]
    rows = x if x.ndim in (2, 3) and x.stride(-1) == 1 else x.reshape(-1, count)
    outer, inner = rows.stride()[:-1] if rows.ndim == 3 else (rows.stride(0), 0)
    num_inner = rows.shape[1] if rows.ndim == 3 else 1
    out, scales = x.new_empty(x.shape), _like(weight, x)
    native_function("mneme_rms_norm")(
        rows.data_ptr(), scales.data_ptr(), out.data_ptr(), rows.shape[0], outer, num_inner, inner, count,
        eps, x.dtype is torch.bfloat16, num_threads(),
    )  # fmt: skip
    return out.to(weight.dtype)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden, delta = hidden.contiguous(), _like(delta, hidden)
    out, scales = torch.empty_like(hidden), _like(weight, hidden)
    native_function("mneme_add_rms_norm")(
        hidden.data_ptr(), delta.data_ptr(), scales.data_ptr(), out.data_ptr(), hidden.shape[0],
        weight.shape[0], eps, hidden.dtype is torch.bfloat16, num_threads(),
    )  # fmt: skip
    return hidden, out.to(weight.dtype)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, count = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, count)
    native_function("mneme_gated")(
        gate_up.data_ptr(), out.data_ptr(), num_rows, count, ACTIVATIONS[activation],
        gate_up.dtype is torch.bfloat16, num_threads(),
    )  # fmt: skip
    return out


def mask_logits(logits: Tensor, bits: Tensor) -> None:
    native_function("mneme_mask_logits")(
        logits.data_ptr(), bits.data_ptr(), len(logits), logits.shape[1], bits.shape[1], num_threads()
    )


def draw_whole(logits: Tensor, temperatures: Sequence[float], numbers: Sequence[float]) -> list[int]:
    logits = logits.contiguous()
    num_rows, count = logits.shape
    options, index = array("d", (*temperatures, *numbers)), array("q", bytes(8 * num_rows))
    native_function("mneme_draw_whole")(
        logits.data_ptr(), options.buffer_info()[0], index.buffer_info()[0], num_rows, count, num_threads()
    )
    return index.tolist()


def _like(tensor: Tensor, x: Tensor) -> Tensor:
    """Make it contiguous and of x's dtype, which the compiled code takes for granted."""
    if tensor.dtype is x.dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(x.dtype).contiguous()
