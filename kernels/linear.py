"""`y = x W^T + bias`, with the weight kept in the form that its device multiplies fastest."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mneme.kernels.native.linear import PackedLinear, can_pack


class Linear(Protocol):
    """A projection of rows. Sums are float32 and rounded once."""

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] -> [T, N], in x's dtype or, where `out_dtype` is float32, in that one.

        A packed weight refuses every other x and `out_dtype` with a ValueError.
        """

    def weight_rows(self, index: Tensor) -> Tensor:
        """Rows of W, [len(index), K]: a tied embedding is read where the output projection keeps it."""


class PlainLinear:
    """A `Linear` whose weight torch multiplies as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [N, K], a row per output feature; bias [N]."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype == torch.float32 != x.dtype and x.is_cuda:  # the product's sums, unrounded; CUDA alone gives them
            y = torch.mm(x, self._weight.t(), out_dtype=torch.float32)
            return y if self._bias is None else y.add_(self._bias)
        y = F.linear(x, self._weight, self._bias)
        return y if out_dtype is None else y.to(out_dtype)

    def weight_rows(self, index: Tensor) -> Tensor:
        return F.embedding(index, self._weight)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """weight [N, K], bias [N]: packed for the compiled kernel where there is one, else as torch has it.

    A packed weight is a copy; the caller should drop its own.
    """
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)
