"""Models of random weights, made on their device, in the shapes of well-known ones; for engine benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from mneme.kernels.linear import make_linear
from mneme.replicas.model.config import DecoderConfig, parse_model_config
from mneme.replicas.model.weights import DecoderWeights, LayerWeights

_STD = 0.02


def _shape(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _shape(4096, 11008, 32, (32, 32), 32000),
    "llama-3-8b": _shape(4096, 14336, 32, (32, 8), 128256, max_position_embeddings=8192, rope_theta=500_000.0),
    "llama-31m": _shape(512, 1376, 8, (8, 4), 8192, max_position_embeddings=8192),
    "llama-24l": _shape(512, 1376, 24, (8, 4), 8192, max_position_embeddings=8192),
    # To compute a token takes little beside what its KV takes, 4 KB in bfloat16: as far as a CPU is from a GPU's ratio.
    "llama-5m": _shape(256, 688, 4, (4, 4), 8192, max_position_embeddings=8192),
    "llama-wide-kv": _shape(128, 256, 4, (4, 4), 8192, max_position_embeddings=8192, head_dim=64),
}


def model_config(name: str) -> DecoderConfig:
    """The decoder of a shape."""
    return parse_model_config(SHAPES[name], name)


def random_weights(config: DecoderConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> DecoderWeights:
    """Normal weights of standard deviation 0.02, norms of one; nothing passes through the host."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=_STD, generator=generator)

    def layer() -> LayerWeights:
        hidden, inner = config.hidden_size, config.intermediate_size
        return LayerWeights(
            attn_norm=torch.ones(hidden, dtype=dtype, device=device),
            qkv=make_linear(normal(config.q_size + 2 * config.kv_size, hidden)),
            q_norm=None,
            k_norm=None,
            o=make_linear(normal(hidden, config.q_size)),
            mlp_norm=torch.ones(hidden, dtype=dtype, device=device),
            gate_up=make_linear(normal(2 * inner, hidden)),
            down=make_linear(normal(hidden, inner)),
        )

    return DecoderWeights(
        embedding=normal(config.vocab_size, config.hidden_size),
        layers=[layer() for _ in range(config.num_layers)],
        norm=torch.ones(config.hidden_size, dtype=dtype, device=device),
        head=make_linear(normal(config.vocab_size, config.hidden_size)),
    )


def layer_weights(config: DecoderConfig) -> int:
    """Weights of the projections of all layers, which every row is multiplied with."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def head_weights(config: DecoderConfig) -> int:
    """Weights of the output projection, which only rows that sample are multiplied with."""
    return config.hidden_size * config.vocab_size


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Key and value of one token in all layers."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize
