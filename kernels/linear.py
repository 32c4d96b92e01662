"""`y = x W^T + bias`, with the weight kept in the form that its device multiplies fastest."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """A projection of rows. Sums are float32 and rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [N, K], a row per output feature; bias [N]."""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, self.weight, self.bias)
