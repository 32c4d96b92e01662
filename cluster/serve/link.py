"""The ingress's end of one replica: one token stream, one submit in flight, one abort in flight.

A link that breaks in any way (error, end, gap in `seq`, another epoch, silence, an engine that is stalled) is *lost*:
every generation on it is told, and the link opens again as a new subscriber. The replica aborts what an old subscriber
had running, so nothing runs twice; who was told resubmits with the tokens it already has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from mneme.cluster.serve.calls import ReplicaCalls, StreamDraining, StreamOpened, StreamStalled
from mneme.cluster.serve.engine_client import STALLED
from mneme.errors import MnemeError
from mneme.replicas.report import ReplicaReport
from mneme.replicas.request import GenerationRequest, SamplingParams, StepMessage, TokenEvent

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0  # a submit that takes longer is answered by losing the link
HEARD_S = 8.0  # a stream of which nothing has come for so long is lost: its process, or the way to it, is stuck
REPORTS_LOST_S = 5.0  # how long the last report stands; an idle replica makes one every 2 s
_NUM_WARM_UP, _WARM_UP_S = 8, 5.0  # requests, and the time that all of them have
_HOT_S, _ONE_TOKEN = 10.0, SamplingParams(max_tokens=1, temperature=0, seed=0)
REOPEN_MIN_S, REOPEN_MAX_S = 0.05, 1.0
_DRAIN_POLL_S = 0.1
DRAIN_WORD_S = 1.0  # a replica that is removed says within that that it drains, or it is dead


class LinkLost(Exception):
    """The link broke while a generation was on it; what it had running there is gone."""


class _StreamFault(Exception):
    """The stream contradicts itself: a gap, another epoch, or lost requests."""


Sink = asyncio.Queue[TokenEvent | LinkLost]


class ReplicaLink:
    """Owns the calls to one replica; lives on one event loop."""

    def __init__(
        self,
        replica_id: str,
        calls: ReplicaCalls,
        *,
        subscriber: str,
        on_change: Callable[[ReplicaLink], None],
        on_report: Callable[[str, ReplicaReport | None], None] = lambda _id, _report: None,
        warm_up: GenerationRequest | None = None,
        hot_prefixes: Callable[[], Sequence[tuple[str, Sequence[int]]]] = tuple,
    ) -> None:
        """`warm_up`: runs some times before the link is open, under ids of its own.

        on_report      is given None while none comes
        hot_prefixes  (salt, tokens) that the replica then takes from the cache tier, or computes, before it is open too
        """
        self.replica_id = replica_id
        self.epoch: str | None = None  # None while there is no stream
        self._calls = calls
        self._subscriber_prefix = subscriber
        self._openings = itertools.count()
        self._subscriber = ""
        self._on_change, self._on_report = on_change, on_report
        self._warm_up = warm_up  # None: it is warm
        self._hot_prefixes = hot_prefixes
        self._draining = asyncio.Event()  # the replica stops; from then on calls do not reach it
        self._was_lost = False
        self.is_late = False  # it was open, and does not answer in time
        self._next_seq = 0  # an engine counts each subscriber's messages from 0
        self._sinks: dict[str, Sink] = {}  # request id -> who wants its events
        self._submits: list[tuple[GenerationRequest, asyncio.Future[MnemeError | None]]] = []
        self._submitting: set[str] = set()  # on their way: an abort must not overtake its submit
        self._unanswered: list[asyncio.Future[MnemeError | None]] = []  # theirs
        self._aborts: dict[str, None] = {}  # an ordered set: to be sent, or on their way
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, and not yet through
        self._reported_at = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether requests may be submitted: there is a stream, and it is warm."""
        return self.epoch is not None and self._warm_up is None and not self._draining.is_set()

    @property
    def is_draining(self) -> bool:
        """Return whether the replica has said that it stops."""
        return self._draining.is_set()

    @property
    def is_coming(self) -> bool:
        """Return whether it opens for the first time, is late, or drains, as its successor is there: no fault."""
        return self._draining.is_set() or not self._was_lost

    @property
    def is_busy(self) -> bool:
        """Return whether a generation still waits for events."""
        return bool(self._sinks)

    def start(self) -> None:
        """Open the stream, and keep it open until `close`."""
        self._spawn("stream", self._keep_open())

    async def leave(self) -> None:
        """Read on while the replica drains, which bounds that itself, then close; one that does not say so is dead."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_WORD_S):
                await self._draining.wait()
        while self._draining.is_set() and self._sinks and not self._tasks["stream"].done():
            await asyncio.wait([self._tasks["stream"]], timeout=_DRAIN_POLL_S)
        await self.close()

    async def close(self) -> None:
        """End the stream at once; generations on it are told."""
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        self._lose("the replica was removed")
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, requests: Sequence[GenerationRequest], sink: Sink) -> list[MnemeError | None]:
        """Send requests with whatever else waits to be sent; their events go to `sink`. Raises `LinkLost`.

        Request ids must not have been used on this replica before: an abort may still be on its way.
        """
        if not self.is_open:
            raise LinkLost(f"no stream to replica {self.replica_id}")
        return await self._submit(requests, sink)

    async def _submit(self, requests: Sequence[GenerationRequest], sink: Sink) -> list[MnemeError | None]:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[MnemeError | None]] = [loop.create_future() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            self._sinks[request.request_id] = sink
            self._submits.append((request, answer))
        self._spawn("submit", self._pump_submits())
        return list(await asyncio.gather(*answers))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these and forget their events; by a task of its own, as the caller may be cancelled."""
        for request_id in request_ids:
            if self._sinks.pop(request_id, None) is not None:
                self._aborts[request_id] = None
        self._send_aborts()

    async def _keep_open(self) -> None:
        pause_s = REOPEN_MIN_S
        while not self._draining.is_set():
            self._subscriber = f"{self._subscriber_prefix}:{next(self._openings)}"
            try:
                await self._read_stream()
                reason = "the stream ended"
            except Exception as error:  # whatever a transport raises, the answer is the same: open again
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                is_late = isinstance(error, TimeoutError)
            else:
                is_late = False
            pause_s = REOPEN_MIN_S if self.is_open else min(2 * pause_s, REOPEN_MAX_S)
            self._lose(reason, is_late=is_late)
            await asyncio.sleep(pause_s)

    async def _read_stream(self) -> None:
        stream = self._calls.events(self.replica_id, self._subscriber)
        try:
            while True:
                try:
                    async with asyncio.timeout(None if self.epoch is None else HEARD_S):
                        item = await anext(stream)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise TimeoutError(f"nothing heard for {HEARD_S:g} s") from None
                now_s = asyncio.get_running_loop().time()
                if isinstance(item, StreamStalled):
                    raise TimeoutError(STALLED)
                if isinstance(item, StreamOpened):
                    self._reported_at = now_s
                    self._opened(item)
                elif isinstance(item, StreamDraining):
                    self._draining.set()
                    self._on_change(self)
                else:
                    for message in item:
                        self._dispatch(message)
                    if now_s - self._reported_at > REPORTS_LOST_S:
                        self._reported_at = now_s  # it is asked once in so long
                        self._on_report(self.replica_id, None)
        finally:
            with contextlib.suppress(Exception):  # it must not take the place of a cancellation
                await stream.aclose()

    def _opened(self, opened: StreamOpened) -> None:
        self.epoch, self._next_seq, self._was_lost, self.is_late = opened.epoch, 0, False, False
        logger.info("replica_id=%s epoch=%s stream open", self.replica_id, opened.epoch)
        if self._warm_up is None:
            self._on_change(self)
        else:
            self._spawn("warm-up", self._run_warm_up(self._warm_up))

    async def _run_warm_up(self, request: GenerationRequest) -> None:
        """Build what first requests build, here and at the replica; what goes wrong is left to requests."""
        with contextlib.suppress(TimeoutError, LinkLost):
            async with asyncio.timeout(_WARM_UP_S):
                for number in range(_NUM_WARM_UP):
                    if not await self._run_alone(request, f"warm-up-{number}"):
                        break
        with contextlib.suppress(TimeoutError, LinkLost):
            async with asyncio.timeout(_HOT_S):
                for number, (salt, tokens) in enumerate(self._hot_prefixes()):
                    hot = replace(request, prompt_token_ids=tuple(tokens), salt=salt, sampling=_ONE_TOKEN)
                    await self._run_alone(hot, f"hot-{number}")
        self._warm_up = None
        if self.is_open:
            self._on_change(self)

    async def _run_alone(self, request: GenerationRequest, name: str) -> bool:
        """Return whether it ended as it should; raises `LinkLost`."""
        request_id, sink = f"{self._subscriber}:{name}", asyncio.Queue[TokenEvent | LinkLost]()
        try:
            (refusal,) = await self._submit([replace(request, request_id=request_id)], sink)
            while refusal is None:
                item = await sink.get()
                if isinstance(item, LinkLost):
                    raise item
                if item.finish_reason is not None:
                    return item.finish_reason != "error"
            return False
        finally:
            self.abort([request_id])

    def _dispatch(self, message: StepMessage) -> None:
        if message.epoch != self.epoch:
            raise _StreamFault(f"epoch {message.epoch} after {self.epoch}")
        if message.seq != self._next_seq:
            raise _StreamFault(f"seq {message.seq} where {self._next_seq} was due")
        self._next_seq = message.seq + 1
        if message.report is not None:
            self._reported_at = asyncio.get_running_loop().time()
            self._on_report(self.replica_id, message.report)
        for event in message.events:
            sink = self._sinks.get(event.request_id)
            if sink is None:
                continue  # aborted here while the event was on its way
            if event.finish_reason is not None:
                del self._sinks[event.request_id]
            sink.put_nowait(event)

    def _lose(self, reason: str, *, is_late: bool = False) -> None:
        """Tell every generation on this link; idempotent."""
        was_open, self.epoch, self._was_lost = self.is_open, None, not is_late
        self.is_late = is_late
        lost = LinkLost(f"replica {self.replica_id}: {reason}")
        submits, self._submits = self._submits, []
        for answer in (*(answer for _, answer in submits), *self._unanswered):
            _answer(answer, lost)
        sinks, self._sinks = dict.fromkeys(self._sinks.values()), {}  # in order: a session's turns keep theirs
        for sink in sinks:
            sink.put_nowait(lost)
        self._aborts.clear()  # the replica aborts everything of a subscriber that is gone
        if was_open:
            logger.warning("replica_id=%s requests=%d stream lost: %s", self.replica_id, len(sinks), reason)
            self._on_change(self)

    async def _pump_submits(self) -> None:
        while self._submits:
            batch = [entry for entry in self._submits if entry[0].request_id in self._sinks]  # the rest is aborted
            self._submits = []
            subscriber = self._subscriber
            requests = [replace(request, subscriber=subscriber) for request, _ in batch]
            self._submitting = {request.request_id for request in requests}
            self._unanswered = [answer for _, answer in batch]
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    refusals = await self._calls.call(
                        self.replica_id, "submit_many", subscriber=subscriber, requests=requests
                    )
            except BaseException as error:  # accepted or not is unknown: only a new subscriber settles that
                lost = LinkLost(f"replica {self.replica_id}: {type(error).__name__} at submit")
                for _, answer in batch:
                    _answer(answer, lost)
                if not isinstance(error, Exception):  # cancelled: the link is closed, and there will be no subscriber
                    raise
                if self._draining.is_set():  # others go on there; what it took of these it drops when it has drained
                    for request, _ in batch:
                        self._sinks.pop(request.request_id, None)
                    continue
                self._restart_stream(subscriber, is_late=isinstance(error, TimeoutError))
                return
            finally:
                self._submitting, self._unanswered = set(), []
            for (request, answer), refusal in zip(batch, refusals, strict=True):
                if refusal is not None:
                    self._sinks.pop(request.request_id, None)
                _answer(answer, refusal)
            self._send_aborts()

    def _send_aborts(self) -> None:
        if self._draining.is_set():
            self._aborts.clear()  # no call reaches it: what runs there for nobody ends with it
        if self._aborts.keys() - self._submitting:
            self._spawn("abort", self._pump_aborts())

    async def _pump_aborts(self) -> None:
        while request_ids := [r for r in self._aborts if r not in self._submitting]:
            subscriber = self._subscriber
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._calls.call(self.replica_id, "abort", request_ids=request_ids)
                for request_id in request_ids:
                    self._aborts.pop(request_id, None)
            except Exception as error:  # what could not be aborted would run on: a new subscriber ends it
                logger.warning("replica_id=%s abort failed: %s", self.replica_id, type(error).__name__)
                self._restart_stream(subscriber, is_late=isinstance(error, TimeoutError))
                return

    def _restart_stream(self, subscriber: str, *, is_late: bool = False) -> None:
        """`is_late`: the replica did not answer in time, and nothing has broken: it is expected back."""
        stream = self._tasks.get("stream")
        if stream is None or subscriber != self._subscriber:
            return  # it was opened anew meanwhile
        stream.cancel()
        self._ending.add(stream)
        stream.add_done_callback(self._ending.discard)
        self._lose("a call failed", is_late=is_late)
        self._spawn("stream", self._keep_open())

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` unless a task of that name runs (it sees the new work itself); keeps the task alive."""
        running = self._tasks.get(name)
        if running is not None and not running.done() and running not in self._ending:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=f"{name}:{self.replica_id}")
        self._tasks[name] = task
        task.add_done_callback(_log_failure)


def _answer(answer: asyncio.Future[MnemeError | None], result: MnemeError | LinkLost | None) -> None:
    if answer.done():
        return
    if isinstance(result, LinkLost):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("task %s failed", task.get_name(), exc_info=task.exception())
