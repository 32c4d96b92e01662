"""Engines whose steps are replayed give the logits of engines that launch every step."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mneme.cachetier.config import CacheConfig
from mneme.kernels.attention import attend
from mneme.replicas.config import EngineConfig
from mneme.replicas.connector.device_pages import CpuChunkPages
from mneme.replicas.connector.save import ChunkSaver
from mneme.replicas.engine.build import connect
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model import decoder as model
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.graphs import CudaCapture, Graph, MakeGraphs, Run, StepGraphs, step_graphs_for
from mneme.replicas.model.parts import can_group
from mneme.replicas.model.runner import Runner
from mneme.replicas.request import GenerationRequest, SamplingParams
from tests.budget import rarer
from tests.replicas.checkpoints import RecordingRunner, decoder_of, write_checkpoint
from tests.replicas.chunk_stores import CHUNK_TOKENS, FakeStore, SlowRows
from tests.replicas.model.played_device import PlayedDevice, StagedByTriton, addresses_of
from tests.replicas.tiered_engine import fingerprint_of, run

TOLERANCE = 2e-4  # of float32 logits, as against `transformers`
# Between products of other shapes, on a GPU; bfloat16 logits of these models are 0.13 from the float32 ones.
TOLERANCE_BY_DTYPE = {torch.float32: 2e-3, torch.bfloat16: 0.25}
VOCAB_SIZE = 320


@pytest.fixture(scope="module", params=["llama-3", *rarer(["mistral"])])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return decoder_of(directory)


def engine_of(
    decoder: Decoder, make_graphs: MakeGraphs | None, kv_dtype: torch.dtype | None = None
) -> tuple[Engine, RecordingRunner]:
    runner = RecordingRunner(decoder, 64, 16, make_graphs, kv_dtype=kv_dtype)
    runner.capture_graphs(8, 32, lambda _share: None)
    return Engine(runner, None, EngineConfig(page_size=16, max_batch_tokens=32, max_running=8)), runner


def with_played_device(
    decoder: Decoder,
    make_device: Callable[[Run, KvPool], PlayedDevice] | None = None,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Engine, RecordingRunner, PlayedDevice, StepGraphs]:
    made: list[tuple[PlayedDevice, StepGraphs]] = []

    def make(run: Run, pool: KvPool) -> StepGraphs:
        device = make_device(run, pool) if make_device else PlayedDevice(run)
        made.append((device, device.graphs()))
        return made[0][1]

    engine, runner = engine_of(decoder, make, kv_dtype)
    return engine, runner, *made[0]


def request(name: str, ids: list[int], max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling)


def serve(engine: Engine) -> dict[str, list[int]]:
    """Requests that share a prompt's beginning, join in the midst of others' answers and end at different times."""
    generator = np.random.default_rng(3)
    head = generator.integers(0, VOCAB_SIZE, 40).tolist()
    arrivals = {
        step: request(f"r{step}", [*head[: generator.integers(8, 40)], step], int(generator.integers(5, 40)))
        for step in (0, 1, 2, 9, 10, 25, 26)
    }
    arrivals[12] = request("twin", list(arrivals[9].prompt_token_ids), 30)  # its rows' KV is resident
    output: dict[str, list[int]] = {}
    for step in range(200):
        if step in arrivals:
            engine.submit(arrivals[step])
        for event in engine.step():
            assert event.error is None
            output.setdefault(event.request_id, []).extend(event.token_ids)
        if step > 26 and not engine.has_work:
            return output
    raise AssertionError("the requests do not end")


def test_replayed_steps_give_the_logits_of_eager_ones(decoder: Decoder) -> None:
    eager_engine, eager = engine_of(decoder, None)
    engine, runner, device, graphs = with_played_device(decoder)
    expected = serve(eager_engine)
    assert serve(engine) == expected
    assert graphs.num_replays > 40
    assert device.shapes == [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]  # each bucket once
    assert graphs.num_graphs == len(device.shapes)
    assert len(expected) == 8
    for name, rows in eager.logits_by_request.items():
        assert (runner.logits_of(name) - torch.stack(rows)).abs().max() <= TOLERANCE, name


def serve_prompts(engine: Engine) -> dict[str, list[int]]:
    """Prompts of 18 to 32 tokens, which nobody shares, and a long one, each beside the answers of those before."""
    generator = np.random.default_rng(1)
    output: dict[str, list[int]] = {}
    for step, length in enumerate([20, 24, 27, 19, 22, 70, 25, 18, 28, 21]):
        ids = generator.integers(0, VOCAB_SIZE, length).tolist()
        engine.submit(request(f"p{step}", ids, 5))
        for event in [*engine.step(), *engine.step()]:
            assert event.error is None
            output.setdefault(event.request_id, []).extend(event.token_ids)
    while engine.has_work:
        for event in engine.step():
            output[event.request_id].extend(event.token_ids)
    return output


def replayed_prompt_steps(runner: RecordingRunner, graphs: StepGraphs) -> list[int]:
    """Fills with the rows of each step with a prompt that is replayed from now on."""
    found: list[int] = []
    forward = runner.forward

    def noted(inputs: StepInputs | None) -> torch.Tensor:
        before = graphs.num_replays
        logits = forward(inputs)
        if (
            inputs is not None
            and graphs.num_replays > before
            and len(np.unique(inputs.plan.sequence)) < inputs.plan.num_rows
        ):
            found.append(inputs.plan.num_rows)
        return logits

    runner.forward = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("decoder", "backend"),
    [("llama-3", "auto"), *rarer([("llama-3", "triton"), ("mistral", "auto")])],  # interpreted: 6 s
    indirect=["decoder"],
)
def test_replayed_prompts_give_the_logits_of_eager_ones(
    decoder: Decoder, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager_engine, eager = engine_of(decoder, None)
    expected = serve_prompts(eager_engine)
    make_device = None
    if backend == "triton":
        triton_step()
        monkeypatch.setattr(decoder, "_native", None)  # by operation, as on a GPU
        monkeypatch.setattr(model, "attend", partial(attend, backend="triton"))
        make_device = partial(TritonDevice, decoder=decoder, monkeypatch=monkeypatch)
    engine, runner, _, graphs = with_played_device(decoder, make_device)
    replayed = replayed_prompt_steps(runner, graphs)
    assert serve_prompts(engine) == expected
    assert {24, 32} <= set(replayed)
    for name, rows in eager.logits_by_request.items():
        assert (runner.logits_of(name) - torch.stack(rows)).abs().max() <= TOLERANCE, name


class TritonDevice(StagedByTriton):
    """Attention by Triton, interpreted. A replay keeps plan and launch of the capture: buffers alone are of now."""

    def __init__(self, run: Run, pool: KvPool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(run, pool, decoder)
        self._monkeypatch, self._captured = monkeypatch, dict[int, Any]()
        self._step = triton_step().DeviceStep(decoder.device)
        monkeypatch.setitem(triton_step()._STEPS.by_device, decoder.device, self._step)

    def capture(self, step: Callable[[], None]) -> Graph:
        graph = super().capture(step)
        self._captured[id(self._last)] = self._step.launch, addresses_of(self._step)
        return graph

    def run(self, inputs: StepInputs) -> torch.Tensor:
        if self.replayed is None:
            return super().run(inputs)
        launch, addresses = self._captured[id(self.replayed)]
        assert addresses == addresses_of(self._step)
        with self._monkeypatch.context() as patch:
            patch.setattr(self._step, "holding", lambda plan, slot_position, grid: self._step)
            patch.setattr(self._step, "staged", self.replayed.plan)
            patch.setattr(self._step, "launch", launch)
            return self._forward(self.replayed)


def triton_step() -> Any:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process")
    return pytest.importorskip("mneme.kernels.triton.step")


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_all_that_differs_between_replays_is_in_tritons_buffers(
    decoder: Decoder, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_step()
    prompts = {"a": list(range(13)), "b": [*range(13), 40], "c": list(range(100, 112))}

    def serve(engine: Engine) -> None:
        for name, ids in prompts.items():
            engine.submit(request(name, ids, 6))  # "a" and "c" begin pages on the way
        while engine.has_work:
            assert all(event.error is None for event in engine.step())

    eager_engine, eager = engine_of(decoder, None, kv_dtype)
    serve(eager_engine)
    monkeypatch.setattr(decoder, "_native", None)  # by operation, as on a GPU
    monkeypatch.setattr(model, "attend", partial(attend, backend="triton"))
    make_device = partial(TritonDevice, decoder=decoder, monkeypatch=monkeypatch)
    engine, runner, _, graphs = with_played_device(decoder, make_device, kv_dtype)
    serve(engine)
    assert graphs.num_replays >= 5
    assert {shape.launch.config.wide_m > 0 for shape in graphs._graphs} == {True, False}
    tolerance = TOLERANCE if kv_dtype is None else 0.005  # a number between two steps may be rounded to its neighbour
    for name, rows in eager.logits_by_request.items():
        assert (runner.logits_of(name) - torch.stack(rows)).abs().max() <= tolerance, name


def cached_engine(decoder: Decoder, store: FakeStore, make_graphs: MakeGraphs | None) -> Engine:
    runner, config = Runner(decoder, 64, 16, make_graphs), CacheConfig(chunk_tokens=CHUNK_TOKENS)
    runner.capture_graphs(8, 64, lambda _share: None)
    connector = connect(runner, store, fingerprint_of(decoder), SlowRows(), config)
    return Engine(runner, None, EngineConfig(page_size=16, max_running=8), connector=connector)


def saved_while_decoding(engine: Engine, store: FakeStore) -> dict[bytes, list[bytes]]:
    """The layers of each chunk in the store, of answers that complete chunks at different times."""
    for index in range(3):
        engine.submit(request(f"r{index}", list(range(10 * index, 10 * index + 40 + 3 * index)), 60))
    run(engine)
    engine.close()
    return {key: [layer.tobytes() for layer in chunk.layers] for key, chunk in store.chunks.items()}


def test_steps_that_are_captured_and_replayed_save_each_layer_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that complete a chunk, too: a replay hands over no layer on the way."""
    handed_over: list[tuple[object, int]] = []
    capturing: list[bool] = []
    hand_over = ChunkSaver._hand_over

    def recorded(self: ChunkSaver, num_layers: int) -> None:
        assert not capturing
        layers = range(self._num_handed_over, num_layers)
        handed_over.extend((copy, layer) for copy in self._copies for layer in layers)
        hand_over(self, num_layers)

    monkeypatch.setattr(ChunkSaver, "_hand_over", recorded)
    monkeypatch.setattr(CpuChunkPages, "by_layer", True)
    made: list[StepGraphs] = []

    def make(run: Run, pool: KvPool) -> StepGraphs:
        device = PlayedDevice(run)

        def capture(step: Callable[[], None]) -> Any:
            capturing.append(True)
            graph = PlayedDevice.capture(device, step)
            capturing.pop()
            return graph

        device.capture = capture  # type: ignore[method-assign]
        made.append(device.graphs())
        return made[0]

    expected = saved_while_decoding(cached_engine(decoder, store := FakeStore(), None), store)
    handed_over.clear()
    found = saved_while_decoding(cached_engine(decoder, store := FakeStore(), make), store)
    assert made[0].num_replays > 20
    num_layers = decoder.config.num_layers
    assert len(handed_over) == len(set(handed_over)) == num_layers * len(expected)
    assert found.keys() == expected.keys()
    assert len(found) == 6  # a full one and a tail of each


@pytest.mark.gpu
def test_a_device_captures_again_after_a_capture_that_failed() -> None:
    """torch is as it was before: its stream, its memory; earlier graphs still replay."""
    device = torch.device("cuda", 0)
    capture, stream = CudaCapture(device), torch.cuda.current_stream(device)
    x = torch.ones(1 << 20, device=device)
    first = capture(lambda: x.mul_(2))  # type: ignore[arg-type,return-value]
    with pytest.raises(RuntimeError):
        capture(lambda: x.sum().item() and None)  # waits for the device
    assert torch.cuda.current_stream(device) == stream
    torch.cuda.empty_cache()  # refused while torch believes that something is captured
    second = capture(lambda: x.add_(1))  # type: ignore[arg-type,return-value]
    x.fill_(3)
    first.replay()
    second.replay()
    assert torch.equal(x, torch.full_like(x, 7))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        ("llama-3", torch.float32, None),
        ("llama-3", torch.bfloat16, None),
        ("llama-3", torch.float32, torch.int8),
        ("gemma-2", torch.bfloat16, None),  # windows in some layers, caps
        ("gpt-oss", torch.bfloat16, None),  # sinks, and experts
        ("qwen3-moe", torch.bfloat16, torch.int8),
    ],
)
def test_cuda_graphs_give_what_launches_give(
    tmp_path: Path, family: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    write_checkpoint(family, tmp_path)
    decoder = decoder_of(tmp_path, dtype, device="cuda:0", share="auto")
    if decoder.config.experts and not can_group(decoder.device, dtype):
        pytest.skip("experts are launched one by one here")
    eager_engine, eager = engine_of(decoder, None, kv_dtype)
    engine, runner = engine_of(decoder, step_graphs_for(decoder, 8), kv_dtype)
    tokens, eager_tokens = serve(engine), serve(eager_engine)
    graphs = runner.graphs
    assert graphs.num_replays > 20
    assert graphs.num_failed == 0
    is_exact = dtype == torch.float32 and kv_dtype is None
    if is_exact:
        assert tokens == eager_tokens
    tolerance = TOLERANCE_BY_DTYPE[dtype if is_exact else torch.bfloat16]
    for name, rows in eager.logits_by_request.items():
        # A padded step and one that is not differ by rounding, in bfloat16 by whole tokens now and then: what is
        # compared is what was computed for the same tokens.
        pairs = zip(tokens[name], eager_tokens[name], strict=True)
        num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        seen = slice(num_equal + 1)  # and the logits at which they part
        difference = (torch.stack(runner.logits_by_request[name][seen]) - torch.stack(rows[seen])).abs().amax(-1)
        # By rounding a row may have another expert now and then.
        assert (difference.median() if decoder.config.experts else difference.max()) <= tolerance, name
    if is_exact:  # behind the comparison: its logits are of other requests
        replayed = replayed_prompt_steps(runner, graphs)
        assert serve_prompts(engine) == serve_prompts(eager_engine)
        assert replayed


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_before_the_next_step_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises where a copy or a read would wait, unseen; captures, which wait, come in a first round."""
    write_checkpoint("llama-3", tmp_path)
    decoder = decoder_of(tmp_path, device="cuda:0", share="auto")
    engine, runner = engine_of(decoder, step_graphs_for(decoder, 8))
    expected = mixed_answers(engine)
    launch, num_watched = engine._launch, 0

    def watched(batch: Any, before: Any) -> Any:
        nonlocal num_watched
        num_watched += before is not None
        torch.cuda.set_sync_debug_mode("default" if before is None else "error")
        try:
            return launch(batch, before)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine, "_launch", watched)
    engine.forest.clear()
    assert mixed_answers(engine) == expected
    assert num_watched > 30
    assert runner.graphs.num_failed == 0


def mixed_answers(engine: Engine) -> dict[str, list[int]]:
    """Greedy and drawn rows, penalties, biases and log-probabilities, joining at different times."""
    generator = np.random.default_rng(5)
    drawn: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    kinds = [
        {"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "repetition_penalty": 1.5},
        {"temperature": 0, "logprobs": 3}, {"temperature": 1.0, "logit_bias": {3: 5.0}},
        {"temperature": 0, "min_tokens": 4},
    ]  # fmt: skip
    output: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        sampling = SamplingParams(**drawn, **kind, seed=index)
        ids = tuple(generator.integers(0, VOCAB_SIZE, 9 + 7 * index).tolist())
        engine.submit(GenerationRequest(request_id=f"m{index}", prompt_token_ids=ids, sampling=sampling))
        for event in [*engine.step(), *engine.step()]:
            output.setdefault(event.request_id, []).extend(event.token_ids)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            output.setdefault(event.request_id, []).extend(event.token_ids)
    return output


def test_a_cpu_has_no_graphs(decoder: Decoder) -> None:
    assert step_graphs_for(decoder, 8) is None


def test_padding_writes_to_the_spare_page_only(decoder: Decoder) -> None:
    engine, runner, _, graphs = with_played_device(decoder)
    for name, start in (("a", 0), ("b", 20), ("c", 40)):
        engine.submit(request(name, list(range(start, start + 17)), 14))
    while engine.has_work:
        engine.step()
    assert graphs.num_replays
    pages = runner.pool.k_pages[0].abs().sum((0, 2, 3))
    positions = runner.pool.slot_position.view(-1, 16)
    written = (positions[1:] < 2**30).any(1)
    assert pages[0] > 0  # three sequences in a bucket of four
    assert torch.equal(pages[1:] > 0, written)
    assert int((positions[1:] < 2**30).sum()) == 3 * (17 + 14 - 1)  # the last token's KV is never needed
