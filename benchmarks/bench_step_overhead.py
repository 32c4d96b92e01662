"""What a decode step costs beside its arithmetic: schedule, plan, calls, sampling, commit.

    python benchmarks/bench_step_overhead.py [--quick] [--batch 8] [--steps 300]

A model with the layers, heads and vocabulary of the 31M one (8 layers, 8/4 heads) but 8 dimensions a head and hidden
size 32: what it computes is close to nothing, so a step's time is an upper bound of the engine's overhead. One thread,
requests of 512 shared + 32 private tokens decoding together, median and 99th percentile over the steps. `report_share`:
what the replica's reports of its load and KV add to all steps together, as a share.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from engines import make_decoder, request
from harness import Run, at_most, options_of
from workloads import WORKLOADS, make_prompts

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.reporter import Reporter
from mneme.replicas.model.runner import Runner

_TARGET_MS = 2.0
_REPORT_TARGET_PERCENT = 1.0
_SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip


def step_times_ms(batch: int, num_steps: int) -> tuple[np.ndarray, float]:
    """Time steps in which all requests decode; the share that reports behind them take beside."""
    engine = Engine(Runner(make_decoder(_SHAPE), 1024, 32), None, EngineConfig())
    reporter, reports_ms = Reporter(engine, "epoch"), 0.0
    for index, ids in enumerate(make_prompts(WORKLOADS["W"]._replace(num_requests=batch))):
        engine.submit(request(str(index), ids, num_steps + 8))
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding.update(event.request_id for event in engine.step() if event.token_ids)
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
        reporter.poll()
        reports_ms += (time.perf_counter() - started) * 1e3
    times_ms = np.array(times) * 1e3
    return times_ms, reports_ms / float(times_ms.sum())


def main() -> None:
    parser = options_of(__doc__, quick="100 steps", seed=False)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    num_steps = min(args.steps, 100) if args.quick else args.steps
    run = Run("step_overhead", args, threads=1, seed=1, batch=args.batch, steps=num_steps)
    times, report_share = step_times_ms(args.batch, num_steps)
    median, worst = round(float(np.median(times)), 3), round(float(np.quantile(times, 0.99)), 3)
    print(f"batch {args.batch}: median {median} ms, p99 {worst} ms a step")
    run.check(at_most("step_overhead_8_rows", median if args.batch == 8 else None, _TARGET_MS, "ms"))
    run.check(at_most("report_share", report_share * 100, _REPORT_TARGET_PERCENT, "%"))
    run.end({"median_ms": median, "p99_ms": worst, "report_share": report_share})


if __name__ == "__main__":
    main()
