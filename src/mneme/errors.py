"""Every error that Mneme raises on purpose, in one tree.

    MnemeError                     500  internal_error
    |- InvalidRequest              400  the request breaks a rule: field, value, rule
    |  |- ContextLengthExceeded    400  prompt + max_tokens can never fit
    |  |- SessionNotFound          404  there is no such session, or no more
    |  |- ResponseNotFound         404  there is no such response of /v1/responses, or no more
    |  |- ThreadNotFound           404  /v1/messages holds no message to go on from: it takes whole histories
    |  |- ExplanationNotFound      404  the request is not remembered, or is another key's
    |  |- PinRefused              400  pinning would leave too few pages for requests
    |  |- PinNotFound             404  there is no such pin, or no more
    |  |- CachePinRefused         400  the cache tier has no room for another pin
    |  |- KvNotFound              404  the cache tier has nothing of a prompt
    |  |- NoCacheTier             400  this cluster has none, and only that could do it
    |  |- RequestTooLarge          413  the body is over its cap
    |  `- RequestTimeout           408  the body did not arrive in time
    |- ModelNotFound               404
    |- Unauthorized                401
    |- PermissionDenied            403  only an admin's API key may do it
    |- DeadlineExceeded            504  the request did not end in its time
    |- TryAgainLater                    carries retry_after_s
    |  |- Overloaded               429  queues are full
    |  |- RateLimited              429  an API key is over its limits
    |  `- ReplicaUnavailable       503  no replica can answer
    |- TransferFailed              500  pages could not be moved between a device pool and the tier under it
    |- ConfigError                 exit status 2: an option is unknown or out of range
    `- CheckpointError             exit status 2: a checkpoint is missing, damaged, hostile or unsupported

`http_status`, `type` and `code` are the members of OpenAI's error object; only `cluster/` reads them.
"""

from __future__ import annotations

_SHOWN_VALUE_CHARS = 80


def shown(value: object) -> str:
    """`repr` of an input value, cut to a length that is safe to log and to send back."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int too long to print, a structure too deep
        text = f"<{type(value).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[:_SHOWN_VALUE_CHARS] + "..."


class MnemeError(Exception):
    """Root of the tree."""

    http_status = 500
    type = "server_error"
    code = "internal_error"


class InvalidRequest(MnemeError):
    """A request breaks a rule; nothing was done for it.

    value  what was given, for the message; None or "" where the rule says all there is to say
    """

    http_status = 400
    type = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, field: str | None, value: object, rule: str) -> None:
        super().__init__(field, value, rule)
        self.field = field
        self.value = value
        self.rule = rule
        self.request_id: str | None = None  # which one it refuses, of several that were sent together
        given = "" if value is None or value == "" else f" (got {shown(value)})"
        self.message = f"{field}: {rule}{given}" if field else rule

    def __str__(self) -> str:
        return self.message


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output can never fit the model's context or the page pool."""

    code = "context_length_exceeded"


class SessionNotFound(InvalidRequest):
    """No session of this name: never begun, expired, deleted, or another tenant's."""

    http_status = 404
    code = "session_not_found"

    def __init__(self, field: str | None, value: object, rule: str = "no such session; it may have expired") -> None:
        super().__init__(field, value, rule)


class ResponseNotFound(InvalidRequest):
    """No response of this id is kept: never stored, expired, deleted, or another tenant's."""

    http_status = 404
    code = "response_not_found"

    def __init__(self, field: str | None, value: object, rule: str = "no such response; it may have expired") -> None:
        super().__init__(field, value, rule)
        if field == "previous_response_id":
            self.code = "previous_response_not_found"  # OpenAI's


class ThreadNotFound(InvalidRequest):
    """No message of /v1/messages is held for others to go on from; clients then send the whole history."""

    http_status = 404
    code = "thread_not_found"  # Anthropic's


class ExplanationNotFound(InvalidRequest):
    """No request of this id is remembered: they are kept for a while only, and for their own tenant."""

    http_status = 404
    code = "request_not_found"


class PinRefused(InvalidRequest):
    """Pages cannot be pinned: what is left would be too little, for running requests or for those in flight."""

    code = "pin_refused"

    def __init__(self, num_pages: int, num_left: int, num_needed: int) -> None:
        rule = f"pinning {num_pages} pages more would leave {num_left} unpinned; at least {num_needed} must be"
        super().__init__("pin", num_pages, rule if num_pages else "nothing of this prefix can be pinned")
        self._figures = (num_pages, num_left, num_needed)

    def __reduce__(self) -> tuple[type[PinRefused], tuple[int, int, int]]:
        return PinRefused, self._figures  # it goes from an engine to an ingress


class PinNotFound(InvalidRequest):
    """No pin of this name: never made, let go, expired, or another tenant's."""

    http_status = 404
    code = "pin_not_found"

    def __init__(self, field: str | None, value: object, rule: str = "no such pin; it may have expired") -> None:
        super().__init__(field, value, rule)


class CachePinRefused(InvalidRequest):
    """Chunks cannot be pinned: the API key has too many pins, or too many bytes would be."""

    code = "pin_refused"


class KvNotFound(InvalidRequest):
    """The cache tier has nothing of a prompt: never computed, or evicted."""

    http_status = 404
    code = "kv_not_found"


class NoCacheTier(InvalidRequest):
    """Only a cache tier could do it, and this cluster has none."""

    code = "no_cache_tier"

    def __init__(self, field: str | None = None, value: object = None, rule: str = "") -> None:
        super().__init__(None, value, rule or "this cluster has no cache tier (cache.enabled)")


class RequestTooLarge(InvalidRequest):
    """The request body is over its cap."""

    http_status = 413
    code = "request_too_large"


class RequestTimeout(InvalidRequest):
    """The request body did not arrive within its time."""

    http_status = 408
    code = "request_timeout"


class ModelNotFound(MnemeError):
    """No configured model has this name."""

    http_status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Unauthorized(MnemeError):
    """The API key is missing or wrong."""

    http_status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDenied(MnemeError):
    """Only an admin's API key may do it."""

    http_status = 403
    type = "permission_error"
    code = "admin_required"

    def __init__(self, message: str = "only a key whose role is admin may do this") -> None:
        super().__init__(message)


class DeadlineExceeded(MnemeError):
    """The time that the request was given is over; what it had of queue, pages and batch is free again."""

    http_status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    def __init__(self, message: str = "the request did not end within its timeout") -> None:
        super().__init__(message)


class TryAgainLater(MnemeError):
    """It may work after `retry_after_s`; the root of what is not the request's fault."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(TryAgainLater):
    """A queue is full."""

    http_status = 429
    type = "rate_limit_error"
    code = "overloaded"


class RateLimited(TryAgainLater):
    """An API key has used up what its limits allow for now."""

    http_status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ReplicaUnavailable(TryAgainLater):
    """No replica can answer now."""

    http_status = 503
    code = "replica_unavailable"


class TransferFailed(MnemeError):
    """Pages could not be moved between a device pool and the tier under it; nothing the tier held can be trusted."""


class ConfigError(MnemeError):
    """A configuration key is unknown, or its value is out of range."""


class CheckpointError(MnemeError):
    """A checkpoint is missing, damaged, hostile or of an unsupported kind."""
