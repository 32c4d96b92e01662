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
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mneme.errors import CheckpointError
from mneme.kernels.linear import Linear
from mneme.kernels.native.quantized import QuantizedLinear, packed_bytes
from mneme.replicas.config import WeightsForm
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.parts import DecoderWeights, GatedMlp
from mneme.replicas.model.weights import count_bytes, load_weights
from tests.replicas import tiered_engine
from tests.replicas.checkpoints import FLOAT32_TOLERANCE, write_checkpoint
from tests.replicas.tiered_engine import make_engine, run, submit

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
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    small = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": small, "weight_scale": scale}, small.float() * scale.float()


def packed_ints(weight: Tensor, bits: int = 4, group: int = GROUP, *, is_even: bool = True) -> Written:
    """compressed-tensors' pack-quantized: signed numbers plus half their range, zeros packed along the outputs."""
    rows, columns = weight.shape
    grouped, most = weight.reshape(rows, -1, group), 2 ** (bits - 1) - 1
    if is_even:
        scale = (grouped.abs().amax(-1) / most).bfloat16()
        zeros = torch.zeros_like(scale)
    else:
        scale = ((grouped.amax(-1) - grouped.amin(-1)) / (2 * most + 1)).bfloat16()
        zeros = (-grouped.amin(-1) / scale).round() - most - 1
    small = (grouped / scale[..., None] + zeros[..., None]).round().clamp(-most - 1, most)
    parts = {"weight_packed": packed((small + most + 1).flatten(1), bits), "weight_scale": scale}
    if not is_even:
        parts["weight_zero_point"] = packed((zeros + most + 1).mT, bits).mT
    meant = ((small - zeros[..., None]) * scale[..., None].float()).flatten(1)
    return {**parts, "weight_shape": torch.tensor([rows, columns])}, meant


def packed_reordered(weight: Tensor) -> Written:
    """`actorder: group`: columns as they were, and the group of each beside them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    parts, meant = packed_ints(weight[:, order], 4, 32)
    numbers = meant / parts["weight_scale"].float().repeat_interleave(32, 1) + 8
    place = order.argsort()
    groups = (torch.arange(weight.shape[1]) // 32)[place].int()
    parts = {**parts, "weight_packed": packed(numbers[:, place].round(), 4), "weight_g_idx": groups}
    return parts, meant[:, place]


def _asymmetric(weight: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of groups of inputs: numbers [in, out], offsets and scales [groups, out], and what they stand for [out, in]."""
    inputs = weight.mT.reshape(-1, group, len(weight))
    low, high = inputs.amin(1), inputs.amax(1)
    scale = ((high - low) / (2**bits - 1)).half().float()
    offset = (-low / scale).round().clamp(1, 2**bits - 1)
    numbers = (inputs / scale[:, None] + offset[:, None]).round().clamp(0, 2**bits - 1)
    meant = ((numbers - offset[:, None]) * scale[:, None]).reshape(-1, len(weight)).mT
    return numbers.reshape(-1, len(weight)), offset, scale, meant


def awq(weight: Tensor, group: int = GROUP) -> Written:
    numbers, offset, scale, meant = _asymmetric(weight, 4, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(numbers, 4, order), "qzeros": packed(offset, 4, order), "scales": scale.half()}
    return parts, meant


def gptq(weight: Tensor, bits: int = 4, group: int = GROUP, *, is_even: bool = False, zero: int = 1) -> Written:
    """zero: that offsets are stored without; 0 with `checkpoint_format: gptq_v2`"""
    if is_even:
        numbers, offset, scale, meant = _symmetric(weight, bits, group)
    else:
        numbers, offset, scale, meant = _asymmetric(weight, bits, group)
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // group
    parts = {"qweight": packed(numbers.mT, bits).mT.contiguous(), "qzeros": packed(offset - zero, bits)}
    return {**parts, "scales": scale.half(), "g_idx": groups}, meant


def _symmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_asymmetric`: all offsets are half the range (`sym`)."""
    inputs, half = weight.mT.reshape(-1, group, len(weight)), 2 ** (bits - 1)
    scale = (2 * inputs.abs().amax(1) / (2**bits - 1)).half().float()
    numbers = (inputs / scale[:, None] + half).round().clamp(0, 2**bits - 1)
    meant = ((numbers - half) * scale[:, None]).reshape(-1, len(weight)).mT
    return numbers.reshape(-1, len(weight)), torch.full_like(scale, half), scale, meant


def gptq_reordered(weight: Tensor, group: int = GROUP) -> Written:
    """Inputs in another order (`desc_act`), the same for all matrices of the same inputs."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    numbers, offset, scale, meant = _asymmetric(weight[:, order], 4, group)
    place = order.argsort()
    groups = (torch.arange(weight.shape[1]) // group)[place].int()
    parts = {"qweight": packed(numbers[place].mT, 4).mT.contiguous(), "qzeros": packed(offset - 1, 4)}
    return {**parts, "scales": scale.half(), "g_idx": groups}, meant[:, place]


def in_groups(bits: int, group: int | None) -> dict[str, Any]:
    """What compressed-tensors says of packed numbers."""
    weights = {"num_bits": bits, "group_size": group, "strategy": "group" if group else "channel"}
    config_groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": config_groups}


FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "fp8 of tensors": (fp8_of_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 of blocks": (fp8_of_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "compressed-tensors, int8": (int8_of_rows, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "compressed-tensors, 4 bits": (packed_ints, in_groups(4, GROUP)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq, 8 bits": (lambda w: gptq(w, 8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq, reordered": (gptq_reordered, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
}
# Formats whose groups the kernels have, and in how many bits: a group is as many of 32 as it takes.
OWN: dict[str, tuple[int, Callable[[Tensor], Written], dict[str, Any]]] = {
    "awq": (4, lambda w: awq(w, 64), {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}),
    "gptq": (4, lambda w: gptq(w, 4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq, symmetric": (
        4,
        lambda w: gptq(w, 4, 64, is_even=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
    ),
    "gptq, version 2": (
        4,
        lambda w: gptq(w, 4, 64, zero=0),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, whole rows": (
        4,
        lambda w: gptq(w, 4, w.shape[1]),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True},
    ),
    "gptq, 8 bits": (8, lambda w: gptq(w, 8, 64, is_even=True), {"quant_method": "gptq", "bits": 8, "group_size": 64}),
    "gptq, reordered": (
        4,
        lambda w: gptq_reordered(w, 32),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "compressed-tensors, 4 bits": (4, lambda w: packed_ints(w, 4, 64), in_groups(4, 64)),
    "compressed-tensors, zeros": (4, lambda w: packed_ints(w, 4, 32, is_even=False), in_groups(4, 32)),
    "compressed-tensors, whole rows": (4, lambda w: packed_ints(w, 4, w.shape[1]), in_groups(4, None)),
    "compressed-tensors, reordered": (4, packed_reordered, in_groups(4, 32)),
    "compressed-tensors, 8 bits packed": (8, lambda w: packed_ints(w, 8, 32), in_groups(8, 32)),
    "compressed-tensors, int8": (8, int8_of_rows, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    write_checkpoint("qwen3", directory)
    return directory


def quantize(plain: Path, directory: Path, name: str) -> Path:
    """Write a checkpoint, and the plain one that it stands for beside it; returns the latter's directory."""
    return written(plain, directory, *FORMATS[name])


def written(plain: Path, directory: Path, write: Callable[[Tensor], Written], said: dict[str, Any]) -> Path:
    tensors, stored, meant = load_file(plain / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        if not key.endswith(("proj.weight", *(f".w{i}.weight" for i in (1, 2, 3)))):  # Mixtral's experts
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that groups of 64 divide."""
    directory = tmp_path_factory.mktemp("wide")
    write_checkpoint("llama-blocks", directory)
    return directory


def codes_of(linear: Linear) -> Tensor:
    assert isinstance(linear, QuantizedLinear)
    return linear.weight_rows(torch.arange(linear._num_features))  # of all, the only way to see them


def loaded(directory: Path, form: WeightsForm, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, load_model_config(directory), torch.device("cpu"), dtype, form=form)


@pytest.mark.parametrize("name", OWN)
def test_numbers_of_a_file_are_multiplied_as_they_are(wide: Path, tmp_path: Path, name: str) -> None:
    """Each is (number - zero) * scale, and so found bit for bit where the zero times the scale is a float16; else
    within what that rounds."""
    bits, write, said = OWN[name]
    other = written(wide, tmp_path / "quantized", write, said)
    ours, dense = loaded(tmp_path / "quantized", "auto"), loaded(other, "dense")
    expected = count_bytes(tmp_path / "quantized", load_model_config(tmp_path / "quantized"), torch.float32, "auto")
    assert (expected.num_bytes, expected.num_rounded_bytes) == (ours.num_bytes, 0)
    assert ours.num_rounded_bytes == 0
    assert ours.num_bytes.keys() == {f"int{bits}", "float32"}
    x = torch.randn(30, load_model_config(other).hidden_size, generator=torch.Generator().manual_seed(2))
    for layer, exact in zip(ours.layers, dense.layers, strict=True):
        assert isinstance(layer.mlp, GatedMlp)
        assert isinstance(exact.mlp, GatedMlp)
        pairs = ((layer.attention.qkv, exact.attention.qkv), (layer.attention.o, exact.attention.o))
        for one, wanted in (*pairs, (layer.mlp.gate_up, exact.mlp.gate_up), (layer.mlp.down, exact.mlp.down)):
            found, meant = codes_of(one), wanted.weight_rows(torch.arange(len(codes_of(one))))
            most = meant.abs().max() * (2.0**-11 if bits == 4 else 2.0**-23)
            assert (found - meant).abs().max() <= most
        error = layer.attention.qkv(x) - exact.attention.qkv(x)
        assert error.norm() < 0.01 * exact.attention.qkv(x).norm(), "of inputs that are rounded"


@pytest.mark.parametrize("name", [name for name in OWN if "symmetric" in name or "compressed-tensors, 4" in name])
def test_symmetric_numbers_are_found_bit_for_bit(wide: Path, tmp_path: Path, name: str) -> None:
    """8 times the scale has no more digits than the scale. In 8 bits they are, too, whatever their zeros."""
    _, write, said = OWN[name]
    other = written(wide, tmp_path / "quantized", write, said)
    dense = loaded(other, "dense")
    forms: tuple[WeightsForm, ...] = ("auto", "int4", "int8")
    for form in forms:
        ours = loaded(tmp_path / "quantized", form)
        for layer, exact in zip(ours.layers, dense.layers, strict=True):
            assert torch.equal(codes_of(layer.attention.qkv), exact.attention.qkv.weight_rows(torch.arange(128)))


@pytest.mark.parametrize("name", OWN)
def test_numbers_of_8_bits_are_rounded_to_4_and_not_taken_for_them(wide: Path, tmp_path: Path, name: str) -> None:
    """In what leads into MLPs, also where the file says nothing of their bits, or has some of 4 beside them."""
    _, write, said = OWN[name]
    other = written(wide, tmp_path / "quantized", write, said)
    ours, dense = loaded(tmp_path / "quantized", "int4"), loaded(other, "dense")
    for layer, exact in zip(ours.layers, dense.layers, strict=True):
        assert isinstance(layer.mlp, GatedMlp)
        assert isinstance(exact.mlp, GatedMlp)
        assert layer.mlp.gate_up.format == "int4"
        found = codes_of(layer.mlp.gate_up)
        meant = exact.mlp.gate_up.weight_rows(torch.arange(len(found)))
        assert (found - meant).norm() < 0.15 * meant.norm()


def test_4_bits_with_zeros_are_exact_in_8(wide: Path, tmp_path: Path) -> None:
    _, write, said = OWN["awq"]
    other = written(wide, tmp_path / "quantized", write, said)
    ours, dense = loaded(tmp_path / "quantized", "int8"), loaded(other, "dense")
    assert ours.num_bytes.keys() == {"int8"}
    for layer, exact in zip(ours.layers, dense.layers, strict=True):
        assert torch.equal(codes_of(layer.attention.o), exact.attention.o.weight_rows(torch.arange(64)))


def test_what_kernels_cannot_have_is_rounded_to_8_bits(wide: Path, tmp_path: Path) -> None:
    """Zeros of their own in 8 bits; queries and keys whose inputs follow in different orders; scales beyond float16."""
    said = {"quant_method": "gptq", "bits": 8, "group_size": 64}
    other = written(wide, tmp_path / "zeros" / "quantized", lambda w: gptq(w, 8, 64), said)
    _rounded(tmp_path / "zeros" / "quantized", other, {"int8", "float32"})
    bits, write, said = OWN["gptq, reordered"]
    other = written(wide, tmp_path / "orders" / "quantized", write, said)
    path = tmp_path / "orders" / "quantized" / "model.safetensors"
    tensors, meant = load_file(path), load_file(other / "model.safetensors")
    for key in [key for key in tensors if key.endswith("k_proj.g_idx")]:
        tensors[key] = tensors[key].flip(0)  # other groups of the same size
        stem, groups = key.removesuffix("g_idx"), tensors[key].long()
        numbers = (tensors[f"{stem}qweight"].mT[..., None] >> torch.arange(0, 32, 4)) & 15
        zeros = ((tensors[f"{stem}qzeros"][..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1) + 1
        scales = tensors[f"{stem}scales"].float()
        meant[f"{stem}weight"] = ((numbers.flatten(1).mT - zeros[groups]) * scales[groups]).mT.contiguous()
    save_file(tensors, path)
    save_file(meant, other / "model.safetensors")
    _rounded(tmp_path / "orders" / "quantized", other, {f"int{bits}", "int8", "float32"})
    large = written(wide, tmp_path / "large" / "quantized", lambda w: packed_ints(w * 3e6, 4, 32), in_groups(4, 32))
    _rounded(tmp_path / "large" / "quantized", large, {"int8", "float32"})


def _rounded(directory: Path, other: Path, formats: set[str]) -> None:
    ours, dense = loaded(directory, "auto"), loaded(other, "dense")
    assert ours.num_bytes.keys() == formats
    assert 0 < ours.num_rounded_bytes <= ours.num_bytes["int8"]
    for layer, exact in zip(ours.layers, dense.layers, strict=True):
        found, meant = codes_of(layer.attention.qkv), exact.attention.qkv.weight_rows(torch.arange(128))
        step = meant.abs().amax() / 127
        assert (found - meant).abs().max() < step


def logits_of(directory: Path, form: WeightsForm, ids: list[int]) -> Tensor:
    """float32 [1, vocab] behind a prompt, by the engine."""
    engine = make_engine(Decoder(load_model_config(directory), loaded(directory, form)), num_host_pages=0)
    submit(engine, "one", ids, 1)
    run(engine)
    return tiered_engine.logits_of(engine, "one")


def test_logits_are_those_of_what_the_file_stands_for(wide: Path, tmp_path: Path) -> None:
    """Up to the rounding of inputs: as far from the reference as dense int8 products of the same weights are."""
    _, write, said = OWN["gptq, reordered"]
    other = written(wide, tmp_path / "quantized", write, said)
    ids = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    ours, dense, eight = (
        logits_of(directory, form, ids)
        for directory, form in ((tmp_path / "quantized", "auto"), (other, "dense"), (other, "int8"))
    )
    error, of_inputs = ((each - dense).norm() / dense.norm() for each in (ours, eight))
    assert error < 1.2 * of_inputs < 0.1


EXPERTS = {
    **{name: OWN[name][1:] for name in OWN if name not in ("gptq, whole rows", "compressed-tensors, whole rows")},
    "awq": (lambda w: awq(w, 32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "fp8 of tensors": FORMATS["fp8 of tensors"],
    "fp8 of blocks": FORMATS["fp8 of blocks"],
    "compressed-tensors, 4 bits": (lambda w: packed_ints(w, 4, 32), in_groups(4, 32)),
}


@pytest.fixture(scope="module", params=["mixtral-blocks", "qwen2-moe-blocks", "qwen3-moe-blocks"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_a_file_are_what_they_stand_for(sparse: Path, tmp_path: Path, name: str) -> None:
    """Their logits, dense, are those that `transformers` computes of the dequantized file. In the file's own numbers
    each layer's experts differ from that by the rounding of inputs alone; what chooses among them is the same."""
    write, said = EXPERTS[name]
    other = written(sparse, tmp_path / "quantized", write, said)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    ids = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0, -1].float()
    assert (logits_of(tmp_path / "quantized", "dense", ids)[0] - wanted).abs().max() <= FLOAT32_TOLERANCE
    ours, dense = loaded(tmp_path / "quantized", "auto"), loaded(other, "dense")
    expected = count_bytes(tmp_path / "quantized", load_model_config(tmp_path / "quantized"), torch.float32, "auto")
    assert (expected.num_bytes, expected.num_rounded_bytes) == (ours.num_bytes, ours.num_rounded_bytes)
    own = "int8" if "8" in name else "int4"
    assert ours.num_bytes.keys() == {own, "float32"}
    assert ours.num_rounded_bytes == (ours.num_bytes["int8"] if "fp8" in name else 0)
    x = torch.randn(40, dense.layers[0].attention.qkv.weight_rows(torch.tensor([0])).shape[1])
    for layer, exact in zip(ours.layers, dense.layers, strict=True):
        meant = exact.mlp(x, torch.float32)
        assert (layer.mlp(x, torch.float32) - meant).norm() < 0.02 * meant.norm()


def test_groups_of_the_last_inputs_may_be_smaller(tmp_path: Path, wide: Path) -> None:
    """GPTQ of 192 inputs in groups of 128, as AutoGPTQ writes it."""

    def write(weight: Tensor) -> Written:
        parts, meant = gptq(weight, 4, 64)
        if weight.shape[1] % 128 == 0 or weight.shape[1] < 128:
            return gptq(weight, 4, min(128, weight.shape[1]))
        for name in ("scales", "qzeros"):
            parts[name] = parts[name][::2].clone()  # of two groups of 64 the first's, and the last one's
        groups = torch.arange(weight.shape[1], dtype=torch.int32) // 128
        numbers = (parts["qweight"].mT[..., None] >> torch.arange(0, 32, 4)) & 15
        zeros = ((parts["qzeros"][..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1) + 1
        meant = ((numbers.flatten(1).mT - zeros[groups.long()]) * parts["scales"].float()[groups.long()]).mT
        return {**parts, "g_idx": groups}, meant

    said = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    other = written(wide, tmp_path / "quantized", write, said)
    ours, dense = loaded(tmp_path / "quantized", "auto"), loaded(other, "dense")
    assert ours.num_rounded_bytes == 0
    for layer, exact in zip(ours.layers, dense.layers, strict=True):
        found = codes_of(layer.mlp.down)  # type: ignore[union-attr]
        meant = exact.mlp.down.weight_rows(torch.arange(64))  # type: ignore[union-attr]
        assert (found - meant).abs().max() <= meant.abs().max() * 2.0**-11


def test_an_order_that_is_not_there_is_refused(wide: Path, tmp_path: Path) -> None:
    _, write, said = OWN["gptq, reordered"]
    written(wide, tmp_path / "quantized", write, said)
    path = tmp_path / "quantized" / "model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if not key.endswith("g_idx")}, path)
    with pytest.raises(CheckpointError, match=r"g_idx is missing; config\.json says desc_act"):
        loaded(tmp_path / "quantized", "auto")


@pytest.mark.parametrize("form", ["dense", "auto", "int8", "int4"])
@pytest.mark.parametrize("name", [*FORMATS, *(f"own {name}" for name in OWN)])
def test_what_is_rounded_is_known_from_headers(
    plain: Path, wide: Path, tmp_path: Path, name: str, form: WeightsForm
) -> None:
    """`doctor` counts each format in each form as it will be loaded; 4 bits that are taken in 8 are not rounded."""
    if name in FORMATS:
        own: tuple[int, ...] = (8,) if "int8" in name else ()
        quantize(plain, tmp_path / "quantized", name)
    else:
        bits, write, said = OWN[name.removeprefix("own ")]
        own = (8,) if bits == 8 else (4, 8)
        written(wide, tmp_path / "quantized", write, said)
    expected = count_bytes(tmp_path / "quantized", load_model_config(tmp_path / "quantized"), torch.float32, form)
    ours = loaded(tmp_path / "quantized", form)
    assert (expected.num_bytes, expected.num_rounded_bytes) == (ours.num_bytes, ours.num_rounded_bytes)
    if form == "dense":
        assert ours.num_rounded_bytes == 0
    else:  # the output is dense in these files
        head = 0 if form == "auto" else packed_bytes(320, 64, 8)
        is_own = {"int8": 8 in own, "int4": 4 in own or (form == "auto" and 8 in own)}
        sizes = {"int8": ours.num_bytes.get("int8", head) - head, "int4": ours.num_bytes.get("int4", 0)}
        assert ours.num_rounded_bytes == head + sum(size for kind, size in sizes.items() if not is_own[kind])


def fp8_of_rows(weight: Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    small = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale}, small.float() * scale.float()


FP8: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any], bool]] = {  # and whether its numbers are multiplied
    "of tensors": (*FORMATS["fp8 of tensors"], True),
    "of rows": (fp8_of_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}, True),
    "of blocks": (*FORMATS["fp8 of blocks"], False),
    "awq": (*OWN["awq"][1:], False),
    "dense": (lambda w: ({"weight": w}, w), {}, False),
}


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("checkpoint", ["llama-blocks", "mixtral-blocks", "qwen2-moe-blocks"])
def test_fp8_is_multiplied_as_it_is_and_all_else_rounded_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str, name: str
) -> None:
    """As on a GPU, by torch's product for CPUs. Outputs and experts are dense, and what chooses among them."""
    monkeypatch.setattr("mneme.replicas.model.weights.can_multiply", lambda _device, _dtype: True)
    write, said, is_own = FP8[name]
    write_checkpoint(checkpoint, tmp_path / "plain")
    other = written(tmp_path / "plain", tmp_path / "quantized", write, said)
    if not said:
        saying(tmp_path / "quantized", quantization_config=None)
    config, dtype = load_model_config(other), torch.bfloat16
    expected = count_bytes(tmp_path / "quantized", load_model_config(tmp_path / "quantized"), dtype, "fp8")
    ours, dense = loaded(tmp_path / "quantized", "fp8", dtype), loaded(other, "dense", dtype)
    assert (expected.num_bytes, expected.num_rounded_bytes) == (ours.num_bytes, ours.num_rounded_bytes)
    assert ours.num_bytes.keys() == {"fp8", "bfloat16"}
    assert ours.num_rounded_bytes == (0 if is_own else ours.num_bytes["fp8"])
    tensors = load_file(other / "model.safetensors")
    x = torch.randn(30, config.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    for index, (layer, exact) in enumerate(zip(ours.layers, dense.layers, strict=True)):
        qkv, parts = layer.attention.qkv, ("q_proj", "k_proj", "v_proj")
        meant = torch.cat([tensors[f"model.layers.{index}.self_attn.{part}.weight"] for part in parts])
        found = qkv.weight_rows(torch.arange(len(meant)))
        if is_own:
            assert torch.equal(found, meant.bfloat16())
        assert (found.float() - meant).norm() < 0.04 * meant.norm()
        for ours_of, theirs_of in ((qkv, exact.attention.qkv), (layer.attention.o, exact.attention.o)):
            wanted = theirs_of(x).float()
            assert (ours_of(x).float() - wanted).norm() < 0.06 * wanted.norm()
        wanted = exact.mlp(x, torch.float32)
        assert (layer.mlp(x, torch.float32) - wanted).norm() < 0.1 * wanted.norm()
    assert torch.equal(ours.head(x), dense.head(x))


@pytest.mark.parametrize("form", ["dense", "auto"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [*FORMATS, *(f"own {name}" for name in OWN)])
def test_a_scale_that_is_no_number_is_refused(
    plain: Path, wide: Path, tmp_path: Path, name: str, bad: float, form: WeightsForm
) -> None:
    """One of the second layer's, by the name of the tensor that has it."""
    if name in FORMATS:
        quantize(plain, tmp_path / "quantized", name)
    else:
        _, write, said = OWN[name.removeprefix("own ")]
        written(wide, tmp_path / "quantized", write, said)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if "layers.1." in key and re.search(r"o_proj\.(weight_)?scale", key))
    tensors[key].view(-1)[-1] = bad
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} has a scale that is NaN or infinite"):
        loaded(tmp_path / "quantized", form)


@pytest.mark.parametrize("form", ["dense", "auto", "int8"])
def test_a_scale_that_is_missing_is_said(plain: Path, tmp_path: Path, form: WeightsForm) -> None:
    """Its numbers alone would be taken for weights, hundreds of times too large."""
    name = next(name for name in FORMATS if "fp8" in name)
    quantize(plain, tmp_path / "quantized", name)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    del tensors[next(key for key in tensors if "layers.1." in key and re.search(r"o_proj\.weight_scale", key))]
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\..*o_proj\.weight has dtype F8_E4M3, and its scale is missing"
    ):
        loaded(tmp_path / "quantized", form)


@pytest.mark.parametrize("form", ["dense", "auto", "int8"])
@pytest.mark.parametrize("zero", [-129, 128, 1 << 16])
def test_a_zero_point_that_is_no_number_of_the_weight_is_refused(
    wide: Path, tmp_path: Path, zero: int, form: WeightsForm
) -> None:
    """A multiple of 2^16 is 0 for who takes 16 bits of it."""

    def write(weight: Tensor) -> Written:
        parts, meant = int8_of_rows(weight)
        return {**parts, "weight_zero_point": torch.zeros(len(weight), 1, dtype=torch.int32)}, meant

    said = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    written(wide, tmp_path / "quantized", write, said)
    loaded(tmp_path / "quantized", form)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith("v_proj.weight_zero_point"))
    tensors[key][3] = zero
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} has a zero point that is not from -128 to 127"):
        loaded(tmp_path / "quantized", form)


@pytest.mark.parametrize(("bits", "least_bits"), [(4, 0xF0), (8, 0xFF00)])
def test_a_zero_that_gptqs_first_format_cannot_have_is_refused(
    wide: Path, tmp_path: Path, bits: int, least_bits: int
) -> None:
    """It has zeros less 1; the second one has them as they are, and so may have the largest."""
    group = {"quant_method": "gptq", "bits": bits, "group_size": 64}
    written(
        wide, tmp_path / "quantized", lambda w: gptq(w, bits, 64, zero=0), {**group, "checkpoint_format": "gptq_v2"}
    )
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith("down_proj.qzeros"))
    tensors[key][0, 0] |= least_bits
    save_file(tensors, path)
    loaded(tmp_path / "quantized", "auto")
    saying(tmp_path / "quantized", quantization_config=group)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(key)} has a zero point that is not from 0 to {2**bits - 1}"
    ):
        loaded(tmp_path / "quantized", "auto")


@pytest.mark.parametrize("name", ["fp8 of tensors", "fp8 of blocks"])
def test_a_number_of_8_bits_that_is_none_is_refused(plain: Path, tmp_path: Path, name: str) -> None:
    quantize(plain, tmp_path / "quantized", name)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith("up_proj.weight"))
    tensors[key].view(torch.uint8)[5, 7] = 0x7F
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} has a number that is NaN"):
        loaded(tmp_path / "quantized", "auto")


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
    key = next(key for key in stored if key.endswith("down_proj_scales"))
    stored[key][1, 2, 0] = 255  # NaN of powers of two
    save_file({key: value.contiguous() for key, value in stored.items()}, tmp_path / "mxfp4" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} has a scale that is NaN or too large"):
        loaded(tmp_path / "mxfp4", "dense")
