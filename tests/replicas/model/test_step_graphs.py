"""When steps are captured, replayed and let go; the forward pass is an echo of its inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mneme.replicas.model.decoder import StepInputs
from mneme.replicas.model.graphs import MAX_BUCKET, Graph, Run, StepGraphs, bucket_of
from tests.replicas.model.played_device import PlayedDevice
from tests.replicas.model.test_cuda_capture import out_of_shared_memory


def make_graphs(device: PlayedDevice, **options: Any) -> StepGraphs:
    return device.graphs(vocab_size=3, max_rows=6, **options)


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
        if self._frozen is None:
            return super().run(inputs)
        return self._forward(self._frozen)


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


@pytest.mark.parametrize("attribute", ["load", "key_positions", "observe", "fusor", "read"])
def test_a_step_with_more_than_its_inputs_is_not_replayed(attribute: str) -> None:
    device = EchoDevice()
    graphs = make_graphs(device)
    for _ in range(3):
        step(graphs, 2)
    for first in (7, 8):
        inputs = graphs.inputs([np.arange(first, first + 2)] * 5, plan=None, num_rows=2)  # type: ignore[arg-type]
        setattr(inputs, attribute, object())  # an echo has no layers: nobody calls it
        assert graphs.forward(inputs)[:, 0].tolist() == [first, first + 1]
    assert (device.num_eager, graphs.num_replays) == (3, 2)


class FailingDevice(EchoDevice):
    """Captures fail, when they are to, in the midst of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.num_tried = True, 0
        self.error: Exception = RuntimeError("operation not permitted when stream is capturing")

    def capture(self, step: Callable[[], None]) -> Graph:
        self.num_tried += 1
        if self.fails:
            step()
            raise self.error
        return super().capture(step)


def test_a_capture_that_fails_is_counted_and_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    device = FailingDevice()
    graphs = make_graphs(device)
    with caplog.at_level(logging.WARNING):
        assert [int(step(graphs, 4, first)[0, 0]) for first in range(50)] == [*range(50)]
    assert (device.num_tried, graphs.stats()) == (1, {"replays": 0, "failed": 1, "off": 0})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not permitted" in caplog.text
    device.fails = False
    assert [int(step(graphs, 4, first)[0, 0]) for first in range(200)] == [*range(200)]
    assert device.num_tried == 2
    assert graphs.num_replays > 100
    assert graphs.bucket(3, 3) == 4


def test_a_kernel_that_triton_has_no_room_for_costs_the_graph_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Triton's errors are no RuntimeErrors."""
    device = FailingDevice()
    device.error = out_of_shared_memory()
    graphs = make_graphs(device)
    with caplog.at_level(logging.WARNING):
        assert [int(step(graphs, 4, first)[0, 0]) for first in range(5)] == [*range(5)]
    assert graphs.stats() == {"replays": 0, "failed": 1, "off": 0}
    (record,) = caplog.records
    assert "tried again in 100 steps: triton" in record.message
    assert record.message.endswith("H100 or H200")


def test_after_failures_in_a_row_nothing_is_captured_and_graphs_go_on() -> None:
    device = FailingDevice()
    graphs = make_graphs(device)
    for _ in range(500):
        step(graphs, 4)
    assert (graphs.is_on, device.num_tried) == (True, 2)
    device.fails = False  # for once: what came before does not count any more
    for _ in range(1_500):
        step(graphs, 2)
    device.fails, num_replays = True, graphs.num_replays
    assert num_replays
    for _ in range(1_500):
        step(graphs, 4)
    assert graphs.stats() == {"replays": num_replays, "failed": 5, "off": 1}
    assert step(graphs, 2, 7)[:, 0].tolist() == [7, 8]
    assert graphs.num_replays == num_replays + 1
    assert device.num_tried == 6


def test_a_capture_that_fails_evicts_no_graph() -> None:
    device = FailingDevice()
    device.fails = False
    graphs = make_graphs(device, max_graphs=1)
    for _ in range(3):
        step(graphs, 2)
    device.fails = True
    for _ in range(2):
        step(graphs, 4)
    num_replays = graphs.num_replays
    step(graphs, 2)
    assert (graphs.num_failed, graphs.num_graphs, graphs.num_replays) == (1, 1, num_replays + 1)


def test_a_device_on_which_nothing_can_be_captured_pads_no_step() -> None:
    device = FailingDevice()
    graphs = make_graphs(device)
    assert graphs.bucket(3, 3) == 4
    for _ in range(1_500):
        step(graphs, 4)
    assert graphs.bucket(3, 3) is None


def test_buckets() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    graphs = make_graphs(EchoDevice())  # of 6 rows
    assert [graphs.bucket(rows, 1) for rows in (0, 1, 5, 6, 8, 9)] == [None, 1, 8, 8, 8, None]
    large = EchoDevice().graphs(max_rows=10**6, max_sampled=40)
    assert large.bucket(MAX_BUCKET, 64) == MAX_BUCKET
    assert large.bucket(MAX_BUCKET + 1, 1) is None
    assert large.bucket(MAX_BUCKET, 65) is None


def test_a_long_prompt_alone_is_captured_where_one_request_runs_at_a_time() -> None:
    """Its one sampled row is padded, too."""
    device = EchoDevice(lambda inputs: inputs.token_ids[inputs.sampled_rows][:, None].repeat(1, 3).float())
    graphs = device.graphs(vocab_size=3, max_rows=128, max_sampled=1)
    rows = np.arange(100)
    for last in (5, 6, 99):
        inputs = graphs.inputs([rows, rows, rows, rows, np.array([last])], plan=None, num_rows=128)  # type: ignore[arg-type]
        assert graphs.forward(inputs)[0, 0] == last
    assert (device.shapes, graphs.num_failed, graphs.num_replays) == ([128], 0, 2)
