"""Request bodies: read whole, in time, each under a cap and all together under another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from mneme.cluster.config import HttpConfig
from mneme.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge

_SKIP_S, _SKIP_IDLE_S = 3.0, 0.5

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class HeldBody:
    """A body that counts against the budget of its reader until it is taken or dropped."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self._bytes = bytearray()
        self.is_begun = False  # some of it was asked for
        self.is_whole = False  # nothing more will come

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

    async def skip(self, body: HeldBody, receive: Receive, *, waits: bool) -> None:
        """Throw away what a client that is refused is sending, for a moment.

        Who is cut off while sending may not get to read why; a connection whose request is over can be used again.
        Who `waits` to be asked for the body (`Expect: 100-continue`) would be asked by the first call of `receive`.
        """
        body.take()
        if waits and not body.is_begun:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SKIP_S):
                while not body.is_whole:
                    async with asyncio.timeout(_SKIP_IDLE_S):
                        message = await receive()
                    body.is_whole = not message.get("more_body", False)

    async def _read_parts(self, body: HeldBody, receive: Receive) -> None:
        body.is_begun = True
        while not body.is_whole:
            async with asyncio.timeout(self._config.body_idle_timeout_s):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body.is_whole = not message.get("more_body", False)
            body.add(message.get("body", b""))
            self._check_size(len(body))

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
