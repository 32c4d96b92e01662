"""Arms of bench_cache_save.py: engines that save what they compute, or do not, and sessions that end in tails."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from cache_engines import (
    CHUNK_TOKENS,
    DTYPE,
    CachedModel,
    RestartableStore,
    answer,
    cache_config,
    make_engine,
    pages_for,
    request,
    wait_for_saves,
)
from random_models import kv_bytes_per_token
from workloads import VOCAB_SIZE

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.store import ChunkStore
from mneme.errors import MnemeError
from mneme.replicas.engine.engine import Engine

BATCH = 16
NUM_STEPS = 64  # of a stretch of decodes
FIRST_CONTEXT = 128  # of the first of the batch
APART = CHUNK_TOKENS // BATCH  # tokens between the contexts of two of the batch
PROMPT_TOKENS = 512  # of a prompt in a stretch of prefills
PROMPTS_PER_STRETCH = 4
TURN_TOKENS = 64  # of a question, and of its answer
NUM_SESSIONS = 4
_MIN_SAVED = 0.5  # of what a stretch completes, or the arm does not do what it says


class Stretch(NamedTuple):
    wall_s: float
    engine_s: float  # processor time of the engine's thread
    num_tokens: int  # that were computed
    num_saved_bytes: int  # that were put into the store meanwhile


class SavingTier(NamedTuple):
    """Under an engine that saves."""

    store: ChunkStore
    config: CacheConfig
    flush: Callable[[], None]  # until all that was put is on the disk
    end: Callable[[], object]


def process_tier(folder: Path) -> SavingTier:
    """In the engine's own process."""
    store = RestartableStore(config := cache_config(folder))
    return SavingTier(store, config, store.flush, store.end)


class SavingArm:
    """An engine with a tier, which ends with it, or without one."""

    num_tokens: int  # of a stretch

    def __init__(self, model: CachedModel, tier: SavingTier | None, num_context: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._serials = itertools.count()
        self._tier = tier
        store, config = (None, CacheConfig()) if tier is None else (tier.store, tier.config)
        self._chunk_bytes = CHUNK_TOKENS * kv_bytes_per_token(model.decoder.config, DTYPE)
        self._engine: Engine = make_engine(model, store, config, pages_for(num_context))

    def close(self) -> None:
        self._engine.close()
        if self._tier is not None:
            self._tier.end()

    def stretch(self) -> Stretch:
        """Raises `MnemeError` if saving was given up where there is a tier."""
        before, wall_s, engine_s = self._num_saved(), time.perf_counter(), time.thread_time()
        self.run()
        engine_s, wall_s = time.thread_time() - engine_s, time.perf_counter() - wall_s
        wait_for_saves(self._engine)  # the other arm's stretch is not to pay for what is left
        if self._tier is not None:
            self._tier.flush()
        num_saved = self._num_saved() - before
        expected = self.num_tokens / CHUNK_TOKENS * self._chunk_bytes
        if self._tier is not None and num_saved < _MIN_SAVED * expected:
            raise MnemeError(f"{num_saved} bytes were saved, not {expected:.0f}")
        return Stretch(wall_s, engine_s, self.num_tokens, num_saved)

    def run(self) -> None:
        raise NotImplementedError

    def _num_saved(self) -> int:
        chunks = self._engine.chunks
        return 0 if chunks is None else chunks.saver.counts.bytes

    def _submit(self, num_tokens: int, num_out: int) -> None:
        ids = self._rng.choices(range(16, VOCAB_SIZE), k=num_tokens)
        self._engine.submit(request(f"{next(self._serials)}", ids, num_out))


class DecodingArm(SavingArm):
    """A batch that decodes; chunks are completed evenly."""

    num_tokens = BATCH * NUM_STEPS

    def __init__(self, model: CachedModel, tier: SavingTier | None, num_stretches: int, seed: int) -> None:
        contexts = [FIRST_CONTEXT + index * APART for index in range(BATCH)]
        num_new = (num_stretches + 1) * NUM_STEPS
        super().__init__(model, tier, sum(contexts) + BATCH * num_new, seed)
        for context in contexts:
            self._submit(context, num_new)
        while any(sequence.num_output < 2 for sequence in self._engine.scheduler.running) or self._is_waiting:
            self._engine.step()

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self._engine.step()

    @property
    def _is_waiting(self) -> bool:
        return len(self._engine.scheduler.running) < BATCH


class PrefillingArm(SavingArm):
    """Prompts of strangers, one after the other; their pages go as others need them."""

    num_tokens = PROMPTS_PER_STRETCH * PROMPT_TOKENS

    def __init__(self, model: CachedModel, tier: SavingTier | None, num_stretches: int, seed: int) -> None:
        super().__init__(model, tier, 8 * PROMPT_TOKENS, seed)

    def run(self) -> None:
        for _ in range(PROMPTS_PER_STRETCH):
            self._submit(PROMPT_TOKENS, 1)
            while self._engine.has_work:
                self._engine.step()


class CountedFiles(FileOperations):
    """Counts what is written, and files at their most."""

    def __init__(self) -> None:
        self.num_bytes = self.num_files = self.most_files = 0

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes = super().write(fd, buffers, offset)
        self.num_bytes += num_bytes
        return num_bytes

    def create(self, path: str) -> int:
        self.num_files += 1
        self.most_files = max(self.most_files, self.num_files)
        return super().create(path)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.num_files -= 1


def write_row(model: CachedModel, folder: Path, num_turns: int, seed: int, *, is_delayed: bool) -> dict[str, Any]:
    """Sessions that take turns in rounds; `is_delayed`: tails may wait to be written."""
    rng, files = random.Random(seed), CountedFiles()
    store = RestartableStore(cache_config(folder), files)
    num_session = num_turns * 2 * TURN_TOKENS
    sessions: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
    with closing(make_engine(model, store, cache_config(folder), pages_for(NUM_SESSIONS * num_session))) as engine:
        for turn in range(num_turns):
            for index, ids in enumerate(sessions):
                ids += rng.choices(range(16, VOCAB_SIZE), k=TURN_TOKENS)
                ids += answer(engine, ids, TURN_TOKENS, f"{index}.{turn}").token_ids
                wait_for_saves(engine)
                if not is_delayed:
                    store.flush()
    store.flush()
    num_files = len(store.paths())
    store.end()
    num_distinct = sum(map(len, sessions)) - NUM_SESSIONS  # the last token's KV was never computed
    distinct_bytes = num_distinct * kv_bytes_per_token(model.decoder.config, DTYPE)
    fewest = sum(-(-(len(ids) - 1) // CHUNK_TOKENS) for ids in sessions)
    return {
        "tails": "delayed" if is_delayed else "each written",
        "sessions": NUM_SESSIONS,
        "turns": num_turns,
        "written MB": files.num_bytes / 1e6,
        "distinct MB": distinct_bytes / 1e6,
        "written over distinct": files.num_bytes / distinct_bytes,
        "files": num_files,
        "most files": files.most_files,
        "files over fewest": num_files / fewest,
    }
