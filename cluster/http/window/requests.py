"""Remembers the requests that ended at this ingress, and tells listeners of them as they end."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from mneme.cluster.wire.answers import RequestTimes
from mneme.cluster.wire.overview import Event, SavedPrefill, ShownRequest
from mneme.errors import Overloaded, ReplicaUnavailable

MAX_REQUESTS = 1_000
MAX_LISTENERS, MAX_LISTENERS_PER_TENANT = 64, 16
_QUARTER_S, _MAX_QUARTERS = 900, 25 * 4  # a day's, also one in which clocks are set; time zones differ by quarters
MAX_WAITING_EVENTS = 256  # of one listener; older ones are dropped, and counted in its next event


class Listener:
    """Holds what one listener has not read yet."""

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


class EndedRequest(NamedTuple):
    """A request that ended, as its tenant sees it, and whose KV it could share."""

    tenant: str
    salt: str
    shown: ShownRequest
    times: RequestTimes


@dataclass(slots=True, eq=False)
class RequestLog:
    """Holds the last requests of all tenants, and who listens."""

    clock: Callable[[], float]  # seconds since 1970
    _requests: deque[EndedRequest] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS))
    _listeners: set[Listener] = field(default_factory=set)
    _began_s: float = field(init=False)
    _saved: Counter[int] = field(default_factory=Counter)  # prompt tokens, by the quarter of an hour
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def __len__(self) -> int:
        return len(self._requests)

    def last(self, tenant: str, count: int) -> list[ShownRequest]:
        """Return a tenant's requests, the latest first."""
        return [each.shown for each in reversed(self._requests) if each.tenant == tenant][:count]

    def find(self, tenant: str, request_id: str) -> EndedRequest | None:
        of_id = (each for each in reversed(self._requests) if each.shown["id"] == request_id)
        return next((each for each in of_id if each.tenant == tenant), None)

    def add(self, ended: EndedRequest) -> None:
        tenant, _, shown, _ = ended
        self._requests.append(ended)
        for listener in self._listeners:
            if listener.tenant == tenant:
                listener.put({"type": "request.ended", "at": shown["ended_at"], "data": dict(shown)})
        kv, quarter = shown["kv_details"], int(shown["ended_at"] // _QUARTER_S)
        if quarter not in self._saved:
            self._saved = Counter({at: tokens for at, tokens in self._saved.items() if at > quarter - _MAX_QUARTERS})
        self._saved[quarter] += kv["device"] + kv["host"] + kv["disk"] + kv["peer"]

    def saved(self, since_s: float) -> SavedPrefill:
        """Count what requests of all tenants need not compute of their prompts, since then or for the last day."""
        now_s = self.clock()
        since_s = min(max(since_s, self._began_s, now_s - _MAX_QUARTERS * _QUARTER_S), now_s)
        tokens = sum(tokens for at, tokens in self._saved.items() if at >= since_s // _QUARTER_S)
        return {"since": since_s, "tokens": tokens}

    def close(self) -> None:
        """End every listener's events at once: a server that stops waits for what it has open."""
        self._is_closed = True
        for listener in self._listeners:
            listener.news.set()

    @contextmanager
    def listening(self, tenant: str) -> Iterator[Listener]:
        """Collect a tenant's events within the block; raises `Overloaded` where as many listen as may.

        Raises `ReplicaUnavailable` behind `close`.
        """
        if self._is_closed:
            raise ReplicaUnavailable("the server is stopping")
        if len(self._listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} listen to events already")
        if sum(each.tenant == tenant for each in self._listeners) >= MAX_LISTENERS_PER_TENANT:
            raise Overloaded(f"{MAX_LISTENERS_PER_TENANT} listen to events with this API key already")
        listener = Listener(tenant)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    async def events(
        self, listener: Listener, poll: Callable[[], Awaitable[list[Event]]], pause_s: float
    ) -> AsyncIterator[Event | None]:
        """Yield a tenant's requests as they end, what `poll` finds every `pause_s`, and None behind that.

        Ends with `close`.
        """
        clock = asyncio.get_running_loop().time
        due_s = clock() + pause_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await listener.news.wait()
            if clock() >= due_s and not self._is_closed:  # though requests end all the time
                for event in await poll():
                    yield event
                yield None
                due_s = clock() + pause_s
            listener.news.clear()
            if listener.num_lost:
                num_lost, listener.num_lost = listener.num_lost, 0  # more may be lost while this is being read
                yield {"type": "lost", "at": self.clock(), "data": {"events": num_lost}}
            for _ in range(len(listener.events)):  # those that come meanwhile wait for the next look at the clock
                yield listener.events.popleft()
            if self._is_closed:
                return
