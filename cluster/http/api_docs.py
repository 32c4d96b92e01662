"""The API's description of itself: the OpenAPI document, and the page `/`. `window/docs.py` shows the document.

Routes and types say what there is, `fields.txt` what each field means: a line `name: sentence` wherever that name
stands, `Type.name: sentence` or `Type|Other.name: sentence` where it means something else.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from typing_extensions import is_typeddict

from mneme.cluster.http.error_response import MESSAGES
from mneme.cluster.http.stream import RunResponse
from mneme.cluster.wire.answers import AnthropicError, Error, Service
from mneme.version import __version__

_JSON = "application/json"
# In the order in which they are shown: what an operation is for, and how its path begins; the first that fits counts.
_TAGS = {
    "Chat and completions": (
        "OpenAI's completions, with vLLM's fields and our own; embeddings and tokens.",
        ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"),
    ),
    "Responses": ("OpenAI's stateful API: each stored response is a session of its own.", ("/v1/responses",)),
    "Anthropic": ("Anthropic's Messages API.", (MESSAGES,)),
    "Sessions": ("Conversations whose KV stays, so that a turn computes only what is new.", ("/v1/sessions",)),
    "KV": ("What is kept of prompts: look it up, compute it ahead, pin it, delete it, explain it.", ("/v1/kv",)),
    "What runs": (
        "Models, replicas, requests, health and figures.",
        ("/v1/", "/health", "/ready", "/metrics", "/version"),
    ),
    "Pages": ("Pages for a browser, and this description.", ("/",)),
}
_SAID = "Once upon a time"
_MESSAGES = [{"role": "user", "content": "Hello"}]
# Bodies that may be sent as they are, by path; `model` is added.
_EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "session_id": "demo", "max_tokens": 32},
    "/v1/completions": {"prompt": _SAID, "max_tokens": 16},
    "/v1/embeddings": {"input": ["a red house", "a blue house"]},
    "/tokenize": {"prompt": _SAID},
    "/detokenize": {"tokens": [10, 11, 12]},
    "/v1/responses": {"instructions": "Be brief.", "input": "Hello", "max_output_tokens": 32},
    MESSAGES: {"system": "Be brief.", "messages": _MESSAGES, "max_tokens": 32},
    f"{MESSAGES}/count_tokens": {"messages": _MESSAGES},
    "/v1/sessions/{session_id}/fork": {"session_id": "demo-copy"},
    "/v1/kv/warm": {"messages": [{"role": "system", "content": "Be brief."}], "ttl_s": 600},
    "/v1/kv/lookup": {"prompt": _SAID},
    "/v1/kv/pin": {"prompt": _SAID, "ttl_s": 600},
    "/v1/kv/unpin": {"prompt": _SAID},
    "/v1/kv": {"prompt": _SAID},
}
_PARAMETERS = {
    "session_id": "the session, as its client named it",
    "response_id": "the id of a stored response",
    "request_id": "the id of a request, or of its completion",
    "pin_id": "the name of a pin",
    "model_id": "the name of a model",
    "X-Session-ID": "the session that this is a turn of",
    "cache_salt": "the one that the session or request was opened under",
    "model": "the one that it belongs to; unless given, the first that knows it",
    "after": "the id of the item to go on behind",
    "limit": "entries at most, from 1 to 100; 20 unless given",
    "verbose": "with each model and its replicas: what every phase of their start took",
    "depth": "runs behind each other at most; 12 unless given",
    "min_tokens": "runs with fewer tokens, what follows them counted, are left out",
    "max_runs": "runs of each replica at most, from 1 to 10000; the 500 largest unless given",
    "all": "1: everybody's, without text; for admins",
    "last": "requests at most, from 1 to 1000; 50 unless given",
    "since": "from when on saved prefill is counted, in seconds since 1970; the last day unless given",
    "order": "asc: oldest first; desc, unless given: newest first",
}
_NAMES = re.compile(r"{(\w+)}")  # in a path
_HINT = "a hint: requests with the same value run on one replica"


class Route(NamedTuple):
    """One endpoint; its handler's docstring describes it, as do the types of its `body` and of what it returns."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    answer: Any = None  # a TypedDict, in JSON, where the handler makes a response of it; None: what it returns, if one
    event: Any = None  # likewise: a TypedDict, of a stream
    texts: Sequence[str] = ()  # media types of its answers that are text
    headers: Sequence[str] = ()  # that it reads
    query: Sequence[str] = ()
    is_admins: bool = False  # refused to others

    @property
    def body(self) -> Any:
        """Return the type of its body, or None."""
        return _types_of(self.handler).get("body")

    @property
    def answers(self) -> dict[str, Any]:
        """Return the types of its answers by media type, of a stream of events that of their data."""
        returned = _types_of(self.handler)["return"]
        whole, event = get_args(returned) if get_origin(returned) is RunResponse else (returned, None)
        answer = self.answer or (whole if is_typeddict(whole) else None)
        found = {_JSON: answer, "text/event-stream": self.event or event, **dict.fromkeys(self.texts, str)}
        return {media_type: kind for media_type, kind in found.items() if kind not in (None, type(None))}


@cache
def _types_of(handler: Callable[..., Awaitable[Any]]) -> dict[str, Any]:
    return get_type_hints(handler)


def openapi(routes: Sequence[Route], *, model: str, needs_model: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes; `needs_model`: a body must name its model, as there are several.

    The first one takes 0.3 s of a core, nearly all of it in pydantic: it is made when it is asked for, beside the event
    loop. Examples name `model`.
    """
    kinds = [kind for route in routes for kind in (route.body, *route.answers.values()) if kind is not None]
    references, schemas = _described((*kinds, Error, AnthropicError))

    def content(kind_by_type: Mapping[str, Any]) -> dict[str, Any]:
        return {media_type: {"schema": references[kind, "validation"]} for media_type, kind in kind_by_type.items()}

    paths: dict[str, Any] = {}
    shown = {"session_id": "demo", "model_id": model}
    for route in routes:
        path = route.path.replace(":path", "")
        summary, _, rest = (inspect.getdoc(route.handler) or "").partition("\n")
        operation: dict[str, Any] = {
            "summary": summary,
            "description": rest.strip(),
            "operationId": f"{route.handler.__name__.strip('_')}",
            "tags": [next(tag for tag, (_, begins) in _TAGS.items() if path.startswith(begins))],
            "parameters": [
                *(_parameter(name, "path", _PARAMETERS[name], shown.get(name)) for name in _NAMES.findall(path)),
                *(_parameter(name, "header", _PARAMETERS.get(name, _HINT)) for name in route.headers),
                *(_parameter(name, "query", _PARAMETERS[name]) for name in route.query),
            ],
            "responses": {
                "200": {"description": "done", "content": content(route.answers)},
                "default": {
                    "description": "what was wrong",
                    "content": content({_JSON: AnthropicError if path.startswith(MESSAGES) else Error}),
                },
            },
        }
        if route.body is not None:
            schema = schemas[route.body.__name__]
            named = {"model": model} if "model" in schema["properties"] else {}
            taken = {**content({_JSON: route.body})[_JSON], "example": {**named, **_EXAMPLES[path]}}
            operation["requestBody"] = {"required": route.method == "POST", "content": {_JSON: taken}}
            if not needs_model:
                required = [name for name in schema.get("required", ()) if name != "model"]
                schemas = {**schemas, route.body.__name__: {**schema, "required": required}}
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mneme", "version": __version__},
        "tags": [{"name": tag, "description": about} for tag, (about, _) in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


@cache
def _described(kinds: tuple[Any, ...]) -> tuple[Mapping[Any, dict[str, Any]], dict[str, Any]]:
    """Return references to these types, and the schemas of all that they are made of, by name."""
    adapters: list[tuple[Any, Literal["validation"], TypeAdapter[Any]]]
    adapters = [(kind, "validation", TypeAdapter(kind)) for kind in kinds]
    references, document = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    meanings = field_meanings()
    for kind, schema in document["$defs"].items():
        for name, field in schema.get("properties", {}).items():
            field["description"] = meanings.get(f"{kind}.{name}") or meanings[name]
    return references, document["$defs"]


def field_meanings() -> dict[str, str]:
    """What fields mean, by `name` and by `Type.name`, which goes before it."""
    meanings = {}
    for line in Path(__file__).with_name("fields.txt").read_text().splitlines():
        key, _, meaning = line.partition(": ")
        kinds, dot, name = key.rpartition(".")
        meanings.update({f"{kind}{dot}{name}": meaning for kind in kinds.split("|")})
    return meanings


def _parameter(name: str, where: str, description: str, example: str | None = None) -> dict[str, Any]:
    schema = {"type": "string"}
    about = {"name": name, "in": where, "required": where == "path", "description": description, "schema": schema}
    return about if example is None else {**about, "example": example}


def service_page(service: Service, url: str) -> str:
    """`GET /` for a browser."""
    shown = {
        "model": ", ".join(service["models"]),
        "context": f"{service['max_model_len']:,} tokens",
        "replicas": f"{service['replicas']} on {service['device']}, {service['dtype']}"
        if service["device"]
        else f"{service['replicas']}, not heard of yet",
        "KV on the device": "{kv_capacity_tokens:,} tokens in {kv_dtype}, {kv_usage:.0%} in use".format(**service),
        "requests": "{running} running, {waiting} waiting".format(**service["requests"]),
        "prompt tokens": f"{service['prompt_tokens']:,}, {cached_share(service):.0%} of them found, not computed",
        "generated tokens": f"{service['generated_tokens']:,}",
    }
    rows = "".join(f"<tr><th>{name}<td>{html.escape(value)}" for name, value in shown.items())
    paths = ("/ui", "/docs", "/openapi.json", "/metrics", "/v1/models")
    links = " &middot; ".join(f'<a href="{path}">{path}</a>' for path in paths)
    call = html.escape(curl_line(url, service))
    return _page(
        f"<h1>Mneme {__version__}</h1><p>{links}</p><table>{rows}</table><h2>Ask it</h2><pre>{call}</pre>"
        f"<pre>mneme chat --url {html.escape(url)}</pre><p>OpenAI's clients: base_url = {html.escape(url)}/v1</p>"
    )


def curl_line(url: str, service: Mapping[str, Any]) -> str:
    """Return how to ask it from a shell."""
    key = ' -H "Authorization: Bearer $KEY"' if service["needs_key"] else ""
    body = json.dumps({"model": service["model"], "messages": [{"role": "user", "content": "Hello"}]})
    quoted = body.replace("'", "'\\''")
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{quoted}'"


def cached_share(tokens: Mapping[str, Any]) -> float:
    return float(tokens["cached_tokens"] / max(1, tokens["prompt_tokens"]))


def _page(content: str) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Mneme</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "h2{margin:2rem 0 .3rem;font-size:1.1rem}h3{margin:1.5rem 0 .3rem;font-size:1rem}p{margin:.3rem 0}"
        "th{text-align:left;font-weight:normal;color:#666;padding-right:2rem}td{padding-right:2rem}"
        "pre{background:#f4f4f4;padding:.8rem;white-space:pre-wrap}a{color:#0645ad}</style>"
        f"<body><main>{content}</main></html>"
    )
