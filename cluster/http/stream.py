"""Runs a request's choices and sends what they say, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

from starlette.responses import Response

from mneme.cluster.http.answers import Answer, Choice, Delta, joined, usage_object
from mneme.cluster.http.body import ClientGone, Receive
from mneme.cluster.http.guard import Send
from mneme.cluster.keys import Meter
from mneme.cluster.metrics.latency import Clock, ModelLatencies
from mneme.cluster.serve.engine_client import EngineClient
from mneme.cluster.wire.openai import StreamOptions
from mneme.errors import DeadlineExceeded, InvalidRequest, MnemeError, ReplicaUnavailable
from mneme.replicas.request import GenerationRequest, TokenEvent

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect a stream
]
_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps no strong reference to a task


class RequestLatency:
    """Measures one request from when its body was there, `started_s` of the same clock."""

    def __init__(self, latencies: ModelLatencies, clock: Clock, started_s: float) -> None:
        self._latencies = latencies
        self._clock = clock
        self._started_s = started_s

    def past_s(self) -> float:
        """Return the seconds since the body was there."""
        return self._clock() - self._started_s

    def event(self, choice: Choice, num_tokens: int) -> None:
        """The choice has taken an event with so many tokens."""
        if num_tokens:
            now = self._clock()
            if choice.first_s is None:
                self._latencies.ttft.observe(now - self._started_s)
                choice.first_s = now
            else:
                self._latencies.itl.observe((now - choice.last_s) / num_tokens)
            choice.last_s = now
        if choice.finish_reason is not None:
            self._observe(choice)

    def end(self) -> None:
        self._latencies.e2e.observe(self.past_s())

    def _observe(self, choice: Choice) -> None:
        latencies, usage = self._latencies, choice.usage
        latencies.queue.observe(usage.queue_s)
        latencies.prefill.observe(usage.prefill_s)
        latencies.decode.observe(choice.decode_s)
        latencies.inference.observe(usage.prefill_s + choice.decode_s)
        latencies.prompt_tokens.observe(usage.prompt_tokens)
        latencies.generation_tokens.observe(choice.num_tokens)
        if choice.num_tokens > 1:
            latencies.tpot.observe(choice.decode_s / (choice.num_tokens - 1))


@dataclass(slots=True, kw_only=True)
class RunResponse:
    """Nothing runs before Starlette calls it, and nothing runs on after it returns.

    The status line waits for the first event, so that a refusal at admission has its own status. A client
    that does not read is cut off when one piece has waited `stall_timeout_s`; until then its text piles up,
    once.
    """

    client: EngineClient
    choices: Sequence[Choice]
    answer: Answer
    stream: StreamOptions | None  # None: the answer is sent whole
    latency: RequestLatency
    stall_timeout_s: float
    num_at_once: int | None = None  # choices; the others run behind them; None: all
    on_end: Callable[[RunResponse, BaseException | None], None] = lambda _response, _error: None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        num_given = self._num_tokens()
        failure: BaseException | None = None
        self._use(scope, num_given)
        try:
            with Generation(self.client, self.choices, receive, self.latency, self.num_at_once) as generation:
                await generation.news()
                if generation.failure is not None:
                    raise generation.failure
                if self.stream is None:
                    response = await self._whole(generation)
                    await response(scope, receive, send)
                else:
                    await self._stream(generation, self.stream, send)
                failure = generation.failure
        except BaseException as error:
            failure = error
            raise
        finally:
            self._use(scope, self._num_tokens() - num_given)
            self.on_end(self, failure)
        self.latency.end()

    def _num_tokens(self) -> int:
        """Count each prompt once, as far as it is known, and what was generated."""
        prompts = {choice.prompt_index: choice.usage.prompt_tokens for choice in self.choices}
        return sum(prompts.values()) + sum(choice.num_tokens for choice in self.choices)

    def _use(self, scope: MutableMapping[str, Any], num_tokens: int) -> None:
        meter: Meter | None = scope["state"]["meter"]
        if meter is not None:
            meter.use(num_tokens)

    async def _whole(self, generation: Generation) -> Response:
        while not generation.is_done:
            await generation.news()
        if generation.failure is not None:
            raise generation.failure
        whole = [joined(list(choice.take())) for choice in self.choices]
        answer = await self._worded(lambda: self.answer.whole(self.choices, whole))
        await self.answer.keep(self.choices)
        text = await self._worded(lambda: json.dumps(answer, ensure_ascii=False))
        return Response(text, media_type="application/json")

    async def _worded(self, word: Callable[[], T]) -> T:
        """Word an answer, off the event loop where it has something to say of each token of a prompt."""
        is_long = any(choice.request.sampling.prompt_logprobs is not None for choice in self.choices)
        return await asyncio.to_thread(word) if is_long else word()

    async def _stream(self, generation: Generation, options: StreamOptions, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        usage = self._usage_writer(options)
        while not generation.is_done:
            await self._send(send, await self._events(generation, usage))
            await generation.news()
        last = await self._events(generation, usage)
        if generation.failure is not None:
            last += self.answer.failed(generation.failure)
        else:
            await self.answer.keep(self.choices)
            last += self.answer.end(self.choices, has_usage=bool(options.include_usage))
        await self._send(send, last, is_last=True)

    async def _events(self, generation: Generation, usage: Callable[[], str]) -> bytes:
        deltas: Iterable[Delta] = generation.take()
        if all(choice.request.sampling.prompt_logprobs is None for choice in self.choices):
            return self.answer.events(self.choices, deltas, usage)  # one by one: usage counts what was taken
        taken = list(deltas)
        return await self._worded(lambda: self.answer.events(self.choices, taken, usage))

    def _usage_writer(self, options: StreamOptions) -> Callable[[], str]:
        """Choose what each chunk says of usage: nothing, null, or the count so far."""
        if not options.include_usage:
            return lambda: ""
        if not options.continuous_usage_stats:
            return lambda: ',"usage":null'
        return lambda: f',"usage":{json.dumps(usage_object(self.choices))}'

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not body and not is_last:
            return
        try:
            async with asyncio.timeout(self.stall_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError:
            logger.info("client stalled request=%s", self.choices[0].request.request_id)
            raise ClientGone from None


class Generation:
    """Runs one HTTP request's choices: `await news()`, then `take()`, until `is_done`; `failure` says what went wrong.

    Of many choices `num_at_once` run together, so that they do not fill a replica's queue; all share one deadline.
    One task reads the engine's events into the choices, one waits for the client to hang up; the request's
    handler wakes when either has something to say. Leaving the `with` block cancels both without awaiting: the
    engine client aborts what still runs from the reading task, which nobody else cancels, so that the abort is
    not lost with the handler.
    """

    def __init__(
        self,
        client: EngineClient,
        choices: Sequence[Choice],
        receive: Receive,
        latency: RequestLatency,
        num_at_once: int | None = None,
    ) -> None:
        self.choices = choices
        self.is_done = False
        self.failure: MnemeError | None = None
        self._client = client
        self._num_at_once = num_at_once or len(choices)
        self._choice_by_request = {choice.request.request_id: choice for choice in choices}
        self._receive = receive
        self._latency = latency
        self._is_client_gone = False
        self._wake = asyncio.Event()
        self._started: list[asyncio.Task[None]] = []

    def __enter__(self) -> Generation:
        self._started = [_start(self._read_events()), _start(self._wait_for_hang_up())]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._started:
            task.cancel()

    async def news(self) -> None:
        """Wait until a choice has news or the run has ended; raises `ClientGone`."""
        await self._wake.wait()
        self._wake.clear()
        if self._is_client_gone:
            raise ClientGone

    def take(self) -> Iterator[Delta]:
        """Take what is new, choice by choice."""
        return chain.from_iterable(choice.take() for choice in self.choices)

    async def _read_events(self) -> None:
        try:
            for first in range(0, len(self.choices), self._num_at_once):
                group = self.choices[first : first + self._num_at_once]
                past_s = self._latency.past_s() if first else 0.0
                await self._read(self._client.generate([_later(each.request, past_s) for each in group]), len(group))
        except InvalidRequest as error:
            choice = self._choice_by_request.get(error.request_id or "", self.choices[0])
            self.failure = choice.refused(error)
        except MnemeError as error:
            self.failure = error
        except Exception:  # the edge of the engine client: the client gets an answer, the log the cause
            logger.exception("generation failed request=%s", self.choices[0].request.request_id)
            self.failure = MnemeError("internal error")
        finally:
            self.is_done = True
            self._wake.set()

    async def _read(self, events: AsyncIterator[TokenEvent], num_running: int) -> None:
        async for event in events:
            choice = self._choice_by_request[event.request_id]
            if event.finish_reason in ("error", "abort"):
                await _close(events)
                raise _failure(event)
            choice.add(event)
            self._latency.event(choice, len(event.token_ids))
            num_running -= event.finish_reason is not None
            self._wake.set()
        if num_running:
            raise ReplicaUnavailable("the answer ended early")

    async def _wait_for_hang_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_client_gone = True
        self._wake.set()


def _later(request: GenerationRequest, past_s: float) -> GenerationRequest:
    """Return a request with so much less of its time; raises `DeadlineExceeded`."""
    if request.timeout_s is None or not past_s:
        return request
    if past_s >= request.timeout_s:
        raise DeadlineExceeded
    return replace(request, timeout_s=request.timeout_s - past_s)


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    """Abort the choices that still run."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


def _failure(event: TokenEvent) -> MnemeError:
    if event.refusal is not None:
        if isinstance(event.refusal, InvalidRequest):
            event.refusal.request_id = event.request_id
        return event.refusal
    if event.finish_reason == "abort":
        return ReplicaUnavailable(event.error or "the replica stopped")
    return MnemeError(event.error or "the engine failed")
