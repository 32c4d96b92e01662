"""`y = x W^T + bias` with weights of 8 or 4 bits, in groups of 32 inputs that have a scale and, in 4 bits, a minimum.

8 bits: round(w / scale), scale = the largest of the group / 127. 4 bits: round((w - minimum) / scale), in as many steps
as the group was rounded to before, else in 15, with the scale and the minimum of least squared error that a search
finds. Scales and minima are float16, so what a GGUF file keeps as Q8_0, Q4_0 or Q4_1 is found again as it is there.
Inputs are rounded to 8 bits, too, by row and group, when they are multiplied.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from mneme.kernels.native.library import DTYPE_NUMBERS, LinearWeight, can_pack, native_function, num_threads

GROUP = 32  # inputs that share a scale
_PANEL = 32  # output features that are kept side by side
_STEP = 4  # inputs of a feature that are kept side by side
_MOST_STEPS, _FEWEST_STEPS = 15, 7  # between a group's smallest and largest number in 4 bits
_OFF_GRID = 0.1  # of a step, of numbers that were rounded to bfloat16 behind their grid
_NUM_SAMPLED = 256
_SHRINKS = (1.0, 0.92, 0.84)  # of a group's range, from which its grid is refined: large numbers may be cut
_NUM_REFINED = 2  # times each: on SmolLM2, 32% of perplexity lost became 18; one range refined 3 times: 22
_NUM_AT_ONCE = 8192  # groups that are refined together, near the caches: 70 ns a weight, on a core that others use too


class QuantizedLinear:
    """A `Linear` whose weight has 8 or 4 bits a number (native/cpp/quantized.cpp); the plain weight is not kept.

    Bytes: 1.06 a weight in 8 bits and 0.62 in 4, x and y once each. Flops: 2 * T * N * K in whole numbers. A row's
    result is the same bits in every batch. An infinite or undefined input makes its row's results NaN.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        """weight [N, K], float32 or bfloat16; bias [N]; bits: 8 or 4. Raises ValueError for others."""
        if weight.ndim != 2 or not can_pack(weight) or bits not in (4, 8):
            raise ValueError(f"weight: no kernel for {bits} bits of {weight.dtype} {tuple(weight.shape)}")
        self._num_features, self._num_inputs = weight.shape
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_cpu):
            raise ValueError(f"bias: must have shape ({self._num_features},) on the CPU")
        self._dtype, self.bits, self.format = weight.dtype, bits, f"int{bits}"
        self._packed = _pack(*quantize(weight, bits))
        self.num_bytes = self._packed.nbytes
        self._bias = None if bias is None else bias.float().contiguous()
        self._call = native_function("mneme_linear")
        self._struct = LinearWeight(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._num_features,
            self._num_inputs,
            DTYPE_NUMBERS[weight.dtype],
            bits,
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
        return values.flatten(1)[:, : self._num_inputs].to(self._dtype).contiguous()


def packed_bytes(num_features: int, num_inputs: int, bits: int) -> int:
    """Return what a weight of this shape takes in 8 or 4 bits."""
    num_groups = -(-num_features // _PANEL) * -(-num_inputs // GROUP)
    num_halves = 1 if bits == 8 else 2  # a scale, and a minimum
    return num_groups * _PANEL * (GROUP * bits // 8 + 2 * num_halves)


def quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight [N, K] -> codes uint8 [N, G, 32], scales and, in 4 bits, minima float16 [N, G]; G = ceil(K / 32).

    A weight is scale * code + minimum, the minimum in 8 bits being -128 * scale. Inputs beyond K have weight 0 in 8
    bits, and in 4 whatever their inputs, which are 0, make of it.
    """
    padded = F.pad(weight, (0, -weight.shape[1] % GROUP))
    groups = padded.view(len(weight), -1, GROUP)
    if bits == 8:
        scales, minima = (groups.abs().amax(2).float() / 127).half(), None
        codes = _rounded(groups.float(), scales).clamp_(-127, 127) + 128
    else:
        least, most = groups.amin(2), groups.amax(2)
        minima = least.half()
        num_steps, is_off_grid = _grids(groups, least, most)
        scales = ((most.float() - minima.float()) / num_steps).half()
        codes = _rounded(groups.float() - minima.float()[..., None], scales).clamp_(0, 15)
        for some in torch.split(is_off_grid.nonzero(), _NUM_AT_ONCE):
            at = tuple(some.unbind(1))
            codes[at], scales[at], minima[at] = _refined(groups[at].float(), (codes[at], scales[at], minima[at]))
    return codes.to(torch.uint8), scales, minima


def _grids(groups: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Return [N, G] in how many steps the smallest and the largest of each group lie apart, and whether its numbers lie
    elsewhere: 15, or fewer if they were rounded to 4 bits before and did not use all of them."""
    found = torch.full(least.shape, float(_MOST_STEPS))
    span = (most.float() - least.float())[..., None]
    is_open = span[..., 0] > 0
    for sample in (is_open.nonzero()[:: max(1, is_open.numel() // _NUM_SAMPLED)], None):
        for steps in range(_MOST_STEPS, _FEWEST_STEPS - 1, -1):
            where = is_open.nonzero() if sample is None else sample
            rows, columns = where.unbind(1)
            units = (
                (groups[rows, columns].float() - least[rows, columns].float()[:, None]) * steps / span[rows, columns]
            )
            fits = (units - units.round()).abs().amax(1) < _OFF_GRID
            found[rows[fits], columns[fits]] = steps
            is_open[rows[fits], columns[fits]] = False
        if (found == _MOST_STEPS).all():  # of those sampled none was rounded before
            break
    return found, is_open


def _refined(groups: Tensor, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and minima of least squared error, of those given and of some that are refined.

    Refining is rounding to a grid, and then moving the grid to where it is nearest to the numbers of its codes.

    groups  float32 [G, 32]
    given   codes float32 [G, 32], scales and minima float16 [G]
    """
    least, most, total = groups.amin(1), groups.amax(1), groups.sum(1)
    best, best_error = given, _squared_error(groups, given)
    for shrink in _SHRINKS:
        scales = (most - least) * (shrink / _MOST_STEPS)
        minima = (least + most - _MOST_STEPS * scales) / 2
        for _ in range(_NUM_REFINED):
            codes = _rounded(groups - minima[:, None], scales).clamp_(0, _MOST_STEPS)
            sums, squares = codes.sum(1), (codes * codes).sum(1)
            spread = GROUP * squares - sums * sums  # 0: one code alone
            slopes = (GROUP * (codes * groups).sum(1) - total * sums) / spread
            scales = torch.where(spread > 0, slopes, scales).half().float()
            minima = ((total - scales * sums) / GROUP).half().float()
        found = (codes, scales.half(), minima.half())
        error = _squared_error(groups, found)
        is_better = error < best_error  # not if it is undefined
        masks = (is_better[:, None], is_better, is_better)
        codes, scales, minima = (torch.where(*each) for each in zip(masks, found, best, strict=True))
        best, best_error = (codes, scales, minima), torch.where(is_better, error, best_error)
    return best


def _squared_error(groups: Tensor, coded: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    codes, scales, minima = coded
    return (codes * scales.float()[:, None] + minima.float()[:, None] - groups).square_().sum(1)


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
