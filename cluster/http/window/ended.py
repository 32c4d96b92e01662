"""Describes a request that has ended: for the list of requests, its listeners, and its spans."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from mneme.cluster.http.body import ClientGone
from mneme.cluster.http.completion_answers import usage_object
from mneme.cluster.http.stream import RunResponse
from mneme.cluster.metrics.spans import Times, trace_id_of
from mneme.cluster.wire.answers import ExplainedRoute, RequestTimes
from mneme.cluster.wire.overview import ShownRequest
from mneme.errors import MnemeError
from mneme.replicas.choices import Choice


def shown_request(
    response: RunResponse[Any, Any],
    error: BaseException | None,
    request: Request,
    path: str,
    routes: Sequence[ExplainedRoute],
    ended_at: float,
) -> ShownRequest:
    """Describe a request that ended, with an error or without."""
    choices, state = response.choices, request.state
    usage = usage_object(choices)
    has_run = any(choice.num_tokens or choice.finish_reason for choice in choices)  # else nothing is known of its KV
    first_s = min((choice.first_s for choice in choices if choice.first_s is not None), default=None)
    return {
        "id": state.request_id,
        "object": "request",
        "path": path,
        "model": response.api.model.id,
        "ended_at": ended_at,
        "outcome": outcome_of(choices, error),
        "replica": routes[-1]["replica"] if routes else _only_replica(response) if has_run else None,
        "trace_id": trace_id_of(request.headers),
        "session": choices[0].request.session_id is not None,
        "choices": len(choices),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "kv_details": usage["kv_details"] if has_run else choices[0].usage._replace(prompt_tokens=0).kv_details(),
        "queue_ms": choices[0].usage.queue_s * 1e3,
        "first_token_ms": None if first_s is None else (first_s - state.received_s) * 1e3,
        "total_ms": (response.api.clock() - state.received_s) * 1e3,
    }


def _only_replica(response: RunResponse[Any, Any]) -> str | None:
    """Name the one that there is: `--local` chooses none."""
    replica_ids = response.api.client.replica_ids()
    return replica_ids[0] if len(replica_ids) == 1 else None


def times_of(response: RunResponse[Any, Any], request: Request, wall_s: float) -> Times:
    """Return when what happened to a request that ended now, by the clock that measured it and by the wall's."""
    past = wall_s - response.api.clock()
    firsts = [choice.first_s for choice in response.choices if choice.first_s is not None]
    usage = response.choices[0].usage
    begun = min(firsts) - usage.prefill_s if firsts else None
    return Times(
        arrived=request.state.arrived_s + past,
        begun=None if begun is None else max(begun, request.state.received_s) + past,
        first_token=min(firsts) + past if firsts else None,
        last_token=max(choice.last_s for choice in response.choices) + past if firsts else None,
        ended=wall_s,
    )


def relative_times(response: RunResponse[Any, Any], request: Request) -> RequestTimes:
    """Return when a request that ended now came how far."""
    choice, start_s = response.choices[0], request.state.received_s
    begun_s = None if choice.first_s is None else max(choice.first_s - choice.usage.prefill_s, start_s)
    return {
        "queued": None if begun_s is None else max(begun_s - choice.usage.queue_s - start_s, 0.0) * 1e3,
        "begun": None if begun_s is None else (begun_s - start_s) * 1e3,
        "tokens": [(num_tokens, round((at_s - start_s) * 1e3, 3)) for num_tokens, at_s in choice.times],
        "ended": (response.api.clock() - start_s) * 1e3,
    }


def outcome_of(choices: Sequence[Choice], error: BaseException | None) -> str:
    """Name how a request ended."""
    if isinstance(error, ClientGone | asyncio.CancelledError):
        return "client_gone"
    if isinstance(error, MnemeError):
        return error.code
    if error is not None:
        return "internal_error"
    return next((choice.finish_reason for choice in choices if choice.finish_reason), "failed")
