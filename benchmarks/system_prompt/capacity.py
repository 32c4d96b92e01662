"""Sequences that run at once in a fixed pool when a part r of their tokens is shared (ChunkAttention 3.1: 1 / (1 - r)).

Read from the engine's scheduler at the end of each step in which requests wait; more arrive than fit. The model has one
layer, as nothing that is counted depends on it.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from harness import PartResult, at_least
from random_models import SHAPES
from system_prompt.bench import NONE, PAGE_SIZE, RELAY, Arm, Bench, Replica, Shape, requests
from system_prompt.serving import serve
from workloads import Workload, make_prompts

TOKENS = 4096  # of each request, prompt and output
NEW = 32
POOL_REQUESTS = 32  # requests whose tokens the pool has slots for
RATIOS = (0.5, 0.75, 0.9)
_WAVES = 2.0  # requests, over those that fit
_ONE_LAYER: dict[str, Any] = SHAPES["llama-31m"] | {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


class Running(NamedTuple):
    median: float
    peak: int
    num_suspensions: int


def run_capacity(bench: Bench) -> PartResult:
    replica = bench.make_replica(_ONE_LAYER, POOL_REQUESTS * TOKENS // PAGE_SIZE)
    part = PartResult(
        name="capacity",
        title=f"running sequences of {TOKENS} tokens in {replica.num_pages} pages, a part r of the tokens shared",
    )
    for r in RATIOS:
        shape = shared_shape(r)
        apart, shared = (_count(replica, arm, shape, r, bench.seed) for arm in (NONE, RELAY))
        growth = shared.median / apart.median
        part.rows.append(
            {
                "r": r, "shared tokens": shape.system, "apart": apart.median, "apart peak": apart.peak,
                "running": shared.median, "peak": shared.peak, "suspended": shared.num_suspensions,
                "growth": growth, "1/(1-r)": 1 / (1 - r),
            }
        )  # fmt: skip
        part.checks.append(at_least(f"running_growth_r_{r:g}", growth, round(0.9 / (1 - r), 4)))
    return part


def shared_shape(r: float) -> Shape:
    """Requests of `TOKENS` tokens, the first `r` of them shared."""
    shared = round(r * TOKENS)
    return Shape(shared, TOKENS - shared - NEW, NEW)


def _count(replica: Replica, arm: Arm, shape: Shape, r: float, seed: int) -> Running:
    fitting = POOL_REQUESTS / (1 - r) if arm.prefix_sharing else POOL_REQUESTS
    prompts = make_prompts(Workload(round(_WAVES * fitting), shape.system, shape.user, shape.new), seed)
    engine = replica.engine(arm, max_running=2048, max_batch_tokens=8192)
    scheduler, counts = engine.scheduler, []

    def count() -> None:
        if scheduler.waiting:
            counts.append(len(scheduler.running))

    serve(engine, requests(prompts, shape.new), watch=count)
    return Running(statistics.median(counts), max(counts), scheduler.num_suspensions)
