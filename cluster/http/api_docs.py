"""The API's description of itself: answers as types, the OpenAPI document, and pages for a browser.

The pages are written out here, with no script and nothing from elsewhere, so they work where there is no internet.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

from mneme.cluster.http.error_response import MESSAGES
from mneme.cluster.serve.engine_client import State
from mneme.cluster.wire.openai import Body
from mneme.replicas.documents import ShownBlend
from mneme.replicas.queries import (
    DroppedChunks,
    DroppedPages,
    ExplainedPrompt,
    FoundInTier,
    FoundPages,
    PinnedChunks,
    PinnedPrompt,
    SessionFigures,
    TenantKv,
    TierFigures,
)
from mneme.replicas.request import KvDetails
from mneme.version import __version__

_REF = "#/components/schemas/{model}"
_PARAMETERS = {
    "X-Session-ID": "the session that this is a turn of",
    "cache_salt": "the one that the session or request was opened under",
    "model": "the one that it belongs to; unless given, the first that knows it",
    "after": "the id of the item to go on behind",
    "limit": "items at most, from 1 to 100; 20 unless given",
    "verbose": "with each model and its replicas: what every phase of their start took",
    "order": "asc: oldest first; desc, unless given: newest first",
}
_HINT = "a hint: requests with the same value run on one replica"


class Route(NamedTuple):
    """One endpoint; its handler's docstring describes it."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    answer: Any  # a TypedDict, in JSON; None: only `others`
    body: type[Body] | None = None
    others: Mapping[str, Any] = {}  # its other answers, by media type: a TypedDict (of each event), or str
    headers: Sequence[str] = ()  # that it reads
    query: Sequence[str] = ()
    is_admins: bool = False  # refused to others


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    error: ErrorFields


class PromptTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ShownKv(KvDetails):
    """Tokens of the prompt by where their KV came from, and how its documents were used."""

    blend: NotRequired[ShownBlend]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    kv_details: ShownKv


class Metrics(TypedDict):
    """vLLM's, of an answer of one choice."""

    queue_time_ms: float
    time_to_first_token_ms: float  # without the queue
    generation_time_ms: float
    mean_itl_ms: NotRequired[float]
    tokens_per_second: NotRequired[float]


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    service_tier: NotRequired[Literal["default", "flex", "priority"]]
    metrics: NotRequired[Metrics]


class AnthropicText(TypedDict):
    type: Literal["text"]
    text: str


class AnthropicThinking(TypedDict):
    """What the model thought; nothing signs it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnthropicToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class CacheCreation(TypedDict):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class AnthropicUsage(TypedDict):
    """The prompt has the first three together: computed, computed up to a mark of `cache_control`, and found."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


class CacheMissReason(TypedDict):
    type: Literal[
        "model_changed", "tools_changed", "system_changed", "messages_changed", "previous_message_not_found",
        "unavailable",
    ]  # fmt: skip
    cache_missed_input_tokens: NotRequired[int]


class AnthropicDiagnostics(TypedDict):
    cache_miss_reason: CacheMissReason


class AnthropicMessage(TypedDict):
    id: str
    diagnostics: NotRequired[AnthropicDiagnostics]
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicErrorDetails(TypedDict):
    error_code: Literal["thread_not_found"]


class AnthropicErrorFields(TypedDict):
    type: str
    message: str
    details: NotRequired[AnthropicErrorDetails]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str


class AnthropicDelta(TypedDict):
    """What its type says; of the last one why the message ended."""

    type: NotRequired[Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]
    stop_reason: NotRequired[str | None]
    stop_sequence: NotRequired[str | None]


class AnthropicEvent(TypedDict):
    """One event of a stream; which fields it has goes by its type."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "error",
    ]  # fmt: skip
    message: NotRequired[AnthropicMessage]
    index: NotRequired[int]
    content_block: NotRequired[AnthropicText | AnthropicThinking | AnthropicToolUse]
    delta: NotRequired[AnthropicDelta]
    usage: NotRequired[AnthropicUsage]
    error: NotRequired[AnthropicErrorFields]
    request_id: NotRequired[str]


class ResponseInputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseText(TypedDict):
    type: Literal["output_text", "input_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class ResponseItem(TypedDict):
    """A message, a call or its output, or reasoning; which fields it has goes by its type, as OpenAI has them."""

    id: str
    type: str
    status: NotRequired[Literal["in_progress", "completed", "incomplete"]]
    role: NotRequired[str]
    content: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[Any]
    input: NotRequired[str]
    output: NotRequired[Any]
    summary: NotRequired[list[Any]]
    encrypted_content: NotRequired[str]


class ResponseFailure(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class FirstDifference(TypedDict):
    """Where two prompts differ: the token's index, and the text from there on, before and now."""

    token: int
    before: str
    now: str


class CacheDiagnostics(TypedDict):
    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: NotRequired[Literal["model_changed", "tools_changed", "input_changed", "context_compacted"]]
    cache_missed_tokens: NotRequired[int]
    comparison_reusable_tokens: NotRequired[int]
    first_difference: NotRequired[FirstDifference]


class Response(TypedDict):
    """OpenAI's response; what was asked for stands in it as it was taken."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_diagnostics: CacheDiagnostics | None
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_options: dict[str, Any] | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseEvent(TypedDict):
    """One event of a stream; which fields it has goes by its type."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item: NotRequired[ResponseItem]
    part: NotRequired[ResponseText]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[Any]]


class ResponseItems(TypedDict):
    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(TypedDict):
    input_tokens: int


class Logprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprobs]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str  # JSON


class FunctionPiece(TypedDict):
    name: NotRequired[str]
    arguments: str  # what follows of the JSON


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatToolPiece(TypedDict):
    """What a chunk brings of the call `index`: id, type and name with the first only."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPiece


class ChatMessage(TypedDict):
    """An answer; `reasoning` is `reasoning_content` by another name. `content` is null where there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ChatToolCall]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class PromptLogprob(TypedDict):
    """vLLM's, of a token at a place of the prompt; `rank` 1 is the likeliest there."""

    logprob: float
    rank: int
    decoded_token: str


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]  # by token id; of the first token none
    usage: Usage


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolPiece]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(_Answer):
    """An event of a stream. After the last comes `[DONE]`; a stream that fails ends with an `Error` instead."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: of an echo's first token
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Answer):
    """An event of a stream. After the last comes `[DONE]`; a stream that fails ends with an `Error` instead."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # in base64: of float32, little-endian


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class Model(TypedDict):
    id: str
    root: str | None
    object: str
    created: int
    owned_by: str
    max_model_len: int
    sampling_defaults: dict[str, float]  # of generation_config.json, in force where a request says nothing
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


class Session(SessionFigures):
    id: str
    object: Literal["session"]
    replica: str


class Deleted(TypedDict):
    id: str
    object: str
    deleted: bool


class ExplainedChoice(ExplainedPrompt):
    """One choice of the request, on one replica."""

    replica: str


class RouteTokens(TypedDict):
    """Tokens of the prompt that a replica was thought to have: by their place, and of documents to be reused."""

    matched: int
    in_host: int
    in_node: int
    at_peers: int
    reused: int


class RouteMs(TypedDict, total=False):
    """Milliseconds that were predicted: `ttft` is the sum of the first five, `total`, which is weighed, of all terms
    but `overhead`."""

    queue: float
    compute: float
    load: float
    decode: float
    overhead: float
    batch: float
    work: float
    move: float
    ttft: float
    total: float


class RouteCandidate(TypedDict):
    replica: str
    tokens: RouteTokens
    ms: RouteMs


class ExplainedRoute(TypedDict):
    """A choice among replicas, the cheapest first."""

    request_id: str
    reason: Literal["session", "score", "ring", "p2c"]
    replica: str
    candidates: list[RouteCandidate]


class Explanation(TypedDict):
    id: str
    object: Literal["kv.explanation"]
    choices: list[ExplainedChoice]
    routes: list[ExplainedRoute]


class Pin(PinnedPrompt):
    object: Literal["kv.pin"]
    where: Literal["device"]
    replicas: list[str]


class TierPin(PinnedChunks):
    object: Literal["kv.pin"]
    where: Literal["tier"]
    pinned: Literal[True]


class PinList(TypedDict):
    object: Literal["list"]
    data: list[Pin | TierPin]


class FoundOnReplica(FoundPages):
    replica: str


class Lookup(TypedDict):
    object: Literal["kv.lookup"]
    num_tokens: int
    replicas: list[FoundOnReplica]
    tier: FoundInTier | None


class DroppedOnReplica(DroppedPages):
    replica: str


class Dropped(TypedDict):
    object: Literal["kv.deleted"]
    by: str
    replicas: list[DroppedOnReplica]
    tier: DroppedChunks | None


class KvStats(TypedDict):
    object: Literal["kv.stats"]
    replicas: list[dict[str, Any]]
    tier: TierFigures | None
    tenant: TenantKv | None


class StartPhase(TypedDict):
    seconds: float
    bytes: int


class ReplicaStart(TypedDict):
    replica: str
    age_s: float  # of its figures
    start: dict[str, StartPhase]


class ModelHealth(TypedDict):
    model: str
    state: State
    reason: str
    replicas: list[ReplicaStart]


class Status(TypedDict):
    status: Literal["ok", "failed"]
    state: State  # of the worst model
    reason: NotRequired[str]
    models: NotRequired[list[ModelHealth]]  # if it is to be verbose


class Ready(TypedDict):
    ready: bool
    replicas: int
    state: State
    reason: NotRequired[str]


class Version(TypedDict):
    version: str


class OpenApi(TypedDict):
    """OpenAPI 3.1."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


class Requests(TypedDict):
    running: int
    waiting: int


class Service(TypedDict):
    """Says what runs here: sums over the replicas that are there; tokens since their start."""

    service: Literal["mneme"]
    version: str
    model: str  # the one that answers where none is named
    models: list[str]
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


def openapi(routes: Sequence[Route], *, needs_model: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes; `needs_model`: a body must name its model, as there are several."""
    schemas: dict[str, Any] = {}

    def reference(described: Any) -> dict[str, Any]:
        schemas.update(_schemas(described))
        return {"$ref": _REF.format(model=described.__name__)}

    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path", "")
        content = {} if route.answer is None else _json(reference(route.answer))
        for media_type, kind in route.others.items():
            content[media_type] = {"schema": {"type": "string"} if kind is str else reference(kind)}
        error = _json(reference(AnthropicError if path.startswith(MESSAGES) else Error))
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
                "200": {"description": "done", "content": content},
                "default": {"description": "what was wrong", "content": error},
            },
        }
        if route.body is not None:
            operation["requestBody"] = {"required": route.method == "POST", "content": _json(reference(route.body))}
        paths.setdefault(path, {})[route.method.lower()] = operation
    for name in {route.body.__name__ for route in routes if route.body is not None and not needs_model}:
        schema = schemas[name]
        schemas[name] = {**schema, "required": [each for each in schema.get("required", ()) if each != "model"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mneme", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


@cache
def _schemas(described: Any) -> dict[str, Any]:
    """The schema of a body by its name, and of what it is made of."""
    schema = TypeAdapter(described).json_schema(ref_template=_REF)
    return {**schema.pop("$defs", {}), described.__name__: schema}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


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
    paths = ("/docs", "/openapi.json", "/metrics", "/v1/models")
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
