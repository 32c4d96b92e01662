"""Remembers the requests that ended at this ingress, and tells listeners of them as they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from mneme.cluster.http.answers import Choice, usage_object
from mneme.cluster.http.body import ClientGone
from mneme.cluster.http.stream import RunResponse
from mneme.cluster.metrics.traces import Times
from mneme.cluster.wire.overview import Event, ShownRequest
from mneme.errors import MnemeError, Overloaded

MAX_REQUESTS = 1_000
MAX_LISTENERS = 64
MAX_WAITING_EVENTS = 256  # of one listener; older ones are dropped, and counted in its next event


class _Listener:
    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.events: deque[Event] = deque()
        self.num_lost = 0
        self.news = asyncio.Event()

    def put(self, event: Event) -> None:
        if len(self.events) == MAX_WAITING_EVENTS:
            self.events.popleft()
            self.num_lost += 1
        self.events.append(event)
        self.news.set()


@dataclass(slots=True, eq=False)
class RequestLog:
    """Holds the last requests of all tenants, and who listens."""

    clock: Callable[[], float]  # seconds since 1970
    _requests: deque[tuple[str, ShownRequest]] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS))
    _listeners: set[_Listener] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._requests)

    def last(self, tenant: str, count: int) -> list[ShownRequest]:
        """Return a tenant's requests, the latest first."""
        own = [each for of_tenant, each in reversed(self._requests) if of_tenant == tenant]
        return own[:count]

    def add(self, tenant: str, request: ShownRequest) -> None:
        self._requests.append((tenant, request))
        for listener in self._listeners:
            if listener.tenant == tenant:
                listener.put({"type": "request.ended", "at": request["ended_at"], "data": dict(request)})

    def check_room(self) -> None:
        """Raise `Overloaded` where as many listen as may."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} listen to events already")

    async def events(
        self, tenant: str, poll: Callable[[], Awaitable[list[Event]]], pause_s: float
    ) -> AsyncIterator[Event | None]:
        """Yield a tenant's requests as they end, what `poll` finds after each pause, and None behind each pause."""
        listener = _Listener(tenant)
        self._listeners.add(listener)
        try:
            while True:
                try:
                    async with asyncio.timeout(pause_s):
                        await listener.news.wait()
                except TimeoutError:
                    for event in await poll():
                        yield event
                    yield None
                listener.news.clear()
                if listener.num_lost:
                    yield {"type": "lost", "at": self.clock(), "data": {"events": listener.num_lost}}
                    listener.num_lost = 0
                while listener.events:
                    yield listener.events.popleft()
        finally:
            self._listeners.discard(listener)


def shown_request(
    response: RunResponse, error: BaseException | None, request: Request, path: str, model: str, ended_at: float
) -> ShownRequest:
    """Describe a request that ended, with an error or without."""
    choices, state = response.choices, request.state
    usage = usage_object(choices)
    first_s = min((choice.first_s for choice in choices if choice.first_s is not None), default=None)
    routes = response.client.routes(choices[0].request.salt, state.request_id)
    return {
        "id": state.request_id,
        "object": "request",
        "path": path,
        "model": model,
        "ended_at": ended_at,
        "outcome": outcome_of(choices, error),
        "replica": routes[-1]["replica"] if routes else None,
        "session": choices[0].request.session_id is not None,
        "choices": len(choices),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "kv_details": usage["kv_details"],
        "queue_ms": choices[0].usage.queue_s * 1e3,
        "first_token_ms": None if first_s is None else (first_s - state.received_s) * 1e3,
        "total_ms": response.latency.past_s() * 1e3,
    }


def times_of(response: RunResponse, request: Request, clock_s: float, wall_s: float) -> Times:
    """Return when what happened to a request that ended now, by the clock that measured it and by the wall's."""
    past = wall_s - clock_s
    firsts = [choice.first_s for choice in response.choices if choice.first_s is not None]
    usage = response.choices[0].usage
    begun = min(firsts) - usage.prefill_s if firsts else None
    return Times(
        arrived=request.state.arrived_s + past,
        begun=None if begun is None else max(begun, request.state.received_s) + past,
        first_token=min(firsts) + past if firsts else None,
        last_token=max(choice.last_s for choice in response.choices) + past if firsts else None,
        ended=wall_s,
    )


def outcome_of(choices: Sequence[Choice], error: BaseException | None) -> str:
    """Name how a request ended."""
    if isinstance(error, ClientGone | asyncio.CancelledError):
        return "client_gone"
    if isinstance(error, MnemeError):
        return error.code
    if error is not None:
        return "internal_error"
    return next((choice.finish_reason for choice in choices if choice.finish_reason), "failed")
