"""The engine replica: a thin Serve deployment around one engine.

Callers are the ingresses of this cluster, over Ray: arguments and answers are pickled Python objects, so the
cluster's network is a trust boundary, and nothing of a client's reaches these methods but parsed, validated
values. Serve never queues or rejects here: admission is the engine's.

Every call names the replica it is meant for: when that one is gone, Serve's router hands the call to another,
which must refuse it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mneme.cluster.config import ClusterConfig
from mneme.cluster.logs import log_to_serve
from mneme.cluster.serve.calls import (
    ALIVE_S,
    Call,
    StreamDraining,
    StreamItem,
    StreamOpened,
    StreamStalled,
    WrongReplica,
)
from mneme.cluster.serve.gpu_health import GpuHealth, own_gpu
from mneme.cluster.serve.gpus import count_machine_gpus
from mneme.config import parse
from mneme.errors import MnemeError, Overloaded, ReplicaUnavailable
from mneme.replicas.queries import Query
from mneme.replicas.request import GenerationRequest, StepMessage

if TYPE_CHECKING:
    from mneme.replicas.engine.loop import EngineLoop

BuildEngine = Callable[..., "EngineLoop"]  # called like `mneme.replicas.engine.build.build_engine_loop`

logger = logging.getLogger(__name__)

LANES = {"kv": (2, 64), "lists": (1, 8)}  # threads for questions that may take long, and those that may be there
_DRAIN_POLL_S = 0.05


class _StreamBuffer:
    """Passes step messages from the engine's thread to one stream; what piles up meanwhile leaves as one item."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: list[StepMessage] = []
        self._has_news = asyncio.Event()
        self._is_draining = self._is_over = False

    def deliver(self, message: StepMessage) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, message)

    def drain(self, *, is_over: bool) -> None:
        """Say that the replica stops; `is_over`: there will be no more messages."""
        self._is_draining, self._is_over = True, is_over
        self._has_news.set()

    async def items(self, replica_id: str, is_stalled: Callable[[], bool]) -> AsyncGenerator[StreamItem, None]:
        """Yield what there is, or that there is nothing, until the replica has stopped."""
        has_said = False
        while not self._is_over or self._messages:
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._has_news.wait()
            self._has_news.clear()
            if self._is_draining and not has_said:
                has_said = True
                yield StreamDraining(replica_id)
            messages, self._messages = tuple(self._messages), []
            yield StreamStalled(replica_id) if not messages and is_stalled() else messages

    def _put(self, message: StepMessage) -> None:
        self._messages.append(message)
        self._has_news.set()


class ReplicaServer:
    """Answers the calls of `ReplicaCalls` that are meant for this replica, by one `EngineLoop`. Uses nothing of Ray."""

    def __init__(
        self, replica_id: str, engine: EngineLoop, *, gpu: GpuHealth | None = None, drain_grace_s: float = 0.0
    ) -> None:
        """`gpu`: what the engine runs on; when that cannot be trusted any more, the replica drains and says so."""
        self._replica_id = replica_id
        self._engine = engine
        self._subscribers: dict[str, _StreamBuffer] = {}
        self._draining: asyncio.Task[None] | None = None
        self._gpu, self._gpu_figures = gpu, {} if gpu is None else gpu.read()
        self._drain_grace_s = drain_grace_s
        self._threads = {lane: ThreadPoolExecutor(num, f"{lane}-query") for lane, (num, _) in LANES.items()}
        self._num_queries = Counter[str]()

    async def events(self, *, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        """The token stream of one subscriber; when it ends, in whatever way, its requests are aborted.

        It opens once the engine is not stalled, and ends at once if it was meant for another replica.
        """
        if replica_id != self._replica_id:
            return
        while self._engine.is_stalled:
            await asyncio.sleep(ALIVE_S)
        buffer = _StreamBuffer()
        self._engine.subscribe(subscriber, buffer.deliver)
        self._subscribers[subscriber] = buffer
        if self._draining is not None:
            buffer.drain(is_over=self._draining.done())
        try:
            yield StreamOpened(self._replica_id, self._engine.epoch)
            async with aclosing(buffer.items(self._replica_id, lambda: self._engine.is_stalled)) as items:
                async for item in items:
                    yield item
        finally:
            self._subscribers.pop(subscriber, None)
            self._engine.unsubscribe(subscriber)

    async def call(self, *, method: Call, replica_id: str, **arguments: Any) -> Any:
        """Answer one of the calls; that it was meant for another replica is returned.

        That is normal while replicas come and go, and Serve logs what is raised as an error, with its traceback.
        """
        try:
            return await getattr(self, method)(replica_id=replica_id, **arguments)
        except WrongReplica as error:
            return error

    async def submit_many(
        self, *, replica_id: str, subscriber: str, requests: Sequence[GenerationRequest]
    ) -> list[MnemeError | None]:
        """Admit requests; one answer each, None for accepted."""
        self._check(replica_id)
        if subscriber not in self._subscribers:
            raise WrongReplica("the subscriber has no stream here")
        if self._draining is not None:
            return [ReplicaUnavailable("this replica is stopping") for _ in requests]
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
        return {**self._engine.stats(), "gpu": self._gpu_figures, "pid": os.getpid()}

    async def query(self, *, replica_id: str, query: Query[Any]) -> Any:
        """Ask the engine, which answers between two of its steps; an error is returned, not raised.

        Questions to the cache tier have threads of their own: it may be slow, and requests must not wait behind it.
        """
        self._check(replica_id)
        lane = query.lane
        if lane is None:
            return await asyncio.to_thread(self._engine.query, query)
        if self._num_queries[lane] >= LANES[lane][1]:
            return Overloaded("too many questions about KV at once")
        self._num_queries[lane] += 1
        job = self._threads[lane].submit(self._engine.query, query)
        loop = asyncio.get_running_loop()

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._num_queries.subtract, [lane])

        job.add_done_callback(leave)  # not when who asks goes: the thread may work on
        return await asyncio.wrap_future(job)

    async def drain(self, grace_s: float) -> None:
        """Take no more work; what has not ended within `grace_s` is saved, and ends as "abort": others go on with it.

        Returns when all streams have been told to end.
        """
        await asyncio.shield(self.begin_drain(grace_s))

    def begin_drain(self, grace_s: float) -> asyncio.Task[None]:
        """See `drain`, which has begun when this returns; the first call counts."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s))
        return self._draining

    async def _drain(self, grace_s: float) -> None:
        logger.info("replica_id=%s grace_s=%g draining", self._replica_id, grace_s)
        for buffer in self._subscribers.values():
            buffer.drain(is_over=False)
        clock = asyncio.get_running_loop().time
        deadline = clock() + grace_s
        while self._engine.stats()["in_flight"] and clock() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        num_moved = await asyncio.to_thread(self._engine.hand_over)
        logger.info("replica_id=%s handed_over=%d drained", self._replica_id, num_moved)
        for buffer in self._subscribers.values():
            buffer.drain(is_over=True)

    async def check_health(self) -> None:
        """Returns when the engine's thread has answered; Serve replaces a replica that stays silent, or raises."""
        if self._gpu is not None:
            self._gpu_figures = await asyncio.to_thread(self._gpu.read)
            problem = self._gpu_figures["problem"]
            if problem is not None:
                logger.error("replica_id=%s gpu=%s problem=%s", self._replica_id, self._gpu.name, problem)
                self.begin_drain(self._drain_grace_s)
                raise ReplicaUnavailable(f"GPU {self._gpu.name}: {problem}")
        await asyncio.to_thread(self._engine.check_health)

    def _check(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise WrongReplica(f"this is replica {self._replica_id}, not {replica_id}")


class EngineReplica(ReplicaServer):
    """Loads an engine in Serve's replica process and answers for it."""

    READS = frozenset({"model", "engine", "cache", "drain_grace_s"})

    def __init__(self, config: dict[str, Any], device: str, gpus: float, build_engine: BuildEngine) -> None:
        """`config`: what it `READS` of a `ClusterConfig`; `device`, `gpus`: as in `EnginePlacement`."""
        # Not in the process that only builds the application, nor where there is no Ray.
        import ray

        from mneme.cachetier.distributed import lifecycle
        from mneme.cluster.serve.autoscaling import LoadMeter
        from mneme.cluster.serve.ray_private import (
            at_stop,
            keep_to_loopback,
            own_application,
            own_replica_id,
            report_progress,
        )

        log_to_serve()
        keep_to_loopback()
        cluster = parse(ClusterConfig, config)
        replica_id = own_replica_id()
        engine = build_engine(
            cluster.model,
            replace(cluster.engine, device=device),
            on_progress=lambda stage, fraction: report_progress(replica_id, stage, fraction),
            device_share=gpus or 1.0,
            node=ray.get_runtime_context().get_node_id(),
            machine_share=gpus / max(1, count_machine_gpus()) or 1.0,
            cache=lifecycle.of_this_node(cluster.cache),
            open_store=lambda cache, fingerprint: lifecycle.start_cache_tier(
                cache,
                own_application(),
                chunk_bytes=fingerprint.layout.chunk_bytes,
                session_ttl_s=cluster.engine.session_ttl_s,
            ),
            open_session_logs=lambda cache, ttl_s: lifecycle.start_session_logs(cache, own_application(), ttl_s),
        )
        engine.start()
        gpu = own_gpu() if device == "cuda" else None
        super().__init__(replica_id, engine, gpu=gpu, drain_grace_s=cluster.drain_grace_s)
        self._meter = LoadMeter()
        at_stop(lambda: self.drain(cluster.drain_grace_s))
        report_progress(replica_id, "ready", 1.0)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to `AutoscalingPolicy`; Serve calls it every second. Of a stalled engine there is nothing new."""
        return {} if self._engine.is_stalled else asdict(self._meter.read(self._engine.stats()))

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()
