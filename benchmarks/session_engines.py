"""Engines that keep nothing, KV on the device, or KV on the device and in host memory; for benchmarks of sessions.

All are our own engine over one set of weights, the random 31M Llama of bench_engine.py in bfloat16; what differs is
configuration.
"""

from __future__ import annotations

from typing import Any

import torch
from random_models import SHAPES, random_weights

from mneme.config import parse
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.config import parse_model_config
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.timeline import Timeline

PAGE_SIZE = 32
DTYPE = torch.bfloat16
STATELESS, DEVICE_ONLY, TWO_TIER = "stateless", "device-only", "two-tier"
SYSTEMS = (STATELESS, DEVICE_ONLY, TWO_TIER)


def make_decoder(max_context: int, seed: int) -> Decoder:
    """The 31M model with positions up to `max_context`."""
    config = parse_model_config({**SHAPES["llama-31m"], "max_position_embeddings": max_context}, "llama-31m")
    return Decoder(config, random_weights(config, torch.device("cpu"), DTYPE, seed))


def make_runner(
    decoder: Decoder, system: str, *, num_pages: int, num_host_pages: int, timeline: Timeline | None = None
) -> Runner:
    """The model with a pool, and with host memory where the system has that."""
    held = num_host_pages if system == TWO_TIER else 0
    return Runner(decoder, num_pages, PAGE_SIZE, num_host_pages=held, timeline=timeline)


def make_engine(runner: Runner, system: str) -> Engine:
    """An engine that keeps what the system keeps, and refuses nobody for the length of its queue."""
    settings: dict[str, Any] = {"page_size": PAGE_SIZE, "max_waiting": 2**20}
    if system == STATELESS:
        settings |= {"prefix_sharing": False, "max_sessions": 0}
    return Engine(runner, None, parse(EngineConfig, settings, "engine"))
