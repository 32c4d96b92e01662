"""The outermost layer: a request id, authentication, a whole body in time, and an answer to every failure.

Pure ASGI, so that nothing of the framework buffers a body or a stream. Order: headers are measured, the API key and
its limits are checked, and only then is the body read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from mneme.cluster.api_keys import Keyring, Meter
from mneme.cluster.config import HttpConfig
from mneme.cluster.http.body import MAX_BODY_BYTES, MAX_HELD_BYTES, BodyReader, ClientGone, HeldBody, Message, Receive
from mneme.cluster.http.error_response import error_response
from mneme.cluster.logs import log_request
from mneme.cluster.metrics.latency import Clock
from mneme.cluster.serve.http_protocol import MAX_HEADER_BYTES, REPLACED
from mneme.cluster.tenancy import PUBLIC
from mneme.errors import InvalidRequest, MnemeError, RequestTooLarge

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Of two, a proxy may have judged the other one.
_ONCE = ("Authorization", "X-API-Key", "Content-Type", "X-Session-ID")
# What we or Serve take for text, by its name in lower case with hyphens.
_TEXT = {
    "x-session-id": "X-Session-ID",
    "x-request-id": "X-Request-ID",
    "serve-multiplexed-model-id": "serve_multiplexed_model_id",
}
# Without a key: what probes and scrapers call, and what says what runs here, as in vLLM
PAGE_PATHS = ("/ui", "/ui/app.js", "/ui/app.css", "/docs", "/docs/docs.js")  # nothing of a tenant's is in them
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/", "/openapi.json", "/version", *PAGE_PATHS})
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


class Guard:
    """Wraps the application; adds what it knows of a request to `scope["state"]`.

    request_id, tenant     texts; `tenant_name` is what its key is called
    is_admin, meter        what the API key may do; the meter is None where it has no limits
    arrived_s, received_s  by the clock: when its headers were there, and when its body was
    body                   a `HeldBody`
    answer_headers         a list: what routes put there is among the answer's headers
    shown                  a `ShownRequest`, put there by what has generated: its line in the log has it too
    """

    def __init__(
        self,
        app: App,
        config: HttpConfig,
        on_answer: Callable[[Mapping[str, Any]], None],
        *,
        clock: Clock,
        keyring: Keyring | None = None,
    ) -> None:
        self._app = app
        self._keyring = keyring or config.keyring(clock)
        self._on_answer = on_answer  # told what `log_request` logs, of every request
        self._clock = clock
        self._bodies = BodyReader(MAX_BODY_BYTES, MAX_HELD_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = self._clock()
        response = _Response(send, secrets.token_hex(16), _given_id(scope))
        body = HeldBody(self._bodies)
        try:
            await self._serve(scope, receive, response, body)
        except (ClientGone, OSError):
            response.outcome = "client_gone"
        except asyncio.CancelledError:  # so Serve says that its client is gone
            response.outcome = "client_gone"
            raise
        except MnemeError as error:
            response.outcome = error.code
            if response.status is None:
                await self._bodies.skip(body, receive, waits=_waits_to_send(scope))
            await self._fail(error, scope, receive, response)
        except Exception:  # the edge of the process
            logger.exception("failed request=%s path=%r", response.request_id, scope["path"])
            internal = MnemeError("internal error")
            response.outcome = internal.code
            await self._fail(internal, scope, receive, response)
        finally:
            body.pop()
            self._end(scope, response, self._clock() - began_s)

    async def _serve(self, scope: Scope, receive: Receive, response: _Response, body: HeldBody) -> None:
        arrived_s = self._clock()
        headers = self._headers(scope)
        known = {"request_id": response.request_id, "body": body, "arrived_s": arrived_s}
        known["answer_headers"] = response.headers
        state = scope.setdefault("state", {})
        path = _plain_path(scope)
        is_open = path in OPEN_PATHS
        if is_open:
            is_admin = path == "/metrics" and self._is_admin(headers)
            state.update(known, tenant=PUBLIC, tenant_name=PUBLIC, is_admin=is_admin, meter=None)
        else:
            caller = self._keyring.authenticate(_credentials(headers))
            body.tenant = caller.tenant
            state.update(known, tenant=caller.tenant, tenant_name=caller.name)
            state.update(is_admin=caller.is_admin, meter=caller.meter)
            response.meter = caller.meter
        with self._taken_in(scope, response):
            has_body = scope["method"] in _BODY_METHODS or (scope["method"] == "DELETE" and _has_body(headers))
            if has_body and not is_open:  # these take none, and say so
                await self._bodies.read(body, headers, receive)
            state["received_s"] = self._clock()
            await self._app(scope, receive, response.send)

    def _is_admin(self, headers: Mapping[str, str]) -> bool:
        """Say whether who needs no key has given an admin's; another one is no reason to refuse."""
        with suppress(MnemeError):
            return self._keyring.authenticate(_credentials(headers)).is_admin
        return False

    @contextmanager
    def _taken_in(self, scope: Scope, response: _Response) -> Iterator[None]:
        """Count a request against its key's limits while it lasts; raises `RateLimited`."""
        if response.meter is None or scope["method"] not in _BODY_METHODS:
            yield
            return
        response.meter.begin()
        try:
            yield
        finally:
            response.meter.end()

    async def _fail(self, error: MnemeError, scope: Scope, receive: Receive, response: _Response) -> None:
        if response.status is None:
            answer = error_response(error, scope["path"], response.request_id)
            await answer(scope, receive, response.send)

    def _end(self, scope: Scope, response: _Response, seconds: float) -> None:
        state = scope.get("state", {})
        line: dict[str, Any] = {
            "id": response.request_id,
            "given_id": response.given_id,
            "tenant": state.get("tenant_name"),
            "method": scope["method"],
            "path": scope["path"],
            "status": response.status,
            "outcome": response.outcome,
            **state.get("shown", {}),
            "total_ms": round(seconds * 1e3, 3),
        }
        self._on_answer(line)
        is_probe = _plain_path(scope) in OPEN_PATHS and response.status == 200
        if not is_probe:
            log_request(line)

    def _headers(self, scope: Scope) -> dict[str, str]:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if size > MAX_HEADER_BYTES:
            rule = f"the request line and headers may have {MAX_HEADER_BYTES} bytes"
            raise RequestTooLarge("headers", size, rule)
        given = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
        names = [name for name, _ in given]
        for once in _ONCE:
            if names.count(once.lower()) > 1:
                raise InvalidRequest(once, None, "may be given once")
        for name, value in given:
            text = _TEXT.get(name.replace("_", "-"))
            if text is not None and REPLACED in value.decode(errors="replace"):
                raise InvalidRequest(text, None, "must be text in UTF-8")
        return {name: value.decode("latin-1") for name, value in given}


class _Response:
    """Adds the request id to the response's headers and remembers its status.

    A request that comes with an `x-request-id` has it from a proxy that sends it back itself, as Ray Serve's does.
    It is never the engine's id: a client may use one twice.
    """

    def __init__(self, send: Send, request_id: str, given_id: str | None) -> None:
        self._send = send
        self.request_id = request_id
        self.given_id = given_id
        self.status: int | None = None
        self.outcome = "ok"  # or the code of what went wrong
        self.meter: Meter | None = None
        self.headers: list[tuple[bytes, bytes]] = []  # added to the answer's

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            added = self.headers + ([] if self.meter is None else self.meter.headers())
            if self.given_id is None:
                added.append((b"x-request-id", self.request_id.encode()))
            message["headers"] = [*message.get("headers", ()), *added]
        await self._send(message)


def _plain_path(scope: Scope) -> str:
    """Return the path without a slash at its end."""
    return scope["path"].rstrip("/") or "/"


def _credentials(headers: Mapping[str, str]) -> str | None:
    """Return what an Authorization header says, or Anthropic's X-API-Key; raises `InvalidRequest` where they differ."""
    authorization, key = headers.get("authorization"), headers.get("x-api-key")
    if key is None:
        return authorization
    if authorization is not None and authorization.partition(" ")[2].strip() != key.strip():
        raise InvalidRequest("X-API-Key", None, "is another key than Authorization's")
    return f"Bearer {key}"


def _has_body(headers: Mapping[str, str]) -> bool:
    """Return whether the headers announce one."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _waits_to_send(scope: Scope) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


def _given_id(scope: Scope) -> str | None:
    given = next((value for name, value in scope["headers"] if name.lower() == b"x-request-id"), None)
    return None if given is None else given[:128].decode("ascii", "backslashreplace")
