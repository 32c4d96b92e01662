"""The API's description of itself: the OpenAPI document, and pages for a browser.

The pages are written out here, with no script and nothing from elsewhere, so they work where there is no internet.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from typing_extensions import is_typeddict

from mneme.cluster.http.error_response import MESSAGES
from mneme.cluster.http.stream import RunResponse
from mneme.cluster.wire.answers import AnthropicError, Error, Service
from mneme.version import __version__

_JSON = "application/json"
_PARAMETERS = {
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
    "order": "asc: oldest first; desc, unless given: newest first",
}
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


def openapi(routes: Sequence[Route], *, needs_model: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes; `needs_model`: a body must name its model, as there are several."""
    kinds = [kind for route in routes for kind in (route.body, *route.answers.values()) if kind is not None]
    references, schemas = _described((*kinds, Error, AnthropicError))

    def content(kind_by_type: Mapping[str, Any]) -> dict[str, Any]:
        return {media_type: {"schema": references[kind, "validation"]} for media_type, kind in kind_by_type.items()}

    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path", "")
        summary, _, rest = (inspect.getdoc(route.handler) or "").partition("\n")
        operation: dict[str, Any] = {
            "summary": summary,
            "description": rest.strip(),
            "operationId": f"{route.handler.__name__.strip('_')}",
            "parameters": [
                *(_parameter(name, "path") for name in re.findall(r"{(\w+)}", path)),
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
            operation["requestBody"] = {"required": route.method == "POST", "content": content({_JSON: route.body})}
            if not needs_model:
                schema = schemas[route.body.__name__]
                required = [name for name in schema.get("required", ()) if name != "model"]
                schemas = {**schemas, route.body.__name__: {**schema, "required": required}}
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mneme", "version": __version__},
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
    return references, document["$defs"]


def _parameter(name: str, where: str, description: str = "") -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": where, "required": where == "path", "description": description, "schema": schema}


def service_page(service: Service, url: str) -> str:
    """`GET /` for a browser."""
    shown = {
        "model": ", ".join(service["models"]),
        "context": f"{service['max_model_len']:,} tokens",
        "replicas": f"{service['replicas']} on {service['device']}, {service['dtype']}"
        if service["device"]
        else f"{service['replicas']}, not heard of yet",
        "KV on the device": f"{service['kv_capacity_tokens']:,} tokens, {service['kv_usage']:.0%} in use",
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


def docs_page(document: Mapping[str, Any]) -> str:
    """`GET /docs`: the OpenAPI document as a page."""
    operations = [
        f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{_text(operation['summary'])}</p>"
        f"<p>{_text(operation['description'])}</p>{''.join(_bodies(operation))}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [
        f'<h3 id="{name}">{name}</h3><p>{_text(schema.get("description", ""))}</p>'
        f"<table>{''.join(_fields(schema))}</table>"
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    return _page(
        f'<h1>Mneme {__version__}: HTTP API</h1><p><a href="/">what runs here</a> &middot; '
        f'<a href="/openapi.json">/openapi.json</a></p>{"".join(operations)}<h2>Types</h2>{"".join(schemas)}'
    )


def _bodies(operation: Mapping[str, Any]) -> Iterator[str]:
    for parameter in operation["parameters"]:
        if parameter["in"] != "path":
            name, where, description = (_text(parameter[key]) for key in ("name", "in", "description"))
            yield f"<p>{where} <code>{name}</code>: {description}</p>"
    for title, content in (("body", operation.get("requestBody")), ("answer", operation["responses"]["200"])):
        for media_type, described in {} if content is None else content["content"].items():
            yield f"<p>{title}, {media_type}: {_type(described['schema'])}</p>"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        needed = "required" if name in required else ""
        yield f"<tr><th><code>{name}</code><td>{_type(field)}<td>{needed}"


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(html.escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _text(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _page(content: str) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Mneme</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "h2{margin:2rem 0 .3rem;font-size:1.1rem}h3{margin:1.5rem 0 .3rem;font-size:1rem}p{margin:.3rem 0}"
        "th{text-align:left;font-weight:normal;color:#666;padding-right:2rem}td{padding-right:2rem}"
        "pre{background:#f4f4f4;padding:.8rem;white-space:pre-wrap}a{color:#0645ad}</style>"
        f"<body>{content}</html>"
    )
