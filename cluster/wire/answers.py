"""The API's answers as types: handlers build them, and the OpenAPI document describes them.

A key that may be absent is `NotRequired`; events of a stream have those that go with their type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

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
from mneme.router.score import ShownRoute

State = Literal["ready", "loading", "idle", "stalled", "failed"]  # of a model's replicas


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


MissType = Literal[
    "model_changed", "tools_changed", "system_changed", "messages_changed", "previous_message_not_found", "unavailable"
]


class CacheMissReason(TypedDict):
    type: MissType
    cache_missed_input_tokens: NotRequired[int]


class AnthropicDiagnostics(TypedDict):
    cache_miss_reason: CacheMissReason


AnthropicBlock = AnthropicText | AnthropicThinking | AnthropicToolUse


class AnthropicHead(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class AnthropicDiagnosed(TypedDict):
    diagnostics: NotRequired[AnthropicDiagnostics]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicEnding(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None


class AnthropicMessage(AnthropicHead, AnthropicDiagnosed, AnthropicEnding):
    content: list[AnthropicBlock]
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
    """What its type says."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]


class AnthropicEvent(TypedDict):
    """One event of a stream; which fields it has goes by its type."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "error",
    ]  # fmt: skip
    message: NotRequired[AnthropicMessage]
    index: NotRequired[int]
    content_block: NotRequired[AnthropicBlock]
    delta: NotRequired[AnthropicDelta | AnthropicEnding]  # the last one says why the message ended
    usage: NotRequired[AnthropicUsage]
    error: NotRequired[AnthropicErrorFields]
    request_id: NotRequired[str]


class ResponseOutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseText(TypedDict):
    type: Literal["output_text", "input_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseItem(TypedDict):
    """A message, a call or its output, or reasoning; which fields it has goes by its type, as OpenAI has them."""

    id: str
    type: str
    status: NotRequired[ItemStatus]
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


CacheChange = Literal["model_changed", "instructions_changed", "tools_changed", "input_changed", "context_compacted"]


class CacheDiagnostics(TypedDict):
    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: NotRequired[CacheChange]
    cache_missed_tokens: NotRequired[int]
    comparison_reusable_tokens: NotRequired[int]
    first_difference: NotRequired[FirstDifference]


class ResponseAsked(TypedDict):
    """What was asked for, as it was taken."""

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
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


class ResponseHead(ResponseAsked):
    id: str
    object: Literal["response"]
    created_at: int
    model: str


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class Response(ResponseHead):
    """OpenAI's response; what was asked for stands in it as it was taken."""

    completed_at: int | None
    status: ResponseStatus
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[ResponseItem]
    usage: ResponseUsage | None
    prompt_cache_diagnostics: CacheDiagnostics | None


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
    input: NotRequired[str]
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


PromptLogprobsShown = list[dict[str, PromptLogprob] | None]  # by token id; of the first token none


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobsShown]
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
    prompt_logprobs: NotRequired[PromptLogprobsShown]


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
    sampling_defaults: Mapping[str, float]  # of generation_config.json, in force where a request says nothing
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


class ExplainedRoute(ShownRoute):
    """A choice among replicas, the cheapest first."""

    request_id: str


class RequestTimes(TypedDict):
    """When a request's first choice came how far, in milliseconds since its body was there.

    queued       an engine took it
    begun        its first rows were computed
    tokens       tokens so far, and when: at most 128 pairs, of a long answer every second, fourth ... token
    ended        its last token, or its error
    """

    queued: float | None  # as the others: None if no token came
    begun: float | None
    tokens: list[tuple[int, float]]
    ended: float


class Explanation(TypedDict):
    id: str
    object: Literal["kv.explanation"]
    trace_id: str | None  # None: it has none, or another ingress answered it
    times: RequestTimes | None  # None: another ingress answered it
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


class Worst(TypedDict):
    state: State  # of the worst model
    reason: NotRequired[str]


class Health(Worst):
    status: Literal["ok", "failed"]


class Status(Health):
    models: NotRequired[list[ModelHealth]]  # if it is to be verbose


class Ready(Worst):
    ready: bool
    replicas: int


class Version(TypedDict):
    version: str
    kernels: list[str]  # who computes on the CPUs of replicas, and in which dtype
    documents: list[str]  # what quality reports of their models allow of reuse in place, or why it is nothing


class OpenApi(TypedDict):
    """OpenAPI 3.1."""

    openapi: str
    info: dict[str, str]
    tags: list[dict[str, str]]
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
    weights: list[str] | None
    kv_dtype: str | None
    kv_capacity_tokens: int
    kv_usage: float  # share of the pages that running requests hold
    requests: Requests
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
