"""The fingerprint of a model: all that changes its KV, and nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mneme.errors import CheckpointError
from mneme.replicas.engine.load import model_fingerprint
from mneme.replicas.model.config import EMBEDDED_MODEL, DecoderConfig, load_model_config, model_directory

MODEL_DIR = model_directory(EMBEDDED_MODEL)
CONFIG = load_model_config(MODEL_DIR)


def digest(model_dir: Path = MODEL_DIR, config: DecoderConfig = CONFIG, dtype: torch.dtype = torch.float32) -> bytes:
    return model_fingerprint(model_dir, config, dtype).digest


def test_what_changes_kv_changes_the_fingerprint() -> None:
    rope = replace(CONFIG.rope, inv_freq=(CONFIG.rope.inv_freq[0] * 2, *CONFIG.rope.inv_freq[1:]))
    configs = [
        CONFIG,
        replace(CONFIG, rope=rope),
        replace(CONFIG, rope=replace(CONFIG.rope, attention_factor=1.5)),
        replace(CONFIG, norm_eps=CONFIG.norm_eps * 2),
        replace(CONFIG, qk_norm=not CONFIG.qk_norm),
        replace(CONFIG, windows=(16,) * CONFIG.num_layers),
        replace(CONFIG, num_q_heads=2 * CONFIG.num_q_heads),
    ]
    digests = {digest(config=config) for config in configs} | {digest(dtype=torch.bfloat16)}
    digests.add(model_fingerprint(MODEL_DIR, CONFIG, torch.float32, chunk_tokens=128).digest)
    assert len(digests) == len(configs) + 2


def test_what_changes_no_kv_changes_no_fingerprint() -> None:
    other = replace(CONFIG, max_context=2 * CONFIG.max_context, eos_token_ids=(1, 2), dtype="bfloat16")
    assert digest(config=other) == digest()


def test_one_changed_weight_is_another_model(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(MODEL_DIR, copy)
    assert digest(copy) == digest()
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert digest(copy) != digest()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        digest(copy)
