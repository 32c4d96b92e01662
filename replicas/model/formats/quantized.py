"""Quantized checkpoints: FP8, compressed-tensors, AWQ and GPTQ, read to the engine's dtype or as their own numbers.

A matrix `x.weight` is found in the form that its file has: with scales beside it (FP8 of a tensor, a row or a block;
integers), or packed into words of 32 bits with scales, and zeros, of groups of inputs. Groups that are a multiple of
the kernels' 32 are given as so many of 32; inputs whose groups are not neighbours (`desc_act`) are put in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mneme.errors import CheckpointError
from mneme.kernels.native.quantized import GROUP, Codes
from mneme.kernels.torch.fp8 import Fp8Codes
from mneme.replicas.model.directory import weights_of_groups
from mneme.replicas.model.tensors import Bits, Files, Quantized

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the eight numbers of a word lie
_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_OTHERS = ("input_scale", "k_scale", "v_scale", "bias_scale", "activation_scale", "input_zero_point")  # of products
_WORD = 32
_HALF_ERROR = 2.0**-11  # of a number in float16
_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_INTEGERS = ("I32", "I64")


class RawFiles(Files, Protocol):
    """Gives tensors as they are in their files, too."""

    def read(self, name: str) -> Tensor: ...

    def header(self, name: str) -> tuple[tuple[int, ...], str]: ...


class _Stored(NamedTuple):
    """A matrix [N, K]: (number - zero) * scale, each input with the zeros and scales of its group."""

    numbers: Tensor  # [N, K], whole or FP8
    zeros: Tensor | None  # whole, as scales; None: 0
    scales: Tensor  # floats [N, groups], or fewer rows, or one number
    groups: Tensor | None = None  # int64 [K] of each input; None: neighbours, all groups of the same size


class QuantizedTensors:
    """Reads matrices of other files, dequantized or as their numbers. What is not quantized is as it is."""

    def __init__(
        self, files: RawFiles, quantization: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._files, self._device, self._dtype = files, device, dtype
        self.model_dir: Path = files.model_dir
        self._method = quantization.get("quant_method")
        weights = weights_of_groups(quantization)
        self._bits: int = weights["num_bits"] if weights else quantization.get("bits", 4)
        group = weights.get("group_size") if weights else quantization.get("group_size")
        self._group = group if group and group > 0 else None  # inputs; None: not said, or all of a row
        self._is_reordered = bool(quantization.get("desc_act")) and self._group is not None
        self._zero = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1  # that GPTQ's offsets lack
        self._block: list[int] | None = quantization.get("weight_block_size")
        parts = ("qweight", "weight_packed", *_SCALES)
        if not any(name.endswith(parts) for name in files.names):
            said = f"config.json says {self._method} (quantization_config), and no tensor has scales"
            raise CheckpointError(f"{self.model_dir}: {said}")

    @property
    def names(self) -> Collection[str]:
        return [name for name in self._files.names if not name.endswith(_OTHERS)]

    def has(self, name: str) -> bool:
        return self._files.has(name) or self._form(name) is not None

    def check(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `Files`. All parts of a matrix have the shapes and dtypes of their format."""
        form = self._form(name)
        if form is None:
            dtype = self._files.header(name)[1] if self._files.has(name) else ""
            if dtype in (*_FLOAT8, "I8"):
                raise CheckpointError(f"{self.model_dir}: {name} has dtype {dtype}, and its scale is missing")
            return self._files.check(name, shape)
        stem, (rows, columns) = name.removesuffix("weight"), shape
        found = [stem + part for part in _parts_of(form) if self._files.has(stem + part)]
        if form == "grouped":
            bits, num_groups = self._bits, self._num_groups(f"{stem}scales", columns, axis=0)
            packed = (columns, rows * bits // _WORD) if self._method == "awq" else (columns * bits // _WORD, rows)
            self._part(f"{stem}qweight", _INTEGERS, packed)
            self._part(f"{stem}qzeros", _INTEGERS, (num_groups, rows * bits // _WORD))
            self._part(f"{stem}scales", _FLOATS, (num_groups, rows))
            if self._files.has(f"{stem}g_idx"):
                self._part(f"{stem}g_idx", _INTEGERS, (columns,))
            elif self._is_reordered:
                said = "config.json says desc_act, so it has to name the group of each input"
                raise CheckpointError(f"{self.model_dir}: {stem}g_idx is missing; {said}")
            return tuple(found)
        zeros = f"{stem}weight_zero_point"
        if form == "packed":
            self._part(f"{stem}weight_packed", _INTEGERS, (rows, -(-columns * self._bits // _WORD)))
            if self._files.has(f"{stem}weight_g_idx"):
                self._part(f"{stem}weight_g_idx", _INTEGERS, (columns,))
            if self._files.has(zeros):
                num_groups = self._num_groups(self._scale_of(stem), columns, axis=1)
                self._part(zeros, _INTEGERS, (-(-rows * self._bits // _WORD), num_groups))
        else:
            self._part(name, (*_FLOAT8, "I8"), shape)
            if self._files.has(zeros):
                self._part(zeros, ("I8", "I32"), self._files.header(self._scale_of(stem))[0])
        self._check_scale(self._scale_of(stem), rows, columns)
        return tuple(found)

    def _part(self, name: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> None:
        found, dtype = self._files.header(name)
        if found not in shapes or dtype not in dtypes:
            is_not = f"has shape {list(found)} and dtype {dtype}"
            implied = " or ".join(f"{list(shape)}" for shape in shapes)
            kinds = ", ".join(dtypes)
            raise CheckpointError(f"{self.model_dir}: {name} {is_not}; config.json implies {implied} of {kinds}")

    def _scale_of(self, stem: str) -> str:
        """The name of the scales of a matrix; its form says that it has some, but for packed ones."""
        return next((stem + part for part in _SCALES if self._files.has(stem + part)), stem + _SCALES[0])

    def _num_groups(self, name: str, columns: int, axis: int) -> int:
        """Of inputs: as the configuration says, else as the scales have it, if all groups are alike."""
        shape = self._files.header(name)[0]
        found = shape[axis] if len(shape) == 2 else 0
        groups = -(-columns // self._group) if self._group else found
        if not groups or (columns % groups and not self._group):
            raise CheckpointError(f"{self.model_dir}: {name} has shape {list(shape)}: no groups of {columns} inputs")
        return groups

    def _check_scale(self, name: str, rows: int, columns: int) -> None:
        shapes: list[tuple[int, ...]]
        if self._block is not None:
            height, width = self._block
            shapes = [(-(-rows // height), -(-columns // width))]
        elif self._group:
            shapes = [(rows, self._num_groups(name, columns, axis=1))]
        else:
            shapes = [(), (1,), (1, 1), (rows,), (rows, 1)]
            if self._method == "compressed-tensors" and self._files.header(name)[0] not in shapes:
                shapes += [(rows, self._num_groups(name, columns, axis=1))]
        self._part(name, _FLOATS, *shapes)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """See `Source`."""
        if self._form(name) is None:
            return self._files.tensor(name, *shape)
        stored = self._stored(name, *shape)
        found = stored.numbers.float()
        if stored.zeros is not None:
            found = found - self._spread(stored.zeros, stored)
        return self._finite(name, (found * self._spread(stored.scales, stored)).to(self._device, self._dtype))

    def stored(self, name: str, *shape: int) -> Tensor:
        """See `Source`."""
        return self._files.stored(name, *shape)

    def quantized(self, name: str) -> Quantized | None:
        """See `Source`. What is in no groups that 32 divides, in FP8 or in blocks is rounded once more, to 8 bits."""
        form = self._form(name)
        if form is None or (form == "scaled" and not self._files.has(name)):  # one is missing: said when it is read
            return None
        if form == "scaled":
            shape, dtype = self._files.header(name)
            scales, _ = self._files.header(self._scale_of(name.removesuffix("weight")))
            if self._block is not None or dtype not in ("I8", "F8_E4M3"):
                return Quantized(8, ())
            of_rows = prod(scales) in (1, shape[0])
            return Quantized(8, (8,) if dtype == "I8" else ("fp8",) if of_rows else ())
        if self._group is not None and self._group % GROUP:
            return Quantized(8, ())
        return Quantized(4, (4, 8)) if self._bits == 4 else Quantized(8, (8,))

    def codes(self, name: str, bits: Bits, *shape: int) -> Codes | Fp8Codes | None:
        """See `Source`. 8 bits have no zeros of their own: numbers are taken less theirs, if they fit then."""
        found = self.quantized(name)
        if found is None or bits not in found.own:  # a file may have several: `found` is this one's
            return None
        stored = self._stored(name, *shape)
        rows, columns = shape
        if bits == "fp8":
            scales = stored.scales.float().reshape(-1).expand(rows).contiguous()
            return Fp8Codes(self._finite(name, stored.numbers).to(self._device), scales.to(self._device), self._dtype)
        groups = self._groups_of(stored)
        order = groups.argsort(stable=True)
        is_ordered = bool((groups.diff() >= 0).all())
        by_block = F.pad(groups[order], (0, -columns % GROUP), value=int(groups[order[-1]])).view(-1, GROUP)
        scales = _of_groups(stored.scales.float(), rows, by_block[:, 0])
        halves = scales.half()
        is_kept = ((halves.float() - scales).abs() <= scales.abs() * _HALF_ERROR).all()  # not one beyond float16
        if (by_block != by_block[:, :1]).any() or not is_kept:
            return None
        numbers = stored.numbers if is_ordered else stored.numbers[:, order]
        values = F.pad(numbers.short(), (0, -columns % GROUP)).reshape(rows, -1, GROUP)
        zeros = _of_groups(torch.tensor(0) if stored.zeros is None else stored.zeros, rows, by_block[:, 0])
        if bits == 4:
            minima = (zeros.float() * -scales).half()
            if not minima.isfinite().all():
                return None
        else:
            values, minima = values - zeros.short()[..., None] + 128, None
            if not 0 <= int(values.min()) <= int(values.max()) <= 255:
                return None
        found_order = None if is_ordered else order.int()
        return Codes(values.to(torch.uint8), halves, minima, columns, self._dtype, found_order)

    def _form(self, name: str) -> str | None:
        stem = name.removesuffix("weight")
        if stem == name:
            return None
        if self._files.has(f"{stem}qweight"):
            return "grouped"
        if self._files.has(f"{stem}weight_packed"):
            return "packed"
        return "scaled" if any(self._files.has(stem + scale) for scale in _SCALES) else None

    def _finite(self, name: str, numbers: Tensor) -> Tensor:
        if numbers.dtype is torch.float8_e4m3fn:  # by its bits, in a third of the time
            is_sound = not bool(((numbers.view(torch.uint8) & 0x7F) == 0x7F).any())
        else:
            is_sound = bool(numbers.float().sum().isfinite())
        if not is_sound:
            raise CheckpointError(f"{self.model_dir}: {name} has a number that is NaN, infinite or too large")
        return numbers

    def _scales(self, name: str) -> Tensor:
        found = self._files.read(name)
        if not found.isfinite().all():
            raise CheckpointError(f"{self.model_dir}: {name} has a scale that is NaN or infinite")
        return found

    def _checked_zeros(self, name: str, zeros: Tensor, least: int, most: int) -> Tensor:
        """Return them if they are among the numbers that the weight may have; raises `CheckpointError`."""
        if not least <= int(zeros.min()) <= int(zeros.max()) <= most:
            raise CheckpointError(f"{self.model_dir}: {name} has a zero point that is not from {least} to {most}")
        return zeros

    def _stored(self, name: str, rows: int, columns: int) -> _Stored:
        form, stem = self._form(name), name.removesuffix("weight")
        zeros = f"{stem}weight_zero_point"
        if form == "scaled":
            found = self._checked_zeros(zeros, self._files.read(zeros), -128, 127) if self._files.has(zeros) else None
            return _Stored(self._files.read(name), found, self._scales(self._scale_of(stem)))
        if form == "grouped":
            return self._grouped(stem, columns)
        # compressed-tensors: numbers of a row follow each other, with an offset of half their range.
        bits, scales = self._bits, self._scales(self._scale_of(stem))
        numbers = _words(self._files.read(f"{stem}weight_packed"), bits)[:, :columns]
        offsets = torch.tensor(2 ** (bits - 1))
        if self._files.has(zeros):
            offsets = _words(self._files.read(zeros).mT.contiguous(), bits).mT[:rows]
        num_groups = scales.shape[1] if scales.ndim > 1 else 1
        return _Stored(numbers, offsets, scales, self._groups(f"{stem}weight_g_idx", num_groups))

    def _grouped(self, stem: str, columns: int) -> _Stored:
        """Read AWQ's and GPTQ's words: inputs by outputs, with a scale and a zero of each group of inputs."""
        weight, zeros = (self._files.read(stem + part) for part in ("qweight", "qzeros"))
        scales = self._scales(f"{stem}scales")
        if self._method == "awq":
            return _Stored(_words(weight, 4, _AWQ_ORDER).mT, _words(zeros, 4, _AWQ_ORDER).mT, scales.mT)
        groups = self._groups(f"{stem}g_idx", len(scales))
        numbers = _words(weight.mT.contiguous(), self._bits)
        # A zero of 0 is less 1 in the file's first format: -1, which borrows from its neighbours in the word.
        offsets = _words(zeros, self._bits).short() + self._zero
        offsets = self._checked_zeros(f"{stem}qzeros", offsets, 0, 2**self._bits - 1)
        return _Stored(numbers, offsets.mT, scales.mT, groups)

    def _groups(self, name: str, num_groups: int) -> Tensor | None:
        """Read the group of each input, where a file names it; compressed-tensors has -1 where it is not used."""
        groups = self._files.read(name).long() if self._files.has(name) else None
        if groups is None or (name.endswith("weight_g_idx") and (groups == -1).all()):
            return None
        if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise CheckpointError(f"{self.model_dir}: {name} names groups that are not among its {num_groups}")
        return groups

    def _groups_of(self, stored: _Stored) -> Tensor:
        """int64 [K]: the group of each input."""
        if stored.groups is not None:
            return stored.groups
        columns, num_groups = stored.numbers.shape[1], stored.scales.shape[1] if stored.scales.ndim == 2 else 1
        return torch.arange(columns) // (self._group or -(-columns // num_groups))

    def _spread(self, part: Tensor, stored: _Stored) -> Tensor:
        """Return a matrix's scales, or its zeros, for each of its numbers; float32, as large or of one number."""
        part = part.float()
        if part.numel() == 1:
            return part.reshape(())
        part = part[:, None] if part.ndim == 1 else part
        rows, columns = stored.numbers.shape
        if self._block is None:
            return part[:, self._groups_of(stored)] if part.shape[1] > 1 else part
        height, width = self._block
        return part.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def _of_groups(part: Tensor, rows: int, groups: Tensor) -> Tensor:
    """[rows or 1, num_groups or 1], [rows] or one number -> [rows, len(groups)]"""
    part = part.reshape(1, 1) if part.numel() == 1 else part[:, None] if part.ndim == 1 else part
    return part.expand(rows, len(groups)) if part.shape[1] == 1 else part.expand(rows, -1)[:, groups]


def _parts_of(form: str) -> tuple[str, ...]:
    if form == "grouped":
        return ("qweight", "qzeros", "scales", "g_idx")
    return ("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", *_SCALES)


def _words(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, words] -> uint8, the numbers of each word, the lowest bits first unless `order` says otherwise."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    if order is not None:
        shifts = shifts[list(order)]
    found: Tensor = ((packed.int()[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)
    return found
