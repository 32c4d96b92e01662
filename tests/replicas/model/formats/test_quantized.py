"""Quantized checkpoints are read as what their formats say, written here as their own tools write them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mneme.errors import CheckpointError
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.weights import load_weights
from tests.replicas.checkpoints import write_checkpoint

pytestmark = pytest.mark.engine

GROUP = 16
Written = tuple[dict[str, Tensor], Tensor]  # the tensors of one matrix, and what they stand for


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]; `order`: which number the lowest bits hold, the next, ..."""
    per_word = 32 // bits
    words = numbers.reshape(len(numbers), -1, per_word).long()
    if order is not None:
        words = words[..., list(order)]
    total = sum(words[..., place] << (bits * place) for place in range(per_word))
    return torch.where(total >= 2**31, total - 2**32, total).int()


def fp8_of_tensor(weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale.reshape(1)}, small.float() * scale


def fp8_of_blocks(weight: Tensor) -> Written:
    """Of 32 x 32, the last ones smaller."""
    rows, columns = weight.shape
    scale = torch.rand(-(-rows // 32), -(-columns // 32)) * 0.01 + 0.01
    spread = scale.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    small = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": scale}, small.float() * spread


def int8_of_rows(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 127
    small = (weight / scale).round().to(torch.int8)
    return {"weight": small, "weight_scale": scale}, small.float() * scale


def packed_int4(weight: Tensor) -> Written:
    rows, columns = weight.shape
    scale = weight.reshape(rows, -1, GROUP).abs().amax(-1) / 7
    spread = scale.repeat_interleave(GROUP, 1)
    small = (weight / spread).round().clamp(-8, 7)
    shape = torch.tensor([rows, columns])
    return {"weight_packed": packed(small + 8, 4), "weight_scale": scale, "weight_shape": shape}, small * spread


def _asymmetric(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of groups of inputs: numbers [in, out], offsets and scales [groups, out], and what they stand for [out, in]."""
    inputs = weight.mT.reshape(-1, GROUP, len(weight))
    low, high = inputs.amin(1), inputs.amax(1)
    scale = ((high - low) / (2**bits - 1)).half().float()
    offset = (-low / scale).round().clamp(1, 2**bits - 1)
    numbers = (inputs / scale[:, None] + offset[:, None]).round().clamp(0, 2**bits - 1)
    meant = ((numbers - offset[:, None]) * scale[:, None]).reshape(-1, len(weight)).mT
    return numbers.reshape(-1, len(weight)), offset, scale, meant


def awq(weight: Tensor) -> Written:
    numbers, offset, scale, meant = _asymmetric(weight, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(numbers, 4, order), "qzeros": packed(offset, 4, order), "scales": scale.half()}
    return parts, meant


def gptq(weight: Tensor, bits: int = 4) -> Written:
    numbers, offset, scale, meant = _asymmetric(weight, bits)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    parts = {"qweight": packed(numbers.mT, bits).mT.contiguous(), "qzeros": packed(offset - 1, bits)}
    return {**parts, "scales": scale.half(), "g_idx": groups}, meant


def gptq_reordered(weight: Tensor) -> Written:
    """Inputs in another order (`desc_act`)."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    parts, _ = gptq(weight[:, order])
    numbers, offset, scale, _ = _asymmetric(weight[:, order], 4)
    place = order.argsort()
    groups = (torch.arange(weight.shape[1]) // GROUP)[place].int()
    meant = ((numbers - offset.repeat_interleave(GROUP, 0)) * scale.repeat_interleave(GROUP, 0))[place].mT
    parts["qweight"] = packed(numbers[place].mT, 4).mT.contiguous()
    return {**parts, "g_idx": groups}, meant


FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "fp8 of tensors": (fp8_of_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 of blocks": (fp8_of_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "compressed-tensors, int8": (int8_of_rows, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "compressed-tensors, 4 bits": (
        packed_int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
        },
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq, 8 bits": (lambda w: gptq(w, 8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq, reordered": (gptq_reordered, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    write_checkpoint("qwen3", directory)
    return directory


def quantize(plain: Path, directory: Path, name: str) -> Path:
    """Write a checkpoint, and the plain one that it stands for beside it; returns the latter's directory."""
    write, said = FORMATS[name]
    tensors, stored, meant = load_file(plain / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        if not key.endswith("proj.weight"):
            stored[key] = meant[key] = tensor
            continue
        parts, meant[key] = write(tensor)
        stored |= {key.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    other = directory.with_name("meant")
    for each, content in ((directory, stored), (other, {key: value.contiguous() for key, value in meant.items()})):
        shutil.copytree(plain, each)
        save_file(content, each / "model.safetensors")
    saying(directory, quantization_config=said)
    return other


def saying(directory: Path, **more: Any) -> Path:
    """Add to a checkpoint's configuration."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_what_it_stands_for(plain: Path, tmp_path: Path, name: str) -> None:
    other = quantize(plain, tmp_path / "quantized", name)
    config = load_model_config(tmp_path / "quantized")
    ours, theirs = (
        load_weights(d, config, torch.device("cpu"), torch.float32) for d in (tmp_path / "quantized", other)
    )
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(2))
    for layer, exact in zip(ours.layers, theirs.layers, strict=True):
        assert torch.allclose(layer.attention.qkv(x), exact.attention.qkv(x), atol=1e-4)
        assert torch.allclose(layer.mlp(x, x.dtype), exact.mlp(x, x.dtype), atol=1e-3)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({}, "quant_method"),
        ({"quant_method": "gptq", "bits": 3}, "bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "16"}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 32]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 32}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "config_groups": "all"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": None}}, "config_groups"),
        *(
            ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}, field)
            for weights, field in (
                ({"num_bits": None}, "num_bits"),
                ({"num_bits": "four"}, "num_bits"),
                ("x", "weights"),
            )
        ),
    ],
)
def test_what_cannot_be_read_is_named(plain: Path, tmp_path: Path, said: dict[str, Any], field: str) -> None:
    directory = saying(Path(shutil.copytree(plain, tmp_path / "model")), quantization_config={**said, "a": 1})
    with pytest.raises(CheckpointError, match=rf"{field}: must be"):
        load_model_config(directory)


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "floats": lambda part: part.float(),
    "half": lambda part: part[: len(part) // 2],
    "flat": lambda part: part.reshape(-1),
    "turned": lambda part: part.mT,
    "integers": lambda part: part.int(),
}
DAMAGE = [
    ("gptq", "o_proj.scales", "half"), ("gptq", "o_proj.scales", "flat"), ("gptq", "o_proj.qzeros", "half"),
    ("gptq", "o_proj.qweight", "floats"), ("gptq", "o_proj.g_idx", "half"), ("gptq", "o_proj.scales", "integers"),
    ("awq", "k_proj.scales", "half"), ("awq", "k_proj.qzeros", "turned"), ("awq", "k_proj.qweight", "half"),
    ("fp8 of tensors", "up_proj.weight", "turned"), ("fp8 of tensors", "k_proj.weight", "integers"),
    ("fp8 of blocks", "up_proj.weight_scale_inv", "half"), ("fp8 of blocks", "up_proj.weight_scale_inv", "flat"),
    ("compressed-tensors, int8", "k_proj.weight_scale", "half"), ("compressed-tensors, int8", "k_proj.weight", "half"),
    ("compressed-tensors, 4 bits", "k_proj.weight_scale", "half"),
    ("compressed-tensors, 4 bits", "k_proj.weight_scale", "turned"),
    ("compressed-tensors, 4 bits", "k_proj.weight_packed", "floats"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "part", "damage"), DAMAGE)
def test_a_part_of_another_shape_or_dtype_is_refused(
    plain: Path, tmp_path: Path, form: str, part: str, damage: str
) -> None:
    """By the headers, before anything is read."""
    quantize(plain, tmp_path / "quantized", form)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith(part))
    save_file({**tensors, key: DAMAGES[damage](tensors[key]).contiguous()}, path)
    config = load_model_config(tmp_path / "quantized")
    with pytest.raises(CheckpointError, match=rf"{re.escape(key.rsplit('.', 1)[0])}\S* has shape .*"):
        load_weights(tmp_path / "quantized", config, torch.device("cpu"), torch.float32)


def test_groups_beyond_the_scales_are_refused(plain: Path, tmp_path: Path) -> None:
    quantize(plain, tmp_path / "quantized", "gptq")
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith("o_proj.g_idx"))
    save_file({**tensors, key: tensors[key] + 1}, path)
    config = load_model_config(tmp_path / "quantized")
    with pytest.raises(CheckpointError, match="names groups that"):
        load_weights(tmp_path / "quantized", config, torch.device("cpu"), torch.float32)


def test_a_method_that_no_tensor_has_is_refused(plain: Path, tmp_path: Path) -> None:
    directory = saying(Path(shutil.copytree(plain, tmp_path / "model")), quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="says fp8"):
        load_weights(directory, load_model_config(directory), torch.device("cpu"), torch.float32)


def test_experts_in_mxfp4_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """gpt-oss as it is published: two numbers of 4 bits in a byte, with a power of two for each 32."""
    write_checkpoint("gpt-oss", tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    inner = 96  # of the checkpoint's 112: blocks are whole
    tensors = {k: t[..., : 2 * inner] if "gate_up_proj" in k else t for k, t in tensors.items()}
    rng = torch.Generator().manual_seed(4)
    stored, meant = {}, {}
    for key, tensor in tensors.items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            stored[key] = meant[key] = tensor
            continue
        num_experts, num_inputs, num_outputs = tensor.shape
        num_inputs -= num_inputs % 32  # of a whole number of blocks
        blocks = torch.randint(0, 256, (num_experts, num_outputs, num_inputs // 32, 16), generator=rng).to(torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:-1], generator=rng).to(torch.uint8)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        meant[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for name, content in (("mxfp4", stored), ("meant", meant)):
        shutil.copytree(tmp_path / "plain", tmp_path / name)
        save_file({key: value.contiguous() for key, value in content.items()}, tmp_path / name / "model.safetensors")
    for name, said in (("mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}), ("meant", {})):
        saying(tmp_path / name, intermediate_size=inner, **said)
    config = load_model_config(tmp_path / "mxfp4")
    ours, theirs = (
        load_weights(tmp_path / name, config, torch.device("cpu"), torch.float32) for name in ("mxfp4", "meant")
    )
    x = torch.randn(3, config.hidden_size, generator=rng)
    for layer, exact in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(layer.mlp(x, x.dtype), exact.mlp(x, x.dtype))
