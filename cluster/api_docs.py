"""The API's description of itself: answers as types, the OpenAPI document, and pages for a browser.

The pages are written out here, with no script and nothing from elsewhere, so they work where there is no internet.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from mneme import __version__
from mneme.cluster.protocol import Body

_REF = "#/components/schemas/{model}"


class Route(NamedTuple):
    """One endpoint; its handler's docstring describes it."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    answer: Any  # a TypedDict; str: text
    body: type[Body] | None = None


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    error: ErrorFields


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    kv_details: dict[str, Any]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage  # in a stream: delta
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletion(TypedDict):
    """With `stream`: events of `chat.completion.chunk` objects, whose choices have `delta`, then `[DONE]`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class Completion(TypedDict):
    """With `stream`, server-sent events of objects like this, then `[DONE]`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class Model(TypedDict):
    id: str
    root: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Session(TypedDict):
    """And what its replica knows of it."""

    id: str
    object: Literal["session"]
    replica: str


class Deleted(TypedDict):
    id: str
    object: str
    deleted: bool


class Explanation(TypedDict):
    id: str
    object: Literal["kv.explanation"]
    choices: list[dict[str, Any]]


class Pin(TypedDict):
    id: str
    object: Literal["kv.pin"]
    where: Literal["device", "tier"]
    pinned: bool


class PinList(TypedDict):
    object: Literal["list"]
    data: list[Pin]


class Lookup(TypedDict):
    object: Literal["kv.lookup"]
    num_tokens: int
    replicas: list[dict[str, Any]]
    tier: dict[str, Any] | None


class Dropped(TypedDict):
    object: Literal["kv.deleted"]
    by: str
    replicas: list[dict[str, Any]]
    tier: dict[str, Any] | None


class KvStats(TypedDict):
    object: Literal["kv.stats"]
    replicas: list[dict[str, Any]]
    tier: dict[str, Any] | None
    tenant: dict[str, Any] | None


class Status(TypedDict):
    status: Literal["ok"]


class Ready(TypedDict):
    ready: bool


class Version(TypedDict):
    version: str


class Requests(TypedDict):
    running: int
    waiting: int


class Service(TypedDict):
    """What runs here: sums over the replicas that answered; tokens since their start."""

    service: Literal["mneme"]
    version: str
    model: str
    max_model_len: int
    needs_key: bool
    replicas: int
    device: str | None
    dtype: str | None
    kv_capacity_tokens: int
    kv_usage: float  # share of the pages that running requests hold
    requests: Requests
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    schemas: dict[str, Any] = {}

    def reference(described: Any) -> dict[str, Any]:
        schema = TypeAdapter(described).json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[described.__name__] = schema
        return {"$ref": _REF.format(model=described.__name__)}

    error = {"description": "what was wrong", "content": _json(reference(Error))}
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path", "")
        content = (
            {"text/plain": {"schema": {"type": "string"}}} if route.answer is str else _json(reference(route.answer))
        )
        summary, _, rest = (inspect.getdoc(route.handler) or "").partition("\n")
        operation: dict[str, Any] = {
            "summary": summary,
            "description": rest.strip(),
            "operationId": f"{route.handler.__name__.strip('_')}",
            "parameters": [_parameter(name, "path", required=True) for name in re.findall(r"{(\w+)}", path)],
            "responses": {"200": {"description": "done", "content": content}, "default": error},
        }
        if route.body is not None:
            operation["requestBody"] = {"required": route.method == "POST", "content": _json(reference(route.body))}
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mneme", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameter(name: str, where: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": {"type": "string"}}


def service_page(service: Service, url: str) -> str:
    """`GET /` for a browser."""
    shown = {
        "model": service["model"],
        "context": f"{service['max_model_len']:,} tokens",
        "replicas": f"{service['replicas']} on {service['device']}, {service['dtype']}",
        "KV on the device": f"{service['kv_capacity_tokens']:,} tokens, {service['kv_usage']:.0%} in use",
        "requests": "{running} running, {waiting} waiting".format(**service["requests"]),
        "prompt tokens": f"{service['prompt_tokens']:,}, {cached_share(service):.0%} of them found, not computed",
        "generated tokens": f"{service['generated_tokens']:,}",
    }
    rows = "".join(f"<tr><th>{name}<td>{html.escape(value)}" for name, value in shown.items())
    paths = ("/docs", "/openapi.json", "/metrics", "/v1/models")
    links = " &middot; ".join(f'<a href="{path}">{path}</a>' for path in paths)
    call = html.escape(curl_line(url, service))
    return _page(
        f"<h1>Mneme {__version__}</h1><p>{links}</p><table>{rows}</table><h2>Ask it</h2><pre>{call}</pre>"
        f"<pre>mneme chat --url {html.escape(url)}</pre><p>OpenAI's clients: base_url = {html.escape(url)}/v1</p>"
    )


def curl_line(url: str, service: Mapping[str, Any]) -> str:
    """How to ask it from a shell."""
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
    for title, content in (("body", operation.get("requestBody")), ("answer", operation["responses"]["200"])):
        if content is not None:
            schema = next(iter(content["content"].values()))["schema"]
            yield f"<p>{title}: {_type(schema)}</p>"


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
