"""`y = x W^T + bias` with weights of FP8 (e4m3) and a scale for each output, by torch's product (`torch._scaled_mm`).

For GPUs from compute capability 8.9 on. A weight is its number times the scale of its row; inputs are rounded to e4m3
when they are multiplied, each row with a scale of its own: largest / 448. Not measured on a GPU. On CPUs torch computes
the same, which tests use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST = 448.0  # of e4m3
_LEAST_SCALE = 2.0**-126  # a row of zeros has this one
_STEP = 16  # that has to divide both sizes of a weight
_MIN_CAPABILITY = (8, 9)


class Fp8Codes(NamedTuple):
    """A weight [N, K]: values times the scale of their row."""

    values: Tensor  # float8_e4m3fn [N, K]
    scales: Tensor  # float32 [N]
    dtype: torch.dtype  # of inputs

    @property
    def device(self) -> torch.device:
        return self.values.device

    def rows(self, change: Callable[[Tensor], Tensor]) -> Fp8Codes:
        """Return the weight whose rows `change` chooses or moves: [N, ...] -> [M, ...]."""
        return self._replace(values=change(self.values), scales=change(self.scales))


def can_multiply(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies FP8 with inputs of a dtype."""
    is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
    return is_new and dtype is torch.bfloat16


def fits(num_outputs: int, num_inputs: int) -> bool:
    """Return whether a weight of these sizes is multiplied."""
    return num_outputs % _STEP == num_inputs % _STEP == 0


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] -> float8_e4m3fn [T, K] and scales float32 [T, 1]; what is infinite or NaN leaves its row undefined."""
    scales = x.abs().amax(1, keepdim=True).float().div_(_MOST).clamp_min_(_LEAST_SCALE)
    return (x / scales).to(torch.float8_e4m3fn), scales


def quantize_fp8(weight: Tensor) -> Fp8Codes:
    """weight [N, K], each row with the scale of its largest number."""
    values, scales = round_rows(weight)
    return Fp8Codes(values, scales[:, 0], weight.dtype)


def fp8_without_memory(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Fp8Codes:
    """Return a weight that says what one of these sizes takes."""
    values = torch.empty((num_outputs, num_inputs), dtype=torch.float8_e4m3fn, device="meta")
    return Fp8Codes(values, torch.empty(num_outputs, device="meta"), dtype)


def join_fp8(parts: Sequence[Fp8Codes]) -> Fp8Codes:
    """Join the rows of weights."""
    first = parts[0]
    if first.values.is_meta:  # as in `mneme.kernels.native.quantized.join_rows`
        return fp8_without_memory(sum(len(each.scales) for each in parts), first.values.shape[1], first.dtype)
    values = torch.cat([each.values.view(torch.uint8) for each in parts]).view(torch.float8_e4m3fn)
    return first._replace(values=values, scales=torch.cat([each.scales for each in parts]))


class Fp8Linear:
    """A `Linear` of FP8. Bytes: 1 a weight, x and y once each. Flops: 2 * T * N * K, sums in float32."""

    def __init__(self, codes: Fp8Codes, bias: Tensor | None = None) -> None:
        """bias [N]. Raises ValueError for sizes that `fits` refuses."""
        if not fits(*codes.values.shape):
            raise ValueError(f"codes: {_STEP} must divide both sizes (got {list(codes.values.shape)})")
        self._values, self._scales = codes.values.contiguous(), codes.scales[None].contiguous()
        self._dtype, self._bias, self._one = codes.dtype, bias, torch.ones((), device=codes.device)
        self.format, self.num_bytes = "fp8", codes.values.nbytes + codes.scales.nbytes

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if not len(x):
            return x.new_empty((0, len(self._values)), dtype=out_dtype) if out is None else out
        rounded, scales = round_rows(x)
        weight = self._values.t()
        if out_dtype is torch.float32:  # scales of rows are for results of 16 bits alone: here they are applied behind
            y = torch._scaled_mm(rounded, weight, self._one, self._one, out_dtype=torch.float32)
            y = y.mul_(scales).mul_(self._scales)
            y = y if self._bias is None else y.add_(self._bias)
        else:
            y = torch._scaled_mm(rounded, weight, scales, self._scales, bias=self._bias, out_dtype=self._dtype)
        return y if out is None else out.copy_(y)

    def weight_rows(self, index: Tensor) -> Tensor:
        """See `Linear`."""
        rows = F.embedding(index, self._values.view(torch.uint8)).view(torch.float8_e4m3fn)
        return (rows.float() * self._scales[0, index, None]).to(self._dtype)
