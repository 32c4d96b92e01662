"""One thread that drives one engine, and the thread-safe calls around it: submit_many, abort, query, subscribe, stats.

Other threads never touch the engine. They leave commands in an inbox that the loop empties before each step;
`submit_many` waits for its answers, which come within one step. Idle, the thread sleeps on a condition.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from mneme.errors import InvalidRequest, MnemeError, ReplicaUnavailable
from mneme.primitives import Workers
from mneme.replicas.engine.commands import ManagedChunks, answer, chunk_tier_of
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.engine.output import Deliver, Subscriber, WithheldEvents
from mneme.replicas.engine.reporter import IDLE_REPORT_S, REPORT_S, Reporter
from mneme.replicas.engine.stats import beside_steps, engine_stats, rss_bytes
from mneme.replicas.queries import FlushSaves, Query
from mneme.replicas.request import GenerationRequest, SessionKey, TokenEvent, session_key
from mneme.replicas.sessions.token_log import RecalledSession

logger = logging.getLogger(__name__)

# How long a step may take until no more requests are sent here, and until it counts as hung and the replica is to be
# replaced: one in which kernels are compiled takes seconds. Where the longest is predicted to take more than the last,
# as of a large model on a CPU, both are longer in proportion.
STALLED_S, HUNG_S, _LONGEST_S = 8.0, 60.0, 2.0
_ALIVE_CHECK_S = 1.0  # how often who waits for an answer looks whether the thread still lives
_COPYING_S = 0.01  # how often an idle engine looks whether its last copies are done, and more may follow
_END_S = 1.0  # what its thread has left to do then
# How long a thread that sends events may keep the interpreter from the engine's, between two of whose operators it
# takes it. With Python's 5 ms a step of mneme-tiny beside 16 streams takes a tenth longer, with less than this too.
_SWITCH_S = 0.0005
_IDLE_S = 30.0  # how often an idle engine looks for sessions that have expired
_STATS_S = 0.05  # how old they may be while steps follow each other; at 128 sequences they take 0.1 ms of each step
# Python's own (700, 10, 10) look for cycles in each step of 128 sequences, for 0.1 ms, and find none. Young objects are
# looked at when there is nothing to do.
_COLLECT_AFTER = (20_000, 20, 50)
_YOUNG = 700  # from so many on

T = TypeVar("T")


class EngineLoop:
    """Owns an engine from `start` to `stop`."""

    def __init__(self, engine: Engine, thread: Workers | None = None, *, node: str = "") -> None:
        """`thread` is the one that made the engine; None: another one steps it. `node`: whose cache tier it uses."""
        self.engine = engine
        self.durable = engine.durable
        self.chunk_tier: ManagedChunks | None = chunk_tier_of(engine.connector)
        self.epoch = uuid.uuid4().hex
        self.reporter = Reporter(engine, self.epoch, node if self.chunk_tier is not None else "")
        self._condition = threading.Condition()
        if engine.connector is not None:
            engine.connector.set_on_answer(self._wake)
        self._inbox: list[Callable[[], None]] = []
        self._stopping = False
        self._subscribers: dict[str, Subscriber] = {}
        self._subscriber_by_request: dict[str, str] = {}
        self._of_sessions: set[str] = set()  # requests
        after = None if engine.durable is None else engine.durable.writer.after
        self._withheld = WithheldEvents(self._send, after)
        self._thread = thread or Workers("engine", 1)
        self._is_running, self._has_ended = False, threading.Event()
        self._step_s = 0.0  # duration of the last step
        self._busy_since_s: float | None = None  # None: the thread waits for something to do
        self._stats: dict[str, Any] = {}
        self._stats_due_s = 0.0

    def start(self) -> None:
        self._gather_stats()
        _process.tune()
        self._is_running = True
        self._thread.run(self._run)

    def stop(self) -> None:
        """End every request as "abort", deliver that, and end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        while self._is_running and not self._has_ended.wait(_ALIVE_CHECK_S) and self.late_s < HUNG_S:
            pass
        self._thread.close(_END_S)

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[MnemeError | None]:
        """Hand over requests; per request None if it was taken, else why not. The engine answers between two steps."""
        recalled = self._recall(session_key(request) for request in requests)
        for grammar in {each.sampling.grammar for each in requests if each.sampling.grammar is not None}:
            with suppress(InvalidRequest):  # which the engine raises too; here no step waits for the compiler
                self.engine.grammars.check(grammar)
        try:
            return self._ask(lambda: self._submit_all(requests, recalled))
        except ReplicaUnavailable as error:
            return [error for _ in requests]

    def check_health(self) -> None:
        """Return once the engine's thread has answered; raises `ReplicaUnavailable` if it has ended, or hangs."""
        self._ask(lambda: None)

    @property
    def late_s(self) -> float:
        """How long the thread is at its step, or what else it does, to be compared with the limits; from any thread."""
        since_s, costs = self._busy_since_s, self.engine.costs
        if since_s is None:
            return 0.0
        longest_s = 0.0 if costs is None else costs.prefill_s(costs.step_rows, self.engine.max_context)
        return (time.perf_counter() - since_s) / max(1.0, longest_s / _LONGEST_S)

    @property
    def is_stalled(self) -> bool:
        """Return whether the thread takes so long that nothing should be sent here, or has ended."""
        return self._has_ended.is_set() or self.late_s > STALLED_S

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        self._post(lambda: self._abort(request_ids))

    def hand_over(self) -> int:
        """End every request as "abort" once what it has computed is in the cache tier; returns how many there were.

        Whoever goes on with them elsewhere finds it there. The engine takes requests still: who calls refuses them.
        """

        def end_all() -> list[TokenEvent]:
            self._abort(list(self._subscriber_by_request))
            return self.engine.pop_events()

        try:
            events = self._ask(end_all)
        except ReplicaUnavailable:  # it has stopped, and ended them
            return 0
        self.query(FlushSaves())  # an error says that it takes long: they are computed again then
        self._post(lambda: self._deliver(events))
        return sum(event.finish_reason == "abort" for event in events)

    def query(self, query: Query[T]) -> T | MnemeError:
        """Answer a question, or return the error that it raises.

        It runs on the caller's thread: what the cache tier says of KV may take milliseconds.
        """
        try:
            return answer(self, query)
        except MnemeError as error:
            return error
        except Exception:  # a question may fail, the engine may not
            logger.exception("query failed query=%s", type(query).__name__)
            return MnemeError("the engine could not answer")

    def between_steps(self, question: Callable[[Engine], T], recalled: Iterable[SessionKey] = ()) -> T:
        """See `AskedEngine.between_steps`."""
        found = self._recall(recalled)

        def ask() -> T:
            if self.engine.sessions.restore_all(found):
                raise ReplicaUnavailable("the session's log cannot be read now")
            return question(self.engine)

        return self._ask(ask)

    def subscribe(self, subscriber: str, deliver: Deliver) -> None:
        """Send this subscriber's events to `deliver`, which is called on the engine's thread and must not block."""
        self._post(lambda: self._subscribers.update({subscriber: Subscriber(deliver)}))

    def unsubscribe(self, subscriber: str) -> None:
        """Forget the subscriber; its requests are aborted, as nobody would hear of them."""
        self._post(lambda: self._drop_subscriber(subscriber))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as of the last step, or one 50 ms before; of what goes on beside steps, as of now."""
        return {**self._stats, **beside_steps(self.engine, self._stats), "rss_bytes": rss_bytes()}

    def _ask(self, question: Callable[[], T]) -> T:
        """Return or raise what `question` does on the engine's thread; `ReplicaUnavailable` if that ended or hangs."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(question())
            except BaseException as error:  # the asker has it
                future.set_exception(error)

        posted = self._post(answer)
        while posted and (future.done() or (self._is_running and not self._has_ended.is_set())):
            try:
                return future.result(timeout=_ALIVE_CHECK_S)
            except TimeoutError:  # a long step, or a thread that has ended
                if self.late_s > HUNG_S:
                    raise ReplicaUnavailable("the engine hangs: its step does not end") from None
        raise ReplicaUnavailable("this replica is stopping")

    def _post(self, command: Callable[[], None]) -> bool:
        with self._condition:
            if self._stopping:
                return False
            self._inbox.append(command)
            self._condition.notify()
        return True

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("the engine's thread ends; this replica must be replaced")
        finally:
            with self._condition:
                self._stopping = True
            _process.restore()
            self._has_ended.set()

    def _serve(self) -> None:
        while self._run_inbox():
            if self._can_step:
                self.engine.measure_quality(is_idle=False)
                self._deliver(self._step())
            self._withheld.release()
            self._report()
            if not self._can_step or self.engine.clock() >= self._stats_due_s:
                self._gather_stats()
            if not self._can_step and gc.get_count()[0] > _YOUNG:
                gc.collect(1)
        self._abort(list(self._subscriber_by_request))
        self._deliver(self.engine.pop_events())
        self.engine.close()  # all logs are written then
        self._withheld.release(everything=True)

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and not self.engine.is_blocked

    @property
    def _pause_s(self) -> float:
        if self.engine.is_blocked:
            return BLOCKED_S
        if self._subscribers and self.reporter.is_waiting:
            return REPORT_S
        if self.engine.forest.store.wants_copies or self._withheld:
            return _COPYING_S
        return IDLE_REPORT_S if self._subscribers else _IDLE_S

    def _run_inbox(self) -> bool:
        """Wait for something to do, run the commands; False when the loop is to end."""
        with self._condition:
            self._busy_since_s = None
            while not (self._inbox or self._stopping or self._can_step):
                if not self._condition.wait(self._pause_s):
                    self.engine.sessions.expire()
                    self.engine.pins.expire()
                    self._withheld.release()
                    self.engine.measure_quality(is_idle=not self.engine.has_work)
                    self._report()
            commands, self._inbox = self._inbox, []
            stopping = self._stopping
            self._busy_since_s = time.perf_counter()
        self.engine.pins.expire()
        for command in commands:
            try:
                command()
            except Exception:  # the thread must outlive any command
                logger.exception("a command failed")
        return not stopping

    def _step(self) -> list[TokenEvent]:
        started_s = time.perf_counter()
        try:
            return self.engine.step()
        except Exception:  # the edge of the engine: no request may be left without an answer
            logger.exception("step failed requests=%s", list(self._subscriber_by_request))
            return self.engine.fail_all("the engine failed; the request was not completed")
        finally:
            self._step_s = time.perf_counter() - started_s

    def _recall(self, keys: Iterable[SessionKey | None]) -> list[RecalledSession]:
        """Read what is written of these sessions and not known to the engine, which goes on with its steps."""
        return [] if self.durable is None else self.durable.recall(keys, self.engine.sessions.version_of)

    def _submit_all(
        self, requests: Sequence[GenerationRequest], recalled: list[RecalledSession]
    ) -> list[MnemeError | None]:
        unread = self.engine.sessions.restore_all(recalled)
        return [self._submit(request, is_unread=session_key(request) in unread) for request in requests]

    def _submit(self, request: GenerationRequest, *, is_unread: bool) -> MnemeError | None:
        if request.subscriber not in self._subscribers:
            return ReplicaUnavailable("the token stream of this request is closed")
        if request.append and is_unread:
            return ReplicaUnavailable("the session's log cannot be read now")
        try:
            self.engine.submit(request)
        except MnemeError as error:
            return error
        except Exception:  # a request may fail, the engine may not
            logger.exception("submit failed request_id=%s", request.request_id)
            return MnemeError("the engine could not take the request")
        self._subscriber_by_request[request.request_id] = request.subscriber
        if request.session_id is not None:
            self._of_sessions.add(request.request_id)
        return None

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Send what happened; the end of a session's turn is sent once the session's log has it."""
        batches: dict[str, list[TokenEvent]] = defaultdict(list)
        ends: dict[str, list[TokenEvent]] = defaultdict(list)
        for event in events:
            name = self._subscriber_by_request.get(event.request_id)
            of_session = event.request_id in self._of_sessions
            if event.finish_reason is not None:
                self._subscriber_by_request.pop(event.request_id, None)
                self._of_sessions.discard(event.request_id)
            if name is not None:
                (ends if event.finish_reason is not None and of_session else batches)[name].append(event)
        self._send(batches)
        if ends:
            self._withheld.send(ends)

    def _send(self, batches: Mapping[str, list[TokenEvent]]) -> None:
        for name, batch in batches.items():
            subscriber = self._subscribers.get(name)
            if subscriber is not None:
                subscriber.send(self.epoch, tuple(batch))

    def _report(self) -> None:
        """Tell all subscribers what is new of this replica."""
        report = self.reporter.poll()
        if report is not None:
            for subscriber in self._subscribers.values():
                subscriber.send(self.epoch, (), report)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def _drop_subscriber(self, name: str) -> None:
        self._subscribers.pop(name, None)
        self._abort([r for r, owner in self._subscriber_by_request.items() if owner == name])

    def _gather_stats(self) -> None:
        self._stats = {**engine_stats(self.engine), "epoch": self.epoch, "last_step_s": self._step_s}
        self._stats_due_s = self.engine.clock() + _STATS_S


class _Process:
    """Sets what is one for the whole process while engines run in it: a notebook gets it back as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_engines = 0
        self._before = gc.get_threshold(), sys.getswitchinterval()

    def tune(self) -> None:
        """Note that an engine begins."""
        gc.collect()
        gc.freeze()  # what was loaded stays: a full collection in the middle of a step need not look at it
        with self._lock:
            if not self._num_engines:
                self._before = gc.get_threshold(), sys.getswitchinterval()
            self._num_engines += 1
            gc.set_threshold(*_COLLECT_AFTER)
            sys.setswitchinterval(_SWITCH_S)

    def restore(self) -> None:
        """Note that an engine has ended; the last one gives back what the first one found."""
        with self._lock:
            self._num_engines -= 1
            if not self._num_engines:
                gc.set_threshold(*self._before[0])
                sys.setswitchinterval(self._before[1])
                gc.unfreeze()


_process = _Process()
