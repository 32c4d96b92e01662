"""When steps are captured, replayed and let go; the forward pass is an echo of its inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mneme.replicas.model.decoder import StepInputs
from mneme.replicas.model.graphs import MAX_BUCKET, Graph, Run, StepGraphs, bucket_of
from mneme.replicas.model.parts import can_group
from tests.replicas.model.played_device import PlayedDevice
from tests.replicas.model.test_cuda_capture import out_of_shared_memory


def make_graphs(device: PlayedDevice, **options: Any) -> StepGraphs:
    """Graphs of steps of up to 8 rows that have been captured."""
    graphs = device.graphs(vocab_size=3, max_rows=6, **options)
    capture_all(graphs)
    return graphs


def capture_all(graphs: StepGraphs, clock: Callable[[], float] = time.monotonic) -> list[float]:
    shares: list[float] = []

    def make_inputs(num_rows: int, num_sampled: int) -> StepInputs:
        zeros = np.zeros(num_rows, np.int64)
        return graphs.inputs([*[zeros] * 4, zeros[:num_sampled]], plan=None, num_rows=num_rows)  # type: ignore[arg-type]

    graphs.capture_all(make_inputs, shares.append, clock)
    return shares


def step(graphs: StepGraphs, num_rows: int, first: int = 0) -> torch.Tensor:
    array = np.arange(first, first + num_rows)
    return graphs.forward(graphs.inputs([array] * 5, plan=None, num_rows=num_rows))  # type: ignore[arg-type]


def echo(inputs: StepInputs) -> torch.Tensor:
    """Logits that show which inputs were read."""
    return torch.stack([inputs.token_ids, inputs.positions + inputs.slots, inputs.sampled_rows], 1).float()


class EchoDevice(PlayedDevice):
    def __init__(self, echo: Run = echo) -> None:
        super().__init__(echo)
        self._plan = None

    def run(self, inputs: StepInputs) -> torch.Tensor:
        if self.replayed is None:
            return super().run(inputs)
        return self._forward(self.replayed)


def test_all_shapes_are_captured_before_traffic_largest_first_and_none_in_it() -> None:
    device = EchoDevice()
    graphs = device.graphs(vocab_size=3, max_rows=6)
    shares = capture_all(graphs)
    assert (device.shapes, shares) == ([8, 4, 2, 1], [0.25, 0.5, 0.75, 1.0])
    for first in range(5):
        expected = torch.arange(first, first + 4.0)
        logits = step(graphs, 4, first)
        assert torch.equal(logits, torch.stack([expected, 2 * expected, expected], 1))
    assert (device.num_eager, graphs.num_replays) == (0, 5)
    assert torch.equal(step(graphs, 2, 7)[:, 0], torch.tensor([7.0, 8.0]))
    assert (device.num_eager, device.shapes) == (0, [8, 4, 2, 1])


def test_each_kind_of_launch_has_its_graphs_and_steps_with_prompts_the_last_alone_which_does_all() -> None:
    device = EchoDevice(lambda inputs: inputs.token_ids[inputs.sampled_rows][:, None].repeat(1, 3).float())
    device.launches = lambda plan: ["decodes", "prompts"]  # type: ignore[method-assign]
    graphs = device.graphs(vocab_size=3, max_rows=8, max_sampled=4)
    capture_all(graphs)
    assert (device.shapes, graphs.num_graphs) == ([8, 4, 4, 2, 2, 1, 1], 7)  # of 8 rows the last launch alone
    rows = np.arange(3, 8)
    for num_rows, num_graphs in ((4, 2), (8, 1)):
        found = set()
        for kind in ("decodes", "prompts"):
            device.key = lambda plan, kind=kind: kind
            arrays = [*[rows[:num_rows]] * 4, np.array([1])]
            assert graphs.forward(graphs.inputs(arrays, plan=None, num_rows=num_rows))[0, 0] == 4  # type: ignore[arg-type]
            found.add(graphs.last_replayed)
        assert (len(found), device.num_eager) == (num_graphs, 0)


@pytest.mark.parametrize(("max_sampled", "num_graphs"), [(1, 47), (128, 47), (256, 79), (512, 79)])
def test_the_number_of_graphs_is_small(max_sampled: int, num_graphs: int) -> None:
    """Of each kind of launch at most: 47 buckets of rows, 32 of which hold more than the few sampled rows."""
    device = EchoDevice(lambda inputs: inputs.token_ids[inputs.sampled_rows][:, None].float())
    graphs = device.graphs(vocab_size=1, max_rows=10**6, max_sampled=max_sampled)
    capture_all(graphs)
    assert graphs.num_graphs == num_graphs
    for rows in sorted({each for edge in map(bucket_of, range(1, MAX_BUCKET)) for each in (edge - 1, edge) if each}):
        array = np.zeros(rows, np.int64)
        for sampled in {1, min(rows, max_sampled, 128), min(rows, max_sampled, 129), min(rows, max_sampled)}:
            arrays = [*[array] * 4, array[:sampled]]
            graphs.forward(graphs.inputs(arrays, plan=None, num_rows=bucket_of(rows)))  # type: ignore[arg-type]
    assert device.num_eager == 0


@pytest.mark.parametrize("has_launches", [True, False])
def test_what_cannot_be_captured_runs_as_it_is(has_launches: bool) -> None:
    device = EchoDevice()
    device.launches = lambda plan: ["one"] * has_launches  # type: ignore[method-assign]
    graphs = make_graphs(device)
    device.key = lambda plan: None
    assert [step(graphs, 4, first)[0, 0] for first in range(3)] == [0, 1, 2]
    assert (device.num_eager, graphs.num_replays) == (3, 0)
    assert (graphs.num_graphs > 0) == has_launches


def test_inputs_of_others_run_as_they_are() -> None:
    device = EchoDevice()
    graphs = make_graphs(device)
    step(graphs, 2)
    ids = torch.tensor([5, 6])
    other = StepInputs(token_ids=ids, positions=ids, slots=ids, sampled_rows=ids, num_sampled=2, plan=None)  # type: ignore[arg-type]
    assert graphs.forward(other)[:, 0].tolist() == [5, 6]
    assert graphs.num_replays == 1


def test_captures_end_in_time_and_the_rest_runs_as_it_is() -> None:
    device = EchoDevice()
    graphs = device.graphs(vocab_size=3, max_rows=6)
    seconds = iter((0.0, 10.0, 59.0, 61.0, 70.0, 70.0))
    assert capture_all(graphs, lambda: next(seconds))[-1] == 1.0
    assert device.shapes == [8, 4]
    assert (step(graphs, 2, 4)[0, 0], device.num_eager, graphs.num_replays) == (4, 1, 0)


@pytest.mark.parametrize("attribute", ["load", "key_positions", "observe", "layer_filter", "read"])
def test_a_step_with_more_than_its_inputs_is_not_replayed(attribute: str) -> None:
    device = EchoDevice()
    graphs = make_graphs(device)
    for first in (7, 8):
        inputs = graphs.inputs([np.arange(first, first + 2)] * 5, plan=None, num_rows=2)  # type: ignore[arg-type]
        setattr(inputs, attribute, object())  # an echo has no layers: nobody calls it
        assert graphs.forward(inputs)[:, 0].tolist() == [first, first + 1]
    assert (device.num_eager, graphs.num_replays) == (2, 0)


class FailingDevice(EchoDevice):
    """Captures fail, when they are to, in the midst of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.num_tried = [True], 0  # the last is of all others, too
        self.error: Exception = RuntimeError("operation not permitted when stream is capturing")

    def capture(self, step: Callable[[], None]) -> Graph:
        self.num_tried += 1
        if self.fails[min(self.num_tried, len(self.fails)) - 1]:
            step()
            raise self.error
        return super().capture(step)


@pytest.mark.parametrize(
    "make_error", [lambda: RuntimeError("operation not permitted when stream is capturing"), out_of_shared_memory]
)
def test_a_capture_that_fails_is_counted_and_costs_its_graph_alone(make_error: Callable[[], Exception]) -> None:
    """Triton's errors are no RuntimeErrors."""
    device = FailingDevice()
    device.error, device.fails = make_error(), [False, True, False]
    graphs = make_graphs(device)
    for num_rows in (4, 2):
        assert [int(step(graphs, num_rows, first)[0, 0]) for first in range(5)] == [*range(5)]
    assert (device.num_tried, graphs.stats()) == (4, {"replays": 5, "failed": 1, "off": 0})


def test_after_failures_in_a_row_nothing_is_captured_and_graphs_go_on() -> None:
    device = FailingDevice()
    device.fails = [False, True]
    graphs = make_graphs(device)
    assert (graphs.is_on, device.num_tried, device.shapes) == (False, 4, [8])
    assert graphs.stats() == {"replays": 0, "failed": 3, "off": 1}
    assert graphs.bucket(6, 6) == 8
    assert step(graphs, 8, 7)[:, 0].tolist() == [*range(7, 15)]
    assert graphs.num_replays == 1


def test_a_device_on_which_nothing_can_be_captured_pads_no_step() -> None:
    device = FailingDevice()
    graphs = make_graphs(device)
    assert (device.num_tried, graphs.num_graphs) == (3, 0)
    assert graphs.bucket(3, 3) is None
    assert device.graphs(vocab_size=3, max_rows=6).bucket(3, 3) == 4  # before: kernels are compiled for padded steps


def test_buckets() -> None:
    rows = (1, 2, 3, 4, 5, 9, 64, 65, 129, 256, 257, 512)
    assert [bucket_of(each) for each in rows] == [1, 2, 4, 4, 8, 16, 64, 80, 144, 256, 288, 512]
    graphs = make_graphs(EchoDevice())  # of 6 rows
    assert [graphs.bucket(rows, 1) for rows in (0, 1, 5, 6, 8, 9)] == [None, 1, 8, 8, 8, None]
    large = EchoDevice().graphs(max_rows=10**6, max_sampled=40)
    assert large.bucket(MAX_BUCKET, 40) == MAX_BUCKET
    assert large.bucket(MAX_BUCKET + 1, 1) is None
    assert large.bucket(MAX_BUCKET, 41) is None


def test_a_long_prompt_alone_is_captured_where_one_request_runs_at_a_time() -> None:
    """Its one sampled row is padded, too."""
    device = EchoDevice(lambda inputs: inputs.token_ids[inputs.sampled_rows][:, None].repeat(1, 3).float())
    graphs = device.graphs(vocab_size=3, max_rows=128, max_sampled=1)
    capture_all(graphs)
    rows = np.arange(100)
    for last in (5, 6, 99):
        inputs = graphs.inputs([*[rows] * 4, np.array([last])], plan=None, num_rows=128)  # type: ignore[arg-type]
        assert graphs.forward(inputs)[0, 0] == last
    assert (device.num_eager, graphs.num_failed, graphs.num_replays) == (0, 0, 3)


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), "bfloat16"), ((10, 0), "bfloat16"), ((9, 0), "float32")])
def test_experts_are_one_product_where_torch_does_not_ask_the_device_for_their_rows(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    """Elsewhere `torch._grouped_mm` reads offsets back: a graph of it cannot be captured (`step_graphs_for`)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert can_group(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert not can_group(torch.device("cuda"), getattr(torch, dtype))
    assert not can_group(torch.device("cpu"), torch.bfloat16)
