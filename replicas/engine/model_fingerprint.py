"""What this engine's KV depends on beside its tokens, as chunks of the cache tier name it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.weights_digest import weights_digest
from mneme.replicas.model.config import DecoderConfig
from mneme.replicas.model.weights import shard_paths

_NOT_IN_KV = ("max_context", "eos_token_ids", "dtype", "rope")  # how long, when it ends; the last two stand elsewhere


def model_fingerprint(
    model_dir: Path, config: DecoderConfig, dtype: torch.dtype, *, chunk_tokens: int = 256, memory: Path | None = None
) -> ModelFingerprint:
    """`dtype` is what the engine computes in; `memory`: see `weights_digest`. Reads every weight file once."""
    architecture = {name: value for name, value in asdict(config).items() if name not in _NOT_IN_KV}
    return ModelFingerprint(
        weights=weights_digest(shard_paths(model_dir), memory),
        layout=ChunkLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            chunk_tokens=chunk_tokens,
        ),
        inv_freq=config.rope.inv_freq,
        attention_factor=config.rope.attention_factor,
        architecture=json.dumps(architecture, sort_keys=True),
    )
