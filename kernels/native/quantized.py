"""`y = x W^T + bias` with weights of 8 or 4 bits, in groups of 32 inputs that have a scale and, in 4 bits, a minimum.

8 bits: round(w / scale), scale = the largest of the group / 127. 4 bits: round((w - minimum) / scale), with the scale
and the minimum of least squared error that a search finds, each error times the mean square of its input where that is
known: the error of a product is a sum over them. Scales and minima are float16. `Codes` of a file that has such groups
are multiplied as they are. Inputs are rounded to 8 bits, too, by row and group, when they are multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mneme.kernels.native.library import DTYPE_NUMBERS, LinearWeight, can_pack, native_function, num_threads

GROUP = 32  # inputs that share a scale
_PANEL = 32  # output features that are kept side by side
_STEP = 4  # inputs of a feature that are kept side by side
_MOST_STEPS = 15  # between the smallest and the largest number of a group in 4 bits
_SHRINKS = (1.0, 0.92, 0.84)  # of a group's range, from which its grid is refined: large numbers may be cut
_NUM_REFINED = 2  # times each: on SmolLM2, 32% of perplexity lost became 18; one range refined 3 times: 22
_LEAST_SQUARE = 1e-4  # of the mean: an input that was never seen may be one all the same
_LEAST_SPREAD = 1e-6  # of codes around their mean, below which it is rounding
_NUM_AT_ONCE = 8192  # groups that are refined together, near the caches: 70 ns a weight, on a core that others use too


class Codes(NamedTuple):
    """A weight [N, K] in whole numbers: scale * value + minimum, the minimum in 8 bits being -128 * scale.

    Inputs beyond K have weight 0 in 8 bits, and in 4 whatever their inputs, which are 0, make of it.
    """

    values: Tensor  # uint8 [N, G, 32]; G = ceil(K / 32)
    scales: Tensor  # float16 [N, G]
    minima: Tensor | None  # float16 [N, G]; None: 8 bits
    num_inputs: int  # K
    dtype: torch.dtype  # of inputs
    order: Tensor | None = None  # int32 [K], the input that each value is for; None: they follow each other

    @property
    def bits(self) -> int:
        return 8 if self.minima is None else 4

    @property
    def device(self) -> torch.device:
        return self.values.device

    def rows(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Return the weight whose rows `change` chooses or moves: [N, ...] -> [M, ...]."""
        minima = None if self.minima is None else change(self.minima)
        return self._replace(values=change(self.values), scales=change(self.scales), minima=minima)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Join rows; torch's own way would import its compiler for tensors without memory: seconds, and a folder."""
    if parts[0].is_meta:
        return parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
    return torch.cat(list(parts))


def joined(parts: Sequence[Codes]) -> Codes | None:
    """Join the rows of weights of the same bits; None where the inputs of their values follow in different orders."""
    first, orders = parts[0], [each.order for each in parts]
    if any((each is None) != (first.order is None) for each in orders):
        return None
    if first.order is not None and not all(torch.equal(first.order, each) for each in orders if each is not None):
        return None
    minima = None if first.minima is None else join_rows([each.minima for each in parts if each.minima is not None])
    values, scales = join_rows([each.values for each in parts]), join_rows([each.scales for each in parts])
    return first._replace(values=values, scales=scales, minima=minima)


class QuantizedLinear:
    """A `Linear` whose weight has 8 or 4 bits a number (native/cpp/quantized.cpp); the plain weight is not kept.

    Bytes: 1.06 a weight in 8 bits and 0.62 in 4, x and y once each. Flops: 2 * T * N * K in whole numbers. A row's
    result is the same bits in every batch. An infinite or undefined input makes its row's results NaN.
    """

    def __init__(self, codes: Codes, bias: Tensor | None = None) -> None:
        """bias [N]. Raises ValueError for what no kernel multiplies."""
        self._num_features, self._num_inputs, self._dtype = len(codes.values), codes.num_inputs, codes.dtype
        if not can_pack(codes.values.new_empty(0, dtype=codes.dtype)):
            raise ValueError(f"codes: no kernel for inputs of {codes.dtype} on {codes.values.device}")
        if bias is not None and (bias.shape != (self._num_features,) or not bias.is_cpu):
            raise ValueError(f"bias: must have shape ({self._num_features},) on the CPU")
        self.bits, self.format = codes.bits, f"int{codes.bits}"
        self._packed = _pack(codes.values, codes.scales, codes.minima)
        self.num_bytes = self._packed.nbytes
        self._bias = None if bias is None else bias.float().contiguous()
        self._order = None if codes.order is None else codes.order.int().contiguous()
        if self._order is not None and not torch.equal(self._order.sort().values, torch.arange(codes.num_inputs)):
            raise ValueError("codes: order must have each input once")
        self._call = native_function("mneme_linear")
        self._struct = LinearWeight(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._num_features,
            self._num_inputs,
            DTYPE_NUMBERS[codes.dtype],
            codes.bits,
            None if self._order is None else self._order.data_ptr(),
        )
        self.address = ctypes.addressof(self._struct)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if x.dtype is not self._dtype or x.ndim != 2 or x.shape[1] != self._num_inputs or not x.is_cpu:
            wanted = f"{self._dtype} [T, {self._num_inputs}] on the CPU"
            raise ValueError(f"x: must be {wanted} (got {x.dtype} {tuple(x.shape)} on {x.device})")
        if out_dtype is not None and out_dtype is not torch.float32 and out_dtype is not self._dtype:
            raise ValueError(f"out_dtype: must be float32 or {self._dtype} (got {out_dtype})")
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty((len(x), self._num_features), dtype=out_dtype) if out is None else out
        self._call(
            self.address, x.data_ptr(), len(x), x.stride(0), y.data_ptr(),
            out_dtype is torch.float32, num_threads(),
        )  # fmt: skip
        return y

    def weight_rows(self, index: Tensor) -> Tensor:
        """See `Linear`: the numbers that the codes stand for."""
        panel, row = index // _PANEL, index % _PANEL
        num_codes = _PANEL * GROUP * self.bits // 8
        shape = self._packed.shape[:2]
        codes = self._packed[:, :, :num_codes].view(*shape, -1, _PANEL, _STEP)[panel, :, :, row]
        halves = self._packed[:, :, num_codes:].view(torch.float16).view(*shape, -1, _PANEL)[panel, :, :, row].float()
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 3).flatten(2, 3)
        scales = halves[..., :1]
        values = codes.flatten(2) * scales + (-128 * scales if self.bits == 8 else halves[..., 1:])
        rows = values.flatten(1)[:, : self._num_inputs].to(self._dtype)
        return (
            rows.contiguous()
            if self._order is None
            else torch.empty_like(rows).index_copy_(1, self._order.long(), rows)
        )


def packed_bytes(num_features: int, num_inputs: int, bits: int) -> int:
    """Return what a weight of this shape takes in 8 or 4 bits."""
    num_groups = -(-num_features // _PANEL) * -(-num_inputs // GROUP)
    num_halves = 1 if bits == 8 else 2  # a scale, and a minimum
    return num_groups * _PANEL * (GROUP * bits // 8 + 2 * num_halves)


def quantize(weight: Tensor, bits: int, squares: Tensor | None = None) -> Codes:
    """weight [N, K], rounded to 8 or 4 bits; raises ValueError for others.

    squares  float32 [K], the mean square of each input, for 4 bits; None: not known, all count alike
    """
    if weight.ndim != 2 or bits not in (4, 8):
        raise ValueError(f"weight: no kernel for {bits} bits of {weight.dtype} {tuple(weight.shape)}")
    num_inputs = weight.shape[1]
    groups = F.pad(weight, (0, -num_inputs % GROUP)).view(len(weight), -1, GROUP)
    if bits == 8:
        exact = groups.abs().amax(2).float() / 127
        scales = exact.half()
        # Below float16's normal numbers a scale is rounded up: nothing is cut off, and no weight is lost.
        is_cut = (scales.float() < exact) & (exact < 2**-14)
        scales = torch.where(is_cut, (scales.view(torch.int16) + 1).view(torch.half), scales)
        values = _rounded(groups.float(), scales).clamp_(-127, 127) + 128
        return Codes(values.to(torch.uint8), scales, None, num_inputs, weight.dtype)
    if squares is None or not squares.isfinite().all():
        squares = torch.ones(num_inputs)
    counts = F.pad(squares.clamp_min(squares.mean() * _LEAST_SQUARE + 1e-30), (0, -num_inputs % GROUP), value=1e-30)
    counts, flat = counts.view(-1, GROUP), groups.flatten(0, 1)
    at_once = torch.split(torch.arange(len(flat)), _NUM_AT_ONCE)
    parts = [_refined(flat[some].float(), counts[some % len(counts)]) for some in at_once]
    values, scales, minima = (torch.cat(each) for each in zip(*parts, strict=True))
    shape = groups.shape[:2]
    return Codes(values.view(groups.shape), scales.view(shape), minima.view(shape), num_inputs, weight.dtype)


def _refined(groups: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 4 bits uint8 [G, 32], scales and minima float16 [G] of least squared error, of some that are refined.

    Refining is rounding to a grid, and then moving the grid to where it is nearest to the numbers of its codes.

    groups  float32 [G, 32]
    counts  float32 [G, 32], how much the squared error of each number counts
    """
    least, most, counts = groups.amin(1), groups.amax(1), counts / counts.sum(1, keepdim=True)
    center = (counts * groups).sum(1)
    minima = least.half()
    scales = ((most - minima.float()) / _MOST_STEPS).half()
    codes = _rounded(groups - minima.float()[:, None], scales).clamp_(0, _MOST_STEPS)
    best = codes, scales, minima
    best_error = _squared_error(groups, best, counts)
    for shrink in _SHRINKS:
        scales = (most - least) * (shrink / _MOST_STEPS)
        minima = (least + most - _MOST_STEPS * scales) / 2
        for _ in range(_NUM_REFINED):
            codes = _rounded(groups - minima[:, None], scales).clamp_(0, _MOST_STEPS)
            mean = (counts * codes).sum(1)
            apart = (codes - mean[:, None]) * counts
            spread = (apart * codes).sum(1)  # 0: one code alone
            scales = torch.where(spread > _LEAST_SPREAD, (apart * groups).sum(1) / spread, scales).half().float()
            minima = (center - scales * mean).half().float()
        found = (codes, scales.half(), minima.half())
        error = _squared_error(groups, found, counts)
        is_better = error < best_error  # not if it is undefined
        masks = (is_better[:, None], is_better, is_better)
        codes, scales, minima = (torch.where(*each) for each in zip(masks, found, best, strict=True))
        best, best_error = (codes, scales, minima), torch.where(is_better, error, best_error)
    codes, scales, minima = best
    return codes.to(torch.uint8), scales, minima


def _squared_error(groups: Tensor, coded: tuple[Tensor, Tensor, Tensor], counts: Tensor) -> Tensor:
    codes, scales, minima = coded
    return (codes * scales.float()[:, None] + minima.float()[:, None] - groups).square_().mul_(counts).sum(1)


def _rounded(values: Tensor, scales: Tensor) -> Tensor:
    units = torch.where(scales == 0, 0, 1 / scales.float())
    return (values * units[..., None]).nan_to_num_(0).round_()


def _pack(codes: Tensor, scales: Tensor, minima: Tensor | None) -> Tensor:
    """[N, G, 32], [N, G], [N, G] -> [ceil(N / 32), G, bytes]: a panel's codes of a group, its scales, its minima."""
    padded = F.pad(codes, (0, 0, 0, 0, 0, -len(codes) % _PANEL))
    steps = padded.view(-1, _PANEL, codes.shape[1], GROUP // _STEP, _STEP).permute(0, 2, 3, 1, 4)
    if minima is not None:
        steps = steps[:, :, ::2] | steps[:, :, 1::2] << 4
    halves = [F.pad(each, (0, 0, 0, -len(codes) % _PANEL)) for each in (scales, minima) if each is not None]
    by_panel = [each.view(-1, _PANEL, each.shape[1]).transpose(1, 2).contiguous() for each in halves]
    return torch.cat((steps.flatten(2), *(each.view(torch.uint8) for each in by_panel)), 2)
