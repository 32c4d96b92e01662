"""A replica's side of the token stream: `ReplicaCalls` answered by one `EngineLoop`. Knows nothing of Ray.

Every call names the replica it is meant for: when that one is gone, Serve's router hands the call to another,
which must refuse it. Admission is the engine's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from mneme.cluster.serve.calls import StreamItem, StreamOpened, WrongReplica
from mneme.errors import MnemeError, Overloaded
from mneme.replicas.engine.commands import Query
from mneme.replicas.engine.kv_commands import KvQuery
from mneme.replicas.request import GenerationRequest, StepMessage

_NUM_KV_THREADS, _MAX_KV_QUERIES = 2, 64


class Engine(Protocol):
    """What a replica needs of an `EngineLoop`; all of it is thread-safe."""

    epoch: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[MnemeError | None]: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def subscribe(self, subscriber: str, deliver: Callable[[StepMessage], None]) -> None: ...
    def unsubscribe(self, subscriber: str) -> None: ...
    def check_health(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def query(self, query: Query) -> Any: ...


class _Outbox:
    """Step messages from the engine's thread to one stream; what piles up meanwhile leaves as one item."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: list[StepMessage] = []
        self._has_messages = asyncio.Event()

    def deliver(self, message: StepMessage) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, message)

    async def take(self) -> tuple[StepMessage, ...]:
        await self._has_messages.wait()
        self._has_messages.clear()
        messages, self._messages = tuple(self._messages), []
        return messages

    def _put(self, message: StepMessage) -> None:
        self._messages.append(message)
        self._has_messages.set()


class ReplicaServer:
    """Answers calls that are meant for this replica."""

    def __init__(self, replica_id: str, engine: Engine) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._subscribers: set[str] = set()
        self._kv_threads = ThreadPoolExecutor(_NUM_KV_THREADS, "kv-query")
        self._num_kv_queries = 0

    async def events(self, *, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        """The token stream of one subscriber; when it ends, in whatever way, its requests are aborted."""
        self._check(replica_id)
        outbox = _Outbox()
        self._engine.subscribe(subscriber, outbox.deliver)
        self._subscribers.add(subscriber)
        try:
            yield StreamOpened(self._replica_id, self._engine.epoch)
            while True:
                yield await outbox.take()
        finally:
            self._subscribers.discard(subscriber)
            self._engine.unsubscribe(subscriber)

    async def submit_many(
        self, *, replica_id: str, subscriber: str, requests: Sequence[GenerationRequest]
    ) -> list[MnemeError | None]:
        """Admit requests; one answer each, None for accepted."""
        self._check(replica_id)
        if subscriber not in self._subscribers:
            raise WrongReplica("the subscriber has no stream here")
        # The engine answers between two of its steps: until then this thread's loop serves others.
        answers: list[MnemeError | None] = await asyncio.to_thread(self._engine.submit_many, requests)
        if subscriber not in self._subscribers:  # the stream ended meanwhile: nobody would hear of them
            self._engine.abort([request.request_id for request in requests])
            raise WrongReplica("the subscriber's stream has ended")
        return answers

    async def abort(self, *, replica_id: str, request_ids: Sequence[str]) -> None:
        """Stop these requests; unknown ids are fine."""
        self._check(replica_id)
        self._engine.abort(request_ids)

    async def stats(self, *, replica_id: str) -> dict[str, Any]:
        """The engine's figures, its process's memory among them, and the process id."""
        self._check(replica_id)
        return {**self._engine.stats(), "pid": os.getpid()}

    async def query(self, *, replica_id: str, query: Query) -> Any:
        """What the engine says between two of its steps; an error is returned, not raised.

        Questions to the cache tier have threads of their own: it may be slow, and requests must not wait behind it.
        """
        self._check(replica_id)
        if not isinstance(query, KvQuery):
            return await asyncio.to_thread(self._engine.query, query)
        if self._num_kv_queries >= _MAX_KV_QUERIES:
            return Overloaded("too many questions about KV at once")
        self._num_kv_queries += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._kv_threads, self._engine.query, query)
        finally:
            self._num_kv_queries -= 1

    async def check_health(self) -> None:
        """Returns when the engine's thread has answered; Serve replaces a replica that stays silent."""
        await asyncio.to_thread(self._engine.check_health)

    def _check(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise WrongReplica(f"this is replica {self._replica_id}, not {replica_id}")
