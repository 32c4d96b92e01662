"""The decoder's row-wise operations, each in one pass; `_backend` is the one place that chooses who computes.

Shapes: T rows, H hidden, I intermediate. A row's result does not depend on the other rows. Sums are float32 and each
result is rounded once. All raise ValueError, naming the argument, for shapes, types and devices that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from mneme.kernels.native import ops as native_ops
from mneme.kernels.torch import ops as torch_ops
from mneme.kernels.triton.modules import triton_module

Activation = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS = get_args(Activation)


class _Ops(Protocol):
    """Lists what a backend module has."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in the weight's dtype.

    x       [..., H]  may be a view of wider rows, as heads of a joint projection are
    weight  [H]
    """
    _check_weight(x, weight)
    return _backend(x).rms_norm(x, weight, eps)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `hidden + delta`, in hidden's dtype, and its `rms_norm`. The first may be `hidden` itself, in place.

    hidden, delta  [T, H]
    weight         [H]
    """
    _check_weight(hidden, weight)
    if hidden.ndim != 2 or delta.shape != hidden.shape or delta.is_cpu is not hidden.is_cpu:
        raise ValueError(f"delta: must be like hidden, [T, H] (got {_text(delta)}, hidden is {_text(hidden)})")
    return _backend(hidden).add_rms_norm(hidden, delta, weight, eps)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute `activation(gate) * up`, [T, I]. Gelu is the exact one; "gelu_tanh" its usual approximation.

    gate_up  [T, 2 I]  gates, then ups
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: must have shape [T, 2 I] (got {_text(gate_up)})")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(_ACTIVATIONS)} (got {activation!r})")
    return _backend(gate_up).gated(gate_up, activation)


def mask_logits(logits: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    logits  float32 [T, vocab]  contiguous
    bits    int32 [T, at least vocab / 32]  bit i of word j: token 32 j + i; contiguous, on the logits' device
    """
    _check_logits(logits)
    num_words = -(-logits.shape[1] // 32)
    is_right = bits.dtype is torch.int32 and bits.ndim == 2 and len(bits) == len(logits) and bits.shape[1] >= num_words
    if not is_right or not logits.is_contiguous() or not bits.is_contiguous() or bits.device != logits.device:
        rule = f"must be int32 [{len(logits)}, at least {num_words}] beside the logits, both contiguous"
        raise ValueError(f"bits: {rule} (got {_text(bits)})")
    _sampler(logits).mask_logits(logits, bits)


def draw_whole(logits: Tensor, temperatures: Sequence[float], numbers: Sequence[float]) -> list[int]:
    """Return a token of each row, drawn from all of them: where the cumulative distribution, in the order of the
    vocabulary, passes the row's number. -1 of rows whose best logit is not finite, as with a NaN.

    logits        float32 [T, vocab]  a token at -inf is never drawn
    temperatures  [T]  the distribution is the softmax of logits / temperature; 0: the best token, the first of equals
    numbers       [T]  in [0, 1)
    """
    _check_logits(logits)
    if not len(logits) == len(temperatures) == len(numbers):
        got = f"got {len(temperatures)}, {len(numbers)}"
        raise ValueError(f"temperatures, numbers: must be one each for {len(logits)} rows of logits ({got})")
    drawn: list[int] = _sampler(logits).draw_whole(logits, temperatures, numbers)
    return drawn


def draw_tokens(
    logits: Tensor,
    *,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    uniform: Sequence[float],
) -> Tensor | None:
    """Draw a token of each row: int32 [rows], -1 of rows whose best logit is not finite; None without a kernel.

    logits   float32 [rows, vocab]
    uniform  in [0, 1): where the cumulative distribution is inverted

    See `mneme.kernels.triton.sampling.pack_params` for the others. Does not wait for the device.
    """
    kernels = triton_module("sampling")
    if kernels is None:
        return None
    params = kernels.pack_params(temperature, top_k, top_p, min_p, uniform)
    tokens: Tensor = kernels.draw(logits, params)
    return tokens


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.ndim != 1 or weight.shape[0] != x.shape[-1] or weight.is_cpu is not x.is_cpu:
        raise ValueError(f"weight: must be one for each of the columns (got {_text(weight)}, the rows are {_text(x)})")


def _check_logits(logits: Tensor) -> None:
    if logits.dtype is not torch.float32 or logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits: must be float32 of shape [T, vocab] (got {_text(logits)})")


def _text(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def _backend(x: Tensor) -> _Ops:
    if x.is_cuda:
        on_cuda: _Ops | None = triton_module("ops")
        return torch_ops if on_cuda is None else on_cuda
    return native_ops if native_ops.can_compute(x) else torch_ops


def _sampler(logits: Tensor) -> ModuleType:
    """Return who masks and draws, but for the draws of `draw_tokens`."""
    return native_ops if native_ops.can_compute(logits) else torch_ops
