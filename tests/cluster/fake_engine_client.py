"""An `EngineClient` in this process: it says one sentence, counts what runs, and fails when told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mneme.cluster.serve.engine_client import Condition
from mneme.errors import ContextLengthExceeded, MnemeError
from mneme.replicas.engine.input import max_output_tokens
from mneme.replicas.engine.output import Explanations, said_to_client
from mneme.replicas.engine.pins import Pins
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.queries import (
    DeletePin,
    DeleteSequencePages,
    DeleteSession,
    DeleteTenantPages,
    GetSession,
    LookUpPages,
    Query,
)
from mneme.replicas.request import GenerationRequest, Logprobs, PromptLogprobs, PromptUsage, SessionKey, TokenEvent
from mneme.replicas.schedule.scheduler import Scheduler
from mneme.replicas.sequence import Sequence as RunningSequence
from mneme.replicas.sessions.sessions import Sessions
from mneme.replicas.sessions.token_log import FinishedTurn
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import history_note
from tests.replicas.asked import answer

SENTENCE = "Grüße, 世界! 🙂 The quick brown fox jumps over the lazy dog. STOP here."
TOTAL_PAGES = 1000


@dataclass
class FakeEngineClient:
    tokenizer: Tokenizer
    sentence: str = SENTENCE
    max_context: int = 1024
    is_endless: bool = False  # say the sentence again and again, up to max_tokens
    refusal: MnemeError | None = None  # raised before the first event
    fail_after: int | None = None  # steps until choice 0 ends with an "error" event
    failure: MnemeError | None = None  # what that event says is the reason
    end_after: int | None = None  # steps until the events just end
    gate: asyncio.Semaphore | None = None  # each step takes one
    ready: bool = True
    unready: Condition = field(default_factory=lambda: Condition("loading"))
    start: dict[str, dict[str, float]] = field(default_factory=dict)

    names: tuple[str, str] = ("a", "b")
    requests: list[GenerationRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    num_aborted: int = 0

    idle: asyncio.Event = field(default_factory=asyncio.Event)
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    query_failure: MnemeError | None = None
    forks: dict[SessionKey, str] = field(default_factory=dict)
    noted: list[tuple[tuple[int, ...], str, str]] = field(default_factory=list)
    explanations: Explanations = field(default_factory=Explanations)
    forest: PrefixForest = field(default_factory=lambda: PrefixForest(4, 16))

    clock: Callable[[], float] = time.monotonic
    max_session_tokens: int = 10**6
    timing: tuple[float, float] = (0.0, 0.0)  # seconds of queue and prefill, of each request
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 10, "cached": 4, "generated": 7})
    _running: set[_Speaker] = field(default_factory=set)
    _seen: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        bounds: dict[str, Any] = {"ttl_s": 3600, "max_sessions": 100, "max_tokens": self.max_session_tokens}
        self.sessions = Sessions(self.tokenizer.encode_continuation, self.clock, **bounds)
        self.pins = Pins(
            self.forest,
            Scheduler(self.forest, max_batch_tokens=16, max_running=1),
            self.sessions,
            max_context=16,
            submit=lambda _request: None,
            abort=lambda _request_id: None,
            clock=self.clock,
        )

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[TokenEvent]:
        self.requests.extend(requests)
        if self.refusal is not None:
            raise self.refusal
        speakers = self._speakers(requests)
        self.running.update(request.request_id for request in requests)
        self.idle.clear()
        self.busy.set()
        try:
            async for event in self._events(speakers):
                yield event
        finally:
            for speaker in speakers:
                self.sessions.end(speaker.request, speaker.turn())
            self._running.difference_update(speakers)
            self.num_aborted += sum(not speaker.is_finished for speaker in speakers)
            self.running.difference_update(request.request_id for request in requests)
            if not self.running:
                self.idle.set()
                self.busy.clear()

    async def _events(self, speakers: list[_Speaker]) -> AsyncIterator[TokenEvent]:
        step = 0
        while any(not speaker.is_finished for speaker in speakers):
            await (self.gate.acquire() if self.gate else asyncio.sleep(0))
            if step == self.end_after:
                return
            if step == self.fail_after:
                request_id = speakers[0].request.request_id
                yield TokenEvent(request_id, (), "error", None, None, "the engine failed on purpose", self.failure)
                return
            for speaker in speakers:
                if not speaker.is_finished:
                    yield speaker.say()
            step += 1

    def _speakers(self, requests: Sequence[GenerationRequest]) -> list[_Speaker]:
        """Sessions are those of a real engine, but turns at once do not wait for each other."""
        speakers = []
        for request in requests:
            prompt = self.sessions.begin(request)
            ids = list(request.prompt_token_ids) if prompt is None else prompt.ids
            speakers.append(_Speaker(self, request, ids))
        self._running.update(speakers)
        return speakers

    def fork(self, key: SessionKey, new_key: SessionKey) -> None:
        self.sessions.fork(key, new_key, self.turn_so_far(key))

    def turn_so_far(self, key: SessionKey) -> tuple[FinishedTurn, GenerationRequest] | None:
        of_session = [s for s in self._running if (s.request.salt, s.request.session_id) == key]
        return (of_session[0].turn(), of_session[0].request) if of_session else None

    async def query(self, query: Query[Any], *, replica_id: str | None = None) -> dict[str, Any]:
        """The second replica has all sessions; the first knows nothing."""
        if self.query_failure is not None:
            raise self.query_failure
        known = answer(self, query)  # type: ignore[arg-type]  # it has what is asked for here
        nothing: Any = known if query.lane is not None else []
        if isinstance(query, GetSession | LookUpPages | DeleteSequencePages | DeleteTenantPages):
            nothing = None
        elif isinstance(query, DeleteSession | DeletePin):
            nothing = False
        said = dict(zip(self.names, (nothing, known), strict=True))
        return {name: each for name, each in said.items() if replica_id in (None, name)}

    def replica_ids(self) -> list[str]:
        return list(self.names)

    def place_fork(self, key: SessionKey, replica_id: str) -> None:
        self.forks[key] = replica_id

    def home_of(self, key: SessionKey) -> str | None:
        return self.forks.get(key)

    def record_prefix(self, token_ids: Sequence[int], replica_id: str, *, salt: str) -> None:
        self.noted.append((tuple(token_ids), replica_id, salt))

    def cached_tokens(self, salt: str, ids: tuple[int, ...]) -> int:
        shared = [_common(ids, other) for other_salt, other in self._seen if other_salt == salt]
        self._seen.append((salt, ids))
        return min(max(shared, default=0), len(ids) - 1)

    async def stats(self) -> dict[str, dict[str, Any]]:
        in_use = len(self.running)
        metrics: dict[str, Any] = {
            "pages": {"free": TOTAL_PAGES - in_use, "cached": 0, "in_use": in_use, "pinned": 0, "total": TOTAL_PAGES},
            "requests": {"running": in_use, "waiting": 0},
            "waiting_tokens": 77,
            "refused": {"requests": 3, "tokens": 2, "session": 1},
            "missed_deadlines": 6,
            "tokens": self.tokens,
            "blend": {"requests": {"hkvd": 2}, "tokens": {"reused": 70}, "declined": {"not_allowed": 3}},
            "finished": {"stop": 1, "length": 2, "abort": self.num_aborted, "error": 0},
            "steps": 0,
            "accuracy": {
                "prefill": {"count": 2, "relative_error_sum": 0.5, "predicted_s": 1.5, "actual_s": 2.0, "scale": 1.1}
            },
            "sessions": 3,
            "rss_bytes": 1 << 20,
            "shared_segments": 5,
            "graphs": {"replays": 40, "failed": 1, "off": 3},
            "kv_tokens": 16_000,
            "device": "cpu",
            "dtype": "float32",
            "documents": "the quality report allows hkvd from 0.2",
            "weight_bytes": {"float32": 1000},
            "kv_bytes": {"float32": 4000},
            "of_a_later_version": {"x": [1]},
            "start": self.start,
        }
        return dict.fromkeys(self.names, metrics)

    def routes(self, salt: str, http_id: str) -> list[dict[str, Any]]:
        return []

    def routing(self) -> dict[str, Any]:
        return {"decisions": {"score": 4, "session": 2}, "accuracy": {"count": 6, "missing_tokens": 64}}

    async def condition(self) -> Condition:
        return Condition("ready") if self.ready else self.unready

    def num_wanted(self) -> int | None:
        return None

    def num_ready(self) -> int:
        return 2 * self.ready


class _Speaker:
    """One request's answer, a token per step."""

    def __init__(self, client: FakeEngineClient, request: GenerationRequest, ids: list[int]) -> None:
        try:
            self._limit = max_output_tokens(request, len(ids), client.max_context, client.max_context)
        except ContextLengthExceeded as error:
            client.sessions.end(request, None)
            error.request_id = request.request_id
            raise
        params = request.sampling
        self.request = request
        self._prompt = ids
        self._tokenizer = client.tokenizer
        self._ids = client.tokenizer.encode(client.sentence, add_special_tokens=False)
        self._is_endless = client.is_endless
        self._text = TextStream.of(client.tokenizer, params)
        usage = PromptUsage(len(ids), client.cached_tokens(request.salt, tuple(ids)))
        self._usage: PromptUsage | None = usage._replace(queue_s=client.timing[0], prefill_s=client.timing[1])
        self._num_said = 0
        self.is_finished = False
        client.explanations.record(self._sequence(self._usage), self._usage)

    def turn(self) -> FinishedTurn:
        said = [self._ids[i % len(self._ids)] for i in range(self._num_said)]
        shown = said_to_client(self._tokenizer, self.request.sampling, said, self._text)
        history = self.request.history
        note = b"" if history is None else history_note(self._tokenizer, history, shown.text)
        return FinishedTurn(self._prompt + said, len(self._prompt), 0, shown, note=note)

    def _sequence(self, usage: PromptUsage) -> RunningSequence:
        num_prompt = usage.prompt_tokens
        sequence = RunningSequence(
            request=self.request, ids=self._prompt, num_prompt=num_prompt, max_tokens=self._limit, arrival=0
        )
        sequence.origins.add(usage.cached_tokens, num_prompt, "recomputed")
        return sequence

    def say(self) -> TokenEvent:
        token_id = self._ids[self._num_said % len(self._ids)]
        self._num_said += 1
        self._text.push([token_id])
        reason = self._finish_reason()
        self.is_finished = reason is not None
        usage, self._usage = self._usage, None
        event = TokenEvent(self.request.request_id, (token_id,), reason, self._logprobs(token_id), usage)
        if usage is not None and self.request.sampling.prompt_logprobs is not None:
            event = event._replace(prompt_logprobs=self._prompt_logprobs(self.request.sampling.prompt_logprobs))
        return event if self.request.pooling is None else event._replace(embedding=(3.0, 0.0, -4.0))

    def _finish_reason(self) -> str | None:
        if self._text.stopped or (not self._is_endless and self._num_said == len(self._ids)):
            return "stop"
        return "length" if self._num_said == self._limit else None

    def _prompt_logprobs(self, num_top: int) -> PromptLogprobs:
        """Token i of the prompt has -i, the likeliest -0.25, -1.25 and so on."""
        count = len(self._prompt) - 1
        return PromptLogprobs(
            np.array(self._prompt[1:], np.int32),
            -np.arange(1, count + 1, dtype=np.float32),
            np.full(count, 9, np.int32),
            np.tile(np.arange(3, 3 + num_top, dtype=np.int32), (count, 1)),
            np.tile(-np.arange(num_top, dtype=np.float32) - 0.25, (count, 1)),
        )

    def _logprobs(self, token_id: int) -> tuple[Logprobs, ...] | None:
        num_top = self.request.sampling.logprobs
        if num_top is None:
            return None
        top = tuple((3 + i, -float(i) if i < 3 else float("-inf")) for i in range(num_top))
        return (Logprobs(token_id, -0.5, top),)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
