"""A device that is played: what a captured step reads keeps its addresses, everything else is frozen at capture."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from mneme.kernels.attention import Plan
from mneme.replicas.model.decoder import Decoder, KvPool, StepInputs
from mneme.replicas.model.graphs import Graph, Run, StepGraphs


class PlayedDevice:
    """A replay runs the forward pass on the tensors of the capture and on the plan that was staged last."""

    def __init__(self, run: Run) -> None:
        def forward(inputs: StepInputs) -> torch.Tensor:
            logits = run(inputs)
            return logits if inputs.logits is None or logits is inputs.logits else inputs.logits.copy_(logits)

        self._forward = forward
        self._plan: Plan | None = None
        self.replayed: StepInputs | None = None
        self.num_eager = 0
        self.shapes: list[int] = []  # rows of each capture
        self.key: Callable[[Plan], Hashable | None] = lambda plan: "one"

    def run(self, inputs: StepInputs) -> torch.Tensor:
        if self.replayed is None:
            self.num_eager += 1
            self._last = inputs
            return self._forward(inputs)
        assert self._plan is not None
        return self._forward(replace(self.replayed, plan=self._plan))

    def reserve(self, plan: Plan) -> None:
        pass

    def launches(self, plan: Plan) -> list[Hashable]:
        return ["one"]

    def stage(self, plan: Plan, launch: Hashable | None = None) -> Hashable | None:
        self._plan = plan
        return launch or self.key(plan)

    def capture(self, step: Callable[[], None]) -> Graph:
        for _ in range(2):  # once so that all is compiled, once to record it
            step()
            self.num_eager -= 1
        frozen = self._last
        self.shapes.append(len(frozen.token_ids))
        device = self

        class Played:
            def replay(self) -> None:
                device.replayed = frozen
                step()
                device.replayed = None

        return Played()

    def graphs(
        self, *, vocab_size: int = 320, max_rows: int = 64, max_sampled: int | None = None, **options: Any
    ) -> StepGraphs:
        """Graphs of steps that this device captures."""
        return StepGraphs(
            self.run, self, self.capture, max_rows=max_rows, max_sampled=max_sampled or max_rows,
            vocab_size=vocab_size, device=torch.device("cpu"), **options,
        )  # fmt: skip


class StagedByTriton(PlayedDevice):
    """Tells shapes apart as the Triton backend does, whose buffers are on the CPU here."""

    def __init__(self, run: Run, pool: KvPool, decoder: Decoder) -> None:
        super().__init__(run)
        self._of_pool = pool.slot_position, decoder.dtype
        self._decoder = decoder
        self.staged: list[Hashable] = []

    def reserve(self, plan: Plan) -> None:
        from mneme.kernels.triton.backend import reserve

        reserve(plan, *self._of_pool)

    def launches(self, plan: Plan) -> list[Hashable]:
        from mneme.kernels.triton.backend import launches_of

        return [*launches_of(plan, self._decoder.device, self._decoder.dtype)]

    def stage(self, plan: Plan, launch: Any = None) -> Hashable | None:
        from mneme.kernels.triton.backend import stage

        self._plan = plan
        self.staged.append(stage(plan, *self._of_pool, self._decoder.ropes[0].num_positions, launch))
        return self.staged[-1]


def addresses_of(step: Any) -> list[int]:
    """Where the buffers of Triton's step are."""
    return [buffer.data_ptr() for buffer in (step.words, step.key_position, *step.partials)]
