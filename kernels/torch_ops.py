"""The decoder's row-wise operations in torch: what every device can do, and what the others are tested against."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = hidden + delta
    return hidden, rms_norm(hidden, weight, eps)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    index = logits.argmax(dim=-1)  # a NaN counts as the largest
    return index, logits.gather(-1, index[:, None])[:, 0]
