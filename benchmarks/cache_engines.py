"""Engines over a cache tier, for benchmarks on a GPU: the store outlives them.

An engine's own pages are emptied between turns, so that it is another replica each time.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_models import PAGE_SIZE, make_decoder, request

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.cachetier.store import ChunkStore
from mneme.errors import MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import chunk_layout, connect
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.graphs import step_graphs_for
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import PromptUsage

_CHUNK_TOKENS = 256
_DISK_BYTES = 4 << 30
_MAX_SAMPLED = 32  # by a step that is replayed
_FLUSH_S = 30.0  # for what waits to be saved
# Computing seems so dear that whatever the tier has is loaded: this is to see that it works.
_LOADS_ALL = Calibration(prefill=(1.0, 1e-2, 0.0), decode=(0.0, 0.0, 0.0), step_rows=2048, kv_bytes_per_token=1)


class CachedModel(NamedTuple):
    """What all engines of a benchmark share."""

    decoder: Decoder
    fingerprint: ModelFingerprint


def cache_config(folder: Path, host_bytes: int) -> CacheConfig:
    """Configure a node with its files in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return CacheConfig(host_bytes=host_bytes, disk=DiskTierConfig(folder=str(folder), capacity_bytes=_DISK_BYTES))


def cached_model(
    shape: str, max_context: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> CachedModel:
    """A model of random weights, whose KV a tier can name."""
    decoder = make_decoder(shape, device=device, dtype=dtype, max_position_embeddings=max_context)
    layout = chunk_layout(decoder.config, dtype, _CHUNK_TOKENS)
    weights = f"{shape} of random weights".encode().hex()
    fingerprint = ModelFingerprint(weights=weights, layout=layout, inv_freq=decoder.config.rope.inv_freq)
    return CachedModel(decoder, fingerprint)


def make_engine(model: CachedModel, store: ChunkStore | None, cache: CacheConfig, num_pages: int) -> Engine:
    """An engine that is alike with a tier and without one (None); on a GPU, with graphs."""
    runner = Runner(model.decoder, num_pages, PAGE_SIZE, step_graphs_for(model.decoder, _MAX_SAMPLED))
    config = EngineConfig(page_size=PAGE_SIZE, max_waiting=2**20, max_sessions=0)
    runner.capture_graphs(config.max_running, config.max_batch_tokens, lambda _share: None)
    if store is None:
        return Engine(runner, None, config)
    connector = connect(runner, store, model.fingerprint, CostModel(_LOADS_ALL), cache)
    return Engine(runner, None, config, connector=connector)


class Answer(NamedTuple):
    """What one request got."""

    ttft_s: float  # from submission
    usage: PromptUsage
    token_ids: list[int]


def answers(engine: Engine, prompts: Sequence[Sequence[int]], num_out: int, name: str = "turn") -> list[Answer]:
    """Requests that come at once; raises `MnemeError` if one fails. The engine is stepped as `LLM` does."""
    began_s, answered = time.perf_counter(), threading.Event()
    first_s, usage = dict[str, float](), dict[str, PromptUsage]()
    token_ids = defaultdict[str, list[int]](list)
    if engine.connector is not None:
        engine.connector.set_on_answer(answered.set)
    names = [f"{name} {index}" for index in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.submit(request(name, ids, num_out))
    while engine.has_work:
        if engine.is_blocked:
            answered.wait(BLOCKED_S)
        answered.clear()
        for event in engine.step():
            if event.finish_reason == "error":
                raise MnemeError(f"{event.request_id}: {event.error}")
            first_s.setdefault(event.request_id, time.perf_counter() - began_s)
            if event.usage is not None:
                usage.setdefault(event.request_id, event.usage)
            token_ids[event.request_id] += event.token_ids
    return [Answer(first_s[name], usage[name], token_ids[name]) for name in names]


def num_replays(engine: Engine) -> int:
    """Steps that were replayed by an engine's runner."""
    graphs = engine.runner.graphs
    return 0 if graphs is None else graphs.num_replays


def wait_for_saves(engine: Engine) -> None:
    """Until what the engine has to save is in the store."""
    until_s = time.perf_counter() + _FLUSH_S
    while engine.connector is not None and engine.connector.saver.num_bytes:
        if time.perf_counter() > until_s:
            raise MnemeError(f"chunks were not saved within {_FLUSH_S:g} s")
        time.sleep(0.001)


class KeptStore:
    """A `ChunkStore` over a node's memory and disk, which outlives its engines."""

    def __init__(self, config: CacheConfig) -> None:
        self._inner = ProcessChunkStore(config)

    def __getattr__(self, name: str) -> Any:
        """All of a `ChunkStore`, but for its end."""
        return getattr(self._inner, name)

    def close(self) -> None:
        """Not the store. See `end`."""

    def end(self) -> None:
        self._inner.close()
