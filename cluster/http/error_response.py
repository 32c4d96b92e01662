"""Failures as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`, mapped only here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from mneme.errors import InvalidRequest, MnemeError, RequestTimeout, TryAgainLater

_TRANSIENT = {408, 429}  # 4xx that may go well when tried again
_FINAL = {504}  # 5xx that a client must not repeat by itself: whoever waited has waited long enough
_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_object(error: MnemeError) -> dict[str, Any]:
    """The body for an error of our own."""
    param = error.field if isinstance(error, InvalidRequest) else None
    param = "model" if error.code == "model_not_found" else param
    return _object(str(error) or "internal error", error.type, param, error.code)


def error_response(error: MnemeError) -> Response:
    """The answer to a request that failed before its first byte was sent."""
    headers = {}
    if isinstance(error, TryAgainLater):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"  # the rest of the body may never come
    return _response(error.http_status, error_object(error), headers)


def http_exception_response(error: HTTPException) -> Response:
    """Answer what the framework refuses by itself: unknown paths and methods."""
    status = error.status_code
    body = _object(str(error.detail), "invalid_request_error", None, _CODES.get(status, "invalid_request"))
    return _response(status, body, dict(error.headers or {}))


def _object(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, body: dict[str, Any], headers: Mapping[str, str]) -> Response:
    is_final = status in _FINAL or (400 <= status < 500 and status not in _TRANSIENT)
    retry = {"x-should-retry": "false"} if is_final else {}
    return Response(json.dumps(body), status, {**retry, **headers}, "application/json")
