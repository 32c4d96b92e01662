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

from mneme.errors import CheckpointError, shown
from mneme.replicas.model.tensors import Files

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the eight numbers of a word lie
_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_OTHERS = ("input_scale", "k_scale", "v_scale", "bias_scale", "activation_scale", "input_zero_point")  # of products
_WORD = 32


class RawFiles(Files, Protocol):
    """Gives tensors as they are in their files, too."""

    def read(self, name: str) -> Tensor: ...


class QuantizedTensors:
    """Reads matrices of other files, dequantized. What is not a matrix, or not quantized, is as it is."""

    def __init__(
        self, files: RawFiles, quantization: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._files, self._device, self._dtype = files, device, dtype
        self.model_dir: Path = files.model_dir
        self._method = quantization.get("quant_method")
        groups = quantization.get("config_groups") or {}
        in_groups = [each["weights"]["num_bits"] for each in groups.values() if each.get("weights")]
        self._bits = int(in_groups[0] if in_groups else quantization.get("bits", 4))
        self._zero = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1  # that GPTQ's offsets lack
        self._block = quantization.get("weight_block_size")

    @property
    def names(self) -> Collection[str]:
        return [name for name in self._files.names if not name.endswith(_OTHERS)]

    def has(self, name: str) -> bool:
        return self._files.has(name) or self._form(name) is not None

    def check(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See `Files`."""
        form = self._form(name)
        if form is None:
            return self._files.check(name, shape)
        stem, (rows, columns) = name.removesuffix("weight"), shape
        parts = {part for part in _parts_of(form) if self._files.has(stem + part)}
        if form == "scaled":
            self._files.check(name, shape)
        elif form == "packed":
            self._files.check(f"{stem}weight_packed", (rows, -(-columns * self._bits // _WORD)))
        elif self._method == "awq":
            self._files.check(f"{stem}qweight", (columns, rows * 4 // _WORD))
        else:
            self._files.check(f"{stem}qweight", (columns * self._bits // _WORD, rows))
        return tuple(stem + part for part in parts)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """See `Source`."""
        form, stem = self._form(name), name.removesuffix("weight")
        if form is None:
            return self._files.tensor(name, *shape)
        if form == "scaled":
            weight, zeros = self._read(name).float(), f"{stem}weight_zero_point"
            found = self._scaled(weight - self._read(zeros).float() if self._files.has(zeros) else weight, stem)
        elif form == "packed":
            found = self._unpacked(stem, *shape)
        else:
            found = self._grouped(stem, *shape)
        return found.to(self._device, self._dtype)

    def stored(self, name: str, *shape: int) -> Tensor:
        """See `Source`."""
        return self._files.stored(name, *shape)

    def _form(self, name: str) -> str | None:
        stem = name.removesuffix("weight")
        if stem == name:
            return None
        if self._files.has(f"{stem}qweight"):
            return "grouped"
        if self._files.has(f"{stem}weight_packed"):
            return "packed"
        return "scaled" if any(self._files.has(stem + scale) for scale in _SCALES) else None

    def _read(self, name: str) -> Tensor:
        return self._files.read(name)

    def _scaled(self, weight: Tensor, stem: str) -> Tensor:
        """Multiply by the scale of the whole, of rows, of groups of inputs, or of blocks."""
        scale = self._read(next(stem + part for part in _SCALES if self._files.has(stem + part))).float()
        if scale.numel() == 1:
            return weight * scale.reshape(())
        scale = scale[:, None] if scale.ndim == 1 else scale
        rows, columns = weight.shape
        height, width = self._block or (-(-rows // scale.shape[0]), -(-columns // scale.shape[1]))
        if scale.shape != (-(-rows // height), -(-columns // width)):
            raise CheckpointError(f"{self.model_dir}: {stem}weight_scale has shape {list(scale.shape)}")
        spread = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        return weight * spread

    def _unpacked(self, stem: str, rows: int, columns: int) -> Tensor:
        """Read compressed-tensors' words: numbers of a row follow each other, with an offset of half their range."""
        bits = self._bits
        numbers = _words(self._read(f"{stem}weight_packed"), bits)[:, :columns].float() - 2 ** (bits - 1)
        zeros = f"{stem}weight_zero_point"
        if self._files.has(zeros):
            scale = self._read(f"{stem}weight_scale")
            offsets = _words(self._read(zeros).mT.contiguous(), bits).mT[:rows].float() - 2 ** (bits - 1)
            numbers = numbers - offsets.repeat_interleave(columns // scale.shape[1], 1)
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
        if numbers.shape != (columns, rows) or int(group.max()) >= len(scales):
            raise CheckpointError(f"{self.model_dir}: {shown(stem)} has parts whose shapes do not fit")
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
