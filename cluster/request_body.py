"""Request bodies: read whole, in time, each under a cap and all together under another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from mneme.cluster.http_config import HttpConfig
from mneme.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class HeldBody:
    """A body that counts against the budget of its reader until it is taken or dropped."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, part: bytes) -> None:
        self._reader.reserve(len(part))
        self._bytes += part

    def take(self) -> bytes:
        """The bytes, once; they are the caller's then."""
        taken, self._bytes = bytes(self._bytes), bytearray()
        self._reader.reserve(-len(taken))
        return taken


class BodyReader:
    """Slow senders hold what they have sent; `max_held_body_bytes` bounds all of them together."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._num_held = 0

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > 0 and self._num_held + num_bytes > self._config.max_held_body_bytes:
            raise Overloaded("too many large requests at once")
        self._num_held += num_bytes

    async def read(self, body: HeldBody, headers: Mapping[str, str], receive: Receive) -> None:
        """Fill `body`; raises `RequestTooLarge` or `RequestTimeout`."""
        length = headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(int(length[:20]))
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                await self._read_parts(body, receive)
        except TimeoutError:
            raise RequestTimeout("body", f"{len(body)} bytes", "did not arrive in time") from None

    async def _read_parts(self, body: HeldBody, receive: Receive) -> None:
        more = True
        while more:
            async with asyncio.timeout(self._config.body_idle_timeout_s):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body.add(message.get("body", b""))
            self._check_size(len(body))
            more = message.get("more_body", False)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._config.max_body_bytes:
            raise RequestTooLarge("body", num_bytes, f"may have {self._config.max_body_bytes} bytes")


def check_json_type(headers: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` for a body that is not JSON by its headers."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest("content-encoding", encoding, "compressed bodies are not accepted")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("content-type", media_type, "must be application/json")
