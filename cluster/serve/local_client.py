"""`EngineClient` over the one engine of this process: no router, no Ray, and no second life for a request.

Calls wait for the engine as long as it takes: a step in which kernels are compiled may last longer than any time limit
between processes would allow. Only an engine whose thread has ended or hangs, or a GPU that has, ends what waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from mneme.cluster.serve.calls import StreamDraining, StreamOpened, StreamStalled, WrongReplica
from mneme.cluster.serve.engine_client import STALLED, Condition
from mneme.cluster.serve.gpu_health import GpuHealth
from mneme.cluster.serve.replica import ReplicaServer
from mneme.cluster.wire.answers import ExplainedRoute
from mneme.errors import InvalidRequest, MnemeError, ReplicaUnavailable
from mneme.replicas.queries import Query
from mneme.replicas.request import GenerationRequest, SessionKey, TokenEvent

if TYPE_CHECKING:
    from mneme.replicas.engine.loop import EngineLoop

R = TypeVar("R")

logger = logging.getLogger(__name__)

NAME = "local"  # of the replica, and of its only subscriber
HEALTH_S = 5.0

_Answers = list[MnemeError | None]
_STOPPING = "the server is stopping"


class LocalEngineClient:
    """Implements `EngineClient` on one event loop, between `open` and `stop`."""

    def __init__(
        self, engine: EngineLoop, *, gpu: GpuHealth | None = None, on_failure: Callable[[str], None] = lambda _: None
    ) -> None:
        """`on_failure`: called with the reason when the engine cannot go on; nothing is served from then on."""
        self._engine = engine
        self._server = ReplicaServer(NAME, engine, gpu=gpu)
        self._on_failure = on_failure
        self._is_open = asyncio.Event()
        self._sinks: dict[str, asyncio.Queue[TokenEvent]] = {}  # by request id
        self._waiting: list[tuple[Sequence[GenerationRequest], asyncio.Future[_Answers]]] = []  # to be submitted
        self._submitting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open the token stream; requests may come when this returns."""
        self._tasks = [asyncio.create_task(self._read_stream()), asyncio.create_task(self._watch())]
        await self._is_open.wait()

    async def stop(self, grace_s: float) -> None:
        """Take no more requests; those that have not ended after `grace_s` are saved, and end with an error."""
        self._is_open.clear()
        await self._server.drain(grace_s)
        stream, watch = self._tasks
        watch.cancel()
        await asyncio.gather(stream, watch, return_exceptions=True)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[TokenEvent, None]:
        """See `EngineClient.generate`."""
        if not self._is_open.is_set():
            raise ReplicaUnavailable(_STOPPING)
        sink = asyncio.Queue[TokenEvent]()
        running = {request.request_id for request in requests}
        self._sinks.update(dict.fromkeys(running, sink))
        submitted = self._submit(requests)
        try:
            for request, refusal in zip(requests, await asyncio.shield(submitted), strict=True):
                if isinstance(refusal, InvalidRequest):
                    refusal.request_id = request.request_id
                if refusal is not None:
                    raise refusal
            while running:
                event = await sink.get()
                if event.finish_reason is not None:
                    running.discard(event.request_id)
                yield event
        finally:
            for request in requests:
                self._sinks.pop(request.request_id, None)
            if running:  # an abort must not overtake its submit
                submitted.add_done_callback(lambda _: self._engine.abort(list(running)))

    async def stats(self) -> dict[str, dict[str, Any]]:
        """See `EngineClient.stats`."""
        return {NAME: await self._server.stats(replica_id=NAME)}

    async def query(self, query: Query[R], *, replica_id: str | None = None) -> dict[str, R]:
        """See `EngineClient.query`."""
        if replica_id not in (None, NAME):
            raise ReplicaUnavailable("that replica is gone")
        answer = await self._server.query(replica_id=NAME, query=query)
        if isinstance(answer, MnemeError):
            raise answer
        return {NAME: answer}

    def replica_ids(self) -> list[str]:
        """See `EngineClient.replica_ids`."""
        return [NAME]

    def place_fork(self, key: SessionKey, replica_id: str) -> None:
        """See `EngineClient.place_fork`: there is one place."""

    def home_of(self, key: SessionKey) -> str | None:
        """See `EngineClient.home_of`."""
        return NAME

    def record_prefix(self, token_ids: Sequence[int], replica_id: str, *, salt: str) -> None:
        """See `EngineClient.record_prefix`: nobody chooses by it."""

    def routes(self, salt: str, http_id: str) -> list[ExplainedRoute]:
        """See `EngineClient.routes`: nothing was chosen."""
        return []

    def routing(self) -> Mapping[str, Any]:
        """See `EngineClient.routing`: nothing was chosen."""
        return {"decisions": {}, "accuracy": {}}

    def num_ready(self) -> int:
        """See `EngineClient.num_ready`."""
        return int(self._is_open.is_set() and not self._engine.is_stalled)

    async def condition(self) -> Condition:
        """See `EngineClient.condition`."""
        if self.num_ready():
            return Condition("ready")
        return Condition("stalled", STALLED) if self._is_open.is_set() else Condition("failed", _STOPPING)

    def num_wanted(self) -> int | None:
        """See `EngineClient.num_wanted`."""
        return 1

    def _submit(self, requests: Sequence[GenerationRequest]) -> asyncio.Future[_Answers]:
        """Hand requests over with whatever else waits: the engine answers between two steps, and all at once."""
        answer: asyncio.Future[_Answers] = asyncio.get_running_loop().create_future()
        self._waiting.append((requests, answer))
        if self._submitting is None or self._submitting.done():
            self._submitting = asyncio.create_task(self._submit_waiting())
        return answer

    async def _submit_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            requests = [replace(request, subscriber=NAME) for each, _ in batch for request in each]
            answers: _Answers
            try:
                answers = await self._server.submit_many(replica_id=NAME, subscriber=NAME, requests=requests)
            except WrongReplica:  # its stream has ended
                answers = [ReplicaUnavailable(_STOPPING)] * len(requests)
            except Exception:  # nobody may wait for ever
                logger.exception("submit failed requests=%s", [request.request_id for request in requests])
                answers = [MnemeError("the engine could not take the request")] * len(requests)
            for each, answer in batch:
                answer.set_result(answers[: len(each)])
                answers = answers[len(each) :]

    async def _read_stream(self) -> None:
        """Give events to whoever waits for them, until the engine has stopped."""
        async with aclosing(self._server.events(replica_id=NAME, subscriber=NAME)) as items:
            async for item in items:
                if isinstance(item, StreamOpened):
                    self._is_open.set()
                elif isinstance(item, StreamDraining):
                    self._is_open.clear()
                elif not isinstance(item, StreamStalled):  # requests wait until it goes on, or hangs
                    for event in (event for message in item for event in message.events):
                        if event.request_id in self._sinks:  # else it was aborted
                            ended = _stopped(event.request_id) if event.finish_reason == "abort" else event
                            self._sinks[event.request_id].put_nowait(ended)
        self._end_all()

    async def _watch(self) -> None:
        """Look after the engine's thread and its GPU, as Serve looks after a replica."""
        while True:
            await asyncio.sleep(HEALTH_S)
            try:
                await self._server.check_health()
            except ReplicaUnavailable as error:
                self._is_open.clear()
                self._end_all()
                self._on_failure(str(error))
                return

    def _end_all(self) -> None:
        for request_id, sink in self._sinks.items():
            sink.put_nowait(_stopped(request_id))


def _stopped(request_id: str) -> TokenEvent:
    return TokenEvent(request_id, (), "error", None, None, _STOPPING, ReplicaUnavailable(_STOPPING))
