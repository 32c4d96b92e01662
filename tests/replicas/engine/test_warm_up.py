"""What runs before traffic leaves nothing behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.errors import ConfigError
from mneme.kernels.page_table import FREE_SLOT_POSITION
from mneme.replicas.config import EngineConfig
from mneme.replicas.engine.build import build_engine
from mneme.replicas.engine.engine import Engine
from mneme.replicas.engine.stats import engine_stats
from mneme.replicas.engine.warm_up import largest_step_bytes, warm_up
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.graphs import Graph, Run, StepGraphs
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams
from tests.budget import rarer
from tests.replicas.checkpoints import decoder_of, write_checkpoint
from tests.replicas.model.played_device import PlayedDevice, StagedByTriton, addresses_of
from tests.replicas.model.test_cuda_capture import out_of_shared_memory
from tests.replicas.schedule.test_engine_policy import run

pytestmark = pytest.mark.engine

CONFIG = EngineConfig(page_size=16, max_batch_tokens=64, max_running=8)


def test_a_new_engine_has_no_trace_of_what_warmed_it(tmp_path: Path) -> None:
    disk = DiskTierConfig(folder=str(tmp_path), capacity_bytes=1 << 24)
    engine = build_engine("mneme-tiny", EngineConfig(num_pages=64, dtype="float32"), cache=CacheConfig(disk=disk))
    try:
        stats = engine_stats(engine)
        assert (engine.num_steps, dict(engine.num_tokens), dict(engine.num_finished)) == (0, {}, {})
        assert (engine.forest.device.num_in_use, engine.forest.device.num_cached) == (0, 0)
        assert stats["cache"]["plans"] == {}
        assert "lookups" not in stats["cache"]
        assert bool((engine.runner.pool.slot_position == FREE_SLOT_POSITION).all())  # what nobody is told
        assert engine.runner.num_shared_segments == 0
        sampling = SamplingParams(temperature=0, max_tokens=1)
        ids = tuple(range(64))  # as it was warmed with
        engine.submit(GenerationRequest(request_id="first", prompt_token_ids=ids, sampling=sampling))
        events = run(engine)
        usage = next(event.usage for event in events if event.usage is not None)
        assert usage.cached_tokens == 0
    finally:
        engine.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama-3")
    write_checkpoint("llama-3", directory)
    return directory


def with_played_device(directory: Path, capture: Callable[[Callable[[], None]], Graph] | None) -> Runner:
    """A runner whose steps are captured by a device that is played, or by `capture`."""
    decoder = decoder_of(directory, share="auto")

    def make(run: Callable[..., torch.Tensor], pool: KvPool) -> StepGraphs:
        device = PlayedDevice(run)
        device.capture = capture or device.capture  # type: ignore[method-assign]
        return device.graphs()

    return Runner(decoder, 64, 16, make)


def test_each_bucket_is_captured_before_an_engine_is_ready_and_no_trace_is_left(checkpoint: Path) -> None:
    runner = with_played_device(checkpoint, None)
    graphs = runner.graphs
    reported: list[tuple[str, float]] = []
    warm_up(runner, None, CONFIG, lambda what, share: reported.append((what, share)))
    num_graphs = graphs.num_graphs
    assert num_graphs == 11  # 1, 2, 4, 8, 16, ..., 64 rows
    assert {what for what, _ in reported} == {"CUDA graphs"}
    shares = [share for _, share in reported]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert (graphs.num_replays, runner.num_shared_segments) == (0, 0)
    assert bool((runner.pool.slot_position == FREE_SLOT_POSITION).all())
    engine = Engine(runner, None, CONFIG)
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for index in range(8):
        ids = tuple(range(index, index + 20))
        engine.submit(GenerationRequest(request_id=f"{index}", prompt_token_ids=ids, sampling=sampling))
    run(engine)
    assert graphs.num_replays == engine.num_steps - 1  # with prompts, too; the last launches nothing
    assert graphs.num_graphs == num_graphs


@pytest.mark.parametrize("is_too_large", [False, True])
def test_traffic_over_the_whole_pool_is_replayed_and_no_buffer_of_graphs_moves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_too_large: bool
) -> None:
    """Where the buffers do not hold a step it runs as it is, from buffers beside them."""
    pytest.importorskip("mneme.kernels.triton.backend")
    from mneme.kernels.triton import step as triton_step

    expected = CONFIG
    if is_too_large:
        monkeypatch.setattr(triton_step, "_MOST_RESERVED_WORDS", 0)
        expected = replace(CONFIG, max_running=1, max_batch_tokens=16)
    made: list[StagedByTriton] = []

    def make(run: Run, pool: KvPool) -> StepGraphs:
        made.append(StagedByTriton(run, pool, decoder))
        return made[0].graphs()

    decoder = decoder_of(checkpoint, share="auto")
    with triton_step.OwnStep(torch.device("cpu")) as step:
        runner = Runner(decoder, 64, 16, make)
        warm_up(runner, None, expected, lambda _what, _share: None)
        graphs, device = runner.graphs, made[0]
        num_graphs, addresses = graphs.num_graphs, addresses_of(step)
        device.staged.clear()
        engine = Engine(runner, None, CONFIG)
        sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for index in range(8):  # seven pages each, of 64
            ids = tuple(range(index, index + 100))
            engine.submit(GenerationRequest(request_id=f"{index}", prompt_token_ids=ids, sampling=sampling))
        events = run(engine)
    assert all(event.error is None for event in events)
    assert addresses_of(step) == addresses
    assert graphs.num_graphs == num_graphs
    assert (None in device.staged) == is_too_large
    assert graphs.num_replays == sum(launch is not None for launch in device.staged) > 0


def test_the_largest_step_is_run_before_the_pool_is_made(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is played, which counts no bytes but those that it is told; the small pool is gone then."""
    runners, num_left = weakref.WeakSet[Runner](), list[int]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: num_left.append(len(runners)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    rows: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: rows.clear() or 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 100 + max(rows)[0])
    forward = Runner.forward

    def noted(self: Runner, inputs: StepInputs | None) -> torch.Tensor:
        runners.add(self)
        if inputs is not None:
            rows.append((len(inputs.token_ids), inputs.num_sampled))
        return forward(self, inputs)

    monkeypatch.setattr(Runner, "forward", noted)
    decoder = decoder_of(checkpoint, share="auto")
    gc.disable()  # not by chance
    try:
        found = largest_step_bytes(decoder, torch.float32, None, CONFIG, lambda _what, _share: None)
    finally:
        gc.enable()
    assert found == CONFIG.max_batch_tokens
    assert rows == [(CONFIG.max_batch_tokens, CONFIG.max_running)]
    assert num_left == [1, 0]


@pytest.mark.parametrize(("model", "dtype"), [("qwen3", "bfloat16"), *rarer([("mistral", "float32")])])
def test_the_variants_that_are_compiled_are_those_that_traffic_launches(model: str, dtype: str, tmp_path: Path) -> None:
    """With norms of heads, and with windows; see `played_triton.py`, which needs a process of its own."""
    pytest.importorskip("triton")
    write_checkpoint(model, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.replicas.engine.played_triton", str(tmp_path), dtype],
        cwd=Path(__file__).resolve().parents[3], env=environment, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["warmed"]) > 10
    assert sorted(found["warmed"]) == sorted(found["needed"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_its_kernels_and_graphs_before_the_first_request() -> None:
    reported: list[str] = []
    config = EngineConfig(num_pages=256, max_running=8, device="cuda")
    engine = build_engine("mneme-tiny", config, on_progress=lambda what, _share: reported.append(what))
    assert {"kernels", "CUDA graphs"} <= set(reported)
    graphs = engine.runner.graphs  # what nobody is told
    assert graphs.num_graphs >= 31
    assert graphs.num_failed == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_whose_pool_has_no_size_serves_as_many_as_may_run() -> None:
    """The pool is what the largest step leaves; the host tier has its size from that."""
    engine = build_engine("mneme-tiny", EngineConfig(max_running=64, device="cuda"))
    try:
        graphs = engine.runner.graphs  # what nobody is told
        assert graphs.num_failed == 0
        assert engine.runner.num_host_pages > 0
        sampling = SamplingParams(max_tokens=20, top_p=0.9, seed=0, ignore_eos=True)
        for index in range(64):
            ids = tuple(range(index, index + 200))
            engine.submit(GenerationRequest(request_id=f"{index}", prompt_token_ids=ids, sampling=sampling))
        events = run(engine)
        assert all(event.error is None for event in events)
        assert sum(event.finish_reason == "length" for event in events) == 64
        assert graphs.num_replays >= 19
    finally:
        engine.close()


def test_a_kernel_that_a_device_has_no_room_for_refuses_the_start_with_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles: where it is launched is seen that it does not fit."""
    runner = with_played_device(checkpoint, None)

    def launch(*_: object) -> torch.Tensor:
        raise out_of_shared_memory()

    monkeypatch.setattr(Decoder, "forward", launch)
    with pytest.raises(ConfigError, match=r"^engine\.device: triton .*OutOfResources: .* H200; engine\.device: cpu"):
        warm_up(runner, None, CONFIG, lambda _what, _share: None)


def test_a_kernel_that_cannot_be_compiled_refuses_the_start_with_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompile = pytest.importorskip("mneme.kernels.triton.precompile")

    def fail(_variants: object, _on_progress: object) -> None:
        raise precompile.CompileError("triton 1.0 does not compile attention_kernel(HEAD_DIM=16)")

    monkeypatch.setattr(precompile, "compile_all", fail)
    monkeypatch.setattr("mneme.replicas.engine.warm_up.variants_of", lambda *_: [])
    runner = with_played_device(checkpoint, None)
    runner.device = "cuda"
    with pytest.raises(
        ConfigError, match=r"^engine\.device: triton 1\.0 does not compile attention_kernel.* cpu"
    ) as error:
        warm_up(runner, None, CONFIG, lambda _what, _share: None)
    assert "\n" not in str(error.value)
