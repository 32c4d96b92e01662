"""The ASGI response that runs a request's choices and sends what they say, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from mneme.cluster.http.answers import DONE, Answer
from mneme.cluster.http.choices import Choice, Delta, joined, usage_object
from mneme.cluster.http.error_response import error_object
from mneme.cluster.http.generation import Generation
from mneme.cluster.http.guard import Send
from mneme.cluster.http.protocol import StreamOptions
from mneme.cluster.http.request_body import ClientGone, Receive
from mneme.cluster.metrics.latency import RequestLatency
from mneme.cluster.serve.engine_client import EngineClient

logger = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect a stream
]


@dataclass(slots=True, kw_only=True)
class RunResponse:
    """Nothing runs before Starlette calls it, and nothing runs on after it returns.

    The status line waits for the first event, so that a refusal at admission has its own status. A client
    that does not read is cut off when one piece has waited `stall_timeout_s`; until then its text piles up,
    once.
    """

    client: EngineClient
    choices: Sequence[Choice]
    answer: Answer
    stream: StreamOptions | None  # None: the answer is sent whole
    latency: RequestLatency
    stall_timeout_s: float

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        with Generation(self.client, self.choices, receive, self.latency) as generation:
            await generation.news()
            if generation.failure is not None:
                raise generation.failure
            if self.stream is None:
                response = await self._whole(generation)
                await response(scope, receive, send)
            else:
                await self._stream(generation, self.stream, send)
        self.latency.end()

    async def _whole(self, generation: Generation) -> Response:
        while not generation.is_done:
            await generation.news()
        if generation.failure is not None:
            raise generation.failure
        whole = [joined(list(choice.take())) for choice in self.choices]
        body = json.dumps(self.answer.whole(self.choices, whole), ensure_ascii=False)
        return Response(body, media_type="application/json")

    async def _stream(self, generation: Generation, options: StreamOptions, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        usage = self._usage_writer(options)
        while not generation.is_done:
            await self._send(send, self._events(generation.take(), usage))
            await generation.news()
        last = self._events(generation.take(), usage)
        if generation.failure is not None:  # no [DONE]: the client must not take this for a whole answer
            last += _event(json.dumps(error_object(generation.failure)))
        else:
            if options.include_usage:
                last += _event(self.answer.usage_chunk(self.choices))
            last += DONE
        await self._send(send, last, is_last=True)

    def _events(self, deltas: Iterable[Delta], usage: Callable[[], str]) -> bytes:
        return b"".join(_event(chunk) for delta in deltas for chunk in self.answer.chunks(delta, usage()))

    def _usage_writer(self, options: StreamOptions) -> Callable[[], str]:
        """What each chunk says of usage: nothing, null, or the count so far."""
        if not options.include_usage:
            return lambda: ""
        if not options.continuous_usage_stats:
            return lambda: ',"usage":null'
        return lambda: f',"usage":{json.dumps(usage_object(self.choices))}'

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not body and not is_last:
            return
        try:
            async with asyncio.timeout(self.stall_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError:
            logger.info("client stalled request=%s", self.choices[0].request.request_id)
            raise ClientGone from None


def _event(payload: str) -> bytes:
    return f"data: {payload}\n\n".encode()
