"""Runs a request's choices and writes what they say, whole or as server-sent events, in the words of the API at hand.

Chat and text completions tell each step as it comes (`completion_answers.py`). Messages and responses are made of
parts: `AnswerInParts` keeps which one is open and what it has grown to, and they say what their events look like.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic_core import from_json
from starlette.responses import Response

from mneme.cluster.api_keys import Meter
from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.body import ClientGone, Receive
from mneme.cluster.http.error_response import error_object
from mneme.cluster.http.guard import Send
from mneme.cluster.metrics.latency import RequestLatency
from mneme.cluster.serve.http_protocol import CLIENT_STALL_S
from mneme.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, MnemeError, ReplicaUnavailable
from mneme.replicas.choices import Choice, Delta, joined
from mneme.replicas.request import GenerationRequest, TokenEvent

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W", bound=Mapping[str, object])  # a whole answer
E = TypeVar("E", bound=Mapping[str, object] | None)  # the data of an event of a stream; None: there is none

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect a stream
]
_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps no strong reference to a task


class FieldNames(NamedTuple):
    """Knows what a client calls the fields that engines name in their refusals."""

    prompt: str
    max_tokens: str  # the prompt's name where the client gave no limit
    offers: str = ""  # said of what is too long: how the client may have it shortened

    def worded(self, error: InvalidRequest) -> InvalidRequest:
        """The refusal in the client's words."""
        field = {"prompt": self.prompt, "max_tokens": self.max_tokens}.get(error.field or "", error.field)
        return type(error)(field, error.value, error.rule + self.offers * isinstance(error, ContextLengthExceeded))


OnEnd = Callable[["RunResponse[Any, Any]", BaseException | None], None]  # told what went wrong, or None


@dataclass(slots=True, kw_only=True)
class RunResponse(Generic[W, E]):
    """Nothing runs before Starlette calls it, and nothing runs on after it returns.

    The status line waits for the first event, so that a refusal at admission has its own status. A client
    that does not read is cut off when one piece has waited `CLIENT_STALL_S`; until then its text piles up,
    once.
    """

    api: ApiState
    choices: Sequence[Choice]
    fields: Sequence[FieldNames]  # of each prompt
    answer: Answer[W, E]
    is_stream: bool = False
    num_at_once: int | None = None  # choices; the others run behind them; None: all
    undo: Callable[[], Awaitable[None]] | None = None  # leaves nothing of what was begun for it if it fails

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        num_given = self._num_tokens()
        failure: BaseException | None = None
        self._use(scope, num_given)
        latency = RequestLatency(self.api.latencies, self.api.clock, scope["state"]["received_s"])
        try:
            with Generation(self, receive, latency) as generation:
                await generation.news()
                if generation.failure is not None:
                    raise generation.failure
                if self.is_stream:
                    await self._stream(generation, send)
                else:
                    response = await self._whole(generation)
                    await response(scope, receive, send)
                failure = generation.failure
        except BaseException as error:
            failure = error
            if isinstance(error, MnemeError) and self.undo is not None:
                await self.undo()
            raise
        finally:
            self._use(scope, self._num_tokens() - num_given)
            on_end: OnEnd | None = scope["state"].get("on_end")
            if on_end is not None:
                on_end(self, failure)
        latency.end()

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
        whole = [joined(list(choice.pop_deltas())) for choice in self.choices]
        answer = await self._worded(lambda: self.answer.whole(self.choices, whole))
        await self.answer.keep(self.choices)
        text = await self._worded(lambda: json.dumps(answer, ensure_ascii=False))
        return Response(text, media_type="application/json")

    async def _worded(self, word: Callable[[], T]) -> T:
        """Word an answer, off the event loop where it has something to say of each token of a prompt."""
        is_long = any(choice.request.sampling.prompt_logprobs is not None for choice in self.choices)
        return await asyncio.to_thread(word) if is_long else word()

    async def _stream(self, generation: Generation, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while not generation.is_done:
            await self._send(send, await self._events(generation))
            await generation.news()
        last = await self._events(generation)
        if generation.failure is not None:
            last += self.answer.failed(generation.failure)
        else:
            last += await self.answer.end(self.choices)
        await self._send(send, last, is_last=True)

    async def _events(self, generation: Generation) -> bytes:
        deltas: Iterable[Delta] = generation.pop_deltas()
        if all(choice.request.sampling.prompt_logprobs is None for choice in self.choices):
            return self.answer.events(self.choices, deltas)  # one by one: usage counts what was taken
        taken = list(deltas)
        return await self._worded(lambda: self.answer.events(self.choices, taken))

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not body and not is_last:
            return
        try:
            async with asyncio.timeout(CLIENT_STALL_S):
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

    def __init__(self, asked: RunResponse[Any, Any], receive: Receive, latency: RequestLatency) -> None:
        self.is_done = False
        self.failure: MnemeError | None = None
        self._asked, self._choices = asked, asked.choices
        self._choice_by_request = {choice.request.request_id: choice for choice in asked.choices}
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

    def pop_deltas(self) -> Iterator[Delta]:
        """Take what is new, choice by choice."""
        return chain.from_iterable(choice.pop_deltas() for choice in self._choices)

    async def _read_events(self) -> None:
        try:
            num_at_once = self._asked.num_at_once or len(self._choices)
            for first in range(0, len(self._choices), num_at_once):
                group = self._choices[first : first + num_at_once]
                past_s = self._latency.past_s() if first else 0.0
                requests = [_later(each.request, past_s) for each in group]
                await self._read(self._asked.api.client.generate(requests), len(group))
        except InvalidRequest as error:
            self.failure = self._worded(error)
        except MnemeError as error:
            self.failure = error
        except Exception:  # the edge of the engine client: the client gets an answer, the log the cause
            logger.exception("generation failed request=%s", self._choices[0].request.request_id)
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

    def _worded(self, error: InvalidRequest) -> InvalidRequest:
        """Return the engine's refusal in the client's words; one of the calls' grammar names the function."""
        choice = self._choice_by_request.get(error.request_id or "", self._choices[0])
        name = None if choice.parser is None or error.field != "tools" else choice.parser.open_call
        if name is not None:
            return InvalidRequest(error.field, error.value, f"{error.rule} (in the arguments of {name})")
        return self._asked.fields[choice.prompt_index].worded(error)

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


class Answer(ABC, Generic[W, E]):
    """Words the answers of one API, whole and as a stream of server-sent events."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> W:
        """The body when every choice has finished; `deltas` holds all of each."""

    @abstractmethod
    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta]) -> bytes:
        """What deltas are told as."""

    @abstractmethod
    async def end(self, choices: Sequence[Choice]) -> bytes:
        """What ends a whole stream."""

    async def keep(self, choices: Sequence[Choice]) -> None:  # most APIs keep nothing
        """Keep what an API keeps of a whole answer, all of which was worded."""

    def failed(self, error: MnemeError) -> bytes:
        """What ends a stream that broke; a client must not take that for a whole answer."""
        return event(json.dumps(error_object(error)))


PartKind = Literal["reasoning", "message", "call"]


@dataclass(slots=True)
class Part:
    """A part of an answer: what was thought or said without a break, or one call."""

    kind: PartKind
    index: int  # in the answer
    call_id: str = ""
    name: str = ""  # of what is called
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far; of a call its arguments."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> Any:
        """Of a call's arguments what is whole, as Anthropic's SDK has it of a stream."""
        given: Any = None
        with suppress(ValueError):
            given = from_json(self.text or "{}", allow_inf_nan=False, allow_partial=True)
        return given if isinstance(given, dict) else {"arguments": self.text}  # the model's own words, not forced


class AnswerInParts(Answer[W, E]):
    """Words an answer of one choice whose parts follow each other; subclasses say which events tell that."""

    def __init__(self, *, is_silent: bool) -> None:
        """`is_silent`: the prompt was all that was wanted."""
        self.parts: list[Part] = []  # the last one is open
        self._has_begun, self._is_silent = False, is_silent

    @abstractmethod
    def _begin(self, choice: Choice) -> Iterator[E]:
        """Yield what a stream begins with."""

    @abstractmethod
    def _begin_part(self, part: Part) -> Iterator[E]:
        """Yield what tells that a part begins."""

    @abstractmethod
    def _grow_part(self, part: Part, text: str) -> Iterator[E]:
        """Yield what tells that a part goes on with a text, which may be empty."""

    @abstractmethod
    def _end_part(self, part: Part, *, is_cut: bool) -> Iterator[E]:
        """Yield what tells that a part has ended; `is_cut`: at a limit."""

    @abstractmethod
    def _end(self, choice: Choice) -> Iterator[E]:
        """Yield what a whole stream ends with, when its last part has ended and it was kept."""

    @abstractmethod
    def _whole(self, choice: Choice) -> W:
        """The answer, when its last part has ended."""

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> W:
        """See `Answer`."""
        (choice,), (delta,) = choices, deltas
        deque(self._add(delta), maxlen=0)
        deque(self._end_parts(choice), maxlen=0)
        return self._whole(choice)

    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta]) -> bytes:
        """See `Answer`."""
        told = b""
        for delta in deltas:  # one by one: usage counts what was taken
            if not self._has_begun:
                self._has_begun = True
                told += written(self._begin(choices[0]))
            told += written(self._add(delta))
        return told

    async def end(self, choices: Sequence[Choice]) -> bytes:
        """See `Answer`; usage is told to everyone."""
        told = written(self._end_parts(choices[0]))
        await self.keep(choices)
        return told + written(self._end(choices[0]))

    def _add(self, delta: Delta) -> Iterator[E]:
        if self._is_silent:
            return
        rest = list(takewhile(lambda piece: piece.id is None, delta.calls))
        for piece in rest:  # of the call that is open: it ends before anything is said behind it
            yield from self._grow(piece.arguments)
        said: tuple[tuple[PartKind, str], ...] = (("reasoning", delta.reasoning), ("message", delta.text))
        for kind, text in said:
            if text:
                if not self.parts or self.parts[-1].kind != kind:
                    yield from self._open(Part(kind, len(self.parts)))
                yield from self._grow(text)
        for piece in delta.calls[len(rest) :]:
            if piece.id is not None:
                yield from self._open(Part("call", len(self.parts), piece.id, piece.name or ""))
            yield from self._grow(piece.arguments)

    def _open(self, part: Part) -> Iterator[E]:
        yield from self._close(is_cut=False)
        self.parts.append(part)
        yield from self._begin_part(part)

    def _grow(self, text: str) -> Iterator[E]:
        self.parts[-1].pieces.append(text)
        yield from self._grow_part(self.parts[-1], text)

    def _close(self, *, is_cut: bool) -> Iterator[E]:
        if self.parts:
            yield from self._end_part(self.parts[-1], is_cut=is_cut)

    def _end_parts(self, choice: Choice) -> Iterator[E]:
        yield from self._close(is_cut=choice.finish_reason == "length")


def written(events: Iterable[Any]) -> bytes:
    return b"".join(event(json.dumps(each), each["type"]) for each in events)


def event(payload: str, name: str | None = None) -> bytes:
    """A server-sent event; Anthropic's and those of responses have names."""
    return f"{'' if name is None else f'event: {name}{chr(10)}'}data: {payload}\n\n".encode()
