"""GGUF files, written here as llama.cpp's converter writes them, are read as the models that they were made of."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from mneme.errors import CheckpointError
from mneme.replicas.card import GGUF, shard_paths
from mneme.replicas.model.directory import load_model_config, model_directory, parse_model_config
from mneme.replicas.model.formats.gguf_file import GgufFile, card_of
from mneme.replicas.model.weights import load_weights
from mneme.replicas.text.tokenizer import Tokenizer
from tests.budget import rarer
from tests.replicas.checkpoints import FLOAT32_TOLERANCE, decoder_of, make_model, teacher_forced
from tests.replicas.tiered_engine import answers, logits_of, make_engine, run, submit

pytestmark = pytest.mark.engine

TINY = model_directory("mneme-tiny")
QUANTIZED = {"Q8_0": 0.01, "Q4_0": 0.12, "Q4_1": 0.1, "F16": 1e-3, "BF16": 1e-2, "F32": 0.0}  # error beside the largest
WINDOW = {"attention.sliding_window": 24}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 48}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-2", {}),
    "qwen3": ("qwen3", {"attention.key_length": 32}),
    "qwen3moe": ("qwen3-moe", {"attention.key_length": 32, **EXPERTS}),
    "gemma3": ("gemma-3", {"attention.key_length": 24, **WINDOW}),
    "gemma2": ("gemma-2", {"attention.key_length": 24, **WINDOW, "attn_logit_softcapping": 5.0}),
    "phi3": ("phi-3", {"attention.sliding_window": 40}),
}


def write(
    path: Path, architecture: str, tensors: dict[str, torch.Tensor], fields: dict[str, Any], kind: str = "F32"
) -> None:
    """Write a file with the vocabulary of mneme-tiny; matrices are of a kind, the rest float32."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in fields.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    vocabulary = json.loads((TINY / "tokenizer.json").read_text())
    tokens = sorted(vocabulary["model"]["vocab"], key=vocabulary["model"]["vocab"].get)
    added = {each["id"]: each["content"] for each in vocabulary["added_tokens"]}
    tokens = [added.get(i, token) for i, token in enumerate([*tokens, *[""] * (max(added) + 1 - len(tokens))])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in added else 1 for i in range(len(tokens))])
    merges = vocabulary["model"]["merges"]
    writer.add_token_merges([" ".join(each) if isinstance(each, list) else each for each in merges])
    writer.add_eos_token_id(3)
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_chat_template((TINY / "chat_template.jinja").read_text())
    number = getattr(gguf.GGMLQuantizationType, kind)
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if kind != "F32" and tensor.ndim > 1:
            writer.add_tensor(name, gguf.quantize(array, number), raw_dtype=number)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_directory(folder: Path) -> None:
    """Make the folder of a file `m.gguf` a model directory."""
    (folder / "config.json").write_text(json.dumps(GgufFile(folder / "m.gguf").config()))
    (folder / GGUF).symlink_to(folder / "m.gguf")


def converted(architecture: str, name: str | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any], Any]:
    """A random model's tensors and fields as llama.cpp has them, and the model itself."""
    usual, more = KINDS[architecture]
    model = make_model(name or usual)
    config = model.config
    names = gguf.get_tensor_name_map(
        next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture), config.num_hidden_layers
    )
    stored: dict[str, torch.Tensor] = {}
    for key, tensor in by_expert(model.state_dict()).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if isinstance(tensor, list):
            tensor = torch.stack(tensor)
        if architecture == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and "norm" in key:
            tensor = tensor + 1
        found = names.get_name(key, (".weight", ".bias"))
        assert found is not None, key
        stored[found] = tensor
    fields = {
        "context_length": config.max_position_embeddings, "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, **more,
    }  # fmt: skip
    return stored, fields, model


def by_expert(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Take experts that `transformers` keeps in one tensor, gates before ups, as files name them."""
    found: dict[str, Any] = {}
    for key, tensor in state.items():
        if key.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stem = key.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            found[f"{key}.weight"] = tensor
        else:
            found[key] = tensor
    return found


@pytest.mark.parametrize("architecture", KINDS)
def test_a_file_computes_what_the_model_does_that_it_was_made_of(tmp_path: Path, architecture: str) -> None:
    tensors, fields, model = converted(architecture)
    write(tmp_path / "m.gguf", architecture, tensors, fields)
    make_directory(tmp_path)
    config = load_model_config(tmp_path)
    if architecture == "gemma3":  # files do not say which layers have the window: each sixth has none
        assert config.windows == (24, 24, 24, 24)
        return
    weights = load_weights(tmp_path, config, torch.device("cpu"), torch.float32)
    ids = torch.arange(0, 300, 7)
    if architecture not in ("gemma2", "phi3"):
        assert torch.allclose(weights.embed(ids), model.get_input_embeddings()(ids).detach(), atol=1e-6)
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(weights.layers, model.model.layers, strict=True):
        normed = theirs.input_layernorm(x)
        assert torch.allclose(ours.attention_norm(x), normed, atol=1e-5)
        attention = theirs.self_attn
        if architecture == "phi3":
            expected = attention.qkv_proj(normed)
        else:
            expected = torch.cat([getattr(attention, f"{part}_proj")(normed) for part in "qkv"], -1)
        assert torch.allclose(ours.attention.qkv(normed), expected, atol=1e-4)
        mlp = theirs.mlp(normed[None])
        assert torch.allclose(
            ours.mlp(normed, torch.float32), (mlp[0] if isinstance(mlp, tuple) else mlp)[0], atol=1e-4
        )


@pytest.mark.parametrize("kind", QUANTIZED)
def test_each_quantization_is_what_the_gguf_package_makes_of_it(tmp_path: Path, kind: str) -> None:
    tensor = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    tensors = {"token_embd.weight": tensor, "blk.0.ffn_up.weight": tensor, "output_norm.weight": tensor[0]}
    write(tmp_path / "m.gguf", "qwen2", tensors, {"block_count": 1}, kind)
    found = GgufFile(tmp_path / "m.gguf").array("blk.0.ffn_up.weight")
    assert np.abs(found - tensor.numpy()).max() <= QUANTIZED[kind] * tensor.abs().max().item() + 1e-9
    number = getattr(gguf.GGMLQuantizationType, kind)
    if kind != "F32":
        assert np.array_equal(found, gguf.dequantize(gguf.quantize(tensor.numpy(), number), number))


@pytest.mark.parametrize(
    ("kind", "bits", "most"), [("Q4_0", 4, 0), ("Q4_0", 8, 0), ("Q4_1", 4, 0), ("Q8_0", 8, 0), ("Q4_K", 4, 2.0**-10)]
)
def test_numbers_of_a_file_are_given_as_they_are(tmp_path: Path, kind: str, bits: int, most: float) -> None:
    """Exact, but for products of two scales, which Q4_K has, in float16; rows of keys lie as the family has them."""
    number, rng = getattr(gguf.GGMLQuantizationType, kind), np.random.default_rng(2)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    raw = rng.integers(0, 256, (64, 512 // per_block, block_bytes), np.uint8)
    halves = 1 if kind in ("Q4_0", "Q8_0") else 2
    raw[..., : 2 * halves] = rng.uniform(0.01, 0.02, (*raw.shape[:2], halves)).astype(np.float16).view(np.uint8)
    file = raw_file(tmp_path / "m.gguf", number, raw)
    for name in ("blk.0.ffn_up.weight", "blk.0.attn_k.weight"):
        found = file.codes(name, bits)
        assert found is not None
        values, scales, minima = (None if each is None else each.astype(np.float32) for each in found)
        assert values is not None
        assert scales is not None
        assert (values.shape, (minima is None)) == ((64, 16, 32), bits == 8)
        numbers = values * scales[..., None] + (-128 * scales if minima is None else minima)[..., None]
        meant = file.array(name)
        assert np.abs(numbers.reshape(64, -1) - meant).max() <= most * np.abs(meant).max()
    assert (file.codes("blk.0.ffn_up.weight", 12 - bits) is None) == (kind != "Q4_0")


def raw_file(path: Path, number: Any, raw: Any) -> GgufFile:
    """A file whose matrices all are these blocks, uint8 [rows, blocks, bytes]."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.attention.head_count_kv", 2)
    for name in ("token_embd.weight", "blk.0.ffn_up.weight", "blk.0.attn_k.weight"):
        writer.add_tensor(name, raw.reshape(len(raw), -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("Q4_0", 0),
        ("Q4_1", 0),
        ("Q4_1", 2),
        ("Q8_0", 0),
        ("Q4_K", 0),
        ("Q4_K", 2),
        ("Q5_0", 0),
        ("Q6_K", 208),
        ("F16", 0),
    ],
)
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, kind: str, at: int, bad: float) -> None:
    """Or a minimum, at a byte of one of the blocks; by the tensor's name, as codes and dequantized."""
    number = getattr(gguf.GGMLQuantizationType, kind)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    raw = np.ones((4, 512 // per_block, block_bytes), np.uint8)
    raw[2, 1, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
    file = raw_file(tmp_path / "m.gguf", number, raw)
    bits = file.bits("blk.0.ffn_up.weight")
    for each in () if bits is None else bits[1]:
        with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has a number or a scale that is NaN"):
            file.codes("blk.0.ffn_up.weight", each)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has a number or a scale that is NaN"):
        file.array("blk.0.ffn_up.weight")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", *rarer(["Q4_0", "F16", "BF16"])])
def test_a_quantized_file_answers_as_the_model_of_its_dequantized_weights(tmp_path: Path, kind: str) -> None:
    """Prefill and decode, from the file to the logits."""
    tensors, fields, model = converted("llama", "llama-blocks")
    write(tmp_path / "m.gguf", "llama", tensors, fields, kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    number = getattr(gguf.GGMLQuantizationType, kind)
    for key, parameter in model.named_parameters():
        stored = names.get_name(key, (".weight", ".bias"))
        if parameter.ndim < 2 or stored not in tensors:
            continue
        found = torch.from_numpy(gguf.dequantize(gguf.quantize(tensors[stored].float().numpy(), number), number))
        if key.endswith(("q_proj.weight", "k_proj.weight")):  # halves of heads, not pairs
            heads = model.config.num_attention_heads if "q_proj" in key else model.config.num_key_value_heads
            found = found.view(heads, -1, 2, found.shape[1]).transpose(1, 2).reshape(found.shape)
        parameter.data = found
    make_directory(tmp_path)
    engine = make_engine(decoder_of(tmp_path), num_host_pages=0, max_batch_tokens=16, max_running=8)
    ids = list(range(3, 200, 7))
    submit(engine, "r", ids, 6)
    tokens = answers(run(engine))["r"]
    expected = teacher_forced(model, ids, tokens)
    assert (logits_of(engine, "r") - expected).abs().max() <= FLOAT32_TOLERANCE
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.slow
def test_a_card_has_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    tensors, fields, _ = converted("llama")
    write(tmp_path / "m.gguf", "llama", tensors, fields)
    directory = card_of(tmp_path / "m.gguf", tmp_path / "cards", parse_model_config)
    assert shard_paths(directory) == [directory / GGUF]
    ours, exact = Tokenizer.load(directory), Tokenizer.load(TINY)
    talk = [{"role": "user", "content": "Naïve  café\n\n 12 <|im_end|>"}]
    text = exact.render_chat(talk)
    assert ours.render_chat(talk) == text
    assert ours.encode_rendered(text) == exact.encode_rendered(text)
    assert ours.eos_token_ids == (3,)
    assert card_of(tmp_path / "m.gguf", tmp_path / "cards", parse_model_config) == directory
    assert model_directory(str(directory)) == directory
    (tmp_path / "chat_template.jinja").write_text("<{{ messages[0]['content'] }}>")
    with_template = card_of(tmp_path / "m.gguf", tmp_path / "cards", parse_model_config)
    assert with_template != directory
    assert Tokenizer.load(with_template).render_chat(talk) == f"<{talk[0]['content']}>"
    (tmp_path / "chat_template.jinja").write_text("\n")
    assert card_of(tmp_path / "m.gguf", tmp_path / "cards", parse_model_config) == directory
    (tmp_path / "chat_template.jinja").write_text("hi", encoding="utf-16")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: the chat template cannot be read"):
        card_of(tmp_path / "m.gguf", tmp_path / "cards", parse_model_config)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"", lambda _: b"GGUF", lambda c: c[: len(c) // 2], lambda c: b"XXXX" + c[4:],
        lambda c: c[:4] + struct.pack("<I", 9) + c[8:], lambda c: c[:2000] + b"\xff" * (len(c) - 2000),
        lambda c: c[:8] + struct.pack("<Q", 2**60) + c[16:],  # many tensors
        lambda c: c[:16] + struct.pack("<Q", 2**60) + c[24:],  # many fields
        lambda c: c[:24] + struct.pack("<Q", 2**62) + c[32:],  # a long key
    ],
)  # fmt: skip
def test_a_file_that_lies_is_refused_in_a_moment(tmp_path: Path, damage: Any) -> None:
    write(tmp_path / "m.gguf", "qwen2", {"token_embd.weight": torch.zeros(8, 32)}, {"block_count": 1})
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage((tmp_path / "m.gguf").read_bytes()))
    with pytest.raises(CheckpointError, match=r"bad\.gguf: "):
        GgufFile(path).config()


def test_a_shape_beyond_the_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen2", {"token_embd.weight": torch.zeros(8, 32)}, {"block_count": 1})
    content = (tmp_path / "m.gguf").read_bytes()
    place = content.index(b"token_embd.weight") + len("token_embd.weight") + 4
    (tmp_path / "bad.gguf").write_bytes(content[:place] + struct.pack("<Q", 2**40) + content[place + 8 :])
    with pytest.raises(CheckpointError, match=r"token_embd\.weight' has shape"):
        GgufFile(tmp_path / "bad.gguf")


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "mamba", {"token_embd.weight": torch.zeros(8, 32)}, {"block_count": 1})
    with pytest.raises(CheckpointError, match=r"general\.architecture must be one of gemma2, .* \(got 'mamba'\)"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("offset", [0, 1])
def test_tensors_that_overlap_or_lie_askew_are_refused(tmp_path: Path, offset: int) -> None:
    tensors = {"token_embd.weight": torch.zeros(8, 32), "output.weight": torch.zeros(8, 32)}
    write(tmp_path / "m.gguf", "qwen2", tensors, {"block_count": 1})
    content = (tmp_path / "m.gguf").read_bytes()
    place = content.index(b"output.weight") + len("output.weight") + 4 + 2 * 8 + 4
    (tmp_path / "bad.gguf").write_bytes(content[:place] + struct.pack("<Q", offset) + content[place + 8 :])
    with pytest.raises(CheckpointError, match=r"lies at byte \d+, (within 'token_embd|which is no multiple)"):
        GgufFile(tmp_path / "bad.gguf")


def test_a_kind_that_cannot_be_dequantized_and_a_file_without_embedding_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen2", {"output.weight": torch.zeros(8, 32)}, {"block_count": 1})
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        GgufFile(tmp_path / "m.gguf").config()
    content = (tmp_path / "m.gguf").read_bytes()
    place = content.index(b"output.weight") + len("output.weight") + 4 + 2 * 8
    (tmp_path / "bad.gguf").write_bytes(content[:place] + struct.pack("<I", 24) + content[place + 4 :])  # I8
    with pytest.raises(CheckpointError, match="is of kind 24; must be one of F32"):
        GgufFile(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("architecture", "num_layers", "scalar"),
    [("gemma2", 46, 4608 / 32), ("gemma3", 62, 5376 / 32), ("gemma3", 26, 256)],
)
def test_scores_of_gemma_are_scaled_as_its_own_checkpoints_say(
    tmp_path: Path, architecture: str, num_layers: int, scalar: float
) -> None:
    """`query_pre_attn_scalar` of google/gemma-2-27b (144), gemma-3-27b (168) and the smaller ones (256)."""
    fields = {
        "block_count": num_layers, "embedding_length": 4608 if architecture == "gemma2" else 5376,
        "attention.head_count": 32, "attention.key_length": 128 if scalar != 256 else 256,
    }  # fmt: skip
    write(tmp_path / "m.gguf", architecture, {"token_embd.weight": torch.zeros(8, 32)}, fields)
    assert GgufFile(tmp_path / "m.gguf").config()["query_pre_attn_scalar"] == scalar


def test_a_part_of_a_head_that_is_rotated(tmp_path: Path) -> None:
    fields = {"embedding_length": 64, "attention.head_count": 4, "rope.dimension_count": 8}
    write(tmp_path / "m.gguf", "phi3", {"token_embd.weight": torch.zeros(8, 64)}, fields)
    assert GgufFile(tmp_path / "m.gguf").config()["partial_rotary_factor"] == 0.5
