"""uvicorn's HTTP/1.1, without what its users stumble over: trailers among the headers, bytes that are no text, and
clients that never end their headers."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.config
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# What a connection may take. HAProxy's own limits follow them, on Kubernetes too (`run/environment.py`, k8s/chart).
MAX_HEADER_BYTES = 32 * 2**10  # of one request, with its first line: uvicorn's parser has no bound of its own
BODY_IDLE_S = 10.0  # between two pieces of a body
CLIENT_STALL_S = 60.0  # that a client may leave a piece of its answer unread
HEADER_S = 10.0  # from a connection, or the first byte of its next request, to the end of the headers
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
REPLACED = "\ufffd"  # stands for what was not UTF-8


class HttpProtocol(HttpToolsProtocol):
    """Trailers are dropped: what comes behind a body was not there when the request was judged.

    Serve decodes some headers as UTF-8 before the application sees them, and fails if they are not: such bytes are
    replaced by U+FFFD, which `Guard` refuses where it matters.
    """

    _takes_headers = True
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._headers_due = self.loop.call_later(HEADER_S, self._refuse_slow_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._takes_headers = True
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADER_S, self._refuse_slow_headers)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._takes_headers:
            super().on_header(name, value if value.isascii() else value.decode(errors="replace").encode())

    def on_headers_complete(self) -> None:
        self._takes_headers = False
        self._stop_waiting()
        super().on_headers_complete()

    def _stop_waiting(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _refuse_slow_headers(self) -> None:
        self._headers_due = None
        if self.cycle is None or self.cycle.response_complete:  # else the answer before goes on, and the next one waits
            self.transport.write(_TOO_LATE)
            self.transport.close()


class EndsEarlyAnswers(RequestResponseCycle):
    """An answer to a request that has not arrived whole ends with the connection, not after a length.

    What has a length HAProxy passes on, and lets the client go on sending for as long as it likes: such clients
    would soon hold all of its connections.
    """

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and self.more_body:
            headers = dict(message["headers"])
            length = headers.pop(b"content-length", None)
            if length is not None:
                self.chunked_encoding, self.expected_content_length = False, int(length)
                message = {**message, "headers": [*headers.items(), (b"connection", b"close")]}
        await super().send(message)


def use_everywhere() -> None:
    """Use it for the servers that this process starts from now on without naming a protocol, as Ray Serve does."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{HttpProtocol.__name__}"
    httptools_impl.RequestResponseCycle = EndsEarlyAnswers  # type: ignore[misc]  # made by the protocol's base
