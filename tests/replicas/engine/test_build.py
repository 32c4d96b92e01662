"""What an engine takes of its device and machine, what is refused when a model is loaded, what identifies its KV."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mneme.config import parse
from mneme.errors import CheckpointError, ConfigError
from mneme.machine import available_bytes
from mneme.replicas.config import EMBEDDED_MODEL, EngineConfig
from mneme.replicas.engine.build import (
    build_engine,
    check_heads,
    choose_device,
    choose_kv_dtype,
    choose_num_host_pages,
    choose_num_pages,
    model_fingerprint,
)
from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.directory import load_model_config, model_directory, parse_model_config

pytestmark = pytest.mark.engine

SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4128, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32,
    "num_attention_heads": 129, "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_heads_that_no_kernel_takes_are_refused_on_cuda_alone() -> None:
    model = parse_model_config(SHAPE, "config.json")
    with pytest.raises(CheckpointError, match=r"num_attention_heads: on CUDA at most 128 .* \(got 129 for 1\)"):
        check_heads(model, torch.device("cuda"))
    check_heads(model, torch.device("cpu"))
    check_heads(parse_model_config({**SHAPE, "num_attention_heads": 128}, "config.json"), torch.device("cuda"))


GIB = 2**30
CUDA = torch.device("cuda")
CONFIG = EngineConfig(max_running=1024, max_context=2**17)


@pytest.fixture
def gpu_with_gib(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play a GPU: (free, total, what this process holds), in GiB."""

    def play(free: float, total: float, reserved: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(free * GIB), int(total * GIB)))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: int(reserved * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")

    return play


def big_model() -> Any:
    return parse_model_config({**SHAPE, "num_hidden_layers": 32, "max_position_embeddings": 2**17}, "config.json")


def test_two_engines_that_load_at_once_on_one_gpu_do_not_take_more_than_it_has(gpu_with_gib: Any) -> None:
    """Each sees the other's weights or does not yet: its own part is what it reckons with."""
    page_bytes = 2 * 32 * 32 * 32 * 2
    for free in (70, 60):  # before and after the other's 10 GiB of weights
        gpu_with_gib(free, 80, 10)
        pages = choose_num_pages(CONFIG, big_model(), CUDA, torch.bfloat16, device_share=0.5)
        assert 2 * (pages * page_bytes + 10 * GIB) <= 80 * GIB
        assert pages == int(28.5 * GIB * 0.8 // page_bytes)  # a context and graphs are not in what torch holds
        measured = choose_num_pages(CONFIG, big_model(), CUDA, torch.bfloat16, 0.5, GIB)
        assert measured == int((28.5 - 2 - 0.05 * 40) * GIB // page_bytes)
    gpu_with_gib(60, 80, 20)  # alone: what the largest step, its graphs and some air leave
    guessed = choose_num_pages(CONFIG, big_model(), CUDA, torch.bfloat16)
    measured = choose_num_pages(CONFIG, big_model(), CUDA, torch.bfloat16, step_bytes=3 * GIB)
    assert (guessed, measured) == (int(48 * GIB // page_bytes), int(50 * GIB // page_bytes))
    gpu_with_gib(12, 80, 10)  # the other took more than its part
    assert choose_num_pages(CONFIG, big_model(), CUDA, torch.bfloat16, 0.5) == int(12 * GIB * 0.8 // page_bytes)


def test_a_gpu_that_its_weights_fill_is_said_to_be_too_small(gpu_with_gib: Any) -> None:
    gpu_with_gib(0.0001, 16, 15.9)
    with pytest.raises(ConfigError, match=r"no room for KV .* the GPU \(a GPU, 0.0 of 16.0 GiB free\)"):
        choose_num_pages(CONFIG, big_model(), CUDA, torch.bfloat16)
    gpu_with_gib(4, 16, 9)  # its half is full
    with pytest.raises(ConfigError, match="no room for KV"):
        choose_num_pages(CONFIG, big_model(), CUDA, torch.bfloat16, device_share=0.5)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("load_weights", r"^model: its weights do not fit the GPU \(a GPU, 0\.5 of 16\.0 GiB free\); .* a larger one"),
        ("Runner", r"^engine\.num_pages, kv_cache_bytes: the pool does not fit the GPU"),
        ("warm_up", r"^engine\.max_batch_tokens: a step of so many does not fit the GPU"),
    ],
)
def test_what_does_not_fit_a_gpu_is_named(
    gpu_with_gib: Any, monkeypatch: pytest.MonkeyPatch, where: str, message: str
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu_with_gib(0.5, 16, 15.5)
    monkeypatch.setattr(f"mneme.replicas.engine.build.{where}", no_memory)
    with pytest.raises(ConfigError, match=message) as error:
        build_engine("mneme-tiny", EngineConfig(num_pages=64, device="cpu"))
    assert "\n" not in str(error.value)


def test_a_gpu_that_is_too_old_for_the_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr("mneme.replicas.engine.build.choose_device", lambda _name: CUDA)
    with pytest.raises(
        ConfigError, match=r"Tesla T4 has compute capability 7\.5, the kernels are for 8\.0 .* cpu serves"
    ):
        build_engine("mneme-tiny", EngineConfig())


def test_pinned_memory_is_divided_among_the_engines_of_a_machine_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 2 * 32 * 32 * 32 * 2

    def host_gib(available_gib: int, machine_share: float) -> float:
        monkeypatch.setattr("mneme.replicas.engine.build.available_bytes", lambda: available_gib * GIB)
        pages = choose_num_host_pages(CONFIG, big_model(), CUDA, torch.bfloat16, 10**9, machine_share)
        return pages * page_bytes / GIB

    assert host_gib(64, 1.0) == 16
    assert host_gib(64, 0.125) == 2
    assert host_gib(2048, 1.0) == 64


def write_cgroup(folder: Path, *, version: int, limit: str, usage: int, files: int) -> Path:
    root, names = (folder, ("memory.max", "memory.current")) if version == 2 else (
        folder / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )  # fmt: skip
    root.mkdir(exist_ok=True)
    (root / names[0]).write_text(limit + "\n")
    (root / names[1]).write_text(f"{usage}\n")
    (root / "memory.stat").write_text(f"anon 5\n{'' if version == 2 else 'total_'}inactive_file {files}\nslab 7\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts_and_its_page_cache_does_not(tmp_path: Path, version: int) -> None:
    cgroup = write_cgroup(tmp_path, version=version, limit="1000000", usage=700_000, files=200_000)
    assert available_bytes(cgroup) == 500_000
    write_cgroup(tmp_path, version=version, limit="1000000", usage=1_300_000, files=0)
    assert available_bytes(cgroup) == 0
    write_cgroup(tmp_path, version=version, limit="max" if version == 2 else str(2**63 - 4096), usage=5, files=0)
    assert available_bytes(cgroup) > 2**20
    assert available_bytes(tmp_path / "nowhere") > 2**20


def test_the_machines_page_cache_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\nBuffers: 7 kB\n")
    assert available_bytes(tmp_path, meminfo) == 4000 << 10
    meminfo.write_text("MemTotal: 9000 kB\n")  # before Linux 3.14
    assert available_bytes(tmp_path, meminfo) > 2**20


@pytest.mark.parametrize(
    ("built_for", "message"),
    [
        (None, r"is a CPU build; install one for CUDA"),
        ("13.0", r"no GPU that its CUDA 13.0 can use; `nvidia-smi` .* update an old one; .* cpu serves"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_an_error_and_not_the_cpu(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ConfigError, match=message):
        choose_device("cuda")
    assert choose_device("auto").type == "cpu"


TINY_DIR = model_directory(EMBEDDED_MODEL)
TINY = load_model_config(TINY_DIR)


def digest(model_dir: Path = TINY_DIR, config: DecoderConfig = TINY, dtype: torch.dtype = torch.float32) -> bytes:
    return model_fingerprint(model_dir, config, dtype).digest


def test_int8_kv_takes_half_the_memory() -> None:
    cpu, config = torch.device("cpu"), EngineConfig(kv_cache_bytes=1 << 24, host_cache_bytes=1 << 24)
    kinds = [choose_kv_dtype(name, cpu, torch.bfloat16, 64) for name in ("auto", "int8")]
    assert kinds == [torch.bfloat16, torch.int8]
    for sized in (
        lambda kind: choose_num_pages(config, TINY, cpu, kind),
        lambda kind: choose_num_host_pages(config, TINY, cpu, kind, 1),
    ):
        wanted = 2 * TINY.head_dim / (TINY.head_dim + 4)  # a scale for each row
        assert sized(torch.int8) == pytest.approx(sized(torch.bfloat16) * wanted, abs=2)
    gpu = torch.device("cuda:0")
    assert choose_kv_dtype("int8", gpu, torch.bfloat16, 96) == torch.int8
    with pytest.raises(
        ConfigError, match=r"^engine.kv_dtype: int8 KV on a GPU: 4 must divide the model's head_dim, 90"
    ):
        choose_kv_dtype("int8", gpu, torch.bfloat16, 90)
    with pytest.raises(ConfigError, match=r"kv_dtype"):
        parse(EngineConfig, {"kv_dtype": "fp8"})


def test_what_changes_kv_changes_the_fingerprint() -> None:
    rope = replace(TINY.rope, inv_freq=(TINY.rope.inv_freq[0] * 2, *TINY.rope.inv_freq[1:]))
    configs = [
        TINY,
        replace(TINY, rope=rope),
        replace(TINY, rope=replace(TINY.rope, attention_factor=1.5)),
        replace(TINY, norm_eps=TINY.norm_eps * 2),
        replace(TINY, qk_norm=not TINY.qk_norm),
        replace(TINY, windows=(16,) * TINY.num_layers),
        replace(TINY, num_q_heads=2 * TINY.num_q_heads),
    ]
    digests = {digest(config=config) for config in configs} | {digest(dtype=torch.bfloat16)}
    digests.add(model_fingerprint(TINY_DIR, TINY, torch.float32, chunk_tokens=128).digest)
    assert len(digests) == len(configs) + 2


def test_what_changes_no_kv_changes_no_fingerprint() -> None:
    other = replace(TINY, max_context=2 * TINY.max_context, eos_token_ids=(1, 2), dtype="bfloat16")
    assert digest(config=other) == digest()


def test_one_changed_weight_is_another_model(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(TINY_DIR, copy)
    assert digest(copy) == digest()
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert digest(copy) != digest()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        digest(copy)
