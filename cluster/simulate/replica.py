"""One simulated engine: prompts wait, are computed beside streams within the step's time, and stream until they end.

Steps are skipped: between two events (a prompt begins or is done, a stream ends, a request comes) all steps are alike
but for the contexts, which grow by one token for each stream, so many steps are one phase, whose time the cost model
gives at its middle. Of prompts one at a time is computed, in order of arrival: beside streams a step takes as many of
its rows as the engine's own budget of time lets it (`seconds_beside`), and no stream waits for the rest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.simulate.costs import Rates
from mneme.cachetier.simulate.simulator import BlockTiers, SimulatedLoads
from mneme.cluster.simulate.workload import Turn
from mneme.replicas.schedule.step_budget import seconds_beside
from mneme.router.autoscaler import ReplicaLoad, ShareMeter

# Llama-2-70B on eight A800s, the machine of the Mooncake traces, computed from its data sheet: 140 GFLOP a token at
# half of 2,496 TFLOP/s, 140 GB of weights and 320 KB of KV a token at 70% of 16 TB/s.
DEFAULT_RATES = Rates(
    prefill_tokens_per_s=8_900.0,
    decode_step_s=0.0125,
    device_gb_per_s=11_400.0,
    host_gb_per_s=50.0,
    kv_bytes_per_token=327_680.0,
)
DEFAULT_DEVICE_GB = 400.0  # for KV, of 640
_LEAST_S = 1e-9  # of any work
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What an engine is configured with."""

    max_step_s: float | None = None  # beside streams; infinite: as many rows as there are; None: the engine's default
    max_running: int = 256
    max_batch_tokens: int = 8192  # rows of a step; for `exact` alone, as what the host holds
    host_tokens: int = 0
    capacity_tokens: int | None = None  # of the device; None: without a bound


class Status(NamedTuple):
    """Says how busy an engine is, as its reports do."""

    queue_s: float  # until the prompts that it has are computed
    queued_tokens: int
    running: int
    waiting: int
    context_tokens: int  # that its streams see
    free_share: float  # of the device


class Job:
    """A request at a replica, and what became of it."""

    __slots__ = (
        "due_s",
        "elsewhere_tokens",
        "end_step",
        "ended_s",
        "expected",
        "first_s",
        "found",
        "is_cancelled",
        "num_new",
        "replica",
        "turn",
    )

    def __init__(self, turn: Turn, due_s: float, replica: int) -> None:
        self.turn, self.due_s, self.replica = turn, due_s, replica
        self.first_s = self.ended_s = 0.0
        self.found: list[int] = []  # blocks by tier
        self.num_new = 0  # tokens
        self.end_step = 0
        self.expected = 0  # blocks that its router took the replica to hold
        self.elsewhere_tokens = 0  # that it took another one to hold
        self.is_cancelled = False


Told = Callable[[Job], None]


class Replica:
    """`advance` is to be called at `next_s`; `None`: there is nothing to do."""

    def __init__(self, shape: EngineShape, tiers: BlockTiers, costs: CostModel, on_first: Told, on_end: Told) -> None:
        self.tiers = tiers
        self.next_s: float | None = None
        self.busy_s = 0.0
        self._waiting: deque[Job] = deque()
        self._shape, self._costs, self._loads = shape, costs, SimulatedLoads(costs)
        prefill_scale, decode_scale = costs.step_scales
        self._prefill_s = costs.calibration.prefill[0] * prefill_scale  # of each step with rows of a prompt
        self._decode_s = costs.calibration.decode[0] * decode_scale  # of each step without
        self._on_first, self._on_end = on_first, on_end
        self._numbers = itertools.count()
        self._streams: list[tuple[int, int, Job]] = []  # by the step with their last token
        self._prompt: Job | None = None
        self._prompt_s = 0.0  # left to compute of it
        self._num_steps = 0
        self._context = 0  # tokens that all streams see
        self._held = 0  # tokens of the device that requests hold
        self._began_s = 0.0
        self._prefilled_s = self._saved_s = 0.0  # since the last `load`
        self._shares = ShareMeter()
        self._steps, self._step_s, self._computed_s = 0, 0.0, 0.0  # of the phase

    def submit(self, job: Job, now_s: float) -> None:
        device, ids = self.tiers.tiers[0], job.turn.block_ids
        num_found = next((n for n, block_id in enumerate(ids) if block_id.to_bytes(_KEY_BYTES) not in device), len(ids))
        job.num_new = max(job.turn.input_tokens - num_found * job.turn.block_tokens, 1)  # as far as is known
        self._waiting.append(job)
        if self.next_s is None:
            self._began_s = now_s
            self._plan(now_s)
        elif self._prompt is None and self._fits(job):  # it begins with the next step
            done = max(math.ceil((now_s - self._began_s) / self._step_s - 1e-9), 1)
            if done < self._steps:
                self._steps = done
                self.next_s = self._began_s + done * self._step_s

    def cancel(self, job: Job) -> bool:
        """The client has gone: what waits leaves, what runs runs to its end unheard. Return whether it waited."""
        job.is_cancelled = True
        is_waiting = job in self._waiting
        if is_waiting:
            self._waiting.remove(job)
        return is_waiting

    def status(self) -> Status:
        waiting = [job.num_new for job in self._waiting]
        prompt_s = 0.0 if self._prompt is None else self._prompt_s
        num_left = 0 if self._prompt is None else self._prompt.num_new
        return Status(
            prompt_s + sum(self._costs.prefill_s(each, 0) for each in waiting),
            sum(waiting) + num_left,
            len(self._streams) + (self._prompt is not None),
            len(waiting),
            self._context,
            1 - min(self._held / self._shape.capacity_tokens, 1.0) if self._shape.capacity_tokens else 1.0,
        )

    def load(self, span_s: float) -> ReplicaLoad:
        """Say what the autoscaler asks; the last call was `span_s` ago."""
        self._shares.note(self._prefilled_s, self._saved_s, span_s)
        self._prefilled_s = self._saved_s = 0.0
        shape, num_streams = self._shape, len(self._streams)
        waiting_s = sum(self._costs.prefill_s(job.num_new, 0) for job in self._waiting)
        return ReplicaLoad(
            backlog_s=waiting_s + (0.0 if self._prompt is None else self._prompt_s),
            prefill_share=self._shares.prefill_share,
            kv_share=min(self._held / shape.capacity_tokens, 1.0) if shape.capacity_tokens else 0.0,
            step_s=self._costs.decode_s(num_streams, self._context),
            constant_s=self._decode_s,
            num_requests=len(self._waiting) + num_streams + (self._prompt is not None),
            saved_share=self._shares.saved_share,
        )

    def lose_all(self) -> list[Job]:
        """The process dies: everything in flight is lost, and the device's KV."""
        lost = [*self._waiting, *(job for *_, job in self._streams)]
        lost += [] if self._prompt is None else [self._prompt]
        return [job for job in lost if not job.is_cancelled]

    def advance(self, now_s: float) -> None:
        """The phase has ended."""
        num_streams = len(self._streams)
        self._num_steps += self._steps
        self._context += self._steps * num_streams
        self._held += self._steps * num_streams
        self.busy_s += now_s - self._began_s
        self._began_s = now_s
        prompt = self._prompt
        if prompt is not None:
            self._prompt_s -= self._computed_s
            self._prefilled_s += self._computed_s
            if self._prompt_s < _LEAST_S:
                self._prompt = None
                self._first_token(prompt, now_s)
        while self._streams and self._streams[0][0] <= self._num_steps:
            *_, job = heapq.heappop(self._streams)
            self._context -= job.turn.input_tokens + job.turn.output_tokens
            self._end(job, now_s)
        self._plan(now_s)

    def _first_token(self, job: Job, now_s: float) -> None:
        job.first_s = now_s
        self._on_first(job)
        if job.turn.output_tokens == 1:
            self._end(job, now_s)
            return
        self._context += job.turn.input_tokens + 1
        job.end_step = self._num_steps + job.turn.output_tokens - 1
        heapq.heappush(self._streams, (job.end_step, next(self._numbers), job))

    def _end(self, job: Job, now_s: float) -> None:
        self._held -= job.num_new + job.turn.output_tokens - 1
        job.ended_s = now_s
        self._on_end(job)

    def _fits(self, job: Job) -> bool:
        """Return whether the prompt has room; one that is alone always has."""
        capacity = self._shape.capacity_tokens
        if not self._streams or capacity is None:
            return len(self._streams) < self._shape.max_running
        has_room = self._held + job.turn.input_tokens <= 0.9 * capacity  # the rest is for streams (Pensieve 4.3)
        return has_room and len(self._streams) < self._shape.max_running

    def _plan(self, now_s: float) -> None:
        if self._prompt is None and self._waiting and self._fits(self._waiting[0]):
            self._begin(self._waiting.popleft())
        shape, num_streams = self._shape, len(self._streams)
        until_end = self._streams[0][0] - self._num_steps if self._streams else 0
        if self._prompt is not None and not num_streams:
            self._steps, self._step_s, self._computed_s = 1, self._prefill_s + self._prompt_s, self._prompt_s
        elif self._prompt is not None:
            decode_s = self._costs.decode_s(num_streams, self._context + num_streams)
            others_s, rows_s = decode_s - self._decode_s + self._prefill_s, seconds_beside(decode_s, shape.max_step_s)
            self._steps = min(max(math.ceil(self._prompt_s / rows_s), 1), until_end)
            self._computed_s = min(self._steps * rows_s, self._prompt_s)
            self._step_s = others_s + self._computed_s / self._steps
        elif num_streams:
            self._steps = until_end
            middle = self._context + num_streams * (until_end + 1) // 2
            self._step_s = self._costs.decode_s(num_streams, middle)
        else:
            self.next_s = None
            return
        self.next_s = now_s + self._steps * self._step_s

    def _begin(self, job: Job) -> None:
        turn = job.turn
        job.found = self.tiers.use([block_id.to_bytes(_KEY_BYTES) for block_id in turn.block_ids])
        timing = self._loads.first_token(turn.input_tokens, turn.block_tokens, job.found)
        job.num_new = max(turn.input_tokens - job.found[0] * turn.block_tokens, 1)
        self._saved_s += self._costs.prefill_s(max(job.found[0] * turn.block_tokens - job.elsewhere_tokens, 0), 0)
        self._held += job.num_new
        self._prompt = job
        all_s = timing.ttft_s if any(timing.loaded[1:]) else timing.compute_s
        self._prompt_s = max(all_s - self._prefill_s * -(-job.num_new // self._costs.step_rows), _LEAST_S)
