"""The HTTP API: OpenAI's completions, models, tokenizing, probes and metrics, over any `EngineClient`.

A request passes `Guard` (id, API key, whole body), `json_body` and `protocol` (types, ranges), `api_state`
(template and tokenizer, off the event loop), and becomes a `RunResponse`, which runs it on the engine
client and sends its text.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mneme.cluster.api_state import ApiState, ServedModel
from mneme.cluster.completion_routes import chat_completions, completions
from mneme.cluster.engine_client import EngineClient
from mneme.cluster.error_response import http_exception_response
from mneme.cluster.guard import Guard, Send
from mneme.cluster.http_config import HttpConfig
from mneme.cluster.kv_routes import drop, lookup, pin, stats, unpin
from mneme.cluster.latency import Clock
from mneme.cluster.metrics_page import MetricsPage
from mneme.cluster.pin_routes import delete_pin, list_pins, warm
from mneme.cluster.request_body import Receive
from mneme.cluster.session_routes import delete_session, explain, fork_session, get_session
from mneme.cluster.token_routes import detokenize, tokenize
from mneme.errors import shown
from mneme.replicas.tokenizer import Tokenizer
from mneme.replicas.truncation import Truncation

Answerable = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Handler = Callable[[ApiState, Request], Awaitable[Answerable]]


def build_api(
    client: EngineClient,
    models: Sequence[ServedModel],
    tokenizer: Tokenizer,
    config: HttpConfig | None = None,
    *,
    ingress: str = "local",
    default_timeout_s: float | None = None,
    clock: Clock = time.perf_counter,
    truncation: Truncation | None = None,
) -> FastAPI:
    """The application; all `models` are names of the one model behind `client`, `ingress` is this process's own.

    `truncation` is what sessions get that outgrow the window and say nothing of it.
    """
    config = config or HttpConfig()
    metrics = MetricsPage(client, ingress, models[0].id)
    api = ApiState(
        client=client,
        models={model.id: model for model in models},
        tokenizer=tokenizer,
        config=config,
        latencies=metrics.latencies,
        metrics=metrics,
        default_timeout_s=default_timeout_s,
        clock=clock,
        truncation=truncation or Truncation(),
    )
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_routes(app, api)
    app.add_exception_handler(HTTPException, _refused_by_framework)
    app.add_middleware(Guard, config=config, on_response=metrics.count_response, clock=clock)
    return app


def _add_routes(app: FastAPI, api: ApiState) -> None:
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", chat_completions),
        ("POST", "/v1/completions", completions),
        ("POST", "/tokenize", tokenize),
        ("POST", "/detokenize", detokenize),
        ("GET", "/v1/models", _list_models),
        ("GET", "/v1/models/{model_id:path}", _get_model),
        ("GET", "/v1/sessions/{session_id:path}", get_session),
        ("DELETE", "/v1/sessions/{session_id:path}", delete_session),
        ("POST", "/v1/sessions/{session_id:path}/fork", fork_session),
        ("GET", "/v1/kv/explain/{request_id:path}", explain),
        ("POST", "/v1/kv/warm", warm),
        ("POST", "/v1/kv/lookup", lookup),
        ("POST", "/v1/kv/pin", pin),
        ("POST", "/v1/kv/unpin", unpin),
        ("DELETE", "/v1/kv", drop),
        ("GET", "/v1/kv/stats", stats),
        ("GET", "/v1/kv/pins", list_pins),
        ("DELETE", "/v1/kv/pins/{pin_id:path}", delete_pin),
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/metrics", _metrics),
    ]
    for method, path, handler in routes:
        app.router.add_route(path, _bound(handler, api), methods=[method])


def _bound(handler: Handler, api: ApiState) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> Any:
        return await handler(api, request)

    return endpoint


async def _list_models(api: ApiState, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_object(model) for model in api.models.values()]})


async def _get_model(api: ApiState, request: Request) -> Response:
    return JSONResponse(_model_object(api.model(request.path_params["model_id"])))


async def _health(api: ApiState, request: Request) -> Response:
    """This process answers."""
    return JSONResponse({"status": "ok"})


async def _ready(api: ApiState, request: Request) -> Response:
    """Every model has a replica that answers."""
    is_ready = api.client.is_ready()
    headers = {} if is_ready else {"retry-after": "1"}
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503, headers)


async def _metrics(api: ApiState, request: Request) -> Response:
    return Response(await api.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _refused_by_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.scope["path"])
    if error.status_code == 404:
        known = dict.fromkeys(route.path.partition("/{")[0] for route in request.app.routes)
        error.detail = f"{path} is not offered; there are {', '.join(known)}"
    elif error.status_code == 405:
        error.detail = f"{path} does not take {request.method}"
    return http_exception_response(error)


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mneme",
        "root": model.root,
        "max_model_len": model.max_context,
    }
