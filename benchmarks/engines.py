"""Our engine over random weights, as benchmarks build it: models, requests, and what a system keeps of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from random_models import SHAPES, random_weights

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import parse_model_config
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams

PAGE_SIZE = 32
DTYPE = torch.bfloat16
MAIN_MODEL = "llama-31m"
STATELESS, DEVICE_ONLY, TWO_TIER = "stateless", "device-only", "two-tier"
SYSTEMS = (STATELESS, DEVICE_ONLY, TWO_TIER)


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


def make_runner(decoder: Decoder, system: str, *, num_pages: int, num_host_pages: int) -> Runner:
    """The model with a pool, and with host memory where the system has that."""
    held = num_host_pages if system == TWO_TIER else 0
    return Runner(decoder, num_pages, PAGE_SIZE, num_host_pages=held)


def make_engine(runner: Runner, system: str) -> Engine:
    """An engine that keeps what the system keeps, and refuses nobody for the length of its queue."""
    keeps: dict[str, Any] = {"prefix_sharing": False, "max_sessions": 0} if system == STATELESS else {}
    return Engine(runner, None, EngineConfig(page_size=PAGE_SIZE, max_waiting=2**20, **keeps))
