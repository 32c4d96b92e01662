"""Quantized checkpoints, read to the engine's dtype: FP8, compressed-tensors, AWQ and GPTQ.

A matrix `x.weight` is found in the form that its file has: with scales beside it (FP8 of a tensor, a row or a block;
integers), or packed into words of 32 bits with scales, and offsets, of groups of inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mneme.errors import CheckpointError
from mneme.replicas.model.directory import weights_of_groups
from mneme.replicas.model.tensors import Files

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the eight numbers of a word lie
_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_OTHERS = ("input_scale", "k_scale", "v_scale", "bias_scale", "activation_scale", "input_zero_point")  # of products
_WORD = 32
_GROUP = 32  # inputs that have a scale where 4 bits are multiplied
_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_INTEGERS = ("I32", "I64")


class RawFiles(Files, Protocol):
    """Gives tensors as they are in their files, too."""

    def read(self, name: str) -> Tensor: ...

    def header(self, name: str) -> tuple[tuple[int, ...], str]: ...


class QuantizedTensors:
    """Reads matrices of other files, dequantized. What is not a matrix, or not quantized, is as it is."""

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
            return tuple(found)
        zeros = f"{stem}weight_zero_point"
        if form == "packed":
            self._part(f"{stem}weight_packed", _INTEGERS, (rows, -(-columns * self._bits // _WORD)))
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
        if not groups or columns % groups:
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
        form, stem = self._form(name), name.removesuffix("weight")
        if form is None:
            return self._files.tensor(name, *shape)
        if form == "scaled":
            found = self._scaled(self._integers(name, stem), stem)
        elif form == "packed":
            found = self._unpacked(stem, *shape)
        else:
            found = self._grouped(stem, *shape)
        return found.to(self._device, self._dtype)

    def stored(self, name: str, *shape: int) -> Tensor:
        """See `Source`."""
        return self._files.stored(name, *shape)

    def bits(self, name: str) -> int | None:
        """See `Source`. What is no 4 bits in groups of neighbours that 32 divides is rounded once more, to 8 bits."""
        form = self._form(name)
        if form is None:
            return None
        is_reordered = self._method != "awq" and self._files.has(name.removesuffix("weight") + "g_idx")
        has_groups = self._group is None or self._group % _GROUP == 0
        return 4 if form != "scaled" and self._bits <= 4 and has_groups and not is_reordered else 8

    def _form(self, name: str) -> str | None:
        stem = name.removesuffix("weight")
        if stem == name:
            return None
        if self._files.has(f"{stem}qweight"):
            return "grouped"
        if self._files.has(f"{stem}weight_packed"):
            return "packed"
        return "scaled" if any(self._files.has(stem + scale) for scale in _SCALES) else None

    def _integers(self, name: str, stem: str) -> Tensor:
        """Read a matrix of 8 bits, less its offsets, which have the form of its scales."""
        weight, zeros = self._read(name).float(), f"{stem}weight_zero_point"
        return weight - self._spread(self._read(zeros), weight.shape) if self._files.has(zeros) else weight

    def _read(self, name: str) -> Tensor:
        return self._files.read(name)

    def _scaled(self, weight: Tensor, stem: str) -> Tensor:
        """Multiply by the scale of the whole, of rows, of groups of inputs, or of blocks."""
        return weight * self._spread(self._read(self._scale_of(stem)), weight.shape)

    def _spread(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return a matrix's scales, or its offsets, for each of its numbers; float32, as large or of one number."""
        part = part.float()
        if part.numel() == 1:
            return part.reshape(())
        part = part[:, None] if part.ndim == 1 else part
        rows, columns = shape
        height, width = self._block or (-(-rows // part.shape[0]), -(-columns // part.shape[1]))
        return part.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]

    def _unpacked(self, stem: str, rows: int, columns: int) -> Tensor:
        """Read compressed-tensors' words: numbers of a row follow each other, with an offset of half their range."""
        bits = self._bits
        numbers = _words(self._read(f"{stem}weight_packed"), bits)[:, :columns].float() - 2 ** (bits - 1)
        zeros = f"{stem}weight_zero_point"
        if self._files.has(zeros):
            offsets = _words(self._read(zeros).mT.contiguous(), bits).mT[:rows].float() - 2 ** (bits - 1)
            numbers = numbers - offsets.repeat_interleave(columns // offsets.shape[1], 1)
        return self._scaled(numbers, stem)

    def _grouped(self, stem: str, rows: int, columns: int) -> Tensor:
        """Read AWQ's and GPTQ's words: inputs by outputs, with a scale and an offset of each group of inputs."""
        weight, zeros, scales = (self._read(stem + part) for part in ("qweight", "qzeros", "scales"))
        if self._method == "awq":
            numbers, offsets = _words(weight, 4, _AWQ_ORDER), _words(zeros, 4, _AWQ_ORDER)
        else:
            numbers = _words(weight.mT.contiguous(), self._bits).mT
            offsets = _words(zeros, self._bits) + self._zero
        group = torch.arange(columns) // -(-columns // len(scales))
        if self._method != "awq" and self._files.has(f"{stem}g_idx"):
            group = self._read(f"{stem}g_idx").long()
        if not 0 <= int(group.min()) <= int(group.max()) < len(scales):
            raise CheckpointError(f"{self.model_dir}: {stem}g_idx names groups that {stem}scales has not")
        found: Tensor = (numbers - offsets[group]).float() * scales.float()[group]
        return found.mT


def _parts_of(form: str) -> tuple[str, ...]:
    if form == "grouped":
        return ("qweight", "qzeros", "scales", "g_idx")
    return ("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", *_SCALES)


def _words(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, words] -> the numbers of each word, the lowest bits first unless `order` says where they lie."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    if order is not None:
        shifts = shifts[list(order)]
    found: Tensor = ((packed.int()[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    return found
