"""The decoder's row-wise operations in torch: what every device can do, and what the others are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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


def mask_logits(logits: Tensor, bits: Tensor) -> None:
    """Unpack the bits where they are: what crosses to a device is a 32nd of the logits."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_barred = ((bits[:, :, None] >> shifts) & 1 == 0).flatten(1)
    logits.masked_fill_(is_barred[:, : logits.shape[1]], -torch.inf)


def draw_whole(logits: Tensor, temperatures: Sequence[float], numbers: Sequence[float]) -> list[int]:
    index = logits.argmax(dim=-1)  # a NaN counts as the largest
    is_finite = logits.gather(-1, index[:, None])[:, 0].isfinite()
    drawn = [row for row, is_known in enumerate(is_finite.tolist()) if is_known and temperatures[row]]
    if drawn:
        temperature = torch.tensor([temperatures[row] for row in drawn], dtype=torch.float32, device=logits.device)
        weights = (logits[drawn] / temperature[:, None]).softmax(dim=-1)
        index[drawn] = invert(weights, [numbers[row] for row in drawn])
    drawn_ids: list[int] = index.where(is_finite, -1).tolist()
    return drawn_ids


def invert(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return int64 [T]: where each row's cumulative weight passes `number` times its end; never where a weight is 0.

    weights  float32 [T, n]
    numbers  [T]  in [0, 1)
    """
    ends = weights.cumsum(dim=-1, dtype=torch.float64)
    target = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None] * ends[:, -1:]
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())  # if rounding leaves no place above the target
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)[:, 0]
