"""Missing, damaged, hostile and unsupported checkpoints: one clear `CheckpointError`, before anything is allocated."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mneme.errors import CheckpointError
from mneme.kernels.native.choice import OURS, Choice, HalfDtype
from mneme.replicas.engine import build as load_module
from mneme.replicas.engine.build import choose_dtype
from mneme.replicas.model.directory import load_model_config, parse_model_config
from mneme.replicas.model.weights import Upload, load_weights
from tests.cachetier.played_streams import PlayedStreams
from tests.replicas.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    write_checkpoint("llama-2", directory)
    return directory


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def load(directory: Path) -> Any:
    return load_weights(directory, load_model_config(directory), torch.device("cpu"), torch.float32)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_header(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the JSON header of the safetensors file, leaving the tensors' bytes as they are."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    edit(header)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + size :])


def test_a_sound_checkpoint_loads_and_reports_progress(sound: Path) -> None:
    shares: list[float] = []
    config = load_model_config(sound)
    load_weights(sound, config, torch.device("cpu"), torch.float32, lambda _what, share: shares.append(share))
    assert shares == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_a_scaling_that_was_added_in_the_old_spelling_counts(sound: Path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128}
    raw = {**json.loads((sound / "config.json").read_text()), "rope_theta": None}
    theta, none = {"rope_theta": 5e5}, {"rope_scaling": None}
    ropes = [
        parse_model_config({**raw, **said}, "config.json").rope
        for said in (
            {**none, "rope_parameters": {**theta, **yarn, "rope_type": "yarn"}},
            {**theta, "rope_parameters": None, "rope_scaling": {**yarn, "type": "yarn"}},
            {"rope_parameters": {**theta, "rope_type": "default"}, "rope_scaling": {**yarn, "type": "yarn"}},
        )
    ]
    assert ropes[0] == ropes[1] == ropes[2]
    assert ropes[0].attention_factor > 1


def test_shards_are_read_like_one_file(sound: Path, tmp_path: Path) -> None:
    write_checkpoint("llama-2", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    rows = torch.eye(64)  # the weight's columns, in whatever form it is kept
    assert torch.equal(load(tmp_path).layers[2].mlp.gate_up(rows), load(sound).layers[2].mlp.gate_up(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_device_gets_through_pinned_memory_is_what_was_read(dtype: torch.dtype) -> None:
    """Few small buffers, and a device that copies late and in its own order: a buffer must not be filled too early."""
    streams = PlayedStreams()
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(7)).to(dtype) for size in ((97, 13), (5,), ())]
    with ThreadPoolExecutor(4) as readers:
        upload = Upload(streams, readers, piece_bytes=64)
        copies = [upload(tensor) for tensor in tensors]
        used: list[list[torch.Tensor]] = []
        streams.current().run(lambda: used.append([copy.clone() for copy in copies]))
        streams.finish(lambda n: 0)  # who computes first wherever it can
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(used[0], tensors, strict=True))


def test_what_a_reader_raises_ends_the_loading() -> None:
    streams = PlayedStreams()
    streams.host_memory = lambda _num_bytes: torch.zeros(8, dtype=torch.uint8)  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as readers, pytest.raises(RuntimeError, match="size"):
        Upload(streams, readers, piece_bytes=64)(torch.zeros(100))


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_the_default_type_is_what_the_cpu_multiplies_faster(name: HalfDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "machine_choice", lambda: Choice(name, OURS, OURS))
    cpu, half = torch.device("cpu"), getattr(torch, name)
    assert choose_dtype("auto", cpu, "bfloat16") == choose_dtype("auto", cpu, "float16") == half
    assert choose_dtype("auto", cpu, "float32") == torch.float32
    assert choose_dtype("bfloat16", cpu, "float32") == torch.bfloat16


@pytest.mark.parametrize("major", [7, 8])
def test_bfloat16_that_a_gpu_only_emulates_is_not_the_default(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that it supports it where it converts to float32 and back; its own question is played, not ours."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _device: True)
    wanted = torch.float32 if major < 8 else torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda"), "bfloat16") == wanted


CONFIG_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type"),
    ({"hidden_size": 10**15}, "hidden_size"),
    ({"hidden_size": -1}, "hidden_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"num_hidden_layers": 10**6}, "model.layers.3"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 1024}, "head_dim"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "original_max_position_embeddings"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta"),
    ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}}, "original_max_position_embeddings"),
    ({"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "got 'mrope'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "rope_parameters"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": "x"}, "eos_token_id"),
    ({"vocab_size": 321}, "embed_tokens"),
    ({"intermediate_size": 113}, "mlp"),
    ({"attention_bias": True}, "q_proj.bias"),
]


@pytest.mark.parametrize(("changes", "field"), CONFIG_FAULTS, ids=[json.dumps(c)[:40] for c, _ in CONFIG_FAULTS])
def test_an_unsupported_configuration_is_refused_by_field(copied: Path, changes: dict[str, Any], field: str) -> None:
    edit_config(copied, **changes)
    with pytest.raises(CheckpointError, match=field):
        load(copied)


def _first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header["model.norm.weight"]
    return entry


HEADER_FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "offsets overlap": lambda h: _first(h).update(data_offsets=h["model.embed_tokens.weight"]["data_offsets"]),
    "offsets leave the file": lambda h: _first(h).update(data_offsets=[0, 2**60]),
    "offsets run backwards": lambda h: _first(h).update(data_offsets=[256, 0]),
    "absurd shape": lambda h: _first(h).update(shape=[2**40, 2**40]),
    "negative shape": lambda h: _first(h).update(shape=[-1]),
    "unknown dtype": lambda h: _first(h).update(dtype="F3"),
    "tensor missing": lambda h: h.pop("model.norm.weight"),
    "tensor too many": lambda h: h.update({"model.extra": h.pop("model.norm.weight")}),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_a_hostile_header_is_refused(copied: Path, fault: str) -> None:
    edit_header(copied, HEADER_FAULTS[fault])
    with pytest.raises(CheckpointError, match=r"safetensors|missing|no place"):
        load(copied)


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda content, size=size: content[:size] for size in (0, 4, 8, 5_000)),
        *(lambda content, size=size: struct.pack("<Q", size) + content[8:] for size in (2**63, 10**8 + 1)),
    ],
)
def test_a_file_that_is_not_sound_is_refused(copied: Path, damage: Callable[[bytes], bytes]) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        load(copied)


def test_integer_weights_are_refused(copied: Path) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="floating point"):
        load(copied)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load(copied)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"a":' * 100_000])
def test_a_damaged_config_is_refused(copied: Path, content: bytes) -> None:
    (copied / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(copied)


@pytest.mark.parametrize(
    "shard", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "model.bin", 3, "gone.safetensors"]
)
def test_an_index_may_only_name_files_beside_it(copied: Path, shard: object) -> None:
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match=r"shard|no such file"):
        load(copied)
