"""What copying idle sessions' KV to the host, ahead of need, costs the decodes that run meanwhile.

    python benchmarks/bench_copy_out.py [--quick] [--pairs 24] [--times 1] [--seed 0]

Engines of the 31M model over one set of weights, each with a host tier, each decoding the same batch of 8 at the same
contexts: one never copies ahead (`copy_out_below` 0), the others always (1.0). While they decode, idle sessions' pages
are given back, in all of them, at the rate at which the batch makes new KV, or `--times` that. Stretches of 64 decode
steps take turns; a cost is the median of the rounds' ratios of wall time.

Host memory of a CPU engine is committed when a page of it is first written, and a page fault costs more than the copy:
once for each host page. `copies` has written all of its host pages before, as any server has after a while, and is what
is checked; `first copies` has not.

What bounds it: the copying is another thread's, on another core, so what it can take from the engine is memory
bandwidth, the interpreter lock between two calls, and the bookkeeping of what was copied. `engine CPU` is the engine's
thread's own processor time, which does not count waiting; `copy GB/s` is what was copied per second of the other
threads' processor time.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
from engines import DTYPE, MAIN_MODEL, PAGE_SIZE, TWO_TIER, make_decoder, make_runner, request
from harness import PartResult, Run, at_most, median_ratio, options_of, take_turns
from random_models import kv_bytes_per_token
from workloads import MODEL_SHAPE, VOCAB_SIZE

from mneme.errors import MnemeError
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.forest.paths import Path
from mneme.replicas.model.decoder import Decoder

BATCH = 8
NUM_CONTEXT = 512  # tokens that each of the batch has at first
NUM_STEPS = 64  # of a stretch
IDLE_TOKENS = 256  # of a session that is given back
SESSIONS_PER_STRETCH = BATCH * NUM_STEPS // IDLE_TOKENS
MAX_COST = 0.03  # of the time of a decode step
PLAIN, COPYING, FIRST = "no copies", "copies", "first copies"
ARMS = (PLAIN, COPYING, FIRST)


class Stretch(NamedTuple):
    """NUM_STEPS decode steps of one engine."""

    wall_s: float
    engine_s: float  # processor time of the engine's thread
    other_s: float  # and of the process's other threads
    num_copied: int  # pages


class Arm:
    """An engine that decodes, and pages of idle sessions to give back: pinned until then."""

    def __init__(self, name: str, decoder: Decoder, num_stretches: int, num_idle_each: int, seed: int) -> None:
        num_idle = num_stretches * num_idle_each
        num_new = (num_stretches + 1) * NUM_STEPS
        num_pages = (num_idle * IDLE_TOKENS + BATCH * (NUM_CONTEXT + num_new)) // PAGE_SIZE + 4 * BATCH
        self.name = name
        self._num_idle_each = num_idle_each
        self._rng = random.Random(seed)
        runner = make_runner(decoder, TWO_TIER, num_pages=num_pages * 10 // 9, num_host_pages=num_pages)
        config = EngineConfig(page_size=PAGE_SIZE, copy_out_below=0.0 if name == PLAIN else 1.0)
        if name != FIRST:
            pages = np.arange(num_pages)
            runner._tier.save(pages, pages)
            runner._tier.before_reuse(pages)
        self._engine = Engine(runner, None, config)
        self._pins = [self._idle_session(index) for index in range(num_idle)]
        for index in range(BATCH):
            self._submit(f"decode{index}", self._draw(NUM_CONTEXT), num_new)
        self._decode(NUM_STEPS // 2)

    def stretch(self) -> Stretch:
        """Decode while sessions are given back, evenly; raises `MnemeError` if not all of their pages were copied."""
        due = [step * NUM_STEPS // self._num_idle_each for step in range(self._num_idle_each)]
        before = self._num_copied()
        wall_s, engine_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
        for step in range(NUM_STEPS):
            for _ in range(due.count(step)):
                self._engine.scheduler.unpin(self._pins.pop())
            self._decode(1)
        engine_s = time.thread_time() - engine_s
        took = Stretch(
            time.perf_counter() - wall_s,
            engine_s,
            time.process_time() - process_s - engine_s,
            self._num_copied() - before,
        )
        expected = self._num_idle_each * IDLE_TOKENS // PAGE_SIZE if self.name != PLAIN else 0
        if took.num_copied != expected or not self._engine.runner.can_copy:
            raise MnemeError(f"arm {self.name}: {took.num_copied} pages were copied, not {expected}, or not in time")
        return took

    def _idle_session(self, index: int) -> Path:
        ids = self._draw(IDLE_TOKENS + 1)
        self._submit(f"idle{index}", ids, 1)
        while self._engine.scheduler.has_work:
            self._engine.step()
        return self._engine.scheduler.pin("", ids[:IDLE_TOKENS], num_kept_tokens=0)

    def _decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._engine.step()

    def _num_copied(self) -> int:
        host = self._engine.forest.host
        return host.num_pages - len(host.free)

    def _submit(self, name: str, ids: list[int], num_new: int) -> None:
        self._engine.submit(request(name, ids, num_new))

    def _draw(self, count: int) -> list[int]:
        return self._rng.choices(range(16, VOCAB_SIZE), k=count)


def measure(decoder: Decoder, num_pairs: int, times: int, seed: int) -> dict[str, list[Stretch]]:
    """The stretches of each arm, pair by pair."""
    arms = {name: Arm(name, decoder, num_pairs + 1, SESSIONS_PER_STRETCH * times, seed) for name in ARMS}
    return take_turns(ARMS, lambda name: arms[name].stretch(), num_pairs)


def row_of(name: str, found: dict[str, list[Stretch]], bytes_per_page: int) -> dict[str, Any]:
    """Medians over the stretches; costs are medians of the pairs' ratios."""
    took, plain = found[name], found[PLAIN]
    num_bytes = sum(each.num_copied for each in took) * bytes_per_page
    extra_s = sum(each.other_s for each in took) - sum(each.other_s for each in plain)
    return {
        "arm": name,
        "stretches": len(took),
        "step ms": statistics.median(each.wall_s for each in took) / NUM_STEPS * 1e3,
        "engine CPU ms": statistics.median(each.engine_s for each in took) / NUM_STEPS * 1e3,
        "cost": median_ratio([each.wall_s for each in took], [each.wall_s for each in plain]) - 1,
        "CPU cost": median_ratio([each.engine_s for each in took], [each.engine_s for each in plain]) - 1,
        "copied MB": num_bytes / 1e6,
        "copy GB/s": num_bytes / extra_s / 1e9 if num_bytes and extra_s > 0 else None,
    }


def main() -> None:
    parser = options_of(__doc__, quick="10 pairs at most; at most 90 s on 2 cores")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--times", type=int, default=1, help="idle KV given back, in what the batch makes meanwhile")
    args = parser.parse_args()
    num_pairs = min(args.pairs, 10) if args.quick else args.pairs
    max_context = NUM_CONTEXT + (num_pairs + 3) * NUM_STEPS
    model = MODEL_SHAPE | {"max_position_embeddings": max_context}
    run = Run("copy_out", args, threads=1, dtype=str(DTYPE), model=model, batch=BATCH, context=NUM_CONTEXT,
              pairs=num_pairs, steps=NUM_STEPS, times=args.times)  # fmt: skip
    decoder = make_decoder(MAIN_MODEL, args.seed, max_context=max_context)
    found = measure(decoder, num_pairs, args.times, args.seed)
    rows = [row_of(name, found, PAGE_SIZE * kv_bytes_per_token(decoder.config, DTYPE)) for name in found]
    (copying,) = (row for row in rows if row["arm"] == COPYING)
    checks = [at_most("copy_out_cost", copying["cost"], MAX_COST, "of a decode step")]
    run.show(PartResult(name="copy_out", title="decode steps beside copies", rows=rows, checks=checks))
    run.end(rows)


if __name__ == "__main__":
    main()
