"""The run of one HTTP request's choices, in tasks that outlive neither the request nor its client.

One task reads the engine's events into the choices, one waits for the client to hang up; the request's
handler wakes when either has something to say. Leaving the `with` block cancels both without awaiting: the
engine client aborts what still runs from the reading task, which nobody else cancels, so that the abort is
not lost with the handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from itertools import chain
from types import TracebackType
from typing import Any

from mneme.cluster.http.choices import Choice, Delta
from mneme.cluster.http.request_body import ClientGone, Receive
from mneme.cluster.metrics.latency import RequestLatency
from mneme.cluster.serve.engine_client import EngineClient
from mneme.errors import InvalidRequest, MnemeError, ReplicaUnavailable
from mneme.replicas.request import TokenEvent

logger = logging.getLogger(__name__)

_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps no strong reference to a task


class Generation:
    """`await news()`, then `take()`; ends when `is_done`, with `failure` if it went wrong."""

    def __init__(
        self, client: EngineClient, choices: Sequence[Choice], receive: Receive, latency: RequestLatency
    ) -> None:
        self.choices = choices
        self.is_done = False
        self.failure: MnemeError | None = None
        self._client = client
        self._choice_by_request = {choice.request.request_id: choice for choice in choices}
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

    def take(self) -> Iterator[Delta]:
        """What is new, choice by choice."""
        return chain.from_iterable(choice.take() for choice in self.choices)

    async def _read_events(self) -> None:
        events = self._client.generate([choice.request for choice in self.choices])
        try:
            await self._read(events)
        except InvalidRequest as error:
            choice = self._choice_by_request.get(error.request_id or "", self.choices[0])
            self.failure = choice.fields.worded(error)
        except MnemeError as error:
            self.failure = error
        except Exception:  # the edge of the engine client: the client gets an answer, the log the cause
            logger.exception("generation failed request=%s", self.choices[0].request.request_id)
            self.failure = MnemeError("internal error")
        finally:
            self.is_done = True
            self._wake.set()

    async def _read(self, events: AsyncIterator[TokenEvent]) -> None:
        num_running = len(self.choices)
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

    async def _wait_for_hang_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_client_gone = True
        self._wake.set()


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    """Abort the other choices."""
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
