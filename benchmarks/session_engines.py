"""Engines that keep nothing, KV on the device, or KV on the device and in host memory; for benchmarks of sessions.

All are our own engine over one set of weights, the random 31M Llama of bench_engine.py in bfloat16; what differs is
configuration.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from random_models import SHAPES, kv_bytes_per_token, random_weights

from mneme.config import parse
from mneme.errors import ConfigError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine import Engine
from mneme.replicas.model import Decoder
from mneme.replicas.model_config import parse_model_config
from mneme.replicas.runner import Runner

PAGE_SIZE = 32
DTYPE = torch.bfloat16
STATELESS, DEVICE_ONLY, TWO_TIER = "stateless", "device-only", "two-tier"
SYSTEMS = (STATELESS, DEVICE_ONLY, TWO_TIER)
HAS_HOST_TIER = "host_cache_bytes" in {field.name for field in fields(EngineConfig)}
NO_HOST_TIER = "this engine has no host tier: EngineConfig.host_cache_bytes is unknown"


def make_decoder(max_context: int, seed: int) -> Decoder:
    """The 31M model with positions up to `max_context`."""
    config = parse_model_config({**SHAPES["llama-31m"], "max_position_embeddings": max_context}, "llama-31m")
    return Decoder(config, random_weights(config, torch.device("cpu"), DTYPE, seed))


def page_bytes(decoder: Decoder) -> int:
    """KV of a page, all layers."""
    return PAGE_SIZE * kv_bytes_per_token(decoder.config, DTYPE)


def make_engine(decoder: Decoder, system: str, *, num_pages: int, host_pages: int, **options: Any) -> Engine:
    """An engine of one of the systems, with its pool; raises `ConfigError` where the system cannot be had.

    host_pages  what a host tier holds, in pages of the device
    """
    settings = dict(options)
    if system == STATELESS:
        settings |= {"prefix_sharing": False, "max_sessions": 0}
    if system == TWO_TIER:
        if not HAS_HOST_TIER:
            raise ConfigError(NO_HOST_TIER)
        settings |= {"host_cache_bytes": host_pages * page_bytes(decoder)}
    elif HAS_HOST_TIER:
        settings |= {"host_cache_bytes": 0}
    config = parse(EngineConfig, {"page_size": PAGE_SIZE, "max_waiting": 2**20, **settings})
    return Engine(Runner(decoder, num_pages, PAGE_SIZE), None, config)
