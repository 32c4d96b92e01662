"""Models of random weights, made on their device, in the shapes of well-known ones, and requests of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.decoder_config import DecoderConfig
from mneme.replicas.model.directory import parse_model_config
from mneme.replicas.model.families.table import FAMILIES
from mneme.replicas.model.parts import DecoderWeights
from mneme.replicas.model.weights import build
from mneme.replicas.request import GenerationRequest, SamplingParams

PAGE_SIZE = 32
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


class RandomSource:
    """Draws each tensor that a family asks for: normal of standard deviation 0.02, norms of one."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return not name.endswith("_blocks")  # quantized tensors

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.normal_(std=_STD, generator=self._generator)

    def quantized(self, _name: str) -> None:
        """Nothing is quantized."""

    def codes(self, _name: str, _bits: int, *_shape: int) -> None:
        """Nothing is quantized."""

    def stored(self, name: str, *_shape: int) -> torch.Tensor:
        raise KeyError(name)


def random_weights(config: DecoderConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> DecoderWeights:
    """Draw a model's weights where they are kept; nothing passes through the host."""
    return build(FAMILIES[config.family], RandomSource(device, dtype, seed), config)


def make_decoder(
    shape: str | dict[str, Any], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Decoder:  # fmt: skip
    """A model of one of `SHAPES`, or of another one; `changes` go before the shape."""
    described = (SHAPES[shape] if isinstance(shape, str) else shape) | changes
    config = parse_model_config(described, shape if isinstance(shape, str) else "benchmark")
    return Decoder(config, random_weights(config, torch.device(device), dtype))


def request(name: str, ids: Sequence[int], num_out: int, **more: Any) -> GenerationRequest:
    """Greedy, of exactly so many tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, seed=0)
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling, **more)


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
