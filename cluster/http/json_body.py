"""A request body to a JSON object, strictly: what another parser might read differently is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from mneme.errors import InvalidRequest

MAX_DEPTH = 64
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # only these can produce one: raw ones are not UTF-8
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    except ValueError as error:  # also an integer of thousands of digits
        raise InvalidRequest(None, None, f"the body is not valid JSON: {str(error)[:200]}") from None
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
    number = float(text)
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
    """Those that can hold text or more children."""
    if isinstance(value, list):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value) if isinstance(item, str | list | dict))
        return
    for key, item in value.items():
        _check_text(f"{path} key", key)
        if isinstance(item, str | list | dict):
            yield (f"{path}.{key}" if path else key), item


def _check_text(path: str, text: str) -> None:
    if _SURROGATE.search(text):
        raise InvalidRequest(_printable(path), None, "must be valid Unicode: it has a lone surrogate")


def _printable(path: str) -> str:
    return path[:80].encode("ascii", "backslashreplace").decode()
