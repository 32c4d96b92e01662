"""Triton without a GPU: an sm_90 is played, CPU tensors go where CUDA's would, launches are recorded and never run.

A program, as kernels of a test's own process may be interpreted: prints, as JSON, what a warm-up would have compiled
and what traffic needs.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton

from mneme.kernels import ops
from mneme.kernels.arguments import KvRows
from mneme.kernels.attention import attend
from mneme.kernels.triton import backend as triton_backend
from mneme.kernels.triton import kv as triton_kv
from mneme.kernels.triton import ops as triton_ops
from mneme.kernels.triton.precompile import Variant
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine import warm_up
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model import decoder as model
from mneme.replicas.model.decoder import Decoder, KvPool
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.graphs import Run, StepGraphs
from mneme.replicas.model.runner import Runner
from mneme.replicas.model.weights import load_weights
from mneme.replicas.request import GenerationRequest, SamplingParams


def play() -> None:
    """From now on there is a device."""
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _device: 0
    )
    triton.runtime.driver.set_active(driver)
    triton_backend.reason_against = lambda _device, _plan: None
    ops._backend = lambda _x: triton_ops  # type: ignore[assignment]
    model.dense_layers = lambda *_: None  # layers go by operation, as on a GPU
    model.attend = partial(attend, backend="triton")
    model.write_kv = lambda *rows: triton_kv.write_kv(KvRows(*rows))


def runner_of(directory: Path, dtype: torch.dtype, max_rows: int) -> Runner:
    config = load_model_config(directory)
    decoder = Decoder(config, load_weights(directory, config, torch.device("cpu"), dtype), share="auto")

    def make(run: Run, pool: KvPool) -> StepGraphs:
        def stage(plan: Any) -> Any:
            return triton_backend.stage(plan, pool.slot_position, decoder.dtype, decoder.ropes[0].num_positions)

        def capture(step: Any) -> Any:
            raise RuntimeError("nothing is captured here")

        return StepGraphs(
            run,
            stage,
            capture,
            max_rows=max_rows,
            max_sampled=max_rows,
            vocab_size=config.vocab_size,
            device=torch.device("cpu"),
        )

    return Runner(decoder, 128, 16, make)


def traffic(runner: Runner, config: EngineConfig) -> list[Variant]:
    """What requests of all lengths need that begin and end at different times, some with a beginning in common."""
    recorder = warm_up.Recorder(runner)
    engine = Engine(recorder, None, config)  # type: ignore[arg-type]
    generator = np.random.default_rng(0)
    for step in range(60):
        if step % 3 == 0:
            ids = [*range(int(generator.integers(0, 2)) * 40), step, *range(int(generator.integers(1, 150)))]
            sampling = SamplingParams(temperature=0, max_tokens=int(generator.integers(1, 20)))
            engine.submit(GenerationRequest(request_id=f"{step}", prompt_token_ids=tuple(ids), sampling=sampling))
        engine.step()
    while engine.has_work:
        engine.step()
    return list(recorder.variants.values())


def main() -> None:
    play()
    config = EngineConfig(page_size=16, max_batch_tokens=256, max_running=8)
    runner = runner_of(Path(sys.argv[1]), getattr(torch, sys.argv[2]), config.max_running)
    warmed = warm_up.variants_of(runner, None, config)
    needed = traffic(runner, config)
    print(json.dumps({"warmed": [repr(v[:]) for v in warmed], "needed": [repr(v[:]) for v in needed]}))  # noqa: T201


if __name__ == "__main__":
    main()
