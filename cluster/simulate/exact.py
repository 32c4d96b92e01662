"""One simulated engine, step by step: its own scheduler over its own prefix forest, with the cost model as device.

Tokens are made of a trace's blocks: equal blocks have equal tokens. Host memory is the engine's own; the cache tier is
not simulated here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from mneme.cachetier.policy.cost_model import CostModel
from mneme.cachetier.policy.eviction import PolicyName, make_policy
from mneme.cluster.simulate.replica import EngineShape, Job, Status, Told
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.pages import DEVICE, Owner, Page
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sequence import Sequence, StepRows
from mneme.router.autoscaler import ReplicaLoad

_PAGE_TOKENS = 64
_UNBOUNDED_TOKENS = 2**22  # of a device without a bound
_SAMPLING = SamplingParams()


class ExactReplica:
    """As `Replica`, with a step for each event."""

    def __init__(
        self,
        shape: EngineShape,
        policy: PolicyName,
        costs: CostModel,
        clock: Callable[[], float],
        on_first: Told,
        on_end: Told,
        on_block: Callable[[int, bool], None] = lambda block_id, is_there: None,
    ) -> None:
        """`on_block` is told which blocks came to the device, or went from it."""
        num_pages = max((shape.capacity_tokens or _UNBOUNDED_TOKENS) // _PAGE_TOKENS, 1)
        num_host_pages = shape.host_tokens // _PAGE_TOKENS
        self._forest = PrefixForest(
            num_pages,
            _PAGE_TOKENS,
            policy=make_policy(policy, clock, num_pages),
            clock=clock,
            num_host_pages=num_host_pages,
            host_policy=make_policy(policy, clock, max(num_host_pages, 1)),
        )
        self._scheduler = Scheduler(
            self._forest,
            max_batch_tokens=shape.max_batch_tokens,
            max_running=shape.max_running,
            costs=costs if shape.max_step_s < math.inf else None,
            max_step_s=shape.max_step_s,
        )
        self.next_s: float | None = None
        self.busy_s = self._prefilled_s = self._saved_s = 0.0
        self._costs = costs
        self._on_first, self._on_end, self._on_block = on_first, on_end, on_block
        self._changed, self._block_tokens = self._forest.report_changes(), 1
        self._told: dict[Page, frozenset[int]] = {}  # blocks that end in each page
        self._arrivals = itertools.count()
        self._owners: dict[int, Owner] = {}
        self._jobs: dict[int, tuple[Job, Sequence]] = {}  # by the sequence
        self._batch: list[StepRows] = []

    def submit(self, job: Job, now_s: float) -> None:
        turn, arrival = job.turn, next(self._arrivals)
        self._block_tokens = turn.block_tokens
        ids = [token for token in turn.block_ids for _ in range(turn.block_tokens)]
        del ids[turn.input_tokens :]
        sequence = Sequence(
            request=GenerationRequest(
                request_id=str(arrival), prompt_token_ids=(), sampling=_SAMPLING, session_id=str(turn.session)
            ),
            ids=ids,
            num_prompt=len(ids),
            max_tokens=turn.output_tokens,
            arrival=arrival,
            owner=self._owners.setdefault(turn.session, Owner()),
        )
        self._jobs[id(sequence)] = job, sequence
        self._scheduler.add(sequence)
        if self.next_s is None:
            self._step(now_s)

    def cancel(self, job: Job) -> bool:
        """The client has gone: its request is aborted. Return whether it had not begun."""
        job.is_cancelled = True
        sequence = next(sequence for each, sequence in self._jobs.values() if each is job)
        has_begun = sequence.path is not None
        if not has_begun:
            del self._jobs[id(sequence)]
            self._scheduler.remove(sequence)
        return not has_begun

    def status(self) -> Status:
        """See `Replica.status`."""
        streams, left = self._streams_and_left()
        return Status(
            sum(self._costs.prefill_s(num_new, 0) for num_new in left),
            sum(left),
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            sum(len(each.context) for each in streams),
            1 - self._forest.num_in_use / self._forest.num_pages,
        )

    def _streams_and_left(self) -> tuple[list[Sequence], list[int]]:
        """Return who has tokens, and how much is to be computed of each other prompt."""
        streams = [s for s in self._scheduler.running if s.num_output]
        prompts = [s for _, s in self._jobs.values() if not s.num_output]
        return streams, [len(s.context) - (0 if s.path is None else s.path.num_tokens) for s in prompts]

    def load(self, span_s: float) -> ReplicaLoad:
        """See `Replica.load`."""
        streams, left = self._streams_and_left()
        load = ReplicaLoad(
            backlog_s=sum(self._costs.prefill_s(num_new, 0) for num_new in left),
            prefill_share=min(self._prefilled_s / span_s, 1.0),
            kv_share=self._forest.num_in_use / self._forest.num_pages,
            step_s=self._costs.decode_s(len(streams), sum(len(s.context) for s in streams)),
            num_requests=len(self._jobs),
            saved_share=self._saved_s / span_s,
        )
        self._prefilled_s = self._saved_s = 0.0
        return load

    def lose_all(self) -> list[Job]:
        return [job for job, _ in self._jobs.values() if not job.is_cancelled]

    def advance(self, now_s: float) -> None:
        """The step has ended."""
        for part in self._batch:
            if part.samples and part.sequence.path is not None:
                self._append(part.sequence, now_s)
        self._tell()
        self._step(now_s)

    def _tell(self) -> None:
        while self._changed:
            page = self._changed.pop()
            first, size = page.start, self._block_tokens
            ends = range(first - first % size + size, first + page.filled[DEVICE] + 1, size)
            there = frozenset(page.tokens[end - 1 - first] for end in ends if page.tokens[end - 1 - first] >= 0)
            told = self._told.pop(page, frozenset())
            if there:
                self._told[page] = there
            for block_id in told ^ there:
                self._on_block(block_id, block_id in there)

    def _append(self, sequence: Sequence, now_s: float) -> None:
        job, _ = self._jobs[id(sequence)]
        sequence.append(-2 - sequence.arrival)  # nobody else's
        if sequence.num_output == 1:
            job.first_s = now_s
            usage, size = sequence.usage, job.turn.block_tokens
            # The last token of a prompt is always computed.
            cached = usage.cached_tokens + (usage.cached_tokens == job.turn.input_tokens - 1)
            num_found = len(job.turn.block_ids) if cached >= job.turn.input_tokens else cached // size
            num_host = min(usage.host_tokens // size, num_found)
            job.found = [num_found - num_host, num_host]
            self._saved_s += self._costs.prefill_s(usage.cached_tokens, 0)
            self._on_first(job)
        if sequence.num_output >= sequence.max_tokens:
            del self._jobs[id(sequence)]
            self._scheduler.remove(sequence)
            job.ended_s = now_s
            self._on_end(job)

    def _step(self, now_s: float) -> None:
        self.next_s = None
        if self._scheduler.has_work:
            self._batch = self._scheduler.schedule()
            moves = self._forest.drain_moves()
            rows = [(part.num_rows, part.end - part.num_rows) for part in self._batch]
            load_bytes = sum(load.num_tokens for load in moves.loads) * self._costs.calibration.kv_bytes_per_token
            # Layers are loaded beside those that compute.
            step_s = max(self._costs.step_s(rows), self._costs.edge_s("host", load_bytes, len(moves.loads)))
            self.busy_s += step_s
            self._prefilled_s += self._costs.step_s([each for each in rows if each[0] > 1])
            self.next_s = now_s + step_s
