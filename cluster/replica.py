"""The engine replica: a thin Serve deployment around one `EngineLoop`.

Callers are the ingresses of this cluster, over Ray: arguments and answers are pickled Python objects, so the cluster's
network is a trust boundary, and nothing of a client's reaches these methods but parsed, validated values.

Every call names the replica it is meant for: when that replica is gone, Serve's router hands the call to another one,
which must refuse it. Admission is the engine's: Serve never queues or rejects here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from mneme.cluster.config import ClusterConfig
from mneme.cluster.ray_private import own_replica_id, report_progress
from mneme.cluster.replica_calls import StreamItem, StreamOpened, WrongReplica
from mneme.config import parse
from mneme.errors import MnemeError
from mneme.replicas.request import GenerationRequest, StepMessage

logger = logging.getLogger(__name__)

LoadEngine = Callable[..., Any]  # `mneme.replicas.load.load_engine_loop`; returns an EngineLoop


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


class EngineReplica:
    """One engine, and the calls of DESIGN.md section 10 on it."""

    def __init__(self, config: dict[str, Any], load_engine: LoadEngine) -> None:
        cluster = parse(ClusterConfig, config)
        self._replica_id = own_replica_id()
        self._subscribers: set[str] = set()
        self._engine = load_engine(cluster.model, cluster.engine, on_progress=self._report)
        self._engine.start()
        report_progress(self._replica_id, "ready", 1.0)

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
        return answers

    async def abort(self, *, replica_id: str, request_ids: Sequence[str]) -> None:
        """Stop these requests; unknown ids are fine."""
        self._check(replica_id)
        self._engine.abort(request_ids)

    async def stats(self, *, replica_id: str) -> dict[str, Any]:
        """The engine's figures and this process's memory."""
        self._check(replica_id)
        return {**self._engine.stats(), "process": {"pid": os.getpid(), "rss_bytes": _rss_bytes()}}

    async def check_health(self) -> None:
        """Returns when the engine's thread has answered; Serve replaces a replica that does not in its time."""
        await asyncio.to_thread(self._engine.submit_many, ())

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()

    def _check(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise WrongReplica(f"this is replica {self._replica_id}, not {replica_id}")

    def _report(self, stage: str, fraction: float) -> None:
        report_progress(self._replica_id, stage, fraction)


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
