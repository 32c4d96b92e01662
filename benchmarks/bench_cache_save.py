"""What saving KV into the cache tier costs the engine, and what of it reaches the disk.

    python benchmarks/bench_cache_save.py [--quick] [--pairs 16] [--folder DIR] [--seed 0] [--out DIR]

*Decodes*: two engines over one set of weights, one with a tier (memory and disk), one without, each decode the same
batch of 16 at the same contexts. Sequences stand 16 tokens apart, so that a stretch of 64 steps completes four chunks
of 256 tokens: as much KV is saved as is made. *Prefills*: 16 prompts of 512 tokens, one after the other, are 32
full chunks. Stretches take turns, in another order each time; a cost is the median of the pairs' ratios of wall time.
What is left to be saved and written at a stretch's end is waited for, but not counted: a part of the last chunks.

*Writes*: sessions take turns of 64 + 64 tokens, all of which end in a tail chunk. Bytes written to files over bytes of
distinct KV, and the number of files, with the delay that tails have (2 s, then superseded ones were never written) and
with every tail written before the next turn: then 256 tokens are written as 127, as 255 (the last token's KV was never
computed) and as 256 tokens, 2.5 times in all.

What bounds it: gathers, checksums and writes are other threads', on another core; they take memory bandwidth and the
interpreter lock between two calls. `engine CPU` is the engine's thread's own processor time.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cache_engines import (
    CHUNK_TOKENS,
    CachedModel,
    RestartableStore,
    answer,
    cache_config,
    make_engine,
    make_model,
    pages_for,
    wait_for_saves,
)
from engines import DTYPE, request
from harness import Check, PartResult, Run, at_most, median_ratio, options_of, rounded, take_turns
from random_models import SHAPES, kv_bytes_per_token
from workloads import VOCAB_SIZE

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig
from mneme.errors import MnemeError
from mneme.replicas.engine.engine import Engine

MODEL, SMALL_MODEL = "llama-31m", "llama-wide-kv"
PLAIN, SAVING = "no tier", "saving"
MAX_COST, MAX_PREFILL_COST = 0.03, 0.05  # of the time of a decode step, of a prompt's
MAX_WRITTEN = 1.1, 2.6  # times the distinct KV: tails delayed, and each of them written; headers included
QUICK_PAIRS = 10
BATCH = 16
NUM_STEPS = 64  # of a stretch of decodes
FIRST_CONTEXT = 128  # of the first of the batch
APART = CHUNK_TOKENS // BATCH  # tokens between the contexts of two of the batch
PROMPT_TOKENS = 512  # of a prompt in a stretch of prefills
PROMPTS_PER_STRETCH = 16  # the last one's chunks are saved when the clock has stopped
TURN_TOKENS = 64  # of a question, and of its answer
NUM_SESSIONS = 4
_MIN_SAVED = 0.5  # of what a stretch completes, or the arm does not do what it says


class Stretch(NamedTuple):
    wall_s: float
    engine_s: float  # processor time of the engine's thread
    num_tokens: int  # that were computed
    num_saved_bytes: int  # that were put into the store meanwhile


class SavingArm:
    """An engine with a tier, which ends with it, or without one."""

    num_tokens: int  # of a stretch

    def __init__(self, model: CachedModel, folder: Path | None, num_context: int, seed: int) -> None:
        """`folder`: of the tier's disk, where there is a tier."""
        self._rng = random.Random(seed)
        self._serials = itertools.count()
        config = CacheConfig() if folder is None else cache_config(folder)
        self._store = store = None if folder is None else RestartableStore(config)
        self._chunk_bytes = CHUNK_TOKENS * kv_bytes_per_token(model.decoder.config, DTYPE)
        self._engine: Engine = make_engine(model, store, config, pages_for(num_context))

    def close(self) -> None:
        self._engine.close()
        if self._store is not None:
            self._store.end()

    def stretch(self) -> Stretch:
        """Raises `MnemeError` if saving was given up where there is a tier."""
        before, wall_s, engine_s = self._num_saved(), time.perf_counter(), time.thread_time()
        self.run()
        engine_s, wall_s = time.thread_time() - engine_s, time.perf_counter() - wall_s
        wait_for_saves(self._engine)  # the other arm's stretch is not to pay for what is left
        if self._store is not None:
            self._store.flush()
        num_saved = self._num_saved() - before
        expected = self.num_tokens / CHUNK_TOKENS * self._chunk_bytes
        if self._store is not None and num_saved < _MIN_SAVED * expected:
            raise MnemeError(f"{num_saved} bytes were saved, not {expected:.0f}")
        return Stretch(wall_s, engine_s, self.num_tokens, num_saved)

    def run(self) -> None:
        raise NotImplementedError

    def _num_saved(self) -> int:
        connector = self._engine.connector
        return 0 if connector is None else connector.saver.counts.bytes

    def _submit(self, num_tokens: int, num_out: int) -> None:
        ids = self._rng.choices(range(16, VOCAB_SIZE), k=num_tokens)
        self._engine.submit(request(f"{next(self._serials)}", ids, num_out))


class DecodingArm(SavingArm):
    """A batch that decodes; chunks are completed evenly."""

    num_tokens = BATCH * NUM_STEPS

    def __init__(self, model: CachedModel, folder: Path | None, num_stretches: int, seed: int) -> None:
        contexts = [FIRST_CONTEXT + index * APART for index in range(BATCH)]
        num_new = (num_stretches + 1) * NUM_STEPS
        super().__init__(model, folder, sum(contexts) + BATCH * num_new, seed)
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

    def __init__(self, model: CachedModel, folder: Path | None, num_stretches: int, seed: int) -> None:
        super().__init__(model, folder, 8 * PROMPT_TOKENS, seed)

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


class Part(NamedTuple):
    """What is paired, and how often."""

    name: str
    shape: str
    arm: type[DecodingArm] | type[PrefillingArm]
    share: float  # of the pairs


PARTS = (
    Part("decodes", MODEL, DecodingArm, 1),
    Part("decodes", SMALL_MODEL, DecodingArm, 1),
    Part("prefills", MODEL, PrefillingArm, 0.7),
    Part("prefills", SMALL_MODEL, PrefillingArm, 1),
)


def measure(model: CachedModel, part: Part, folder: Path, num_pairs: int, seed: int) -> dict[str, list[Stretch]]:
    """The stretches of each arm, pair by pair."""
    with ExitStack() as ends:
        arms = {}
        for name in (PLAIN, SAVING):
            arms[name] = part.arm(model, None if name == PLAIN else folder, num_pairs + 1, seed)
            ends.callback(arms[name].close)
        return take_turns(arms, lambda name: arms[name].stretch(), num_pairs)


def row_of(part: Part, name: str, found: dict[str, list[Stretch]]) -> dict[str, Any]:
    took, plain = found[name], found[PLAIN]
    return {
        "part": part.name,
        "model": part.shape,
        "arm": name,
        "stretches": len(took),
        "ms": statistics.median(each.wall_s for each in took) * 1e3,
        "engine CPU ms": statistics.median(each.engine_s for each in took) * 1e3,
        "tokens/s": statistics.median(each.num_tokens / each.wall_s for each in took),
        "cost": median_ratio([each.wall_s for each in took], [each.wall_s for each in plain]) - 1,
        "CPU cost": median_ratio([each.engine_s for each in took], [each.engine_s for each in plain]) - 1,
        "saved MB": sum(each.num_saved_bytes for each in took) / 1e6,
    }


def checks_of(rows: Sequence[dict[str, Any]], writes: Sequence[dict[str, Any]]) -> list[Check]:
    found = {(row["part"], row["model"]): row["cost"] for row in rows if row["arm"] == SAVING}
    checks = [
        at_most(f"saving_cost_{model}", found.get(("decodes", model)), MAX_COST, "of a decode step")
        for model in (MODEL, SMALL_MODEL)
    ]
    checks += [
        at_most(f"saving_cost_prefill_{model}", found.get(("prefills", model)), MAX_PREFILL_COST, "of a prefill")
        for model in (MODEL, SMALL_MODEL)
    ]
    written = {row["tails"]: row["written over distinct"] for row in writes}
    for name, most in zip(("delayed", "each written"), MAX_WRITTEN, strict=True):
        checks.append(at_most(f"written_over_distinct_{name.replace(' ', '_')}", written.get(name), most))
    files = [row["files over fewest"] for row in writes]
    checks.append(at_most("files_over_fewest", max(files, default=None), 1.0))
    return checks


def main() -> None:
    parser = options_of(__doc__, quick="10 pairs of decodes, 6 turns; at most 90 s on 2 cores", out=True, folder=True)
    parser.add_argument("--pairs", type=int, default=16)
    args = parser.parse_args()
    num_pairs = min(args.pairs, QUICK_PAIRS) if args.quick else args.pairs
    run = Run("cache_save", args, threads=1, cpu=torch.backends.cpu.get_cpu_capability(), dtype=str(DTYPE),
              models={shape: SHAPES[shape] for shape in (MODEL, SMALL_MODEL)}, chunk_tokens=CHUNK_TOKENS, batch=BATCH,
              steps=NUM_STEPS, prompt_tokens=PROMPT_TOKENS, pairs=num_pairs)  # fmt: skip
    parts = PARTS[:1] if args.quick else PARTS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mneme-", dir=args.folder) as name:
        folder = Path(name)
        models = {s: make_model(s, 8192, folder / "calibration", args.seed) for s in (MODEL, SMALL_MODEL)}
        for index, part in enumerate(parts):
            found = measure(models[part.shape], part, folder / f"part{index}", int(part.share * num_pairs), args.seed)
            rows += [row_of(part, arm, found) for arm in found]
            run.show(PartResult(name=part.name, title="with a tier and without", rows=rows[-2:]))
        num_turns = 6 if args.quick else 16
        writes = [
            write_row(models[SMALL_MODEL], folder / f"writes{delayed}", num_turns, args.seed, is_delayed=delayed)
            for delayed in (True, False)
        ]
    checks, title = checks_of(rows, writes), "turns of 64 + 64 tokens on the disk"
    run.show(PartResult(name="writes", title=title, rows=writes, checks=checks))
    run.end(rows, writes=rounded(writes))


if __name__ == "__main__":
    main()
