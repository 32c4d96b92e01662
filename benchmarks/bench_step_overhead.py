"""What a decode step costs beside its arithmetic: schedule, plan, calls, sampling, commit.

    python benchmarks/bench_step_overhead.py [--quick] [--batch 8] [--steps 300]

A model with the layers, heads and vocabulary of the 31M one (8 layers, 8/4 heads) but 8 dimensions a head and hidden
size 32: what it computes is close to nothing, so a step's time is an upper bound of the engine's overhead. One thread,
requests of 512 shared + 32 private tokens decoding together, median and 99th percentile over the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from attention.report import at_most, closing_checks, print_check
from random_models import random_weights
from workloads import WORKLOADS, cpu_name, load_average, make_prompts

from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.config import parse_model_config
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams

_TARGET_MS = 2.0
_SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip


def step_times_ms(batch: int, num_steps: int) -> np.ndarray:
    """Of steps in which all requests decode."""
    config = parse_model_config(_SHAPE, "overhead")
    decoder = Decoder(config, random_weights(config, torch.device("cpu"), torch.bfloat16))
    engine = Engine(Runner(decoder, 1024, 32), None, EngineConfig())
    workload = WORKLOADS["W"]._replace(num_requests=batch)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 8, ignore_eos=True)
    for index, ids in enumerate(make_prompts(workload)):
        engine.submit(GenerationRequest(request_id=str(index), prompt_token_ids=tuple(ids), sampling=params))
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding.update(event.request_id for event in engine.step() if event.token_ids)
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return np.array(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_before, started = load_average(), time.perf_counter()
    num_steps = min(options.steps, 100) if options.quick else options.steps
    times = step_times_ms(options.batch, num_steps)
    median, worst = round(float(np.median(times)), 3), round(float(np.quantile(times, 0.99)), 3)
    print(f"batch {options.batch}: median {median} ms, p99 {worst} ms a step")
    check = at_most("step_overhead_8_rows", median if options.batch == 8 else None, _TARGET_MS, "ms")
    print_check(check)
    report = {
        "benchmark": "step_overhead", "device": cpu_name(), "kind": "cpu", "quick": options.quick, "seed": 1,
        "threads": 1, "load_average": [load_before, load_average()],
        "elapsed_s": round(time.perf_counter() - started, 1), "batch": options.batch, "steps": num_steps,
        "results": {"median_ms": median, "p99_ms": worst}, **closing_checks([check]),
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
