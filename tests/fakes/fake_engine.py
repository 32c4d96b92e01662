"""An engine without a model: deterministic tokens on a thread of its own, with `EngineLoop`'s interface."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from mneme.errors import InvalidRequest, MnemeError, Overloaded, SessionNotFound
from mneme.replicas.queries import DeleteSession, GetReport, GetSession, LeaveSession, Query
from mneme.replicas.request import GenerationRequest, PromptUsage, SessionKey, StepMessage, TokenEvent

Deliver = Callable[[StepMessage], None]


def next_token(context: Sequence[int]) -> int:
    """A function of the last token and the length: a resumed request continues as if never interrupted."""
    return (context[-1] * 31 + len(context) * 7 + 11) % 251


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What greedy generation of `count` tokens gives."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


class FakeEngineLoop:
    """One token per running request and step; a step takes `step_s`."""

    def __init__(self, *, step_s: float = 0.02, max_running: int = 128) -> None:
        self.epoch = uuid.uuid4().hex
        self._step_s = step_s
        self._max_running = max_running
        self._lock = threading.Condition()
        self._running: dict[str, GenerationRequest] = {}
        self.admitted: list[GenerationRequest] = []
        self._context: dict[str, list[int]] = {}
        self._subscribers: dict[str, tuple[Deliver, int]] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._num_finished = self._num_generated = 0
        self._is_stopped = False
        self.is_stalled = False
        self.sessions: dict[SessionKey, float] = {}
        self.durable: set[SessionKey] = set()  # sessions that have a log on disk
        self.queries: list[Query[Any]] = []
        self.refusals: list[MnemeError] = []  # answers to the next questions
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._lock.notify_all()

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[MnemeError | None]:
        with self._lock:
            answers = [self._admit(request) for request in requests]
            self._lock.notify_all()
        return answers

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._forget(request_id)

    def hand_over(self) -> int:
        with self._lock:
            ended = list(self._running.values())
            for request in ended:
                self._forget(request.request_id)
                event = TokenEvent(request.request_id, (), "abort", None, None)
                self._deliver(request.subscriber, (event,))
        return len(ended)

    def subscribe(self, subscriber: str, deliver: Deliver) -> None:
        with self._lock:
            self._subscribers[subscriber] = (deliver, 0)

    def unsubscribe(self, subscriber: str) -> None:
        with self._lock:
            self._subscribers.pop(subscriber, None)
            for request_id in [r for r, request in self._running.items() if request.subscriber == subscriber]:
                self._forget(request_id)

    def check_health(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        with self._lock:
            in_use = len(self._running)
            return {
                "pages": {"free": 1000 - in_use, "cached": 0, "in_use": in_use, "pinned": 0, "total": 1000},
                "requests": {"running": in_use, "waiting": 0},
                "tokens": {"generated": self._num_generated},
                "load": {"backlog_s": 0.0, "step_s": self._step_s, "prefill_token_s": 0.0},
                "finished": self._num_finished,
                "epoch": self.epoch,
                "in_flight": {
                    r: len(self._context[r]) - len(request.prompt_token_ids) for r, request in self._running.items()
                },
            }

    def query(self, query: Query[Any]) -> Any:
        """Sessions are those that `sessions` names, by key: seconds since they were used."""
        if isinstance(query, GetReport):  # it reports nothing
            return None
        with self._lock:
            self.queries.append(query)
            if self.refusals:
                return self.refusals.pop()
            if isinstance(query, GetSession):
                idle_s = self.sessions.get(query.key)
                return None if idle_s is None else {"version": 0, "idle_s": idle_s}
            if isinstance(query, DeleteSession | LeaveSession):
                return self.sessions.pop(query.key, None) is not None
            return []

    def _admit(self, request: GenerationRequest) -> MnemeError | None:
        if not request.prompt_token_ids:
            return InvalidRequest("prompt", (), "must not be empty")
        if len(self._running) >= self._max_running:
            return Overloaded("the engine is full")
        if request.append and (request.salt, request.session_id) not in {*self.sessions, *self.durable}:
            return SessionNotFound("session_id", str(request.session_id).partition(":")[2])
        self.admitted.append(request)
        self._running[request.request_id] = request
        self._context[request.request_id] = list(request.prompt_token_ids)
        return None

    def _forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._context.pop(request_id, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._running and not self._is_stopped:
                    self._lock.wait()
                if self._is_stopped:
                    return
                self._step()
            time.sleep(self._step_s)

    def _step(self) -> None:
        events: dict[str, list[TokenEvent]] = {}
        for request_id, request in list(self._running.items()):
            events.setdefault(request.subscriber, []).append(self._advance(request_id, request))
        for subscriber, batch in events.items():
            self._deliver(subscriber, tuple(batch))

    def _deliver(self, subscriber: str, events: tuple[TokenEvent, ...]) -> None:
        if subscriber in self._subscribers:
            deliver, seq = self._subscribers[subscriber]
            self._subscribers[subscriber] = (deliver, seq + 1)
            deliver(StepMessage(self.epoch, seq, events))

    def _advance(self, request_id: str, request: GenerationRequest) -> TokenEvent:
        context = self._context[request_id]
        num_prompt = len(request.prompt_token_ids)
        token = next_token(context)
        context.append(token)
        self._num_generated += 1
        usage = None
        if len(context) == num_prompt + 1:
            usage = PromptUsage(num_prompt, num_prompt - 1 if request.prompt_token_ids in self._seen else 0)
        is_done = len(context) - num_prompt >= (request.sampling.max_tokens or 16)
        if is_done:
            self._seen.add(tuple(context))
            self._num_finished += 1
            self._forget(request_id)
        return TokenEvent(request_id, (token,), "length" if is_done else None, None, usage)


def load_fake_engine(
    model: str, config: object, *, on_progress: Callable[[str, float], None], **options: object
) -> FakeEngineLoop:
    """In the place of `build_engine_loop`; `MNEME_FAKE_FAULT` says what goes wrong."""
    fault = os.environ.get("MNEME_FAKE_FAULT")
    on_progress("weights", 0.4)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crashed":
        os.abort()
    on_progress("weights", 1.0)
    return FakeEngineLoop()
