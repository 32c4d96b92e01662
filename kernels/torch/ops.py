"""The decoder's row-wise operations in torch: what every device can do, and what the others are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256  # weights that `invert` skips at once


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)


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


def mask_logits(logits: Tensor, bits: Tensor) -> None:
    """Unpack the bits where they are: what crosses to a device is a 32nd of the logits."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_barred = ((bits[:, :, None] >> shifts) & 1 == 0).flatten(1)
    logits.masked_fill_(is_barred[:, : logits.shape[1]], -torch.inf)


def draw_whole(logits: Tensor, temperatures: Sequence[float], numbers: Sequence[float]) -> Tensor:
    temperature = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    return invert((logits / temperature[:, None]).softmax(dim=-1), numbers)


def invert(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return int64 [T]: where each row's cumulative weight passes `number` times its end; never where a weight is 0.

    weights  float32 [T, n]
    numbers  [T]  in [0, 1)

    First the block of weights where that is, then the place inside, so that only the blocks' sums are accumulated.
    """
    padding = -weights.shape[-1] % _BLOCK
    blocks = (F.pad(weights, (0, padding)) if padding else weights).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    ends = sums.cumsum(dim=-1)
    target = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None] * ends[:, -1:]
    block = _first_beyond(ends, target)
    rest = (target - ends.gather(-1, block) + sums.gather(-1, block)).clamp_(min=0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0]
    return (block * _BLOCK + _first_beyond(inside.double().cumsum(dim=-1), rest))[:, 0]


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return int64 [T, 1]: the first place above the target, or where the end is reached if rounding leaves none."""
    index = torch.searchsorted(cumulative, target, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()))
