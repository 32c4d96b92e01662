"""Loading and saving beside computing: read buffers (AttentionStore Fig. 19), write overlap (Fig. 20)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cache_engines import (
    CachedModel,
    RestartableStore,
    ThrottledFiles,
    answer,
    cache_config,
    make_engine,
    pages_for,
    request,
    wait_for_saves,
)
from cache_turns import Draw, tell
from random_models import kv_bytes_per_token

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.policy.cost_model import CostModel
from mneme.errors import MnemeError
from mneme.replicas.engine.engine import BLOCKED_S, Engine

NUM_HISTORY, NUM_NEW = 1024, 100  # Fig. 19's
NUM_OTHER, MAX_OTHER = 64, 512  # tokens of a prompt that decodes meanwhile, and of its answer
LOAD_OVER_COMPUTE = 2.0  # as long as the new tokens' computing times this, loading the history takes
PROMPTS = (1024, 1280, 1600)  # Fig. 20's
NUM_OUT = 20
NO_SAVING, BESIDE, WAITED_FOR = "no saving", "beside", "waited for"


class _Took(NamedTuple):
    ttft_s: float
    longest_s: float  # between two tokens of the other
    num_cached: int


class _Turns:
    """A turn whose history is on a disk, beside another that decodes, on engines that read ahead more or less."""

    def __init__(self, model: CachedModel, folder: Path, seed: int) -> None:
        self._ends, self._draw, self._files = ExitStack(), Draw(seed), ThrottledFiles()
        history_bytes = NUM_HISTORY * kv_bytes_per_token(model.decoder.config, model.decoder.dtype)
        self.layer_bytes = history_bytes // model.decoder.config.num_layers
        costs = model.calibration
        compute_s = CostModel(costs).prefill_s(NUM_NEW, NUM_HISTORY)
        self.bytes_per_s = history_bytes / (LOAD_OVER_COMPUTE * compute_s)
        edges = {**costs.edges, "disk": (0.0, 0.0, 1 / self.bytes_per_s)}  # as if calibrated on that disk
        self._model = model._replace(calibration=replace(costs, edges=edges))
        self._config = cache_config(folder)
        self._store = RestartableStore(self._config, self._files)
        self._ends.callback(self._store.end)
        self._history = tell(model, self._store, self._draw.ids(NUM_HISTORY - 64))

    def close(self) -> None:
        self._ends.close()

    def engine(self, buffer_bytes: int | None) -> Engine:
        """None: without a tier."""
        store = None if buffer_bytes is None else self._store
        config = replace(self._config, read_buffer_bytes=buffer_bytes or 0)
        engine = make_engine(self._model, store, config, pages_for(NUM_HISTORY + NUM_NEW + NUM_OTHER + MAX_OTHER))
        self._ends.callback(engine.close)
        return engine

    def take(self, engine: Engine) -> _Took:
        """Raises `MnemeError` if the other ends first: then nothing was to be held up."""
        self._files.bytes_per_s = None
        self._store.restart(is_cold=False)
        self._files.bytes_per_s = self.bytes_per_s
        engine.forest.clear()
        engine.submit(request("other", self._draw.ids(NUM_OTHER), MAX_OTHER))
        for _ in range(4):
            engine.step()
        sent_s = other_s = time.perf_counter()
        engine.submit(request("turn", self._history + self._draw.ids(NUM_NEW), 1))
        longest_s = 0.0
        took_s, num_cached = 0.0, 0
        while "turn" in engine.in_flight:
            for event in engine.step():
                now_s = time.perf_counter()
                if event.request_id == "turn" and event.usage is not None:
                    took_s, num_cached = now_s - sent_s, event.usage.cached_tokens
                elif event.request_id == "other":
                    longest_s, other_s = max(longest_s, now_s - other_s), now_s
        if "other" not in engine.in_flight:
            raise MnemeError(f"the turn takes longer than {MAX_OTHER} tokens of another")
        engine.abort("other")
        engine.take_events()
        wait_for_saves(engine)
        return _Took(took_s, longest_s, num_cached)


def read_buffer_rows(model: CachedModel, folder: Path, num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row per size of the read buffer, in layers of the history."""
    turns = _Turns(model, folder, seed)
    try:
        num_layers = model.decoder.config.num_layers
        sizes = [None, *range(num_layers + 1)]
        engines = {size: turns.engine(None if size is None else size * turns.layer_bytes) for size in sizes}
        found: dict[int | None, list[_Took]] = {size: [] for size in sizes}
        for number in range(num_rounds + 1):
            for size in sizes if number % 2 else sizes[::-1]:
                took = turns.take(engines[size])
                if number:
                    found[size].append(took)
    finally:
        turns.close()
    return [
        {
            "read buffer": "recompute" if size is None else f"{size} layers",
            "rounds": num_rounds,
            "ttft ms": statistics.median(each.ttft_s for each in found[size]) * 1e3,
            "other's longest gap ms": statistics.median(each.longest_s for each in found[size]) * 1e3,
            "found share": statistics.mean(each.num_cached for each in found[size]) / NUM_HISTORY,
            "disk MB/s": turns.bytes_per_s / 1e6,
        }
        for size in sizes
    ]


def write_overlap_rows(model: CachedModel, num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row per length of the prompt and way of saving, all to memory."""
    draw, arms = Draw(seed), (NO_SAVING, BESIDE, WAITED_FOR)
    config = CacheConfig(host_bytes=256 << 20)
    with ExitStack() as ends:
        engines = {}
        for name in arms:
            store = None if name == NO_SAVING else RestartableStore(config)
            engines[name] = make_engine(model, store, config, pages_for(max(PROMPTS) + NUM_OUT))
            ends.callback(engines[name].close)
            if store is not None:
                ends.callback(store.end)
        return [row for length in PROMPTS for row in _overlap_rows(engines, draw, length, num_rounds)]


def _overlap_rows(engines: dict[str, Engine], draw: Draw, length: int, num_rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(num_rounds + 1):
        for name in engines if number % 2 else reversed(engines):
            took_s = _saved(engines[name], draw.ids(length), is_waited_for=name == WAITED_FOR)
            wait_for_saves(engines[name])
            if number:
                found[name].append(took_s)
    base = found[WAITED_FOR]
    return [
        {
            "prompt": length,
            "saving": name,
            "rounds": num_rounds,
            "ms": statistics.median(took) * 1e3,
            "below waited for": statistics.median(1 - a / b for a, b in zip(took, base, strict=True)),
        }
        for name, took in found.items()
    ]


def _saved(engine: Engine, ids: Sequence[int], *, is_waited_for: bool) -> float:
    """Seconds until the answer has ended and, if that is waited for after each step, all of it is saved."""
    engine.forest.clear()
    if not is_waited_for:
        return answer(engine, ids, NUM_OUT).total_s
    began_s = time.perf_counter()
    engine.submit(request("turn", ids, NUM_OUT))
    while engine.has_work:
        if engine.is_blocked:
            time.sleep(BLOCKED_S)
        if any(event.finish_reason == "error" for event in engine.step()):
            raise MnemeError("a prompt failed")
        wait_for_saves(engine)
    return time.perf_counter() - began_s
