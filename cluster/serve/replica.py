"""The engine replica: a thin Serve deployment around one engine.

Callers are the ingresses of this cluster, over Ray: arguments and answers are pickled Python objects, so the
cluster's network is a trust boundary, and nothing of a client's reaches these methods but parsed, validated
values. Serve never queues or rejects here: admission is the engine's.

Every call names the replica it is meant for: when that one is gone, Serve's router hands the call to another,
which must refuse it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mneme.cluster.config import ClusterConfig
from mneme.cluster.logs import log_to_serve
from mneme.cluster.serve.calls import StreamItem, StreamOpened, WrongReplica
from mneme.cluster.serve.gpus import EnginePlacement, count_machine_gpus
from mneme.cluster.serve.ray_private import keep_to_loopback, own_application, own_replica_id, report_progress
from mneme.cluster.tenancy import kv_salt, tenants
from mneme.config import parse
from mneme.errors import MnemeError, Overloaded
from mneme.replicas.engine.commands import COMMANDS, KvCommand, Query
from mneme.replicas.request import GenerationRequest, StepMessage

if TYPE_CHECKING:
    from mneme.replicas.engine.loop import EngineLoop

LoadEngine = Callable[..., "EngineLoop"]  # called like `mneme.replicas.engine.load.load_engine_loop`

_NUM_KV_THREADS, _MAX_KV_QUERIES = 2, 64


class _StreamBuffer:
    """Passes step messages from the engine's thread to one stream; what piles up meanwhile leaves as one item."""

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
    """Answers the calls of `ReplicaCalls` that are meant for this replica, by one `EngineLoop`. Uses nothing of Ray."""

    def __init__(self, replica_id: str, engine: EngineLoop) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._subscribers: set[str] = set()
        self._kv_threads = ThreadPoolExecutor(_NUM_KV_THREADS, "kv-query")
        self._num_kv_queries = 0

    async def events(self, *, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        """The token stream of one subscriber; when it ends, in whatever way, its requests are aborted."""
        self._check(replica_id)
        buffer = _StreamBuffer()
        self._engine.subscribe(subscriber, buffer.deliver)
        self._subscribers.add(subscriber)
        try:
            yield StreamOpened(self._replica_id, self._engine.epoch)
            while True:
                yield await buffer.take()
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
        """Ask the engine, which answers between two of its steps; an error is returned, not raised.

        Questions to the cache tier have threads of their own: it may be slow, and requests must not wait behind it.
        """
        self._check(replica_id)
        if not isinstance(COMMANDS.get(query.name), KvCommand):
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


class EngineReplica(ReplicaServer):
    """Loads an engine in Serve's replica process and answers for it."""

    def __init__(self, config: dict[str, Any], placement: EnginePlacement, load_engine: LoadEngine) -> None:
        from mneme.cachetier.distributed import lifecycle  # not in the process that only builds the application

        log_to_serve()
        keep_to_loopback()
        cluster = parse(ClusterConfig, config)
        replica_id = own_replica_id()
        engine = load_engine(
            cluster.model,
            replace(cluster.engine, device=placement.device),
            on_progress=lambda stage, fraction: report_progress(replica_id, stage, fraction),
            salts=[kv_salt(tenant, None) for tenant in tenants(cluster.http.api_keys)],
            device_share=placement.gpus_per_replica or 1.0,
            machine_share=placement.gpus_per_replica / max(1, count_machine_gpus()) or 1.0,
            cache=lifecycle.of_this_node(cluster.cache),
            open_store=lambda cache, _: lifecycle.start_cache_tier(
                cache, own_application(), session_ttl_s=cluster.engine.session_ttl_s
            ),
            open_session_logs=lambda cache, ttl_s: lifecycle.start_session_logs(cache, own_application(), ttl_s),
        )
        engine.start()
        super().__init__(replica_id, engine)
        report_progress(replica_id, "ready", 1.0)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()
