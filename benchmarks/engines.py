"""Models of random weights and requests, as benchmarks make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from random_models import SHAPES, random_weights

from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import parse_model_config
from mneme.replicas.request import GenerationRequest, SamplingParams

PAGE_SIZE = 32
DTYPE = torch.bfloat16


def make_decoder(
    shape: str | dict[str, Any], seed: int = 0, *, max_context: int | None = None, device: str = "cpu",
    dtype: torch.dtype = DTYPE,
) -> Decoder:  # fmt: skip
    """A model of one of `SHAPES`, or of another one, with positions up to `max_context`."""
    described = SHAPES[shape] if isinstance(shape, str) else shape
    if max_context is not None:
        described = described | {"max_position_embeddings": max_context}
    config = parse_model_config(described, shape if isinstance(shape, str) else "benchmark")
    return Decoder(config, random_weights(config, torch.device(device), dtype, seed))


def request(name: str, ids: Sequence[int], num_out: int, **more: Any) -> GenerationRequest:
    """Greedy, of exactly so many tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, seed=0)
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling, **more)
