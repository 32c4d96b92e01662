"""`ReplicaCalls` without Ray: replicas in this process, with faults to order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from mneme.cluster.serve.calls import StreamDraining, StreamItem, StreamOpened, WrongReplica
from mneme.cluster.serve.replica import ReplicaServer
from mneme.replicas.request import StepMessage
from tests.fakes.fake_engine import FakeEngineLoop


class ReplicaDied(Exception):
    """What a transport raises when the process at its other end is gone."""


class DirectCalls:
    """Replicas by id; each can be killed, made to lose a message, or made to hang."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngineLoop] = {}
        self.submit_batches: list[int] = []
        self.num_wakes = 0
        self.num_opened = 0  # streams so far
        self.hang_submits = False
        self.hang_queries = False
        self.late: set[str] = set()  # replicas that do not answer `stats`
        self.frozen: set[str] = set()  # whose streams say nothing, as those of a stopped process
        self.servers: dict[str, ReplicaServer] = {}
        self._deaths: dict[str, asyncio.Event] = {}
        self._drop_next: set[str] = set()
        self._is_unreachable: set[str] = set()

    def add(self, replica_id: str, *, step_s: float = 0.001, max_running: int = 128) -> FakeEngineLoop:
        engine = FakeEngineLoop(step_s=step_s, max_running=max_running)
        engine.start()
        self.engines[replica_id] = engine
        self.servers[replica_id] = ReplicaServer(replica_id, engine)
        self._deaths[replica_id] = asyncio.Event()
        return engine

    def kill(self, replica_id: str) -> None:
        self.engines[replica_id].stop()
        self._deaths[replica_id].set()

    async def drain(self, replica_id: str, grace_s: float) -> None:
        """As Serve stops a replica: no call reaches it any more."""
        self._is_unreachable.add(replica_id)
        await self.servers[replica_id].drain(grace_s)

    def drop_next_message(self, replica_id: str) -> None:
        self._drop_next.add(replica_id)

    def stop_all(self) -> None:
        for engine in self.engines.values():
            engine.stop()

    async def events(self, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        death = self._alive(replica_id)
        self.num_opened += 1
        stream = self.servers[replica_id].events(replica_id=replica_id, subscriber=subscriber)
        died = asyncio.ensure_future(death.wait())
        item: asyncio.Future[StreamItem] | None = None
        try:
            while True:
                item = asyncio.ensure_future(anext(stream))
                await asyncio.wait({item, died}, return_when=asyncio.FIRST_COMPLETED)
                if died.done():
                    raise ReplicaDied(replica_id)
                while replica_id in self.frozen:
                    await asyncio.sleep(0.005)
                yield self._maybe_dropped(replica_id, item.result())
        finally:
            died.cancel()
            if item is not None:
                item.cancel()
                await asyncio.gather(item, return_exceptions=True)
            await stream.aclose()

    async def wake(self) -> None:
        self.num_wakes += 1
        await asyncio.Event().wait()

    async def call(self, replica_id: str, method: str, **arguments: Any) -> Any:
        self._alive(replica_id)
        if replica_id in self._is_unreachable:
            raise WrongReplica(replica_id)
        if method == "submit_many":
            self.submit_batches.append(len(arguments["requests"]))
        hangs = {"submit_many": self.hang_submits, "query": self.hang_queries, "stats": replica_id in self.late}
        if hangs.get(method):
            await asyncio.Event().wait()
        if method == "submit_many":
            await asyncio.sleep(0.005)  # a call takes time, so that others pile up behind it
        return await getattr(self.servers[replica_id], method)(replica_id=replica_id, **arguments)

    def _alive(self, replica_id: str) -> asyncio.Event:
        death = self._deaths[replica_id]
        if death.is_set():
            raise ReplicaDied(replica_id)
        return death

    def _maybe_dropped(self, replica_id: str, item: StreamItem) -> StreamItem:
        if not item or isinstance(item, StreamOpened | StreamDraining) or replica_id not in self._drop_next:
            return item
        self._drop_next.discard(replica_id)
        messages: tuple[StepMessage, ...] = item[1:]
        return messages
