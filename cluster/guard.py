"""The outermost layer: a request id, authentication, a whole body in time, and an answer to every failure.

Pure ASGI, so that nothing of the framework buffers a body or a stream. Order: headers are measured, the API
key is checked, and only then is the body read, whole and bounded, and handed on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mneme.cluster.error_response import error_response
from mneme.cluster.http_config import HttpConfig
from mneme.cluster.tenancy import authenticate
from mneme.errors import InvalidRequest, MnemeError, RequestTimeout, RequestTooLarge

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # what probes and scrapers call, without a key
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Guard:
    """Wraps the application; sets `scope["state"]` to `{"request_id", "tenant", "body"}`."""

    def __init__(self, app: App, config: HttpConfig, on_response: Callable[[str, int], None]) -> None:
        self._app = app
        self._config = config
        self._on_response = on_response  # told the path and status of every answer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        response = _Response(send, request_id)
        try:
            headers = self._headers(scope)
            is_open = scope["path"] in OPEN_PATHS
            tenant = authenticate(headers.get("authorization"), () if is_open else self._config.api_keys)
            body = await self._read_body(scope, headers, receive)
            scope.setdefault("state", {}).update(request_id=request_id, tenant=tenant, body=body)
            await self._app(scope, _Replay(body, receive), response.send)
        except (ClientGone, OSError):
            logger.info("client gone request=%s", request_id)
        except MnemeError as error:
            await self._fail(error, scope, receive, response)
        except Exception:  # the edge of the process
            logger.exception("failed request=%s path=%r", request_id, scope["path"])
            await self._fail(MnemeError("internal error"), scope, receive, response)
        if response.status is not None:
            self._on_response(scope["path"], response.status)

    async def _fail(
        self, error: MnemeError, scope: MutableMapping[str, Any], receive: Receive, response: _Response
    ) -> None:
        logger.info("refused request=%s status=%d code=%s", response.request_id, error.http_status, error.code)
        if response.status is None:
            await error_response(error)(scope, receive, response.send)

    def _headers(self, scope: MutableMapping[str, Any]) -> dict[str, str]:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > self._config.max_header_bytes:
            rule = f"the request line and headers may have {self._config.max_header_bytes} bytes"
            raise RequestTooLarge("headers", size, rule)
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

    async def _read_body(self, scope: MutableMapping[str, Any], headers: dict[str, str], receive: Receive) -> bytes:
        if scope["method"] not in _BODY_METHODS:
            return b""
        self._check_length(headers.get("content-length"))
        _check_encoding(headers)
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                while more:
                    async with asyncio.timeout(self._config.body_idle_timeout_s):
                        message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    self._check_size(len(body))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RequestTimeout("body", f"{len(body)} bytes", "did not arrive in time") from None
        return bytes(body)

    def _check_length(self, content_length: str | None) -> None:
        if content_length is not None and content_length.isdecimal():
            self._check_size(int(content_length[:20]))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._config.max_body_bytes:
            raise RequestTooLarge("body", num_bytes, f"may have {self._config.max_body_bytes} bytes")


class _Response:
    """Adds the request id to the response's headers and remembers its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)


class _Replay:
    """A `receive` that gives the body that was read, then whatever comes: the client's disconnect."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _check_encoding(headers: dict[str, str]) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest("content-encoding", encoding, "compressed bodies are not accepted")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("content-type", media_type, "must be application/json")
