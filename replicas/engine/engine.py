"""The engine: requests in, one batch per step, events out.

    submit -> Sessions.begin -> Scheduler.add          the prompt's ids, exact where the session knows them
    step:  Engine._tidy                                requests whose deadline has passed end
           Scheduler.schedule                          rows under a token budget; pages; the forest
           Runner.prepare                              page tables -> plan, tokens and slots -> tensors
           Runner.forward                              logits of the rows that sample
           Engine._commit                              of the step before: tokens, ends, pages given back, events
           Runner.sample                               a token of each

One thread calls an engine (`EngineLoop` gives it one).

On a GPU a step is launched before the tokens of the one before are known on the host, and sampled behind the commit of
that one, so that the GPU never waits for this thread, and grammars, penalties and stop strings need no special case
(vLLM's asynchronous scheduling does the same but for these). While a step is scheduled, placeholders stand for the
tokens that are on their way: ids below -1, each given once, which nobody sees between two calls of `step`. Pages that
got one learn the token when it is known (`paths.learn`). A step whose outcome decides more than tokens is
committed before the next is scheduled: at once where it loads or reads documents, else when that is known
(`_must_wait`). A sequence that ends unforeseen has one row too many, whose draw is dropped.
On a CPU each step is committed at once, by the same code.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mneme.cachetier.policy.eviction import make_policy
from mneme.errors import DeadlineExceeded, InvalidRequest, MnemeError, Overloaded, TransferFailed
from mneme.primitives import LazyHeap
from mneme.replicas.blend.asked import AskedBeginnings
from mneme.replicas.blend.auto import Controller
from mneme.replicas.blend.blend import Blend, decide
from mneme.replicas.blend.first_report import FirstReport
from mneme.replicas.blend.gate import NO_REPORT, Gate
from mneme.replicas.blend.order import best_order
from mneme.replicas.config import EngineConfig
from mneme.replicas.documents import (
    FIRST_ASKED,
    HISTORY,
    LEARNED_POSITIONS,
    NOT_SHARED,
    SLIDING_WINDOW,
    Declined,
    DocumentSpan,
)
from mneme.replicas.engine.input import QueueLimits, check_request, make_sequence
from mneme.replicas.engine.output import Outbox, finished_turn
from mneme.replicas.engine.pins import ONE_TOKEN, Pins
from mneme.replicas.forest.forest import COPY_OUT_BELOW, PrefixForest
from mneme.replicas.forest.paths import learn
from mneme.replicas.model.draws import GREEDY, Draws, Expected, Sampled, SampleRow
from mneme.replicas.request import GenerationRequest, SessionKey, TokenEvent
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sequence import DecodeRow, End, Sequence, StepRows
from mneme.replicas.sessions.durable import DurableSessions
from mneme.replicas.sessions.session_pages import abandon_roots
from mneme.replicas.sessions.sessions import Sessions
from mneme.replicas.sessions.token_log import FinishedTurn, TokenLog, TurnPrompt, root_turn, turn_name
from mneme.replicas.text.matcher import Grammars

if TYPE_CHECKING:
    import torch

    from mneme.cachetier.policy.cost_model import CostModel
    from mneme.replicas.connector.connector import KvConnector
    from mneme.replicas.model.runner import Runner
    from mneme.replicas.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BLOCKED_S = 0.0005  # how often who drives an engine that is blocked looks whether it still is
_FAILED = "the engine failed; the request was not completed"
_FIRST_PLACEHOLDER, _LAST_PLACEHOLDER = -2, -(1 << 30)  # pages keep ids in 32 bits


@dataclass(slots=True, kw_only=True)
class _Flight:
    """Holds a step that was launched and whose tokens are not known to the host yet."""

    batch: list[StepRows]
    sampling: list[Sequence] = field(init=False)  # those of the batch that get a token
    draws: Draws = field(init=False)
    began_s: float
    is_special: bool  # documents or reads of prompts: committed at once, as its outcome decides more than tokens
    has_loads: bool  # of pages; likewise
    is_timed: bool = True  # what it took is what such a step costs
    # Sequence, its row in the draws, and what stood for its token while the next step was scheduled.
    expected: list[tuple[Sequence, int, int]] = field(default_factory=list)
    ending: set[Sequence] = field(default_factory=set)  # with the token that is on its way

    def __post_init__(self) -> None:
        self.sampling = [part.sequence for part in self.batch if part.samples]


class Engine:
    """Runs one model on one device."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_new_tokens: int | None = None,
        connector: KvConnector | None = None,
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        durable: DurableSessions | None = None,
        gate: Gate = NO_REPORT,
        first_report: FirstReport | None = None,
        recovers: bool = True,
        copy_out_below: float = COPY_OUT_BELOW,
        on_close: Callable[[], None] | None = None,
        start_phases: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Make an engine.

        max_new_tokens  what the model says of requests without a limit of their own
        connector  the cache tier, which the runner uses too
        costs      what its work costs, which learns from its steps; None: the connector's, and without one nothing is
                   predicted
        durable    the logs of sessions
        gate       says what of documents may be reused in place where a request leaves that to the engine
        first_report  has that measured where it is not known
        copy_out_below  `PrefixForest`'s
        recovers   whether a step for which the device has no memory is computed again; else it raises
        start_phases  seconds and bytes of each phase of loading it, as `StartReport` has them
        """
        self.start_phases = start_phases or {}
        self.runner, self.connector, self.durable = runner, connector, durable
        self.costs = costs if costs is not None or connector is None else connector.costs
        self._on_close, self._recovers, self._first_report = on_close, recovers, first_report
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < runner.vocab_size)
        self._max_new_tokens = max_new_tokens
        self.grammars = Grammars(tokenizer, runner.vocab_size)
        self.clock = clock
        self.forest = make_forest(runner, config, clock, copy_out_below)
        self.scheduler = Scheduler(
            self.forest,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            attention_mass=getattr(runner, "attention_mass", None),
            costs=self.costs,
            max_step_s=None if config.max_step_ms is None else config.max_step_ms / 1e3,
        )
        self.sessions = Sessions(
            self._encode,
            clock,
            ttl_s=config.session_ttl_s,
            max_sessions=config.max_sessions,
            end_token_ids=self._eos_token_ids,
            decode=None if tokenizer is None else tokenizer.decode,
            on_drop=lambda log: self.forest.abandon(log.root, owner=log),
            on_delete=self.delete_kv,
            log_writer=None if durable is None else durable.writer,
        )
        self._blends, self._asked = Controller(gate, self.costs), AskedBeginnings()
        self._cannot_blend = None if config.prefix_sharing else NOT_SHARED
        if runner.immovable is not None:
            self._cannot_blend = SLIDING_WINDOW if runner.immovable == "sliding_window" else LEARNED_POSITIONS
        self.max_context = min(runner.max_context, config.max_context or runner.max_context)
        self.pins = Pins(
            self.forest,
            self.scheduler,
            self.sessions,
            max_context=self.max_context,
            submit=self.submit,
            abort=self.abort,
            clock=clock,
        )
        self._sequence_by_id: dict[str, Sequence] = {}
        self._arrivals = itertools.count()
        self.limits = QueueLimits(self.scheduler.waiting, self.sessions.queued, config, clock)
        self._timeout_s = config.request_timeout_s
        self.deadlines = LazyHeap[str]()  # of requests
        self._outbox = Outbox(on_end=self.deadlines.discard, clock=clock)
        # The parties to the end of a sequence, in order: chunks are saved while it has its pages, and its prompt is
        # pinned before one of them can go. Its session comes last: the next turn begins when all else is done.
        self._parties: tuple[Callable[[End], None], ...] = (
            *(() if connector is None else (connector.ended,)),
            self.scheduler.ended,
            self._end_children,
            self._outbox.ended,
            self.pins.ended,
            self._compute_asked,
        )
        self.num_tokens = self._outbox.num_tokens  # "prompt", "cached", "generated", "computed" of prompts
        self.num_finished = self._outbox.num_finished  # by finish_reason
        self.blends = self._outbox.blends
        self.explanations = self._outbox.explanations
        self.num_steps = 0
        self._flight: _Flight | None = None
        self._next_placeholder = _FIRST_PLACEHOLDER
        self._committed_s = -math.inf  # when the tokens of the last step were there
        self.num_ahead = 0  # steps that were launched before the tokens of the one before were known
        self.num_missed_deadlines = 0
        # Called with the sequences of a step that sample and logits [S, vocab]; returns what is sampled from.
        self.on_logits: Callable[[list[Sequence], torch.Tensor], torch.Tensor] | None = None

    @property
    def sink_ids(self) -> tuple[int, ...]:
        """Return the tokens behind which documents are computed apart."""
        return () if self._tokenizer is None else tuple(self._tokenizer.sink_ids)

    @property
    def gate(self) -> Gate:
        """Return what of documents may be reused in place where a request leaves that to the engine."""
        return self._blends.gate

    def measure_quality(self, *, is_idle: bool) -> None:
        """Let the model's first report be measured while there is nothing else to do."""
        if self._first_report is not None and (gate := self._first_report.poll(is_idle=is_idle)) is not None:
            self._blends.gate = gate

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that is sure to finish."""
        return min(self.max_context, self.forest.capacity)

    @property
    def is_blocked(self) -> bool:
        """Return whether a step would do nothing yet: all there is waits for the cache tier, for some milliseconds."""
        return not self._outbox and self._flight is None and self.scheduler.is_blocked

    @property
    def has_work(self) -> bool:
        has_any = self.scheduler.has_work or self._flight is not None or bool(self._outbox)
        return has_any or (self.forest.store.wants_copies and self.runner.can_copy)

    @property
    def in_flight(self) -> dict[str, int]:
        """Every request that was taken and has not ended, by id, with its output tokens so far."""
        queued = dict.fromkeys(self.sessions.queued.request_ids, 0)
        children = self.scheduler.gathering.parent_by_child
        started = {request_id: s.num_output for request_id, s in self._sequence_by_id.items() if s not in children}
        return queued | started

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; its events come from `step`.

        Raises `InvalidRequest`, `ContextLengthExceeded` or `Overloaded`; nothing is then left of it.
        """
        self.limits.check(request)
        if request.request_id in self._sequence_by_id or request.request_id in self.sessions.queued:
            raise InvalidRequest("request_id", request.request_id, "is already running")
        check_request(request, self.runner.vocab_size, self.max_context, immovable=self.runner.immovable)
        # Sessions and forest keep the salt: once per tenant.
        request = replace(request, salt=sys.intern(request.salt), taken_s=self.clock())
        if request.documents:
            request = request.in_order(best_order(request, self.forest, self._asked))
        try:
            prompt = self.sessions.begin(request)
        except Overloaded as error:  # too many turns of its session
            raise self.limits.refusal("session", str(error)) from error
        if prompt is not None:
            try:
                self._start(request, prompt)
            except Exception:
                self._begin_next(self.sessions.end(request, None))
                raise
        timeout_s = self._timeout_s if request.timeout_s is None else request.timeout_s
        if timeout_s is not None:
            self.deadlines.push(request.request_id, self.clock() + timeout_s)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its pages stay cached. Unknown ids are ignored."""
        self._end(request_id, "abort")

    def step(self) -> list[TokenEvent]:
        """Run one batch; returns what happened to each request, in order, since the last call.

        After a fault of the host tier, or where the device's memory did not do, all that ran is computed again.
        """
        try:
            self._step()
        except TransferFailed:
            self._compute_again("the host tier failed")
        except Exception as error:
            if not (self._recovers and self.runner.is_out_of_memory(error)):
                raise
            self.scheduler.shrink()
            self.runner.free_memory()
            self._compute_again("the device is out of memory")
        return self.pop_events()

    def _step(self) -> None:
        self._tidy()
        before = self._pop_flight()
        try:
            with self._expecting(before) as expected:
                batch = self.scheduler.schedule(() if before is None else before.ending)
                self._outbox.mark_begun(batch)
                flight, logits = self._launch(batch, expected)
        except BaseException:
            if before is not None:  # its tokens are right
                self._commit(before)
            raise
        if before is not None:
            self._commit(before)
        self._flight = self._sample(flight, logits)
        self.num_ahead += before is not None
        # What a step loads may not come, and nobody else is to hold it before that is known.
        if not (self.runner.runs_ahead and batch) or self._flight.is_special or self._flight.has_loads:
            self._commit_flight()

    def _commit_flight(self) -> None:
        """Commit the step that is under way, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._commit(flight)

    def _pop_flight(self) -> _Flight | None:
        """Take the step under way; None if there is none, or if it had to be committed before anything is scheduled."""
        if self._flight is not None and self._must_wait(self._flight):
            self._flight.is_timed = False  # it may have been done for long
            self._commit_flight()
        flight, self._flight = self._flight, None
        return flight

    def _must_wait(self, flight: _Flight) -> bool:
        """Return whether what is scheduled next depends on more of a step than the ids of its tokens."""
        if self.scheduler.gathering:
            return True
        return any(sequence.view.is_over(len(sequence.context) + 1) for sequence in flight.sampling)

    @contextmanager
    def _expecting(self, flight: _Flight | None) -> Iterator[Expected | None]:
        """Within, a placeholder stands for each token that a step drew; who ends with that token has no more rows."""
        if flight is None:
            yield None
            return
        first = self._next_placeholder
        self._next_placeholder -= len(flight.draws)
        if self._next_placeholder < _LAST_PLACEHOLDER:
            self._next_placeholder = _FIRST_PLACEHOLDER
        expected = Expected(flight.draws, first)
        for row, sequence in enumerate(flight.sampling):
            if sequence.has_ended:
                continue
            if sequence.num_output + 1 >= sequence.max_tokens:
                flight.ending.add(sequence)  # whatever the token is
                continue
            flight.expected.append((sequence, row, expected.placeholder(row)))
            sequence.ids.append(expected.placeholder(row))
            if sequence.context is not sequence.ids:
                sequence.context.append(expected.placeholder(row))
        try:
            yield expected
        finally:
            for sequence, _, placeholder in flight.expected:
                token_id = sequence.ids.pop()
                assert token_id == placeholder
                if sequence.context is not sequence.ids:
                    sequence.context.pop()

    def _launch(self, batch: list[StepRows], expected: Expected | None) -> tuple[_Flight, torch.Tensor]:
        """Launch a step's moves and its forward pass; returns its logits, float32 [rows that sample, vocab]."""
        moves = self.forest.store.drain_moves(can_copy=self.runner.can_copy)
        began_s, children = self.clock(), self.scheduler.gathering.parent_by_child
        saves = [] if self.connector is None or self.runner.runs_ahead else self.connector.begin_step(batch)
        logits = self.runner.forward(self.runner.prepare(batch, moves, saves, expected))
        flight = _Flight(
            batch=batch,
            began_s=began_s,
            is_special=any(part.is_special or part.sequence in children for part in batch if not part.is_plain),
            has_loads=bool(moves.loads or moves.grafts),
        )
        return flight, logits

    def _sample(self, flight: _Flight, logits: torch.Tensor) -> _Flight:
        """Launch the draws of a step, once all is known that they depend on, and copies of its chunks behind them."""
        if self.on_logits is not None:
            logits = self.on_logits(flight.sampling, logits)
        # Of one that has ended nobody wants the token.
        sampling = flight.sampling
        rows = [GREEDY if (s.row or s.drawing).is_greedy or s.has_ended else _sample_row(s) for s in sampling]
        flight.draws = self.runner.sample(logits, rows)
        if self.connector is not None and self.runner.runs_ahead:
            self.connector.save_launched(flight.batch)
        return flight

    def turn_so_far(self, key: SessionKey) -> tuple[FinishedTurn, GenerationRequest] | None:
        """Return what the first choice of the session's running turn has, if it runs."""
        first = self._first_choice(key)
        return None if first is None else (finished_turn(first, self._tokenizer), first.request)

    def fork(self, key: SessionKey, new_key: SessionKey) -> None:
        """Make a new session with a session's past, which then owns its pages too; raises as `Sessions.fork` does."""
        self.sessions.fork(key, new_key, self.turn_so_far(key))
        first, fork = self._first_choice(key), self.sessions.get(new_key)
        if fork is not None and fork.seen is None:  # a truncated one has ids only
            self.forest.claim(fork, None if first is None else first.path, self.sessions.get(key))

    def delete_kv(self, key: SessionKey, log: TokenLog) -> None:
        """Delete a session's pages, and the exact copy of what was asked again."""
        self.keep_nothing(lambda sequence: self.scheduler.gathering.asker(sequence).owner is log)
        self.forest.delete(log, log.root, key[0], log.ids)

    def keep_nothing(self, is_meant: Callable[[Sequence], bool]) -> None:
        """Save nothing more of what runs, nor copy it exactly: that would come after its deletion."""
        for sequence in [each for each in self._sequence_by_id.values() if is_meant(each)]:
            sequence.chain, sequence.blend.is_forgotten = None, True
            if self.scheduler.gathering.asker(sequence).has_ended:  # a copy: nobody waits for it
                self._finish(sequence, "abort")

    def _first_choice(self, key: SessionKey) -> Sequence | None:
        """Find the first choice of the session's running turn."""
        log = self.sessions.get(key)
        ids = [] if log is None or log.running is None else log.running.answering
        sequences = [self._sequence_by_id[request_id] for request_id in ids if request_id in self._sequence_by_id]
        return next((s for s in sequences if s.request.choice_index == 0), None)

    def fail_all(self, message: str) -> list[TokenEvent]:
        """End every request with "error" after a step that raised; no page is trusted any more."""
        self._flight = None
        if self.connector is not None:
            self.connector.abandon()
        children = self.scheduler.gathering.parent_by_child
        # What is computed for others first: a parent would end it as "abort", whose KV is saved, or not at all.
        for sequence in sorted(self._sequence_by_id.values(), key=lambda each: each not in children):
            if not sequence.has_ended:
                self._finish(sequence, "error", message)
        self.forest.clear(is_trusted=False)
        self.pins.renew()
        return self.pop_events()

    def _start(self, request: GenerationRequest, prompt: TurnPrompt, parent: Sequence | None = None) -> None:
        sequence = make_sequence(
            request,
            prompt,
            self._tokenizer,
            owner=self.sessions.owner_of(request),
            capacity=self.capacity,
            max_context=self.max_context,
            max_new_tokens=self._max_new_tokens,
            arrival=next(self._arrivals),
            eos_token_ids=self._eos_token_ids,
            grammars=self.grammars,
        )
        sequence.blend = self._blend(sequence, is_approximate=bool(sequence.view.event) and prompt.is_blended)
        leader = self._leader(sequence)
        missing: list[list[int]] = []
        if leader is None:
            has_history = sequence.root is not None
            missing = sequence.blend.missing(sequence.context, self.forest, has_history=has_history)
        if self.connector is not None:
            # What it reuses of documents is asked for by itself; after a restart a tier may have all of it, exactly.
            is_alone, asks = not self.scheduler.has_work, not sequence.blend.spans or bool(sequence.blend.first_asked)
            self.connector.look_up(sequence, self.forest, is_alone=is_alone, asks=asks)
        self.scheduler.add(sequence, parent=parent, leader=leader, num_missing=len(missing))
        self._sequence_by_id[request.request_id] = sequence
        new = [[*self.sink_ids, *sequence.context[span.start : span.end]] for span in sequence.blend.first_asked]
        for index, ids in enumerate(missing):
            name, is_only_found = f"child-{index}", ids in new
            self._start_child(sequence, name, ids, is_only_found=is_only_found, taken_s=request.taken_s)

    def _start_child(
        self, parent: Sequence, name: str, ids: list[int], *, is_only_found: bool = False, **more: Any
    ) -> None:
        """Compute a prompt that a sequence needs or leaves; nobody else hears of it."""
        request = parent.request
        child = GenerationRequest(
            request_id=f"{request.request_id}/{name}",
            prompt_token_ids=tuple(ids),
            sampling=ONE_TOKEN,
            salt=request.salt,
            **more,
        )
        self._start(child, TurnPrompt(ids, ids, None, 0), parent)
        if is_only_found:
            self._sequence_by_id[child.request_id].is_only_found = True

    def _blend(self, sequence: Sequence, *, is_approximate: bool) -> Blend:
        """Say how a sequence uses documents. `is_approximate`: its session's earlier turns reuse some in place."""
        cannot = self._cannot_blend if sequence.request.documents else HISTORY
        num_asked = 0 if cannot else self._num_asked(sequence)
        first_asked = () if cannot else self._first_asked(sequence)
        decided = cannot or decide(
            sequence.request,
            self.sink_ids,
            capacity=self.capacity,
            num_layers=self.runner.num_layers,
            controller=self._blends,
            num_tokens=len(sequence.context),
            num_exact=self._num_exact(sequence),
            num_again=0 if self._can_wait(sequence, num_asked) else num_asked,
            unknown=first_asked if self.connector is None else (),
        )
        if isinstance(decided, Declined):
            declined = Blend(declined=decided, is_history_approximate=is_approximate)
            declined.first_asked = first_asked if decided is FIRST_ASKED else ()
            return declined
        if first_asked:  # which are computed as text
            decided.first_asked, decided.predicted_s = first_asked, None
        decided.is_history_approximate = is_approximate and sequence.root is not None  # else that is computed exactly
        decided.num_asked = num_asked if sequence.request.blend.mode == "auto" else 0
        return decided

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """Find the first choice of a turn, if the turn is blended for that one and has no answer yet."""
        if not sequence.blend.spans:
            return None
        request = sequence.request
        first = self._sequence_by_id.get(f"{turn_name(request)}.0")
        is_ahead = first is not None and first is not sequence and first.num_output == 0 and bool(first.blend.spans)
        return first if is_ahead and first is not None and first.context == sequence.context else None

    def _num_exact(self, sequence: Sequence) -> int:
        """Count the tokens that it need not compute, from the first on."""
        if sequence.root is not None:
            return sequence.view.num_history
        return sum(self.forest.resident(sequence.request.salt, sequence.context))

    def _num_asked(self, sequence: Sequence) -> int:
        """Count the tokens that another prompt began with, up to a border of a document; none behind KV of its own."""
        if sequence.root is not None:
            return 0
        request = sequence.request
        return self._asked.record(request.salt, sequence.context, request.documents, root_turn(request))

    def _first_asked(self, sequence: Sequence) -> tuple[DocumentSpan, ...]:
        """Return documents without KV here that no other turn asked for: to compute them first would cost this one."""
        request, turn = sequence.request, root_turn(sequence.request)
        if request.blend.mode != "auto":
            return ()
        whole = [span for span in request.documents if request.blend.is_long(span)]
        ids = {span: sequence.context[span.start : span.end] for span in whole}
        new = [span for span in whole if self._asked.is_new(request.salt, ids[span], turn)]
        salt, sink_ids = request.salt, self.sink_ids
        return tuple(span for span in new if not self._has_all(salt, [*sink_ids, *ids[span]]))

    def _has_all(self, salt: str, ids: list[int]) -> bool:
        return sum(self.forest.resident(salt, ids)) == len(ids)

    def _can_wait(self, sequence: Sequence, end: int) -> bool:
        """Return whether its first tokens may be computed when it has ended: if documents among them have KV.

        Not if they are being computed now: it follows that.
        """
        request, context = sequence.request, sequence.context
        if self._is_coming(request.salt, context[:end]):
            return False
        wholes = [span for span in request.documents if span.end <= end and request.blend.is_long(span)]
        prompts = [[*self.sink_ids, *context[span.start : span.end]] for span in wholes]
        return bool(prompts) and all(self._has_all(request.salt, ids) for ids in prompts)

    def _is_coming(self, salt: str, ids: list[int]) -> bool:
        """Return whether a child computes a prompt that begins so."""
        requests = (child.request for child in self.scheduler.gathering.parent_by_child)
        wanted = salt, tuple(ids)
        return any((request.salt, request.prompt_token_ids[: len(ids)]) == wanted for request in requests)

    def _tidy(self) -> None:
        """Do what goes before each step; no placeholder is anywhere."""
        self.limits.measure_queue()
        self._expire()
        if self.connector is not None:
            self.connector.look_again(self.scheduler.waiting.unstarted, self.forest)
            self._end_needless_children()

    def _end_needless_children(self) -> None:
        """End children that nobody need wait for: no tier has the document, or one has the prompt, exactly."""
        gathering = self.scheduler.gathering
        for child, parent in list(gathering.parent_by_child.items()):
            if parent not in gathering:
                continue
            if parent.load is not None and not parent.load.is_asking and not parent.is_found_whole:
                parent.drop_load()
            load = child.load
            is_late = load is not None and load.is_asking and load.left_s() <= 0  # nobody says in time
            is_lacking = child.is_only_found and (load is None or is_late or (load.is_decided and not load.spans))
            if not self._outbox.has_begun(child) and (is_lacking or parent.is_found_whole):
                self._finish(child, "abort")

    def _commit(self, flight: _Flight) -> None:
        """Wait for a step's tokens, and give them to its sequences."""
        batch, sampling, sampled = flight.batch, flight.sampling, flight.draws.wait()
        began_s, self._committed_s = max(flight.began_s, self._committed_s), self.clock()
        self._learn_tokens(flight, sampled)
        if not any(type(part) is not DecodeRow and part.sequence.request.is_warm_up for part in batch):
            self.num_steps += 1
            self.num_tokens["computed"] += sum(part.num_rows - part.samples for part in batch if not part.is_plain)
        if self.connector is not None:
            outcomes = zip(sampling, sampled, strict=True)
            unsound = {sequence for sequence, outcome in outcomes if outcome.token_id is None}
            self.connector.end_step(unsound, self.scheduler.retract, has_loads=flight.has_loads)
        is_timed = flight.is_timed and not flight.has_loads  # else it may have waited
        if is_timed:
            self._learn(batch, self._committed_s - began_s)
        if flight.is_special:
            self._time_blends(batch, self._committed_s - began_s if is_timed else None)
        for part, scores in self.runner.pop_scores() if flight.is_special else ():
            sequence = part.sequence
            if sequence.path is not None and sequence.blend.add_scores(scores, is_last=part.is_last):
                self.scheduler.reopen(sequence)
        for part, left in self.runner.pop_departures() if flight.is_special else ():
            if part.sequence.path is not None:
                part.sequence.blend.add_departures(part.sequence.path, part.positions[part.narrowed], left)
        for sequence, outcome in self._outbox.append_next(sampling, sampled):
            # One that went back as its chunks did not come computes this token again; one that was suspended does not.
            if sequence.has_ended or (sequence.path is None and flight.has_loads):
                continue
            try:
                self._append(sequence, outcome)
            except Exception:  # one request may fail, the batch may not
                logger.exception("commit failed request_id=%s", sequence.request.request_id)
                self._finish(sequence, "error", _FAILED)

    def _learn_tokens(self, flight: _Flight, sampled: list[Sampled]) -> None:
        """Let pages know the tokens whose placeholders they got."""
        learned = []
        for sequence, row, placeholder in flight.expected:
            path, token_id = sequence.path, sampled[row].token_id
            if token_id is not None and path is not None and path.num_tokens > len(sequence.context):
                learned.append((path, placeholder, token_id))
        learn(learned)

    def _learn(self, batch: list[StepRows], took_s: float) -> None:
        """Let the costs know what a step took. Some rows of a blend see less than a prompt's, or leave early."""
        if self.costs is None:
            return
        rows = [
            (part.num_rows, part.end - part.num_rows)
            for part in batch
            if not (part.is_shifted or part.num_compared or part.sequence.request.leaves_nothing)
        ]
        if rows and len(rows) == len(batch):
            self.costs.learn_step(rows, took_s)

    def _time_blends(self, batch: list[StepRows], took_s: float | None) -> None:
        """Let the controller know what a blend took up to its first token, if no step of that was others' too."""
        for part in batch:
            blend = part.sequence.blend
            if took_s is None or len(batch) > 1:
                blend.predicted_s = None
            elif blend.predicted_s:
                blend.took_s += took_s
                if part.samples and not part.sequence.num_output:
                    self._blends.learn(blend.predicted_s, blend.took_s)

    def _compute_again(self, why: str) -> None:
        """Queue what ran to be computed again: the step failed, so no page is trusted."""
        logger.exception("%s requests=%s", why, [s.request.request_id for s in self.scheduler.running])
        if self.connector is not None:
            self.connector.abandon()
        for sequence in self.scheduler.retract_all():
            if not sequence.has_ended:  # else it ended with whom it was computed for
                self._finish(sequence, "error", _FAILED)
        self.pins.renew()

    def _append(self, sequence: Sequence, outcome: Sampled) -> None:
        matcher, grammar = sequence.drawing.matcher, sequence.request.sampling.grammar
        if outcome.token_id is not None:
            sequence.append(outcome.token_id)
        if matcher is not None and matcher.error is not None and grammar is not None:
            self._finish(sequence, "error", InvalidRequest(grammar.field, None, matcher.error))
            return
        if outcome.token_id is None:
            self._finish(sequence, "error", "the model's logits are not finite")
            return
        if sequence.num_output == 1:
            self.scheduler.gathering.release_followers(sequence)
        sequence.drawing.logprobs.extend([outcome.logprobs] if outcome.logprobs else [])
        reason = sequence.finish_reason(outcome.token_id)
        if reason is None:
            self._outbox.report(sequence)
        else:
            self._finish(sequence, reason)

    def _expire(self) -> None:
        """End what has missed its deadline, waiting or running; a session keeps what the turn has so far."""
        for request_id in self.deadlines.pop_below(self.clock()) if self.deadlines else ():
            self.num_missed_deadlines += 1
            self._end(request_id, "error", DeadlineExceeded())

    def _end(self, request_id: str, reason: str, refusal: MnemeError | None = None) -> None:
        sequence = self._sequence_by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, reason, refusal)
        elif self.sessions.queued.cancel(request_id) is not None:
            self._outbox.report_unstarted(request_id, reason, refusal)

    def _finish(self, sequence: Sequence, reason: str, error: str | MnemeError | None = None) -> None:
        """End a sequence. `error`: a message where the engine failed, a `MnemeError` where the request is sound."""
        end = End(sequence, reason, error, self.scheduler.gathering.parent_by_child.get(sequence))
        has_session = sequence.request.session_id is not None
        kept = finished_turn(sequence, self._tokenizer) if has_session and end.is_sound else None
        del self._sequence_by_id[sequence.request.request_id]
        sequence.has_ended = True
        for party in self._parties:
            party(end)
        before = sequence.owner.root if isinstance(sequence.owner, TokenLog) else None
        following = self.sessions.end(sequence.request, kept)
        abandon_roots(self.forest, before, sequence, {each.root for each in self._sequence_by_id.values()})
        self._begin_next(following)

    def _end_children(self, end: End) -> None:
        """End the sequences that nobody waits for any more: its own children, and those that compute what it has."""
        request, is_found = end.sequence.request, end.parent is not None and end.reason in ("stop", "length")
        for child, parent in list(self.scheduler.gathering.parent_by_child.items()):
            is_same = child.request.salt == request.salt and child.request.prompt_token_ids == request.prompt_token_ids
            if parent is end.sequence or (is_found and is_same):
                self._finish(child, "abort")

    def _compute_asked(self, end: End) -> None:
        """Compute exactly what two prompts began with, once the second has its answer: from now on it is found.

        If nobody waits, all that a prompt reused documents in, as without reuse it would be found too, and by
        themselves the documents that were asked for the first time.
        """
        sequence, blend = end.sequence, end.sequence.blend
        if end.reason not in ("stop", "length") or sequence.request.choice_index or blend.is_forgotten:
            return
        salt, ids, is_idle = sequence.request.salt, sequence.context[: self.capacity - 1], not self.scheduler.has_work
        for index, span in enumerate(blend.first_asked if is_idle else ()):
            alone = [*self.sink_ids, *ids[span.start : span.end]]
            if not self._has_all(salt, alone):
                self._start_child(sequence, f"document-{index}", alone, taken_s=self.clock())
        is_own = sequence.request.blend.mode == "auto" and is_idle and blend.uses and blend.base is None
        num_wanted = blend.spans[-1].end if is_own else blend.num_asked
        is_known = sum(self.forest.resident(salt, ids)) >= num_wanted
        if num_wanted and not is_known and not self._is_coming(salt, ids[:num_wanted]):
            is_all = num_wanted >= blend.spans[-1].end
            self._start_child(sequence, "exact", ids if is_all else ids[:num_wanted], taken_s=self.clock())

    def _begin_next(self, turn: list[GenerationRequest]) -> None:
        """Start a session's next turn; what cannot run is answered with its error, and the turn after it follows."""
        unstarted = deque(turn)
        while unstarted:
            request = unstarted.popleft()
            try:
                prompt = self.sessions.begin(request)
                assert prompt is not None, "the turn is this request's"
                self._start(request, prompt)
            except Exception as error:
                refusal = error if isinstance(error, MnemeError) else None
                if refusal is None:
                    logger.exception("start failed request_id=%s", request.request_id)
                self._outbox.report_unstarted(request.request_id, "error", refusal)
                unstarted.extend(self.sessions.end(request, None))

    def close(self) -> None:
        """Give back the host tier's memory and thread. The engine is not used again; what ran has no answer."""
        for part in (self._first_report, self.runner, self.connector, self.durable):
            if part is not None:
                part.close()
        if self._on_close is not None:
            self._on_close()

    def pop_events(self) -> list[TokenEvent]:
        """Take the events since the last call; `step` returns them too."""
        return self._outbox.pop_events()

    def _encode(self, text: str) -> list[int]:
        """Encode text that goes on where other text ended."""
        assert self._tokenizer is not None, "only requests with text match by text"
        return self._tokenizer.encode_continuation(text)


def _sample_row(sequence: Sequence) -> SampleRow:
    """Say how the next token of a sequence is drawn."""
    request, drawing = sequence.request, sequence.drawing
    first = sequence.num_prompt - request.output_offset
    barred_ids, mask = drawing.limits(sequence.ids, first, sequence.num_output)
    return SampleRow(
        params=request.sampling,
        seed=request.sampling.seed or 0,
        choice_index=request.choice_index,
        position=request.output_offset + sequence.num_output,
        barred_ids=barred_ids,
        mask=mask,
        seen=drawing.seen,
        drawn=drawing.drawn,
    )


def make_forest(
    runner: Runner, config: EngineConfig, clock: Callable[[], float], copy_out_below: float = COPY_OUT_BELOW
) -> PrefixForest:
    """Make the forest over the runner's pages, as configured."""
    return PrefixForest(
        runner.num_pages,
        runner.page_size,
        sharing=config.prefix_sharing,
        first_page=runner.first_page,
        policy=make_policy(config.eviction, clock, runner.num_pages),
        clock=clock,
        num_host_pages=runner.num_host_pages,
        host_policy=make_policy(config.eviction, clock, runner.num_host_pages),
        copy_out_below=copy_out_below,
        window=runner.window,
    )
