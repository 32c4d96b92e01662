"""uvicorn's HTTP/1.1, without what its users stumble over: trailers among the headers, and bytes that are no text."""

from __future__ import annotations

from typing import Any

import uvicorn.config
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REPLACED = "\ufffd"  # stands for what was not UTF-8


class HttpProtocol(HttpToolsProtocol):
    """Trailers are dropped: what comes behind a body was not there when the request was judged.

    Serve decodes some headers as UTF-8 before the application sees them, and fails if they are not: such bytes are
    replaced by U+FFFD, which `Guard` refuses where it matters.
    """

    _takes_headers = True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._takes_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._takes_headers:
            super().on_header(name, value if value.isascii() else value.decode(errors="replace").encode())

    def on_headers_complete(self) -> None:
        self._takes_headers = False
        super().on_headers_complete()


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
