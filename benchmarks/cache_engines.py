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
from engines import DTYPE, PAGE_SIZE, make_decoder, request

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.cachetier.store import ChunkStore
from mneme.errors import MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import chunk_layout, connect
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.engine.warm_up import warm_up
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.graphs import step_graphs_for
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import PromptUsage

CHUNK_TOKENS = 256
HOST_BYTES, DISK_BYTES = 1 << 30, 4 << 30
_MAX_SAMPLED = 32  # by a step that is replayed
FLUSH_S = 30.0  # for what waits to be saved
_UNKNOWN = Calibration(prefill=(0, 0, 0), decode=(0, 0, 0), step_rows=1, kv_bytes_per_token=1)


class CachedModel(NamedTuple):
    """What all engines of a benchmark share."""

    decoder: Decoder
    fingerprint: ModelFingerprint
    calibration: Calibration


def cache_config(folder: Path, *, host_bytes: int = HOST_BYTES, **more: Any) -> CacheConfig:
    """Configure a node with its files in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return CacheConfig(
        host_bytes=host_bytes, disk=DiskTierConfig(folder=str(folder), capacity_bytes=DISK_BYTES), **more
    )


def bare_model(
    shape: str, max_context: int, seed: int, *, device: str = "cpu", dtype: torch.dtype = DTYPE
) -> CachedModel:
    """A model of random weights, without a calibration."""
    decoder = make_decoder(shape, seed, max_context=max_context, device=device, dtype=dtype)
    described = decoder.config
    layout = chunk_layout(described, dtype, CHUNK_TOKENS)
    name = f"{shape} of random weights, seed {seed}"
    fingerprint = ModelFingerprint(weights=name.encode().hex(), layout=layout, inv_freq=described.rope.inv_freq)
    return CachedModel(decoder, fingerprint, _UNKNOWN)


def pages_for(num_tokens: int, share: float = 1.25) -> int:
    """Count the pages of a pool in which so many tokens find room beside the reserve."""
    return int(share * num_tokens / PAGE_SIZE) + 8


def make_engine(
    model: CachedModel,
    store: ChunkStore | None,
    cache: CacheConfig,
    num_pages: int,
    *,
    share_prefixes: bool = True,
    costs: CostModel | None = None,
    is_warm: bool = False,
    **more: Any,
) -> Engine:
    """An engine that is alike with a tier and without one (None); on a GPU, with graphs.

    `more` of `EngineConfig`.

    `costs`: what an earlier one has learned; None: what was calibrated. `is_warm`: as engines are that serve.
    """
    runner = Runner(model.decoder, num_pages, PAGE_SIZE, step_graphs_for(model.decoder, _MAX_SAMPLED))
    more = {"max_sessions": 0, **more}
    config = EngineConfig(page_size=PAGE_SIZE, max_waiting=2**20, prefix_sharing=share_prefixes, **more)
    if is_warm:
        warm_up(runner, None, config, lambda _what, _share: None)
    else:
        runner.capture_graphs(config.max_running, config.max_batch_tokens, lambda _share: None)
    if store is None:
        return Engine(runner, None, config)
    costs = costs or CostModel(model.calibration)
    connector = connect(runner, store, model.fingerprint, costs, cache)
    return Engine(runner, None, config, connector=connector)


class Answer(NamedTuple):
    """What one request got."""

    ttft_s: float  # from submission
    total_s: float  # to the last token
    usage: PromptUsage
    token_ids: list[int]


def answer(engine: Engine, ids: Sequence[int], num_out: int, name: str = "turn", **more: Any) -> Answer:
    """One request alone; raises `MnemeError` if it fails. `more` of the request."""
    (only,) = answers(engine, [ids], num_out, name, **more)
    return only


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], num_out: int, name: str = "turn", **more: Any
) -> list[Answer]:
    """Requests that come at once; raises `MnemeError` if one fails. The engine is stepped as `LLM` does."""
    began_s, answered = time.perf_counter(), threading.Event()
    first_s, last_s = dict[str, float](), dict[str, float]()
    usage, token_ids = dict[str, PromptUsage](), defaultdict[str, list[int]](list)
    if engine.connector is not None:
        engine.connector.set_on_answer(answered.set)
    names = [f"{name} {index}" for index in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.submit(request(name, ids, num_out, **more))
    while engine.has_work:
        if engine.is_blocked:
            answered.wait(BLOCKED_S)
        answered.clear()
        for event in engine.step():
            name, now_s = event.request_id, time.perf_counter() - began_s
            if event.finish_reason == "error":
                raise MnemeError(f"{name}: {event.error}")
            first_s.setdefault(name, now_s)
            last_s[name] = now_s
            if event.usage is not None:
                usage.setdefault(name, event.usage)
            token_ids[name] += event.token_ids
    return [Answer(first_s[name], last_s[name], usage[name], token_ids[name]) for name in names]


def wait_for_saves(engine: Engine) -> None:
    """Until what the engine has to save is in the store."""
    until_s = time.perf_counter() + FLUSH_S
    while engine.connector is not None and engine.connector.saver.num_bytes:
        if time.perf_counter() > until_s:
            raise MnemeError(f"chunks were not saved within {FLUSH_S:g} s")
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
