"""What a step takes on the host beside its arithmetic: schedule, plan, commit; and the calls of a layer.

    python benchmarks/bench_step_overhead.py [--quick] [--steps 200]

The forward pass is taken out: it returns logits that were made before, 8,192 of each row, and what that and the draws
take is subtracted (`draw_ms` beside). What is left is bound by Python, one object after the other. Decodes of so many
sequences, 512 of their 1,024 tokens shared (steady), or 4,096 tokens of their own while one is aborted and one like it
begins before each step (churn: `outside_ms` is what these two calls take). `layer_us`: one more layer of a model that
computes close to nothing (hidden size 32, two heads of 16 dimensions), the difference of 24 and 8 layers.
`report_share`: what reports of load and KV add to all steps at 8 rows of the 31M model's shape, with its layers and
heads of 16 dimensions, as a share. CPU time of one thread, medians; `least_ms`: the least tenth, where the machine is
shared.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from harness import Run, at_most, options_of
from random_models import make_decoder, request

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.reporter import Reporter
from mneme.replicas.model.decoder import Decoder, StepInputs
from mneme.replicas.model.runner import Runner

_STEADY_MS = {32: 0.25, 128: 0.6, 256: 1.2}  # promised, by rows
_CHURN_MS = 1.5
_REPORT_TARGET_PERCENT = 1.0
_PAGE_SIZE = 32
_SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip


class NoModel(Runner):
    """Is a runner whose passes return what was drawn before; it says what they and the draws took."""

    def __init__(self, decoder: Decoder, num_pages: int, num_rows: int) -> None:
        super().__init__(decoder, num_pages, _PAGE_SIZE)
        self._logits = torch.rand(num_rows, self.vocab_size)
        self.forward_s = self.draw_s = 0.0

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        started = time.thread_time()
        logits = self._logits[: 0 if inputs is None else inputs.num_sampled].clone()
        self.forward_s = time.thread_time() - started
        return logits

    def sample(self, *args: Any) -> Any:
        started = time.thread_time()
        draws = super().sample(*args)
        self.draw_s = time.thread_time() - started
        return draws


def host_times(num_rows: int, num_shared: int, num_own: int, num_steps: int, *, churns: bool) -> dict[str, float]:
    """Time steps in which all requests decode."""
    num_out = num_steps + num_rows + 64
    own_pages = (num_own + num_out) // _PAGE_SIZE + 2
    num_pages = num_shared // _PAGE_SIZE + int(1.3 * num_rows * own_pages) + 256  # who begins again finds its pages
    runner = NoModel(make_decoder(_SHAPE), num_pages, num_rows + 8)
    engine = Engine(runner, None, EngineConfig(max_running=num_rows + 8, max_batch_tokens=2048))
    random = np.random.default_rng(0)
    shared = random.integers(16, 8000, num_shared).tolist()
    prompts = [shared + random.integers(16, 8000, num_own).tolist() for _ in range(num_rows)]
    for index, ids in enumerate(prompts):
        engine.submit(request(str(index), ids, num_out))
    decoding: set[str] = set()
    while len(decoding) < num_rows:
        decoding.update(event.request_id for event in engine.step() if event.token_ids)
    gc.collect()
    gc.disable()  # a replica collects while it is idle
    host_s, draw_s, outside_s = [], [], []
    for step in range(num_steps):
        started = time.thread_time()
        if churns:
            engine.abort(str(step))
            engine.submit(request(str(num_rows + step), prompts[step % num_rows], num_out))
        outside_s.append(time.thread_time() - started)
        started = time.thread_time()
        engine.step()
        host_s.append(time.thread_time() - started - runner.forward_s - runner.draw_s)
        draw_s.append(runner.draw_s)
    gc.enable()
    engine.close()
    figures = {
        "median_ms": np.median(host_s),
        "least_ms": np.quantile(host_s, 0.1),
        "p99_ms": np.quantile(host_s, 0.99),
    }
    figures |= {"draw_ms": np.median(draw_s), "outside_ms": np.median(outside_s)}
    return {name: round(1e3 * float(value), 3) for name, value in figures.items()}


def layer_us(num_rows: int, num_steps: int) -> float:
    """Time what one more layer adds to a forward pass."""
    medians = []
    for num_layers in (8, 24):
        runner = Runner(make_decoder(_SHAPE | {"num_hidden_layers": num_layers, "vocab_size": 256}), 256, _PAGE_SIZE)
        engine = Engine(runner, None, EngineConfig())
        for index in range(num_rows):
            engine.submit(request(str(index), range(5, 40), num_steps + 8))
        times = []
        forward = runner.forward

        def timed(inputs: StepInputs | None, forward: Any = forward, times: list[float] = times) -> torch.Tensor:
            started = time.thread_time()
            logits: torch.Tensor = forward(inputs)
            times.append(time.thread_time() - started)
            return logits

        for _ in range(4):  # prefill
            engine.step()
        runner.forward = timed  # type: ignore[method-assign]
        for _ in range(num_steps):
            engine.step()
        medians.append(float(np.median(times)))
        engine.close()
    return round((medians[1] - medians[0]) / 16 * 1e6, 1)


def report_share(num_steps: int) -> float:
    """Return what reports behind each step take, as a share of all steps."""
    shape = _SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 4}
    engine = Engine(Runner(make_decoder(shape), 1024, _PAGE_SIZE), None, EngineConfig())
    reporter, steps_s, reports_s = Reporter(engine, "epoch"), 0.0, 0.0
    for index in range(8):
        engine.submit(request(str(index), [*range(16, 528), *range(600 + index, 632 + index)], num_steps + 8))
    for _ in range(num_steps):
        started = time.thread_time()
        engine.step()
        stepped = time.thread_time()
        reporter.poll()
        steps_s, reports_s = steps_s + stepped - started, reports_s + time.thread_time() - stepped
    engine.close()
    return reports_s / steps_s


def main() -> None:
    parser = options_of(__doc__, quick="40 steps", seed=False)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    num_steps = min(args.steps, 40) if args.quick else args.steps
    torch.set_num_threads(1)
    run = Run("step_overhead", args, threads=1, seed=0, steps=num_steps)
    found: dict[str, Any] = {}
    for num_rows, target in _STEADY_MS.items():
        times = found[f"steady_{num_rows}"] = host_times(num_rows, 512, 512, num_steps, churns=False)
        print(f"{num_rows} rows, steady: {times}")
        run.check(at_most(f"host_{num_rows}_rows", times["median_ms"], target, "ms"))
    times = found["churn_128"] = host_times(128, 0, 4096, num_steps, churns=True)
    print(f"128 rows of 4,096 tokens, a join and a leave: {times}")
    run.check(at_most("host_128_rows_churn", times["median_ms"], _CHURN_MS, "ms"))
    found["layer_us"] = {num_rows: layer_us(num_rows, num_steps) for num_rows in (1, 8, 32)}
    print(f"one more layer, by rows: {found['layer_us']} us")
    share = report_share(num_steps)
    run.check(at_most("report_share", share * 100, _REPORT_TARGET_PERCENT, "%"))
    run.end({**found, "report_share": round(share, 5)})


if __name__ == "__main__":
    main()
