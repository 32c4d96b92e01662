"""Reads request bodies whole and in time, each under a cap and all together under another, and parses their JSON.

The JSON is taken strictly: what another parser might read differently is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from mneme.cluster.serve.http_protocol import BODY_IDLE_S
from mneme.cluster.tenancy import PUBLIC
from mneme.errors import InvalidRequest, Overloaded, RequestTimeout, RequestTooLarge
from mneme.primitives import read_float

MAX_BODY_BYTES = 8 * 2**20  # of one request
MAX_HELD_BYTES = 256 * 2**20  # of all requests whose bodies are being read: 32 of the largest
BODY_TIMEOUT_S = 60.0  # from the headers to the last byte of the body: 8 MB at 1.1 Mbit/s
_SKIP_S, _SKIP_IDLE_S = 3.0, 0.5
MAX_DEPTH = 64
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # only these can produce one: raw ones are not UTF-8
_SURROGATE = re.compile("[\ud800-\udfff]")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class HeldBody:
    """A body that counts against the budget of its reader until it is taken or dropped."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self._bytes = bytearray()
        self.tenant = PUBLIC  # whose it is
        self.is_begun = False  # some of it was asked for
        self.is_whole = False  # nothing more will come

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, part: bytes) -> None:
        self._reader.reserve(self.tenant, len(part))
        self._bytes += part

    def pop(self) -> bytes:
        """The bytes, once; they are the caller's then."""
        taken, self._bytes = bytes(self._bytes), bytearray()
        self._reader.reserve(self.tenant, -len(taken))
        return taken


class BodyReader:
    """Slow senders hold what they have sent; `max_held_bytes` bounds all of them together.

    A tenant holds one body, or as much as is left for others: however many come, the next one finds room.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        """`max_bytes`: of one body."""
        self._max_bytes, self._max_held_bytes = max_bytes, max_held_bytes
        self._held = Counter[str]()  # bytes by tenant

    def reserve(self, tenant: str, num_bytes: int) -> None:
        own, free = self._held[tenant] + num_bytes, self._max_held_bytes - self._held.total() - num_bytes
        if num_bytes > 0 and (free < 0 or own > max(free, self._max_bytes)):
            raise Overloaded("too many large requests at once")
        self._held[tenant] = own
        if not own:
            del self._held[tenant]

    async def read(self, body: HeldBody, headers: Mapping[str, str], receive: Receive) -> None:
        """Fill `body`; raises `RequestTooLarge` or `RequestTimeout`."""
        length = headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(int(length[:20]))
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await self._read_parts(body, receive)
        except TimeoutError:
            raise RequestTimeout("body", f"{len(body)} bytes", "did not arrive in time") from None

    async def skip(self, body: HeldBody, receive: Receive, *, waits: bool) -> None:
        """Throw away what a client that is refused is sending, for a moment.

        Who is cut off while sending may not get to read why; a connection whose request is over can be used again.
        Who `waits` to be asked for the body (`Expect: 100-continue`) would be asked by the first call of `receive`.
        """
        body.pop()
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
            async with asyncio.timeout(BODY_IDLE_S):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body.is_whole = not message.get("more_body", False)
            body.add(message.get("body", b""))
            self._check_size(len(body))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestTooLarge("body", num_bytes, f"may have {self._max_bytes} bytes")


def check_json_type(headers: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` for a body that is not JSON by its headers."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest("content-encoding", encoding, "compressed bodies are not accepted")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("content-type", media_type, "must be application/json")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Raises `InvalidRequest` for anything but one JSON object.

    Also refused: duplicate keys, NaN and Infinity (also as 1e999), nesting deeper than 64, and text that is not
    Unicode (lone surrogates), which no tokenizer takes.
    """
    text = _decode(body)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise InvalidRequest("body", None, f"JSON may be nested {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(None, None, f"the body is not valid JSON: {str(error)[:200]}") from None
    except ValueError:
        raise InvalidRequest(None, None, "the body has a number of thousands of digits") from None
    if not isinstance(value, dict):
        raise InvalidRequest(None, None, "the body must be a JSON object")
    if _SURROGATE_ESCAPE.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        _check_tree(value)
    return value


def _decode(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")  # a byte order mark may be there: RFC 8259, section 8.1
    except UnicodeDecodeError as error:
        raise InvalidRequest(None, None, f"the body is not UTF-8 (byte {error.start})") from None


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(None, None, f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = read_float(text)
    if not math.isfinite(number):
        raise InvalidRequest(None, None, f"the number {text[:20]} is out of range")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise InvalidRequest(_printable(duplicate), None, "each key may appear once")
    return result


def _check_tree(root: dict[str, Any]) -> None:
    """Walk without recursion: depth, and every string, keys included."""
    pending: list[tuple[str, int, Any]] = [("", 1, root)]
    while pending:
        path, depth, value = pending.pop()
        if isinstance(value, str):
            _check_text(path, value)
        elif depth > MAX_DEPTH:
            raise InvalidRequest(path[:80], None, f"JSON may be nested {MAX_DEPTH} deep")
        else:
            pending.extend((child, depth + 1, item) for child, item in _children(path, value))


def _children(path: str, value: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the children that can hold text or more children."""
    if isinstance(value, list):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value) if isinstance(item, str | list | dict))
        return
    for key, item in value.items():
        _check_text(f"{path} key".strip(), key)
        if isinstance(item, str | list | dict):
            yield (f"{path}.{key}" if path else key), item


def _check_text(path: str, text: str) -> None:
    if _SURROGATE.search(text):
        raise InvalidRequest(_printable(path), None, "must be valid Unicode: it has a lone surrogate")


def _printable(path: str) -> str:
    return path[:80].encode("ascii", "backslashreplace").decode()
