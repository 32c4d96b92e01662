"""One simulated engine, step by step: the engine's scheduler over its prefix forest, with the cost model as device.

Steps that only decode, for the same sequences in pages that they have, are alike: such a run is one event. What it did
is done when somebody looks, and it ends early where a request comes.

Tokens are made of a trace's blocks: equal blocks have equal tokens. Host memory is the engine's own; the cache tier is
not simulated here.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mneme.cachetier.names import EvictionPolicyName
from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.eviction import make_policy
from mneme.lab.cache.costs import Rates
from mneme.lab.cluster.workload import Turn
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.tree import DEVICE, HOST, Owner, Page
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.schedule.queue import OUTPUT_WEIGHT
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sequence import Sequence, StepRows
from mneme.router.autoscaler import ReplicaLoad, ShareMeter

# Llama-2-70B on eight A800s, the machine of the Mooncake traces, computed from its data sheet: 140 GFLOP a token at
# half of 2,496 TFLOP/s, 140 GB of weights and 320 KB of KV a token at 70% of 16 TB/s.
DEFAULT_RATES = Rates(
    prefill_tokens_per_s=8_900.0, decode_step_s=0.0125, device_gb_per_s=11_400.0, host_gb_per_s=50.0,
    kv_bytes_per_token=327_680.0,
)  # fmt: skip
DEFAULT_DEVICE_GB = 400.0  # for KV, of 640
PAGE_TOKENS = 64
_UNBOUNDED_TOKENS = 2**22  # of a device without a bound
_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What an engine is configured with."""

    max_step_s: float | None = None  # beside streams; infinite: as many rows as there are; None: the engine's default
    max_running: int = 256
    max_batch_tokens: int = 8192  # rows of a step
    capacity_tokens: int | None = None  # of the device; None: without a bound
    host_tokens: int = 0


class Status(NamedTuple):
    """Says how busy an engine is, as its reports do."""

    backlog_s: float  # until the prompts that it has are computed
    queued_tokens: int
    running: int
    waiting: int
    context_tokens: int  # that its streams see
    free_share: float  # of the device


@dataclass(slots=True, eq=False)
class Job:
    """A request at a replica, and what became of it."""

    turn: Turn
    due_s: float
    replica: int
    first_s: float = 0.0
    ended_s: float = 0.0
    found: tuple[int, int] = (0, 0)  # blocks on the device, in host memory
    expected: int = 0  # blocks that its router took the replica to hold
    elsewhere_tokens: int = 0  # that it took another one to hold
    is_cancelled: bool = False


class Replica:
    """`advance` is to be called at `next_s`; `None`: there is nothing to do."""

    def __init__(
        self,
        shape: EngineShape,
        policy: EvictionPolicyName,
        costs: CostModel,
        clock: Callable[[], float],
        on_first: Callable[[Job], None],
        on_end: Callable[[Job], None],
        on_block: Callable[[int, int | None], None] = lambda block_id, tier: None,
    ) -> None:
        """`on_block` is told which blocks came to the device, or to the host alone, or are in neither any more."""
        num_pages = max((shape.capacity_tokens or _UNBOUNDED_TOKENS) // PAGE_TOKENS, 1)
        num_host_pages = shape.host_tokens // PAGE_TOKENS
        self._forest = PrefixForest(
            num_pages, PAGE_TOKENS, policy=make_policy(policy, clock, num_pages), clock=clock,
            num_host_pages=num_host_pages, host_policy=make_policy(policy, clock, max(num_host_pages, 1)),
        )  # fmt: skip
        self._scheduler = Scheduler(
            self._forest, max_batch_tokens=shape.max_batch_tokens, max_running=shape.max_running,
            costs=None if shape.max_step_s == math.inf else costs, max_step_s=shape.max_step_s,
        )  # fmt: skip
        self._max_running, self._clock = shape.max_running, clock
        self._busy_s = self._prefilled_s = self._saved_s = 0.0
        self._shares = ShareMeter()
        self._costs = costs
        self._on_first, self._on_end, self._on_block = on_first, on_end, on_block
        self._changed, self._block_tokens = self._forest.report_changes(), 1
        self._told: dict[Page, dict[int, int]] = {}  # the tier of each block that ends in a page
        self._arrivals = itertools.count()
        self._owners: dict[int, Owner] = {}
        self._jobs: dict[int, tuple[Job, Sequence]] = {}  # by the sequence
        self._batch: list[StepRows] = []  # of the step that runs
        self._ends: list[float] = []  # when it ends, and those after it that are alike
        self._lengths: list[float] = []  # seconds of these

    @property
    def next_s(self) -> float | None:
        return self._ends[-1] if self._ends else None

    @property
    def busy_s(self) -> float:
        self._catch_up()
        return self._busy_s

    def submit(self, job: Job, now_s: float) -> None:
        self._cut()
        turn, arrival = job.turn, next(self._arrivals)
        self._block_tokens = turn.block_tokens
        ids = np.repeat(np.array(turn.block_ids), turn.block_tokens)[: turn.input_tokens].tolist()
        request = GenerationRequest(
            request_id=str(arrival), prompt_token_ids=(), sampling=_SAMPLING, session_id=str(turn.session)
        )
        sequence = Sequence(
            request=request, ids=ids, num_prompt=len(ids), max_tokens=turn.output_tokens, arrival=arrival,
            owner=self._owners.setdefault(turn.session, Owner()),
        )  # fmt: skip
        self._jobs[id(sequence)] = job, sequence
        self._scheduler.add(sequence)
        if self.next_s is None:
            self._step(now_s)

    def cancel(self, job: Job) -> bool:
        """The client has gone: its request is aborted. Return whether it had not begun."""
        self._catch_up()
        job.is_cancelled = True
        sequence = next(sequence for each, sequence in self._jobs.values() if each is job)
        has_begun = sequence.path is not None
        if not has_begun:
            del self._jobs[id(sequence)]
            self._scheduler.remove(sequence)
        return not has_begun

    def status(self) -> Status:
        self._catch_up()
        streams, prompts = self._streams, [s for _, s in self._jobs.values() if not s.num_output]
        left = [len(s.context) - (0 if s.path is None else s.path.num_tokens) for s in prompts]  # to compute of each
        return Status(
            sum(self._costs.prefill_s(num_new, 0) for num_new in left), sum(left), len(self._scheduler.running),
            len(self._scheduler.waiting), sum(len(each.context) for each in streams), 1 - self._used_share,
        )  # fmt: skip

    @property
    def _streams(self) -> list[Sequence]:
        return [s for s in self._scheduler.running if s.num_output]

    @property
    def _used_share(self) -> float:
        pages = self._forest.stats()["pages"]
        return pages["in_use"] / pages["total"]

    def load(self, span_s: float) -> ReplicaLoad:
        """Say what the autoscaler asks; the last call was `span_s` ago."""
        status = self.status()
        self._shares.add_work(self._prefilled_s, self._saved_s, span_s)
        self._prefilled_s = self._saved_s = 0.0
        return ReplicaLoad(
            backlog_s=status.backlog_s, prefill_share=self._shares.prefill_share, kv_share=self._used_share,
            step_s=self._costs.decode_s(len(self._streams), status.context_tokens), num_requests=len(self._jobs),
            constant_s=self._costs.terms_of("decode")[0], saved_share=self._shares.saved_share,
        )  # fmt: skip

    def lose_all(self) -> list[Job]:
        """The process dies: everything in flight is lost, and all KV."""
        return [job for job, _ in self._jobs.values() if not job.is_cancelled]

    def advance(self, now_s: float) -> None:
        """The step has ended, and all of its run."""
        self._catch_up()
        for part in self._batch:
            if part.samples and part.sequence.path is not None:
                self._append(part.sequence, now_s)
        self._tell()
        self._step(now_s)

    def _tell(self) -> None:
        while self._changed:
            page = self._changed.pop()
            first, size = page.start, self._block_tokens
            there: dict[int, int] = {}
            for end in range(first - first % size + size, first + max(page.filled) + 1, size):
                if (block_id := page.tokens[end - 1 - first]) >= 0:
                    there[block_id] = DEVICE if end - first <= page.filled[DEVICE] else HOST
            told = self._told.pop(page, {})
            if there:
                self._told[page] = there
            for block_id in told.keys() | there.keys():
                if told.get(block_id) != there.get(block_id):
                    self._on_block(block_id, there.get(block_id))

    def _append(self, sequence: Sequence, now_s: float) -> None:
        job, _ = self._jobs[id(sequence)]
        sequence.append(_answered(sequence))
        if sequence.num_output == 1:
            job.first_s = now_s
            usage, size = sequence.usage, job.turn.block_tokens
            # The last token of a prompt is always computed.
            cached = usage.cached_tokens + (usage.cached_tokens == job.turn.input_tokens - 1)
            num_found = len(job.turn.block_ids) if cached >= job.turn.input_tokens else cached // size
            num_host = min(usage.host_tokens // size, num_found)
            job.found = num_found - num_host, num_host
            on_device = usage.cached_tokens - usage.host_tokens
            self._saved_s += self._costs.prefill_s(max(on_device - job.elsewhere_tokens, 0), 0)
            self._on_first(job)
        if sequence.num_output >= sequence.max_tokens:
            del self._jobs[id(sequence)]
            self._scheduler.remove(sequence)
            job.ended_s = now_s
            self._on_end(job)

    def _step(self, now_s: float) -> None:
        self._ends, self._lengths = [], []
        if self._scheduler.has_work:
            self._batch = self._scheduler.schedule()
            moves = self._forest.store.drain_moves()
            rows = [(part.num_rows, part.end - part.num_rows) for part in self._batch]
            load_bytes = sum(load.num_tokens for load in moves.loads) * self._costs.calibration.kv_bytes_per_token
            # Layers are loaded beside those that compute.
            step_s = max(self._costs.step_s(rows), self._costs.edge_s("host", load_bytes, len(moves.loads)))
            self._busy_s += step_s
            if prompts := [each for each in rows if each[0] > 1]:
                self._prefilled_s += self._costs.step_s(prompts)
            self._lengths = [step_s, *self._alike()]
            self._ends = [*itertools.accumulate(self._lengths, initial=now_s)][1:]

    def _alike(self) -> Iterator[float]:
        """Yield the seconds of further steps that are sure to have the rows that follow, and nothing else."""
        num_alike = self._num_alike()
        num_keys = sum(part.end for part in self._batch) if num_alike else 0
        for _ in range(num_alike):
            num_keys += len(self._batch)
            yield self._costs.decode_s(len(self._batch), num_keys)

    def _num_alike(self) -> int:
        """Count them: until a page is full or a stream ends, if nobody else is to be admitted."""
        scheduler, batch = self._scheduler, self._batch
        is_open = bool(scheduler.waiting) and len(scheduler.running) < self._max_running
        has_news = bool(self._changed)  # of pages, to be told when this step has ended
        if is_open or has_news or len(batch) < len(scheduler.running) or self._forest.store.wants_copies:
            return 0
        fewest = _UNBOUNDED_TOKENS
        for part in batch:
            sequence = part.sequence
            if part.num_rows > 1 or not part.samples or not sequence.num_output or sequence.path is None:
                return 0
            if sequence.path.gaps or sequence.view.window is not None:
                return 0
            fewest = min(fewest, -part.end % PAGE_TOKENS, sequence.max_tokens - sequence.num_output - 1)
        return fewest

    def _catch_up(self) -> None:
        """Do what the steps of the run did that have ended; the one that runs has its rows."""
        num_ended = bisect_left(self._ends, self._clock())
        if not num_ended:
            return
        for part in self._batch:
            sequence = part.sequence
            assert sequence.path is not None
            for _ in range(num_ended):
                sequence.append(_answered(sequence))
            sequence.path.take_rows(sequence.context, num_ended)
            self._scheduler.waiting.charge([sequence], num_ended * OUTPUT_WEIGHT)
        for length_s in self._lengths[1 : num_ended + 1]:
            self._busy_s += length_s
        del self._ends[:num_ended], self._lengths[:num_ended]

    def _cut(self) -> None:
        """End the run with the step that runs: what comes is seen behind it."""
        self._catch_up()
        del self._ends[1:], self._lengths[1:]


def _answered(sequence: Sequence) -> int:
    """Return a token that is nobody else's."""
    return -2 - sequence.arrival
