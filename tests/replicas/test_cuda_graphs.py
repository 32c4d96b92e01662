"""Decode graphs with a device that is played: buffers keep their addresses, everything else is frozen at capture."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mneme.kernels.attention import Plan, attend
from mneme.replicas import model
from mneme.replicas.config import EngineConfig
from mneme.replicas.cuda_graphs import (
    MAX_BUCKET,
    DecodeGraphs,
    Graph,
    MakeGraphs,
    Run,
    bucket_of,
    decode_graphs_for,
)
from mneme.replicas.engine import Engine
from mneme.replicas.model import Decoder, KvPool, StepInputs
from mneme.replicas.model_config import load_model_config
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.runner import Runner
from mneme.replicas.sequence import Chunk
from mneme.replicas.weights import load_weights
from tests.replicas.checkpoints import write_checkpoint

TOLERANCE = 2e-4  # of float32 logits, as against `transformers`
VOCAB_SIZE = 320


class PlayedDevice:
    """A replay runs the forward pass on the tensors of the capture and on the plan that was staged last."""

    def __init__(self, run: Run) -> None:
        self._forward = run
        self._plan: Plan | None = None
        self._frozen: StepInputs | None = None
        self.num_eager = 0
        self.shapes: list[int] = []  # rows of each capture
        self.key: Callable[[Plan], Hashable | None] = lambda plan: "one"

    def run(self, inputs: StepInputs) -> torch.Tensor:
        if self._frozen is None:
            self.num_eager += 1
            self._last = inputs
            return self._forward(inputs)
        assert self._plan is not None
        return self._forward(replace(self._frozen, plan=self._plan))

    def stage(self, plan: Plan) -> Hashable | None:
        self._plan = plan
        return self.key(plan)

    def capture(self, step: Callable[[], None]) -> Graph:
        step()
        self.num_eager -= 1
        frozen = self._last
        self.shapes.append(len(frozen.token_ids))
        device = self

        class Played:
            def replay(self) -> None:
                device._frozen = frozen
                step()
                device._frozen = None

        return Played()


class RecordingRunner(Runner):
    """Keeps the logits that each request's tokens were chosen from."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: dict[str, list[torch.Tensor]] = {}

    def prepare(self, chunks: list[Chunk], fresh_pages: list[int]) -> StepInputs | None:
        self._sampling = [chunk.sequence.request.request_id for chunk in chunks if chunk.samples]
        return super().prepare(chunks, fresh_pages)

    def forward(self, inputs: StepInputs | None) -> torch.Tensor:
        logits = super().forward(inputs)
        for request_id, row in zip(self._sampling, logits, strict=True):
            self.logits.setdefault(request_id, []).append(row.clone())
        return logits


@pytest.fixture(scope="module", params=["llama-3", "mistral"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    config = load_model_config(directory)
    return Decoder(config, load_weights(directory, config, torch.device("cpu"), torch.float32), share="always")


def engine_of(decoder: Decoder, make_graphs: MakeGraphs | None) -> tuple[Engine, RecordingRunner]:
    runner = RecordingRunner(decoder, 64, 16, make_graphs)
    return Engine(runner, None, EngineConfig(page_size=16, max_batch_tokens=32, max_running=8)), runner


def with_played_device(
    decoder: Decoder, make_device: Callable[[Run, KvPool], PlayedDevice] | None = None
) -> tuple[Engine, RecordingRunner, PlayedDevice, DecodeGraphs]:
    made: list[tuple[PlayedDevice, DecodeGraphs]] = []

    def make(run: Run, pool: KvPool) -> DecodeGraphs:
        device = make_device(run, pool) if make_device else PlayedDevice(run)
        graphs = DecodeGraphs(
            device.run, device.stage, device.capture,
            max_rows=8, vocab_size=VOCAB_SIZE, device=torch.device("cpu"),
        )  # fmt: skip
        made.append((device, graphs))
        return graphs

    engine, runner = engine_of(decoder, make)
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
    assert set(device.shapes) >= {1, 2, 4, 8}
    assert len(device.shapes) == graphs.num_graphs == len(set(device.shapes))  # each bucket once
    assert len(expected) == 8
    for name, rows in eager.logits.items():
        assert (torch.stack(runner.logits[name]) - torch.stack(rows)).abs().max() <= TOLERANCE, name


class TritonDevice(PlayedDevice):
    """Attention by Triton, interpreted. A replay keeps the plan of the capture too: only buffers are of the present."""

    def __init__(self, run: Run, pool: KvPool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(run)
        self._pool, self._decoder, self._monkeypatch = pool, decoder, monkeypatch
        self._step = triton_step().step_of(decoder.device)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        if self._frozen is None:
            return super().run(inputs)
        with self._monkeypatch.context() as patch:
            patch.setattr(self._step, "prepare", lambda plan, slot_position, grid: None)
            return self._forward(self._frozen)

    def stage(self, plan: Plan) -> Hashable | None:
        from mneme.kernels.triton_backend import stage

        rope = self._decoder.rope
        key: Hashable = stage(plan, self._pool.slot_position, self._decoder.dtype, rope.num_positions)
        return key


def triton_step() -> Any:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process")
    return pytest.importorskip("mneme.kernels.triton_step")


def test_all_that_differs_between_replays_is_in_tritons_buffers(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_step()
    prompts = {"a": list(range(13)), "b": [*range(13), 40], "c": list(range(100, 112))}

    def serve(engine: Engine) -> None:
        for name, ids in prompts.items():
            engine.submit(request(name, ids, 9))  # "a" and "c" begin pages on the way
        while engine.has_work:
            assert all(event.error is None for event in engine.step())

    eager_engine, eager = engine_of(decoder, None)
    serve(eager_engine)
    monkeypatch.setattr(model, "attend", partial(attend, backend="triton"))
    make_device = partial(TritonDevice, decoder=decoder, monkeypatch=monkeypatch)
    engine, runner, device, graphs = with_played_device(decoder, make_device)
    serve(engine)
    assert graphs.num_replays >= 5
    assert set(device.shapes) == {4}
    for name, rows in eager.logits.items():
        assert (torch.stack(runner.logits[name]) - torch.stack(rows)).abs().max() <= TOLERANCE, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_give_what_launches_give(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint("llama-3", tmp_path)
    config = load_model_config(tmp_path)
    decoder = Decoder(config, load_weights(tmp_path, config, torch.device("cuda", 0), dtype))
    eager_engine, eager = engine_of(decoder, None)
    engine, runner = engine_of(decoder, decode_graphs_for(decoder, 8))
    assert serve(engine) == serve(eager_engine)  # the same kernels on the same numbers
    graphs = runner._graphs
    assert graphs is not None
    assert graphs.num_replays > 20
    for name, rows in eager.logits.items():
        assert (torch.stack(runner.logits[name]) - torch.stack(rows)).abs().max() <= 0.02, name


def test_a_cpu_has_no_graphs(decoder: Decoder) -> None:
    assert decode_graphs_for(decoder, 8) is None


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


def make_graphs(device: PlayedDevice, **options: Any) -> DecodeGraphs:
    return DecodeGraphs(
        device.run, device.stage, device.capture,
        max_rows=6, vocab_size=3, device=torch.device("cpu"), **options,
    )  # fmt: skip


def step(graphs: DecodeGraphs, num_rows: int, first: int = 0) -> torch.Tensor:
    array = np.arange(first, first + num_rows)
    return graphs.forward(graphs.inputs([array] * 4, plan=None, num_sampled=num_rows))  # type: ignore[arg-type]


def echo(inputs: StepInputs) -> torch.Tensor:
    """Logits that show which inputs were read."""
    return torch.stack([inputs.token_ids, inputs.positions + inputs.slots, inputs.sampled_rows], 1).float()


class EchoDevice(PlayedDevice):
    def __init__(self) -> None:
        super().__init__(echo)
        self._plan = None

    def run(self, inputs: StepInputs) -> torch.Tensor:
        if self._frozen is None:
            return super().run(inputs)
        return echo(self._frozen)


def test_a_shape_is_captured_when_it_is_met_again() -> None:
    device = EchoDevice()
    graphs = make_graphs(device)
    for first in range(5):
        expected = torch.arange(first, first + 4.0)
        logits = step(graphs, 4, first)
        assert torch.equal(logits, torch.stack([expected, 2 * expected, expected], 1))
    assert (device.num_eager, device.shapes, graphs.num_replays) == (1, [4], 4)
    assert torch.equal(step(graphs, 2, 7)[:, 0], torch.tensor([7.0, 8.0]))
    assert (device.num_eager, device.shapes) == (2, [4])


def test_other_launches_are_another_shape() -> None:
    device = EchoDevice()
    graphs = make_graphs(device)
    keys = iter("aabbaab")
    device.key = lambda plan: next(keys)
    for _ in range(7):
        step(graphs, 4)
    assert (device.num_eager, device.shapes, graphs.num_replays) == (2, [4, 4], 5)


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    device = EchoDevice()
    graphs = make_graphs(device)
    device.key = lambda plan: None
    assert [step(graphs, 4, first)[0, 0] for first in range(3)] == [0, 1, 2]
    assert (device.num_eager, graphs.num_graphs) == (3, 0)


def test_inputs_of_others_run_as_they_are() -> None:
    device = EchoDevice()
    graphs = make_graphs(device)
    for _ in range(3):
        step(graphs, 2)
    ids = torch.tensor([5, 6])
    other = StepInputs(token_ids=ids, positions=ids, slots=ids, sampled_rows=ids, num_sampled=2, plan=None)  # type: ignore[arg-type]
    assert graphs.forward(other)[:, 0].tolist() == [5, 6]
    assert graphs.num_replays == 2


def test_the_least_recently_used_graph_goes_first() -> None:
    device = EchoDevice()
    graphs = make_graphs(device, max_graphs=2)
    for num_rows in (1, 1, 2, 2, 1, 4, 4):
        step(graphs, num_rows)
    assert (device.shapes, graphs.num_graphs) == ([1, 2, 4], 2)
    step(graphs, 1)
    assert (device.shapes, device.num_eager) == ([1, 2, 4], 3)  # 1 was used after 2 and is still there
    step(graphs, 2)
    step(graphs, 2)
    assert device.shapes == [1, 2, 4, 2]


def test_a_capture_that_fails_turns_graphs_off(caplog: pytest.LogCaptureFixture) -> None:
    device = EchoDevice()

    def fail(step: Callable[[], None]) -> Graph:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(
        device.run, device.stage, fail, max_rows=4, vocab_size=3, device=torch.device("cpu")
    )  # fmt: skip
    assert graphs.bucket(3) == 4
    with caplog.at_level(logging.WARNING):
        assert [step(graphs, 4, first)[0, 0] for first in range(4)] == [0, 1, 2, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not permitted" in caplog.text
    assert graphs.bucket(3) is None


def test_buckets() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    graphs = make_graphs(EchoDevice())  # of 6 rows
    assert [graphs.bucket(rows) for rows in (0, 1, 5, 6, 8, 9)] == [None, 1, 8, 8, 8, None]
    large = DecodeGraphs(
        echo, lambda plan: None, lambda step: None, max_rows=10**6, vocab_size=3, device=torch.device("cpu")  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    assert large.bucket(MAX_BUCKET) == MAX_BUCKET
    assert large.bucket(MAX_BUCKET + 1) is None
