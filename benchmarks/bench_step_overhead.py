"""What a decode step costs beside its arithmetic: schedule, plan, calls, sampling, commit.

    python benchmarks/bench_step_overhead.py [--quick] [--batch 8] [--steps 300]

A model with the layers and vocabulary of the 31M one and its heads of 64 dimensions, but one of them and hidden size
32: what it computes is little, and by the kernels that serve (heads of 8 dimensions are padded to 16 lanes, which is
most of a step then). `host` is a step without its forward pass and its draws: schedule, plan, commit. One thread and
its own time, requests of 512 shared + 32 private tokens decoding together, median and 99th percentile over the steps.
`report_share`: what the replica's reports of its load and KV add to all steps together, as a share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from engines import make_decoder, request
from harness import Run, at_most, options_of
from workloads import WORKLOADS, make_prompts

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.reporter import Reporter
from mneme.replicas.model.decoder import StepInputs
from mneme.replicas.model.draws import Draws, SampleRow
from mneme.replicas.model.runner import Runner

_TARGET_MS = 2.0
_REPORT_TARGET_PERCENT = 1.0
HOST_TARGETS_MS = {32: 0.25, 128: 0.6, 256: 1.2}  # by requests
_SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip


class TimedRunner(Runner):
    """Adds up what forward passes and draws take."""

    spent_s = 0.0

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        started = time.thread_time()
        logits = super().forward(inputs)
        self.spent_s += time.thread_time() - started
        return logits

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Draws:
        started = time.thread_time()
        draws = super().sample(logits, rows)
        self.spent_s += time.thread_time() - started
        return draws


def step_times_ms(batch: int, num_steps: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Time steps in which all requests decode, and their host's part; what reports behind them take beside, a share."""
    runner = TimedRunner(make_decoder(_SHAPE), max(1024, 24 * batch), 32)
    engine = Engine(runner, None, EngineConfig(max_running=max(batch, 128)))
    reporter, reports_ms = Reporter(engine, "epoch"), 0.0
    for index, ids in enumerate(make_prompts(WORKLOADS["W"]._replace(num_requests=batch))):
        engine.submit(request(str(index), ids, num_steps + 8))
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding.update(event.request_id for event in engine.step() if event.token_ids)
    times, host = [], []
    for _ in range(num_steps):
        started = time.thread_time()
        spent_s = runner.spent_s
        engine.step()
        times.append(time.thread_time() - started)
        host.append(times[-1] - (runner.spent_s - spent_s))
        started = time.thread_time()
        reporter.poll()
        reports_ms += (time.thread_time() - started) * 1e3
    times_ms = np.array(times) * 1e3
    return times_ms, np.array(host) * 1e3, reports_ms / float(times_ms.sum())


def main() -> None:
    parser = options_of(__doc__, quick="100 steps", seed=False)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    num_steps = min(args.steps, 100) if args.quick else args.steps
    run = Run("step_overhead", args, threads=1, seed=1, batch=args.batch, steps=num_steps)
    times, host, report_share = step_times_ms(args.batch, num_steps)
    median, worst = (round(float(np.quantile(times, share)), 3) for share in (0.5, 0.99))
    host_median, host_worst = (round(float(np.quantile(host, share)), 3) for share in (0.5, 0.99))
    print(f"batch {args.batch}: median {median} ms, p99 {worst} ms a step; host {host_median} ms, p99 {host_worst} ms")
    run.check(at_most("step_overhead_8_rows", median if args.batch == 8 else None, _TARGET_MS, "ms"))
    for batch, target in HOST_TARGETS_MS.items():
        run.check(at_most(f"host_{batch}_rows", host_median if args.batch == batch else None, target, "ms"))
    run.check(at_most("report_share", report_share * 100, _REPORT_TARGET_PERCENT, "%"))
    figures = {"median_ms": median, "p99_ms": worst, "host_ms": host_median, "host_p99_ms": host_worst}
    run.end({**figures, "report_share": report_share})


if __name__ == "__main__":
    main()
