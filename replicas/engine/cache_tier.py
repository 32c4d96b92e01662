"""Gives an engine its cache tier: fingerprint of the model, store, cost model, threads."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.process_store import ProcessChunkStore
from mneme.cachetier.policy.cost_file import CostFile
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.store import ChunkStore
from mneme.kernels.native.library import BuildError, cache_folder, locked
from mneme.replicas.config import EngineConfig
from mneme.replicas.connector.connector import ChunkCache
from mneme.replicas.connector.mover import ChunkMover
from mneme.replicas.engine.calibration import machine_of, remembered_costs
from mneme.replicas.engine.model_fingerprint import model_fingerprint
from mneme.replicas.model.config import DecoderConfig
from mneme.replicas.model.runner import Runner

log = logging.getLogger(__name__)

_CALIBRATION_S = 5.0  # at most, when a model is first served on a machine

OpenStore = Callable[[CacheConfig, ModelFingerprint], ChunkStore]


def process_store(config: CacheConfig, fingerprint: ModelFingerprint) -> ChunkStore:
    """A tier of this process alone: what an engine without a cluster has."""
    return ProcessChunkStore(config)


def open_cache_tier(
    runner: Runner,
    engine: EngineConfig,
    cache: CacheConfig,
    model_dir: Path,
    model: DecoderConfig,
    dtype: torch.dtype,
    open_store: OpenStore = process_store,
) -> ChunkCache:
    """Before there is traffic; the runner moves chunks from then on. Raises `ConfigError` or `CheckpointError`."""
    folder = _kept_folder()
    fingerprint = model_fingerprint(
        model_dir, model, dtype, chunk_tokens=cache.chunk_tokens, memory=folder / "weights.json"
    )
    file = CostFile(folder, fingerprint.digest, machine_of(runner, engine))
    store = open_store(cache, fingerprint)
    try:
        costs = _costs(runner, engine, cache, file)
    except BaseException:
        store.close()
        raise
    return _chunk_cache(runner, store, fingerprint, costs, cache, on_close=lambda: file.write(costs))


def _chunk_cache(
    runner: Runner,
    store: ChunkStore,
    fingerprint: ModelFingerprint,
    costs: CostModel,
    cache: CacheConfig,
    on_close: Callable[[], None],
) -> ChunkCache:
    mover = ChunkMover(runner.pool, store, fingerprint, cache, costs.note_save)
    runner.use_chunks(mover)
    return ChunkCache(
        store,
        fingerprint,
        costs,
        cache,
        page_size=runner.page_size,
        on_close=on_close,
        settle_saves=mover.saver.settle,
    )


def _costs(runner: Runner, engine: EngineConfig, cache: CacheConfig, file: CostFile) -> CostModel:
    """Processes that start at once measure one after the other; the later ones read what the first has left."""
    disk_folder = None if cache.disk is None else Path(cache.disk.folder)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, BuildError):  # then they measure beside each other
            held.enter_context(locked(file.path.with_name("costs.lock")))
        return remembered_costs(
            runner, engine, file, chunk_tokens=cache.chunk_tokens, disk_folder=disk_folder, budget_s=_CALIBRATION_S
        )


def _kept_folder() -> Path:
    """Where digests and costs are kept from start to start; for a user without a home they are not."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("digests and costs are not kept: %s", error)
        return Path(os.devnull)
    return folder
