"""The HTTP API: OpenAI's completions and responses, Anthropic's messages, probes, metrics, over any `EngineClient`.

A request passes `Guard` (id, API key, whole body), `body` and `wire` (types, ranges), and its route's handler, which is
given the `ApiState` of the model that the request names, or the whole `Service`.
A completion passes `api_state` there (template and tokenizer, off the event loop), and becomes a `RunResponse`, which
runs it on the engine client and sends its text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from mneme.cluster.config import HttpConfig
from mneme.cluster.http import api_docs as docs
from mneme.cluster.http import completions, kv, messages, responses, sessions
from mneme.cluster.http.api_docs import Route
from mneme.cluster.http.api_state import MAX_PROMPT_RECORDS, ApiState, Backend, ServedModel, Service
from mneme.cluster.http.error_response import MESSAGES, http_exception_response
from mneme.cluster.http.guard import Guard
from mneme.cluster.http.stream import RunResponse
from mneme.cluster.http.window import overview, page
from mneme.cluster.http.window.docs import docs_page
from mneme.cluster.http.window.ended import relative_times, shown_request, times_of
from mneme.cluster.http.window.requests import EndedRequest, RequestLog
from mneme.cluster.metrics.exposition import MetricsPage
from mneme.cluster.metrics.families import number_at
from mneme.cluster.metrics.latency import Clock
from mneme.cluster.metrics.spans import Traces
from mneme.cluster.serve.engine_client import STATES, Condition
from mneme.cluster.wire import answers
from mneme.cluster.wire.openai import (
    IGNORED_HEADER,
    DetokenizeRequest,
    TokenizeRequest,
    ignored_fields,
    plain_documents,
    template_variables,
    validate,
)
from mneme.cluster.wire.overview import Event
from mneme.errors import InvalidRequest, PermissionDenied, shown
from mneme.primitives import Bounded
from mneme.replicas.text.document_parts import prompt_parts
from mneme.version import __version__

_RESPONSE = "/v1/responses/{response_id}"
_BAD = ("stalled", "failed")


def build_api(
    backends: Sequence[Backend],
    config: HttpConfig | None = None,
    *,
    ingress: str = "local",
    clock: Clock = time.perf_counter,
    traces: Traces | None = None,
) -> Starlette:
    """The application; the first of `backends` answers requests that name no model, `ingress` is this process's own."""
    config = config or HttpConfig()
    keyring = config.keyring(clock)
    if traces is None and config.otlp_endpoint is not None:
        traces = Traces.to(config.otlp_endpoint, ingress)
    metrics = MetricsPage({each.model.id: each.client for each in backends}, ingress)
    prompts = Bounded[tuple[str, str], Any](MAX_PROMPT_RECORDS)
    requests = RequestLog(time.time)
    shared: dict[str, Any] = {"config": config, "clock": clock, "prompts": prompts, "requests": requests}
    apis = [ApiState(**each._asdict(), **shared, latencies=metrics.latencies.of(each.model.id)) for each in backends]
    app = Starlette(exception_handlers={HTTPException: _refused_by_framework})
    app.router.redirect_slashes = False
    app.state.end_events = requests.close  # for who stops the server
    service = Service(apis=apis, metrics=metrics, needs_key=not keyring.is_open, requests=requests, traces=traces)
    _add_routes(app, service)
    app.add_middleware(Guard, config=config, on_answer=metrics.count_answer, clock=clock, keyring=keyring)
    return app


def _add_routes(app: Starlette, service: Service) -> None:
    sent, salt = ("X-Session-ID", *completions.AFFINITY_HEADERS), ("cache_salt", "model")
    of_model = [
        Route("POST", "/v1/chat/completions", completions.chat_completions, headers=sent),
        Route("POST", "/v1/completions", completions.completions, headers=sent),
        Route("POST", MESSAGES, messages.messages, headers=sent),
        Route("POST", f"{MESSAGES}/count_tokens", messages.count_tokens),
        Route("POST", "/v1/responses", responses.create_response, headers=completions.AFFINITY_HEADERS),
        Route("GET", _RESPONSE, responses.get_response, query=salt),
        Route("DELETE", _RESPONSE, responses.delete_response, query=salt),
        Route("POST", f"{_RESPONSE}/cancel", responses.cancel_response, query=salt),
        Route(
            *("GET", f"{_RESPONSE}/input_items", responses.list_input_items),
            query=("after", "limit", "order", *salt),
        ),
        Route("POST", "/v1/embeddings", completions.embeddings),
        Route("POST", "/tokenize", tokenize),
        Route("POST", "/detokenize", detokenize),
        Route("GET", "/v1/sessions/{session_id:path}", sessions.get_session, query=salt),
        Route("DELETE", "/v1/sessions/{session_id:path}", sessions.delete_session, query=salt),
        Route("POST", "/v1/sessions/{session_id:path}/fork", sessions.fork_session, query=salt),
        Route("GET", "/v1/kv/explain/{request_id:path}", sessions.explain, query=salt),
        Route("POST", "/v1/kv/warm", kv.warm),
        Route("POST", "/v1/kv/lookup", kv.lookup),
        Route("POST", "/v1/kv/pin", kv.pin),
        Route("POST", "/v1/kv/unpin", kv.unpin),
        Route("DELETE", "/v1/kv/pins/{pin_id:path}", kv.delete_pin, query=("model",)),
    ]
    of_all = [
        Route("GET", "/v1/models", _list_models),
        Route("GET", "/v1/models/{model_id:path}", _get_model),
        Route("DELETE", "/v1/kv", kv.drop),
        Route("GET", "/v1/kv/stats", kv.stats, is_admins=True),
        Route("GET", "/v1/kv/tree", overview.kv_tree, query=("depth", "min_tokens", "max_runs", "all")),
        Route("GET", "/v1/kv/tiers", overview.kv_tiers, query=("since",)),
        Route("GET", "/v1/sessions", overview.list_sessions, query=("limit",)),
        Route("GET", "/v1/requests", overview.list_requests, query=("last",)),
        Route("GET", "/v1/cluster", overview.cluster),
        Route("GET", "/v1/events", overview.events, event=Event),
        Route("GET", "/v1/kv/pins", kv.list_pins),
        Route("GET", "/health", _health, answers.Status, query=("verbose",)),
        Route("GET", "/ready", _ready, answers.Ready),
        Route("GET", "/metrics", _metrics, texts=["text/plain"]),
        Route("GET", "/version", _version),
        Route("GET", "/", _root, answers.Service, texts=["text/html"]),
        Route("GET", "/docs", _docs, texts=["text/html"]),
        Route("GET", "/docs/docs.js", page.docs_script, texts=["text/javascript"]),
        Route("GET", "/ui", page.page, texts=["text/html"]),
        Route("GET", "/ui/app.js", page.script, texts=["text/javascript"]),
        Route("GET", "/ui/app.css", page.style, texts=["text/css"]),
        Route("GET", "/openapi.json", _openapi),
    ]
    routes = [*of_model, *of_all]
    for index, route in enumerate(routes):
        answer = partial(_answer, service, route, index < len(of_model))
        with_slash = () if "{" in route.path else (f"{route.path.rstrip('/')}/",)  # a name may end with one
        for path in {route.path, *with_slash}:
            app.router.add_route(path, answer, methods=[route.method])
    service.metrics.known_paths = frozenset(route.path for route in routes if "{" not in route.path)
    model, needs_model = service.apis[0].model.id, len(service.apis) > 1
    app.state.openapi = cache(partial(docs.openapi, routes, model=model, needs_model=needs_model))
    app.state.docs_page = cache(lambda: docs_page(app.state.openapi(), needs_key=service.needs_key))


async def _answer(service: Service, route: Route, of_model: bool, request: Request) -> Any:
    """Check the body of a route that has one and call its handler, whose answer is a response or an object of JSON.

    The handler of what is a model's is called with the one that the request names; without a name, with one that knows
    its object.

    `X-Mneme-Ignored-Fields` of the answer names what was given and is unknown.
    """
    if route.is_admins and not request.state.is_admin:
        raise PermissionDenied
    given: tuple[Any, ...] = ()
    if route.body is not None:
        body = await service.apis[0].parsed(request)
        is_clear = len(service.apis) == 1 and body.get("model") is None  # which model is asked
        taken = validate(route.body, {**body, "model": service.apis[0].model.id} if is_clear else body)
        given = (taken,)
        if ignored := ignored_fields(body, taken):
            request.state.answer_headers.append((IGNORED_HEADER, ignored.encode()))
    request.state.on_end = partial(_log_request, service, route, request)
    if of_model:
        name = getattr(given[0], "model", None) if given else None
        name = request.query_params.get("model") if name is None else name
        answer = await service.first(name, lambda api: route.handler(api, request, *given))
    else:
        answer = await route.handler(service, request, *given)
    return JSONResponse(answer) if isinstance(answer, dict) else answer


def _log_request(
    service: Service, route: Route, request: Request, response: RunResponse[Any, Any], error: BaseException | None
) -> None:
    """Remember a request that has run."""
    salt = response.choices[0].request.salt
    routes = response.api.client.routes(salt, request.state.request_id)
    shown = shown_request(response, error, request, route.path, routes, service.requests.clock())
    if service.traces is not None:
        times = times_of(response, request, shown["ended_at"])
        shown["trace_id"] = service.traces.add(shown, times, routes, request.headers)
    ended = EndedRequest(request.state.tenant, salt, shown, relative_times(response, request))
    service.requests.add(ended)
    request.state.shown = shown


async def _list_models(service: Service, request: Request) -> answers.ModelList:
    """The names that `model` may have."""
    models = [_model_object(api.model, name) for api in service.apis for name in api.model.names]
    first_id, last_id = models[0]["id"], models[-1]["id"]
    return {"object": "list", "data": models, "first_id": first_id, "last_id": last_id, "has_more": False}


async def _get_model(service: Service, request: Request) -> answers.Model:
    """The model of this name."""
    name: str = request.path_params["model_id"]
    model = service.of(name).model
    return _model_object(model, name if name in model.names else model.id)


async def _health(service: Service, request: Request) -> Response:
    """Say how the worst model is; status 503 if it has no replica and none that loads: they failed, or stall."""
    conditions = await service.conditions()
    is_ok = all(each.state not in _BAD for each in conditions.values())
    about: answers.Health = {"status": "ok" if is_ok else "failed", **_worst(conditions)}
    if "verbose" in request.query_params:
        models: list[answers.ModelHealth] = [
            {"model": api.model.id, "state": state, "reason": reason, "replicas": await _replicas(api)}
            for api in service.apis
            for state, reason in [conditions[api.model.id]]
        ]
        about = answers.Status(**about, models=models)
    return JSONResponse(about, 200 if is_ok else 503)


async def _replicas(api: ApiState) -> list[answers.ReplicaStart]:
    return [
        {"replica": name, "age_s": each.get("age_s", 0.0), "start": each.get("start", {})}
        for name, each in (await api.client.stats()).items()
    ]


async def _ready(service: Service, request: Request) -> Response:
    """Return how many replicas requests may go to; status 503 if a model has none, with the state that it is in."""
    each = [api.client.num_ready() for api in service.apis]
    num_ready = sum(each) if all(each) else 0
    if num_ready:
        is_ready: answers.Ready = {"ready": True, "replicas": num_ready, "state": "ready"}
        return JSONResponse(is_ready)
    about: answers.Ready = {"ready": False, "replicas": 0, **_worst(await service.conditions())}
    return JSONResponse(about, 503, {"retry-after": "1"})


def _worst(conditions: Mapping[str, Condition]) -> answers.Worst:
    worst = max(conditions.values(), key=lambda each: STATES.index(each.state))
    return {"state": worst.state, "reason": worst.reason} if worst.reason else {"state": worst.state}


async def _metrics(service: Service, request: Request) -> Response:
    """Figures for Prometheus; those of API keys, to an admin's."""
    with_tenants = request.state.is_admin or not service.needs_key
    return Response(await service.metrics.render(with_tenants=with_tenants), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def _version(service: Service, request: Request) -> answers.Version:
    """The server's version, who computes on the CPUs of its replicas, and what they may do with documents."""
    replicas = (await service.stats()).values()
    found = ((each.get("dtype"), each.get("kernels")) for each in replicas)
    return {
        "version": __version__,
        "kernels": sorted({f"{dtype}: {kernels}" for dtype, kernels in found if kernels}),
        "documents": sorted({each["documents"] for each in replicas if "documents" in each}),
    }


async def _docs(service: Service, request: Request) -> Response:
    """This description as a page for a browser, which sends what is to be tried."""
    return HTMLResponse(await asyncio.to_thread(request.app.state.docs_page), headers=page.HEADERS)


async def _openapi(service: Service, request: Request) -> answers.OpenApi:
    """This description in OpenAPI's form."""
    document: answers.OpenApi = await asyncio.to_thread(request.app.state.openapi)
    return document


async def _root(service: Service, request: Request) -> Response:
    """Return what runs here and how busy it is: a page for a browser, JSON for others."""
    model = service.apis[0].model
    replicas = (await service.stats()).values()

    def total(*path: str) -> int:
        return round(sum(number_at(each, path) for each in replicas))

    about: answers.Service = {
        "service": "mneme",
        "version": __version__,
        "model": model.id,
        "models": [api.model.id for api in service.apis],
        "max_model_len": model.max_context,
        "needs_key": service.needs_key,
        "replicas": sum(api.client.num_ready() for api in service.apis),
        "device": next((each.get("device") for each in replicas), None),
        "dtype": next((each.get("dtype") for each in replicas), None),
        "weights": next((sorted(each["weight_bytes"]) for each in replicas if "weight_bytes" in each), None),
        "kv_dtype": next((kind for each in replicas for kind in each.get("kv_bytes", ())), None),
        "kv_capacity_tokens": total("kv_tokens"),
        "kv_usage": total("pages", "in_use") / max(1, total("pages", "total")),
        "requests": {"running": total("requests", "running"), "waiting": total("requests", "waiting")},
        "prompt_tokens": total("tokens", "prompt"),
        "cached_tokens": total("tokens", "cached"),
        "generated_tokens": total("tokens", "generated"),
    }
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(docs.service_page(about, str(request.base_url).rstrip("/")))
    return JSONResponse(about)


async def _refused_by_framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.scope["path"])
    if error.status_code == 404:
        error.detail = f"{path} is not offered; /docs lists what is"
    elif error.status_code == 405:
        error.detail = f"{path} does not take {request.method}"
    return http_exception_response(error, request.scope["path"], request.state.request_id)


def _model_object(model: ServedModel, name: str) -> answers.Model:
    """Return what OpenAI's clients read of a model, and behind it what Anthropic's do."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "mneme",
        "root": model.root,
        "max_model_len": model.max_context,
        "sampling_defaults": model.sampling_defaults,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
    }


async def tokenize(api: ApiState, request: Request, body: TokenizeRequest) -> answers.Tokens:
    """Ids of a text, or of a conversation as the chat endpoint would render it."""
    text = body.prompt
    if (text is None) == (body.messages is None):
        raise InvalidRequest("prompt", None, "give either a prompt or messages")
    documents = plain_documents(body.documents)
    if body.messages is not None:
        begin = body.add_generation_prompt
        variables = template_variables(None, body.tools)
        prompt = await api.render(
            body.messages, add_generation_prompt=begin, template_variables=variables, documents=documents
        )
    else:
        assert text is not None
        special, given = body.add_special_tokens, prompt_parts(text, documents)
        prompt = await api.off_loop(len(text), lambda: api.encode("prompt", given, add_special_tokens=special))
    ids = list(prompt.token_ids)
    found: answers.Tokens = {"count": len(ids), "max_model_len": api.model.max_context, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = list(map(api.tokenizer.token_text, ids))
    return found


async def detokenize(api: ApiState, request: Request, body: DetokenizeRequest) -> answers.Text:
    """The text of ids."""

    def decode() -> str:
        api.check_ids("tokens", body.tokens)
        return api.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)

    return {"prompt": await api.off_loop(len(body.tokens), decode)}
