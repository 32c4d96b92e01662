"""`y = x W^T + bias`, with the weight kept in the form that its device multiplies fastest.

Bytes: at least the weight, x and y once each. Flops: 2 * T * N * K.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mneme.kernels.native.library import DTYPE_NUMBERS, LinearWeight, can_pack, native_function, num_threads

_PANEL = 32  # output features that are kept side by side
_HALF_PART = 1 / 64  # exact but for what rounding to float16 loses beside 1e-5
_scratch = threading.local()
_STEP_BY_DTYPE = {torch.float32: 1, torch.bfloat16: 2}  # k's of one feature that are kept side by side


class Linear(Protocol):
    """Projects rows. Sums are float32 and rounded once."""

    format: str  # of its weight: a dtype's name, int8, int4 or fp8
    num_bytes: int  # of its weight

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N], in x's dtype or, where `out_dtype` is float32, in that one.

        out  contiguous, of the result's shape and dtype: gets it and is returned

        A packed weight refuses every other x and `out_dtype` with a ValueError.
        """

    def weight_rows(self, index: Tensor) -> Tensor:
        """Return rows of W, [len(index), K]: a tied embedding is read where the output projection keeps it."""


class PlainLinear:
    """A `Linear` whose weight torch multiplies as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [N, K], a row per output feature; bias [N]."""
        self._weight = weight
        self._bias = bias
        self.format, self.num_bytes = _name_of(weight.dtype), weight.nbytes

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out_dtype == torch.float32 != x.dtype and x.is_cuda:  # the product's sums, unrounded; CUDA alone gives them
            y = torch.mm(x, self._weight.t(), out_dtype=torch.float32, out=out)
            return y if self._bias is None else y.add_(self._bias)
        if out_dtype == torch.float32 and x.dtype is torch.float16:  # a sum beyond 65504 comes out in part
            y = F.linear(x * _HALF_PART, self._weight).float() / _HALF_PART
            y = y if self._bias is None else y.add_(self._bias)
        else:
            y = F.linear(x, self._weight, self._bias)
            y = y if out_dtype is None else y.to(out_dtype)
        return y if out is None else out.copy_(y)

    def weight_rows(self, index: Tensor) -> Tensor:
        return F.embedding(index, self._weight)


def make_linear(weight: Tensor, bias: Tensor | None = None, torch_rows: int | None = None) -> Linear:
    """weight [N, K], bias [N]: packed for the compiled kernel where there is one, else as torch has it.

    torch_rows  see `PackedLinear`

    A packed weight is a copy; the caller should drop its own.
    """
    return PackedLinear(weight, bias, torch_rows) if can_pack(weight) else PlainLinear(weight, bias)


class PackedLinear:
    """A `Linear` whose weight is packed for the compiled kernel (native/cpp/linear.cpp); the plain weight is not kept.

    One packed copy serves any number of rows: from few, where it reads weights about as fast as memory goes, to
    thousands, where it is as fast as oneDNN on a processor that both use alike (benchmarks/bench_linear.py).
    Each sum runs over k in one order whatever the number of rows, so a row's result is the same bits in every batch.

    Where oneDNN has what the compiled kernel lacks, such as AMX, torch may multiply from some number of rows on: the
    weight is unpacked for the call, which takes about as long as reading it twice, so that there is never a second
    copy of all weights. A row's bits then depend on whether its step has so many rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, torch_rows: int | None = None) -> None:
        """weight [N, K], float32 or bfloat16, copied; bias [N]. Raises ValueError for others.

        torch_rows  from so many rows on torch multiplies, but for sums that are wanted unrounded; None: never
        """
        if weight.ndim != 2 or not can_pack(weight):
            raise ValueError(f"weight: must be a matrix that can be packed (got {weight.dtype} {tuple(weight.shape)})")
        self._num_features, self._num_inputs = weight.shape
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_cpu):
            got = f"got {tuple(bias.shape)} on {bias.device}"
            raise ValueError(f"bias: must have shape ({self._num_features},) on the CPU ({got})")
        self._packed = _pack(weight)
        self.format, self.num_bytes = _name_of(weight.dtype), self._packed.nbytes
        self._bias = None if bias is None else bias.float().contiguous()
        self._dtype, self._torch_rows = weight.dtype, torch_rows
        self._padding = -self._num_inputs % _STEP_BY_DTYPE[weight.dtype]
        self._call = native_function("mneme_linear")
        self._struct = LinearWeight(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._num_features,
            self._packed.shape[1],
            DTYPE_NUMBERS[weight.dtype],
            bits=0,
        )
        self._pointer = ctypes.addressof(self._struct)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if x.dtype is not self._dtype or x.ndim != 2 or x.shape[1] != self._num_inputs or not x.is_cpu:
            wanted = f"{self._dtype} [T, {self._num_inputs}] on the CPU, as the weight is"
            raise ValueError(f"x: must be {wanted} (got {x.dtype} {tuple(x.shape)} on {x.device})")
        if out_dtype is not None and out_dtype is not torch.float32 and out_dtype is not self._dtype:
            raise ValueError(f"out_dtype: must be float32 or {self._dtype}, as the weight is (got {out_dtype})")
        num_rows = x.shape[0]
        is_rounded = out_dtype is None or out_dtype is self._dtype
        if self._torch_rows is not None and num_rows >= self._torch_rows and is_rounded:
            bias = None if self._bias is None else self._bias.to(self._dtype)
            y = F.linear(x, self.unpacked(), bias)
            return y if out is None else out.copy_(y)
        if self._padding or x.stride(1) != 1:
            x = F.pad(x, (0, self._padding)).contiguous()
        y = x.new_empty((num_rows, self._num_features), dtype=out_dtype) if out is None else out
        self._call(
            self._pointer, x.data_ptr(), num_rows, x.stride(0), y.data_ptr(),
            out_dtype is torch.float32, num_threads(),
        )  # fmt: skip
        return y

    @property
    def address(self) -> int | None:
        """Return where compiled code finds the weight, while this lives; None where inputs have to be padded first."""
        return None if self._padding else self._pointer

    def unpacked(self) -> Tensor:
        """[N, K] in memory of this thread, which the next call overwrites."""
        shape = (self._num_features, self._num_inputs + self._padding)
        found: Tensor | None = getattr(_scratch, "weight", None)
        num_bytes = shape[0] * shape[1] * self._dtype.itemsize
        if found is None or len(found) < num_bytes:
            found = _scratch.weight = torch.empty(num_bytes, dtype=torch.uint8)
        weight = found[:num_bytes].view(self._dtype).view(shape)
        native_function("mneme_unpack")(self._pointer, weight.data_ptr(), num_threads())
        return weight[:, : self._num_inputs]

    def weight_rows(self, index: Tensor) -> Tensor:
        panels = self._packed[index // _PANEL, :, index % _PANEL]
        return panels.flatten(1)[:, : self._num_inputs]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pack(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / 32), ceil(K / step), 32, step], zeros where there is no weight."""
    num_features, num_inputs = weight.shape
    step = _STEP_BY_DTYPE[weight.dtype]
    padded = F.pad(weight, (0, -num_inputs % step, 0, -num_features % _PANEL))
    panels = padded.view(len(padded) // _PANEL, _PANEL, padded.shape[1] // step, step)
    return panels.transpose(1, 2).contiguous()
