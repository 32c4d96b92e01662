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
from starlette.responses import HTMLResponse, JSONResponse, Response

from mneme import __version__
from mneme.cluster.config import HttpConfig
from mneme.cluster.http import api_docs as docs
from mneme.cluster.http.api_docs import Route
from mneme.cluster.http.api_state import ApiState, ServedModel
from mneme.cluster.http.completions import chat_completions, completions
from mneme.cluster.http.error_response import http_exception_response
from mneme.cluster.http.guard import Guard, Send
from mneme.cluster.http.kv_protocol import DropRequest, LookupRequest, PinRequest, UnpinRequest, WarmRequest
from mneme.cluster.http.kv_routes import drop, lookup, pin, stats, unpin
from mneme.cluster.http.pin_routes import delete_pin, list_pins, warm
from mneme.cluster.http.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, ForkRequest, TokenizeRequest
from mneme.cluster.http.request_body import Receive
from mneme.cluster.http.session_routes import delete_session, explain, fork_session, get_session
from mneme.cluster.http.token_routes import detokenize, tokenize
from mneme.cluster.metrics.families import number_at
from mneme.cluster.metrics.latency import Clock
from mneme.cluster.metrics.page import MetricsPage
from mneme.cluster.serve.engine_client import EngineClient
from mneme.errors import shown
from mneme.replicas.text.tokenizer import Tokenizer
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
    sent = ("X-Session-ID", *api.config.affinity_headers)
    salt = ("cache_salt",)
    routes = [
        Route(
            *("POST", "/v1/chat/completions", chat_completions, docs.ChatCompletion, ChatRequest),
            others={"text/event-stream": docs.ChatChunk},
            headers=sent,
        ),
        Route(
            *("POST", "/v1/completions", completions, docs.Completion, CompletionRequest),
            others={"text/event-stream": docs.CompletionChunk},
            headers=sent,
        ),
        Route("POST", "/tokenize", tokenize, docs.Tokens, TokenizeRequest),
        Route("POST", "/detokenize", detokenize, docs.Text, DetokenizeRequest),
        Route("GET", "/v1/models", _list_models, docs.ModelList),
        Route("GET", "/v1/models/{model_id:path}", _get_model, docs.Model),
        Route("GET", "/v1/sessions/{session_id:path}", get_session, docs.Session, query=salt),
        Route("DELETE", "/v1/sessions/{session_id:path}", delete_session, docs.Deleted, query=salt),
        Route("POST", "/v1/sessions/{session_id:path}/fork", fork_session, docs.Session, ForkRequest, query=salt),
        Route("GET", "/v1/kv/explain/{request_id:path}", explain, docs.Explanation, query=salt),
        Route("POST", "/v1/kv/warm", warm, docs.Pin, WarmRequest),
        Route("POST", "/v1/kv/lookup", lookup, docs.Lookup, LookupRequest),
        Route("POST", "/v1/kv/pin", pin, docs.TierPin, PinRequest),
        Route("POST", "/v1/kv/unpin", unpin, docs.Deleted, UnpinRequest),
        Route("DELETE", "/v1/kv", drop, docs.Dropped, DropRequest),
        Route("GET", "/v1/kv/stats", stats, docs.KvStats),
        Route("GET", "/v1/kv/pins", list_pins, docs.PinList),
        Route("DELETE", "/v1/kv/pins/{pin_id:path}", delete_pin, docs.Deleted),
        Route("GET", "/health", _health, docs.Status),
        Route("GET", "/ready", _ready, docs.Ready),
        Route("GET", "/metrics", _metrics, None, others={"text/plain": str}),
        Route("GET", "/version", _version, docs.Version),
        Route("GET", "/", _root, docs.Service, others={"text/html": str}),
        Route("GET", "/docs", _docs, None, others={"text/html": str}),
        Route("GET", "/openapi.json", _openapi, docs.OpenApi),
    ]
    for route in routes:
        app.router.add_route(route.path, _bound(route.handler, api), methods=[route.method])
    api.metrics.known_paths = frozenset(route.path for route in routes if "{" not in route.path)
    app.state.openapi = docs.openapi(routes)


def _bound(handler: Handler, api: ApiState) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> Any:
        return await handler(api, request)

    return endpoint


async def _list_models(api: ApiState, request: Request) -> Response:
    """The names that `model` may have."""
    return JSONResponse({"object": "list", "data": [_model_object(model) for model in api.models.values()]})


async def _get_model(api: ApiState, request: Request) -> Response:
    """The model of this name."""
    return JSONResponse(_model_object(api.model(request.path_params["model_id"])))


async def _health(api: ApiState, request: Request) -> Response:
    """This process answers."""
    return JSONResponse({"status": "ok"})


async def _ready(api: ApiState, request: Request) -> Response:
    """How many replicas requests may go to; status 503 if none."""
    num_ready = api.client.num_ready()
    headers = {} if num_ready else {"retry-after": "1"}
    return JSONResponse({"ready": num_ready > 0, "replicas": num_ready}, 200 if num_ready else 503, headers)


async def _metrics(api: ApiState, request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(await api.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _version(api: ApiState, request: Request) -> Response:
    """The server's version."""
    return JSONResponse({"version": __version__})


async def _docs(api: ApiState, request: Request) -> Response:
    """This description as a page for a browser."""
    return HTMLResponse(docs.docs_page(request.app.state.openapi))


async def _openapi(api: ApiState, request: Request) -> Response:
    """This description in OpenAPI's form."""
    return JSONResponse(request.app.state.openapi)


async def _root(api: ApiState, request: Request) -> Response:
    """What runs here and how busy it is: a page for a browser, JSON for others."""
    model = next(iter(api.models.values()))
    replicas = [each.metrics for each in await api.client.stats()]

    def total(*path: str) -> int:
        return round(sum(number_at(each, path) for each in replicas))

    service: docs.Service = {
        "service": "mneme",
        "version": __version__,
        "model": model.id,
        "max_model_len": model.max_context,
        "needs_key": bool(api.config.api_keys),
        "replicas": len(replicas),
        "device": next((each.get("device") for each in replicas), None),
        "dtype": next((each.get("dtype") for each in replicas), None),
        "kv_capacity_tokens": total("kv_tokens"),
        "kv_usage": total("pages", "in_use") / max(1, total("pages", "total")),
        "requests": {"running": total("requests", "running"), "waiting": total("requests", "waiting")},
        "prompt_tokens": total("tokens", "prompt"),
        "cached_tokens": total("tokens", "cached"),
        "generated_tokens": total("tokens", "generated"),
    }
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(docs.service_page(service, str(request.base_url).rstrip("/")))
    return JSONResponse(service)


async def _refused_by_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.scope["path"])
    if error.status_code == 404:
        error.detail = f"{path} is not offered; /docs lists what is"
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
