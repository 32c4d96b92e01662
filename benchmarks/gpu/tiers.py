"""`make gpu-tiers`: what moving KV costs, by itself and beside decodes: the host tier, the cache tier."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from cache_engines import (
    CachedModel,
    KeptStore,
    answers,
    cache_config,
    cached_model,
    make_engine,
    num_replays,
    wait_for_saves,
)
from gpu import precompile
from gpu.check import of_data_sheet
from gpu.engine import split
from gpu.model import Model, Prompts
from gpu.steps import Row, Run, Step
from random_models import PAGE_SIZE, kv_bytes_per_token, request

from mneme.cachetier.host_pages.cpu import DevicePool
from mneme.cachetier.host_pages.cuda import CudaTier, make_tier
from mneme.replicas.model.decoder import KvPool

_RUNS = (1, 8, 64)
_HISTORY = 4096


def steps(is_dry: bool) -> list[Step]:
    """The bus first: nothing that follows can be faster."""
    compiled = {} if is_dry else {name: job for name, job in precompile.jobs(is_dry).items() if "8b" in name}
    return [
        *([Step("precompile", 60, compiled, len(compiled))] if compiled else []),
        Step("host tier", 60, {"host tier": _host_tier}),
        Step("host tier beside decodes", 60, {"host tier beside decodes": _beside_decodes}),
        Step("cache tier", 120, {"cache tier": _cache_tier}),
        Step("cache tier beside decodes", 100, {"cache tier beside decodes": _saves_beside_decodes}),
    ]


def _bus(run: Run) -> float:
    """Bytes per second of one large copy out of pinned memory."""
    if run.is_dry:
        return 1e10
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=run.device)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return len(host) / statistics.median(times)


def _host_tier(run: Run) -> Iterator[Row]:
    """4k tokens of an 8B model, in runs of so many neighbouring host pages, there and back."""
    layers, heads, dim, num_pages = run.pick((32, 8, 128, 128), (2, 1, 16, 64))
    dtype = run.pick(torch.bfloat16, torch.float32)
    shape = (layers, heads, 2 * num_pages, PAGE_SIZE, dim)
    pool: DevicePool = KvPool(
        k_pages=torch.zeros(shape, dtype=dtype, device=run.device),
        v_pages=torch.zeros(shape, dtype=dtype, device=run.device),
        slot_position=torch.zeros(shape[2] * PAGE_SIZE, dtype=torch.int32, device=run.device),
    )
    bus, rng = _bus(run), np.random.default_rng(0)
    yield of_data_sheet("bus, pinned to device", bus / 1e9, "GB/s")
    started = time.perf_counter()
    tier = make_tier(pool, 4 * num_pages)
    if isinstance(tier, CudaTier):  # a dry run has none
        tier.wait_pinned()
    num_bytes = 2 * 4 * num_pages * layers * heads * PAGE_SIZE * dim * dtype.itemsize
    yield Row("pin", (time.perf_counter() - started) / num_bytes * 1e9, "s/GB")
    device_pages = np.arange(num_pages)
    for length in _RUNS:
        starts = rng.permutation(4 * num_pages // (length + 1))[: num_pages // length] * (length + 1)
        host_pages = (starts[:, None] + np.arange(length)).ravel()[:num_pages]
        moved = 2 * len(host_pages) * layers * heads * PAGE_SIZE * dim * dtype.itemsize
        seconds: dict[str, list[float]] = {"save": [], "load": [], "launch": []}
        for _ in range(run.pick(4, 1)):
            started = time.perf_counter()
            tier.save(device_pages[: len(host_pages)], host_pages)
            while not tier.is_idle:
                time.sleep(1e-4)
            seconds["save"].append(time.perf_counter() - started)
            started = time.perf_counter()
            load = tier.load(host_pages, device_pages[: len(host_pages)])
            seconds["launch"].append(time.perf_counter() - started)
            load.wait_layer(layers - 1)
            if not run.is_dry:
                torch.cuda.synchronize()
            seconds["load"].append(time.perf_counter() - started)
        for what in ("load", "save"):
            rate = moved / min(seconds[what])
            yield Row(f"host tier {what}, runs of {length}", rate / 1e9, "GB/s", rate / bus)
        yield Row(
            f"host tier load, runs of {length}, launching", min(seconds["launch"]) * 1e3, "ms", note="engine's thread"
        )
    tier.close()


def _beside_decodes(run: Run) -> Iterator[Row]:
    """Decode steps during each of which 4k tokens are on their way in."""
    shape = run.pick(Prompts("private", 0, 512), Prompts("private", 0, 32))
    batch, num_steps, num_moved = run.pick((32, 24, 128), (2, 2, 4))
    model = Model(
        run.pick("llama-3-8b", "llama-5m"), run.device, run.pick(torch.bfloat16, torch.float32),
        max_batch=4 * batch, prompts=(shape,), num_steps=4 * num_steps,  # so that most of the pool is nobody's
        num_host_pages=4 * num_moved,
    )  # fmt: skip
    alone = split(model, model.decoding(batch, shape), num_steps)
    # Any pages will do: nobody looks at the tokens.
    last, tier = model.runner.pool.k_pages.shape[2], model.runner._tier
    device_pages, host_pages = np.arange(last - num_moved, last), np.arange(num_moved)
    tier.save(device_pages, host_pages)

    def load(_number: int) -> None:
        tier.load(host_pages, device_pages)

    beside = split(model, model.decoding(batch, shape), num_steps, load)
    yield Row(f"decode b{batch}, step", alone.step, "ms")
    note = "" if run.is_dry else f"GPU {alone.gpu:.2f} and {beside.gpu:.2f}"
    yield Row(f"decode b{batch} beside a load of 4k per step", beside.step, "ms", alone.step / beside.step, note)
    model.runner.close()


def _model(run: Run) -> CachedModel:
    return cached_model(run.pick("llama-3-8b", "llama-5m"), run.pick(8192, 1024), run.device)


def _cache_tier(run: Run) -> Iterator[Row]:
    """A history of 4k tokens that an engine saves, and others load or compute anew: time to the first token."""
    model, num_history = _model(run), run.pick(_HISTORY, 512)
    rng = np.random.default_rng(0)
    history = rng.integers(16, model.decoder.config.vocab_size, num_history).tolist()
    history_bytes = num_history * kv_bytes_per_token(model.decoder.config, model.decoder.dtype)
    num_pages = int(1.25 * (2 * num_history + 256) / PAGE_SIZE) + 8
    floor_ms = history_bytes / _bus(run) * 1e3

    def turn(number: int) -> list[int]:
        return [*history, 16 + number, *rng.integers(16, 1000, 63).tolist()]

    with tempfile.TemporaryDirectory() as folder:
        cache = cache_config(Path(folder), 4 << 30)
        store = KeptStore(cache)
        with closing(make_engine(model, store, cache, num_pages)) as engine:
            answers(engine, [turn(0)], 1)
            answered = time.perf_counter()
            wait_for_saves(engine)
            saved_ms = (time.perf_counter() - answered) * 1e3
            yield Row("cache tier save of 4k, behind the answer", saved_ms, "ms", None)
            times, cached = [], 0
            for number in range(run.pick(6, 2)):
                engine.forest.clear()
                (found,) = answers(engine, [turn(number + 1)], 1, f"load {number}")
                times.append(found.ttft_s * 1e3)
                cached = found.usage.cached_tokens
        if cached < num_history // 2:
            raise SystemExit(f"only {cached} of {num_history} tokens came from the cache tier")
        loaded_ms = statistics.median(times[1:])
        with closing(make_engine(model, None, cache, num_pages)) as engine:
            times = []
            for number in range(run.pick(4, 2)):
                engine.forest.clear()
                times.append(answers(engine, [turn(number + 20)], 1, f"compute {number}")[0].ttft_s * 1e3)
        computed_ms = statistics.median(times[1:])
        with closing(make_engine(model, None, cache, num_pages)) as engine:
            answers(engine, [turn(40)], 1)
            times = [answers(engine, [turn(41 + i)], 1, f"kept {i}")[0].ttft_s * 1e3 for i in range(run.pick(4, 2))]
        kept_ms = statistics.median(times[1:])
        store.end()
    note = "" if run.is_dry else f"first token {loaded_ms:.1f} ms, {kept_ms:.1f} where it is on the device"
    load_ms = max(loaded_ms - kept_ms, 1e-3)
    yield Row("cache tier load of 4k", load_ms, "ms", floor_ms / load_ms, note)
    yield Row("cache tier recompute of 4k", computed_ms - kept_ms, "ms")
    yield Row("cache tier load over recompute", load_ms / max(computed_ms - kept_ms, 1e-3), "x")


def _saves_beside_decodes(run: Run) -> Iterator[Row]:
    """Decodes that fill a chunk every so often: with the tier on they go on being replayed, but for those steps."""
    model, batch = _model(run), run.pick(32, 2)
    num_new = run.pick(300, 8)
    prompt = np.random.default_rng(1).integers(16, 1000, 64).tolist()
    with tempfile.TemporaryDirectory() as folder:
        cache = cache_config(Path(folder), 8 << 30)
        store = KeptStore(cache)
        for name, tier in (("off", None), ("on", store)):
            with closing(make_engine(model, tier, cache, batch * (num_new // PAGE_SIZE + 4) + 64)) as engine:
                for number in range(batch):
                    engine.submit(request(str(number), [16 + number, *prompt], num_new))
                times = []
                while engine.has_work:
                    started = time.perf_counter()
                    engine.step()
                    times.append((time.perf_counter() - started) * 1e3)
                if tier is not None:
                    wait_for_saves(engine)
                replayed = num_replays(engine)
            slow = sorted(times)[int(0.99 * len(times))]
            note = "" if run.is_dry else f"p99 {slow:.1f} ms, {replayed} of {len(times)} steps replayed"
            yield Row(f"decode b{batch}, cache tier {name}", statistics.median(times), "ms", note=note)
            if not run.is_dry and replayed < len(times) // 2:
                raise SystemExit(f"cache tier {name}: {replayed} of {len(times)} steps were replayed: graphs went off")
        store.end()
