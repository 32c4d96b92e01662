"""The decoder's row-wise operations, each in one pass; `_backend` is the one place that chooses who computes.

Shapes: T rows, H hidden, I intermediate. A row's result does not depend on the other rows. Sums are float32 and each
result is rounded once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from mneme.kernels import native_ops, torch_ops

log = logging.getLogger(__name__)

Activation = Literal["silu", "gelu", "gelu_tanh"]


class _Ops(Protocol):
    """What a backend module has."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    x       [..., H]  may be a view of wider rows, as heads of a joint projection are
    weight  [H]
    """
    return _backend(x).rms_norm(x, weight, eps)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`hidden + delta` and its `rms_norm`. The first may be `hidden` itself, written in place.

    hidden, delta  [T, H]
    weight         [H]
    """
    return _backend(hidden).add_rms_norm(hidden, delta, weight, eps)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up`, [T, I]. Gelu is the exact one; "gelu_tanh" its usual approximation.

    gate_up  [T, 2 I]  gates, then ups
    """
    return _backend(gate_up).gated(gate_up, activation)


def best_tokens(logits: Tensor) -> tuple[list[int], list[float]]:
    """The largest logit of each row, the first of equal ones: its index and itself. A row with a NaN gives NaN.

    logits  float32 [T, vocab]
    """
    computed = native_ops if native_ops.can_compute(logits) else torch_ops
    index, value = computed.best_tokens(logits)
    return index.tolist(), value.tolist()


def draw_whole(logits: Tensor, temperatures: Sequence[float], numbers: Sequence[float]) -> list[int]:
    """The token of each row at which the cumulative distribution, in the order of the vocabulary, passes its number.

    logits        float32 [T, vocab]  the largest of each row is finite; a token at -inf is never drawn
    temperatures  [T]  above 0: the distribution is the softmax of logits / temperature
    numbers       [T]  in [0, 1)
    """
    computed = native_ops if native_ops.can_compute(logits) else torch_ops
    drawn: list[int] = computed.draw_whole(logits, temperatures, numbers).tolist()
    return drawn


def _backend(x: Tensor) -> _Ops:
    if x.is_cuda:
        return _cuda_ops()
    return native_ops if native_ops.can_compute(x) else torch_ops


@functools.cache
def _cuda_ops() -> _Ops:
    try:
        from mneme.kernels import triton_ops
    except ImportError as error:
        log.warning("the decoder's operations run in torch: %s", error)
        return torch_ops
    return triton_ops
