"""Failures as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`, mapped only here.

Below /v1/messages they are Anthropic's: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import Response

from mneme.cluster.wire.answers import AnthropicError, Error
from mneme.errors import InvalidRequest, MnemeError, RequestTimeout, ThreadNotFound, TryAgainLater

_TRANSIENT = {408, 429}  # 4xx that may go well when tried again
_FINAL = {504}  # 5xx that a client must not repeat by itself: whoever waited has waited long enough
MESSAGES = "/v1/messages"  # the path of Anthropic's API
_ANTHROPIC_TYPES = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
    **{429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_object(error: MnemeError) -> Error:
    """The body for an error of our own."""
    param = error.field if isinstance(error, InvalidRequest) else None
    param = "model" if error.code == "model_not_found" else param
    return _object(str(error) or "internal error", error.type, param, error.code)


def anthropic_error(error: MnemeError, request_id: str) -> AnthropicError:
    """The same in Anthropic's form; its SDKs know by the details that a thread is to be begun anew."""
    body = _anthropic(error.http_status, str(error) or "internal error", request_id)
    if isinstance(error, ThreadNotFound):
        body["error"]["details"] = {"error_code": "thread_not_found"}
    return body


def _anthropic(status: int, message: str, request_id: str) -> AnthropicError:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_response(error: MnemeError, path: str, request_id: str) -> Response:
    """The answer to a request that failed before its first byte was sent."""
    headers = {}
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, TryAgainLater):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"  # the rest of the body may never come
    is_anthropics = path.startswith(MESSAGES)
    body = anthropic_error(error, request_id) if is_anthropics else error_object(error)
    return _response(error.http_status, body, headers)


def http_exception_response(error: HTTPException, path: str, request_id: str) -> Response:
    """Answer what the framework refuses by itself: unknown paths and methods."""
    status = error.status_code
    message = str(error.detail)
    code = _CODES.get(status, "invalid_request")
    is_anthropics = path.startswith(MESSAGES)
    own = _object(message, "invalid_request_error", None, code)
    body = _anthropic(status, message, request_id) if is_anthropics else own
    return _response(status, body, dict(error.headers or {}))


def _object(message: str, kind: str, param: str | None, code: str) -> Error:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, body: Error | AnthropicError, headers: Mapping[str, str]) -> Response:
    is_final = status in _FINAL or (400 <= status < 500 and status not in _TRANSIENT)
    retry = {"x-should-retry": "false"} if is_final else {}
    return Response(json.dumps(body), status, {**retry, **headers}, "application/json")
