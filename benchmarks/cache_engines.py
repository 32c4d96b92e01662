"""Engines over a cache tier whose costs were measured, for benchmarks of the tier.

The store outlives its engines and can be restarted under one, as a cluster is: what was in memory is gone, and the
files are found again. An engine's own pages are emptied between turns, so that it is another replica each time.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engines import DTYPE, PAGE_SIZE, make_decoder, request
from workloads import VOCAB_SIZE

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.syscalls import Buffer, FileOperations
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.cachetier.store import ChunkStore
from mneme.errors import MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import chunk_layout, compiled_kernels, connect
from mneme.replicas.engine.calibration import calibrate
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
NUM_NEW = 64  # tokens that a turn adds
NUM_ANSWER = 64  # of a history, those that were sampled
_UNKNOWN = Calibration(prefill=(0, 0, 0), decode=(0, 0, 0), step_rows=1, kv_bytes_per_token=1)
_READABLE, _SHARED, _FAILED = 1, 1, ctypes.c_void_p(-1).value
_MAX_CACHED = 0.01  # of a file that counts as cold

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


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


def make_model(
    shape: str, max_context: int, disk_folder: Path, seed: int, *, dtype: torch.dtype = DTYPE
) -> CachedModel:
    """A model of random weights, and what its steps and the tier's edges cost on this machine."""
    assert compiled_kernels() is not None, "what is compiled now is not to be measured"
    disk_folder.mkdir(parents=True, exist_ok=True)
    model = bare_model(shape, max_context, seed, dtype=dtype)
    runner = Runner(model.decoder, pages_for(max_context), PAGE_SIZE)
    engine = EngineConfig(page_size=PAGE_SIZE)
    measured = calibrate(runner, engine, chunk_tokens=CHUNK_TOKENS, disk_folder=disk_folder)
    runner.close()
    return model._replace(calibration=measured)


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


class RestartableStore:
    """A `ChunkStore` over a node's memory and disk, which can be restarted under an engine."""

    def __init__(self, config: CacheConfig, files: FileOperations | None = None) -> None:
        self._config, self._files = config, files
        self._inner = ProcessChunkStore(config, files=files)

    @property
    def folder(self) -> Path:
        assert self._config.disk is not None
        return Path(self._config.disk.folder)

    @property
    def inner(self) -> ProcessChunkStore:
        return self._inner

    def flush(self) -> None:
        """All that waits is on the disk."""
        if not self._inner.node.flush(FLUSH_S):
            raise MnemeError(f"the disk was not written within {FLUSH_S:g} s")

    def restart(self, *, is_cold: bool) -> None:
        """Only files are left; cold: none of their bytes is in memory, which is verified."""
        self._inner.close()
        if is_cold:
            make_cold(self.paths())
        self._inner = ProcessChunkStore(self._config, files=self._files)

    def paths(self) -> list[Path]:
        """List the files of chunks on the disk."""
        return sorted(self.folder.rglob("*.kv"))

    def __getattr__(self, name: str) -> Any:
        """All else of a `ChunkStore`: the store of now does it."""
        return getattr(self._inner, name)

    def close(self) -> None:
        """Not the store: it outlives its engines. See `end`."""

    def end(self) -> None:
        self._inner.close()


def make_cold(paths: Iterable[Path]) -> None:
    """Write the files out and have the kernel forget them. Raises MnemeError for one that it still has in memory."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # only clean pages can go
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        share = cached_share(path)
        if share > _MAX_CACHED:
            raise MnemeError(f"{path}: {share:.0%} of it is still in memory: is its folder on a disk?")


def cached_share(path: Path) -> float:
    """How much of a file is in memory, as mincore(2) says; the map it needs is never read."""
    num_bytes, fd = path.stat().st_size, os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, num_bytes, _READABLE, _SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap", str(path))
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    pages = ctypes.create_string_buffer(-(-num_bytes // page_bytes))
    try:
        if _libc.mincore(address, num_bytes, pages):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        _libc.munmap(address, num_bytes)
    return sum(page & 1 for page in pages.raw) / len(pages)


class ThrottledFiles(FileOperations):
    """A disk that reads at most so many bytes per second, for all readers together; None: as fast as it is."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.bytes_per_s: float | None = None
        self._sleep, self._lock = sleep, threading.Lock()

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See `FileOperations.read`."""
        bytes_per_s = self.bytes_per_s  # may change meanwhile, another thread sets it
        if bytes_per_s is None:
            return super().read(fd, buffers, offset)
        with self._lock:
            num_bytes = super().read(fd, buffers, offset)
            self._sleep(num_bytes / bytes_per_s)
        return num_bytes


class ColdFiles(FileOperations):
    """A disk of which nothing stays in memory: what is closed is written out, and the kernel forgets it."""

    def close(self, fd: int) -> None:
        """See `FileOperations.close`."""
        os.fsync(fd)  # only clean pages can go
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        super().close(fd)


class Draw:
    """Random token ids; no question begins as an earlier one did."""

    def __init__(self, seed: int) -> None:
        self._rng, self._first = random.Random(seed), 15

    def ids(self, count: int) -> list[int]:
        return self._rng.choices(range(16, VOCAB_SIZE), k=count)

    def question(self) -> list[int]:
        self._first += 1
        return [self._first, *self.ids(NUM_NEW - 1)]


def tell(model: CachedModel, store: RestartableStore, ids: list[int]) -> list[int]:
    """An engine answers a prompt, saves what it computed, and ends; returns the session so far."""
    engine = make_engine(model, store, cache_config(store.folder), pages_for(len(ids) + NUM_ANSWER))
    with closing(engine):
        told = answer(engine, ids, NUM_ANSWER).token_ids
        wait_for_saves(engine)
    store.flush()
    return ids + told
