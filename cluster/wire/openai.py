"""What a request body may say: types and refused fields here, ranges in `SamplingParams`.

Types are strict (no "5" for 5; 5.0 is 5), numbers finite. Every breach is an `InvalidRequest` whose
`field` is the path in the body, such as `messages[0].content`.

A field of the OpenAI and vLLM APIs that no model here names is refused when leaving it out would change what the
answer means: a caller who asks for audio must hear that none will come. Its harmless values (null, the default, "off")
are accepted.

Everything else that is unknown is accepted and ignored, as clients of vLLM and SGLang expect; that includes
`user`, `store`, `metadata`, `safety_identifier`, `prediction`, `prompt_cache_retention`, `prompt_cache_options`,
`moderation`, `verbosity` and `kv_transfer_params`, none of which changes what the tokens mean. The
answer names what was ignored (`ignored_fields`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar
from zlib import crc32

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from mneme.errors import InvalidRequest
from mneme.replicas.config import MAX_TIMEOUT_S, MAX_TTL_S, MIN_TTL_S
from mneme.replicas.documents import MAX_DOCUMENTS, Mode, Order, Selector
from mneme.replicas.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Grammar,
    GrammarKind,
    Pooling,
    SamplingParams,
)
from mneme.replicas.text.document_parts import Part, StandIns, prompt_parts
from mneme.replicas.text.tool_calls import MAX_TOOLS
from mneme.replicas.truncation import Keep, Strategy

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MAX_SEQUENCES = 128  # prompts x n of one request
MAX_EMBEDDINGS = 2048  # OpenAI's, of one request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "fast"]
_PRIORITY_OF_TIER = {"flex": 30, "priority": -30}  # the others are served as "default"
IGNORED_HEADER = b"x-mneme-ignored-fields"
MAX_IGNORED, MAX_IGNORED_CHARS = 16, 64  # names of ignored fields that an answer tells, and characters of each

M = TypeVar("M", bound="Body")
_UNION_BRANCHES = frozenset(
    {
        "str",
        "int",
        "float",
        "bool",
        "none",
        "CalledTool",
        "ContentPart",
        "GivenDocument",
        "NamedToolChoice",
        "TextSource",
    }
)  # pydantic puts them into error paths
_NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9_.\-]")
_RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class Body(BaseModel):
    """Strict about what it names, silent about the rest."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _whole(value: object) -> object:
    """Return whole floats as integers: R, Lua and others write 8.0 for 8."""
    return int(value) if type(value) is float and value.is_integer() else value


class LeftOut(Body):
    """Something that an API knows and no answer here heeds; the answer names it by its kind (`ignored_fields`)."""

    type: str


WHOLE = BeforeValidator(_whole)
Int = Annotated[int, WHOLE]
Ttl = Annotated[float, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]  # seconds
Text = Annotated[str, Field(min_length=1)]
LastTokens = Annotated[int, Field(ge=-1), WHOLE]  # vLLM's `truncate_prompt_tokens`; -1: as many as the model takes
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SessionOptions(Body):
    """`append`: messages or prompt are only what is new; `ttl_s`: how long the session is kept unused.

    `history: "log"`: where resent messages say what the session did, but lack reasoning, the session's tokens stand.
    """

    id: str | None = None
    append: bool = False
    history: Literal["text", "log"] = "text"
    ttl_s: Ttl | None = None


class TruncationOptions(Body):
    """Says what happens if the prompt does not fit; what is left out is as configured. Ranges: `Truncation`."""

    model_config = ConfigDict(extra="forbid")  # ours alone: a name that is not known is misspelt

    strategy: Strategy = "error"
    ratio: float = 0.5
    keep_first: Int | None = None
    keep: Keep | None = None

    def given(self) -> dict[str, Any]:
        return self.model_dump(include=self.model_fields_set)


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES)]


class NamedSchema(Body):
    """A JSON schema that answers must match; `strict` or not, they do."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_object", field="response_format")
        if self.json_schema is None:
            raise InvalidRequest("response_format.json_schema", None, "must be given with this type")
        return Grammar("json_schema", self.json_schema.schema_, "response_format.json_schema.schema")


class StructuredOutputs(Body):
    """Constrains the answer as vLLM has it: one of these, `grammar` in Lark's notation."""

    model_config = ConfigDict(extra="forbid")  # a constraint that is not known must not be left out

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # there is one backend
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class PromptParts(Body):
    prompt: Annotated[list[str | ContentPart], Field(min_length=1, max_length=MAX_CONTENT_PARTS)]


class SamplingBody(Body):
    """Defines what both completion APIs take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    prompt_logprobs: Int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    session: SessionOptions | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    truncation: TruncationOptions | None = None
    truncate_prompt_tokens: LastTokens | None = None
    documents: Documents | None = None
    blend: BlendBody | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE] | None = None
    service_tier: ServiceTier | None = None
    # From the arrival of the request at this server to the end of its answer.
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    def sampling(
        self, *, logprobs: int | None, max_tokens: int | None, seed: int, echoed: int | None = None
    ) -> SamplingParams:
        """Raises `InvalidRequest` for values out of range; `seed` is taken where none is given.

        echoed  as `prompt_logprobs`, where the prompt is a part of the answer's text
        """
        of_prompt = [each for each in (self.prompt_logprobs, echoed) if each is not None]
        plain = ("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        flags = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
        names = (*plain, "presence_penalty", "frequency_penalty", *flags)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            seed=seed if self.seed is None else self.seed,
            logit_bias=parse_logit_bias(self.logit_bias or {}),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=self.allowed_token_ids,
            bad_words=tuple(self.bad_words or ()),
            logprobs=logprobs,
            prompt_logprobs=max(of_prompt, default=None),
            grammar=self.grammar(),
        )

    def grammar(self) -> Grammar | None:
        """Return what the answer must match; raises `InvalidRequest` where two fields say so."""
        inner = self.structured_outputs or StructuredOutputs.model_construct()
        named: list[tuple[GrammarKind, str, Any]] = [
            ("json_schema", "structured_outputs.json", inner.json_),
            ("regex", "structured_outputs.regex", inner.regex),
            ("choice", "structured_outputs.choice", inner.choice),
            ("grammar", "structured_outputs.grammar", inner.grammar),
            ("json_object", "structured_outputs.json_object", inner.json_object or None),
            ("json_schema", "guided_json", self.guided_json),
            ("regex", "guided_regex", self.guided_regex),
            ("choice", "guided_choice", self.guided_choice),
            ("grammar", "guided_grammar", self.guided_grammar),
        ]
        given = [Grammar(kind, value, field) for kind, field, value in named if value is not None]
        of_format = None if self.response_format is None else self.response_format.grammar()
        if of_format is not None:
            given.append(of_format)
        if len(given) > 1:
            raise InvalidRequest(given[0].field, None, f"cannot be combined with {given[1].field}")
        return given[0] if given else None

    @property
    def whole_priority(self) -> int:
        """Return `priority`, with that of the tier."""
        return (self.priority or 0) + _PRIORITY_OF_TIER.get(self.service_tier or "", 0)

    @property
    def used_tier(self) -> str | None:
        """Return the tier that the answer names, as OpenAI does where one was asked for."""
        return None if self.service_tier is None else tier_of(self.service_tier)

    @property
    def documents_beside(self) -> list[Any]:
        """The documents that stand in no message and no prompt."""
        return plain_documents(self.documents)

    @property
    def appends(self) -> bool:
        return self.session is not None and self.session.append

    def check_truncation(self) -> None:
        """Raise `InvalidRequest` where two fields would shorten the prompt, or one what is not the whole prompt."""
        other = "truncation" if self.truncation is not None else "session.append" if self.appends else None
        if self.truncate_prompt_tokens is not None and other is not None:
            raise InvalidRequest("truncate_prompt_tokens", None, f"cannot be combined with {other}")

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", None, "only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", self.prompt_logprobs, "only allowed when stream is false")


class TextPart(Body):
    """Text by any of the names that OpenAI's APIs have for it, or an assistant's refusal, which is text too."""

    model_config = ConfigDict(validate_default=True)  # what is not given is looked at, too

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @field_validator("*")
    @classmethod
    def _is_given(cls, value: Any, about: ValidationInfo) -> Any:
        kind = about.data.get("type")  # none: it has been refused
        if value is None and kind is not None and about.field_name == _holds_text(kind):
            raise PydanticCustomError("missing", "field required")
        return value

    @property
    def said(self) -> str:
        return getattr(self, _holds_text(self.type)) or ""


class ContentPart(TextPart):
    """Text, or a document: its `title` is its first line, usage and explanations call it by its `id`.

    vLLM's too: an assistant's `thinking`, and a `tool_reference`, where the tool of that `name` is defined as `text`.
    """

    type: Literal[  # type: ignore[assignment]
        "text", "input_text", "output_text", "refusal", "document", "thinking", "tool_reference"
    ]
    title: str | None = None
    id: str | None = None
    thinking: str | None = None
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return it as text, or as a document."""
        others = {"title": self.title, "id": self.id} if self.type == "document" else {}
        return {"type": "document" if others else "text", "text": self.text or self.said, **others}


def _holds_text(kind: str) -> str:
    return {"refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}.get(kind, "text")


def plain_parts(given: list[str | ContentPart]) -> list[dict[str, Any]]:
    """Return the parts of a text as texts and documents."""
    return [{"type": "text", "text": each} if isinstance(each, str) else each.for_template() for each in given]


class GivenDocument(Body):
    """A document as `Document.of` takes it, which asks for its text; many who use vLLM call that `contents`."""

    text: Text | None = None
    contents: Text | None = None
    title: str | None = None
    id: str | None = None


Documents = Annotated[list[str | GivenDocument], Field(max_length=MAX_DOCUMENTS)]


def tier_of(asked: ServiceTier | None) -> str:
    """Return the tier that a request is served at."""
    return asked if asked in _PRIORITY_OF_TIER else "default"


def plain_documents(given: list[str | GivenDocument] | None) -> list[Any]:
    """Return the documents as texts and mappings."""
    return [each if isinstance(each, str) else each.model_dump() for each in given or ()]


class BlendBody(Body):
    """Says how the KV of documents is used; what is not given is as `engine.blend` has it. Ranges: `BlendOptions`."""

    model_config = ConfigDict(extra="forbid")  # ours alone: a name that is not known is misspelt

    mode: Mode = "auto"
    selector: Selector | None = None
    ratio: float | None = None
    min_tokens: Int = 64
    order: Order | None = None

    def given(self) -> dict[str, Any]:
        return self.model_dump(include=self.model_fields_set)


def _checked_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise PydanticCustomError("arguments", "must be the schema of an object: arguments have names")
    return schema


def is_tool(*kinds: str | None) -> BeforeValidator:
    """Refuse other kinds of tools, which a server would have to run or a model to be trained for."""

    def check(kind: object) -> object:
        if kind not in kinds:
            raise PydanticCustomError("kind", "this kind of tool is not supported; functions are")
        return kind

    return BeforeValidator(check)


ArgumentsSchema = Annotated[dict[str, Any], AfterValidator(_checked_arguments)]


class Function(Body):
    """A function that an answer may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: ArgumentsSchema | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # defined where a message refers to it, and called from there on


class Tool(Body):
    type: Annotated[Literal["function"], is_tool("function")]
    function: Function


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class ToolUse(NamedTuple):
    """Says what a request wants called."""

    tools: list[dict[str, Any]]  # all, as chat templates take them
    schema_by_name: dict[str, dict[str, Any]]  # of arguments; of the functions that the answer may call
    is_forced: bool  # the answer is calls
    is_one: bool  # only one call
    is_strict: bool  # arguments must be valid


class CalledFunction(Body):
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Return it with arguments as a mapping, as templates write them; what is no JSON object stays as it is.

        So does one with half a character, which a model may write as an escape, and no prompt can have.
        """
        try:
            arguments = json.loads(self.arguments or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class MessageToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation; `content` may be null only where an assistant said nothing, or called tools.

    OpenAI's forms from before tools are taken as what replaced them: `function_call`, and the role "function".
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[str | ContentPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="after")
    def _with_tools(self) -> Message:
        if self.role == "function":  # its content is nullable
            self.role, self.content = "tool", self.content or ""
            self.tool_call_id = _call_id(self.name or "")
        if self.function_call is not None and not self.tool_calls:
            call = self.function_call
            self.tool_calls = [MessageToolCall(id=_call_id(call.name), function=call)]
        return self

    @property
    def said(self) -> str | list[str | ContentPart]:
        """What was said; an assistant may have refused instead."""
        return self.content or (self.role == "assistant" and self.refusal) or ""

    def for_template(self, index: int, stand_ins: StandIns) -> dict[str, Any]:
        """Return the message as chat templates expect it: plain text, and "developer" under its older name."""
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"messages[{index}].tool_calls", None, "only an assistant calls tools")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"messages[{index}].content", None, "may be null only for an assistant")
        text, thought = self.said, ""
        if isinstance(text, list):
            thoughts = [part.said for part in text if isinstance(part, ContentPart) and part.type == "thinking"]
            if thoughts and self.role != "assistant":
                raise InvalidRequest(f"messages[{index}].content", "thinking", "only an assistant thinks")
            thought = "".join(thoughts)
            told = [part for part in text if isinstance(part, str) or part.type != "thinking"]
            text = stand_ins.content(plain_parts(told), f"messages[{index}].content", group=index)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        others: dict[str, Any] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning or thought or None,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": call.function.for_template()}
                for call in self.tool_calls or ()
            ]
            or None,
        }
        return message | {name: value for name, value in others.items() if value is not None}


def _call_id(function: str) -> str:
    """Name a call that has only its function's name, as its result does; some templates want nine characters."""
    return f"{crc32(function.encode()):09x}"


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class Conversation(Body):
    """Defines a tool where a message refers to it, so that what is found later changes no token before that."""

    messages: Messages | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _with_references(self) -> Self:
        told = {tool.function.name: _told(tool) for tool in self.tools or ()}
        for part in _references(self.messages or ()):
            part.text = json.dumps(told[part.name], ensure_ascii=False) if part.name in told else part.name
        return self


class ChatRequest(Conversation, SamplingBody):
    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    def check_continuation(self) -> None:
        """Raise `InvalidRequest` where the answer is to go on with the last message and cannot."""
        name, last = "continue_final_message", self.messages[-1]
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise InvalidRequest(name, True, "needs add_generation_prompt: false")
        if last.role != "assistant" or not last.said or last.tool_calls:
            raise InvalidRequest(name, True, "needs an assistant's text as the last message")
        if self.appends or self.tools:
            raise InvalidRequest(name, True, f"cannot be combined with {'session.append' if self.appends else 'tools'}")

    def tool_use(self) -> ToolUse | None:
        """Return what may be called and must be, None where there are no tools; raises `InvalidRequest`."""
        choice, functions = self.tool_choice, {tool.function.name: tool.function for tool in self.tools or ()}
        if len(functions) < len(self.tools or ()):
            raise InvalidRequest("tools", None, "each function has a name of its own")
        if self.tools and isinstance(choice, NamedToolChoice):
            if choice.function.name not in functions:
                raise InvalidRequest("tool_choice.function.name", choice.function.name, "is none of the tools")
            functions = {choice.function.name: functions[choice.function.name]}
        else:
            found = {part.name for part in _references(self.messages)}
            functions = {name: each for name, each in functions.items() if not each.defer_loading or name in found}
        if not functions:
            if choice not in (None, "none", "auto"):
                raise InvalidRequest("tool_choice", None, "needs tools")
            return None
        return ToolUse(
            [_told(tool) for tool in self.tools or ()],
            {} if choice == "none" else {name: each.parameters or {} for name, each in functions.items()},
            is_forced=choice not in (None, "none", "auto"),
            is_one=isinstance(choice, NamedToolChoice) or self.parallel_tool_calls is False,
            is_strict=any(each.strict for each in functions.values()),
        )

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template, tools among them.

        An effort is one, and as in vLLM also a switch, for templates that have only that.
        """
        effort = self.reasoning_effort
        own = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return template_variables({**own, **(self.chat_template_kwargs or {})}, self.tools)

    @property
    def max_tokens_field(self) -> str:
        """The one that counts."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling_params(self, seed: int) -> SamplingParams:
        name = self.max_tokens_field
        limit: int | None = getattr(self, name)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", self.top_logprobs, "only allowed when logprobs is true")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        try:
            return self.sampling(logprobs=logprobs, max_tokens=limit, seed=seed)
        except InvalidRequest as error:  # named as the client wrote it
            field = {"max_tokens": name, "logprobs": "top_logprobs"}.get(error.field or "", error.field)
            raise InvalidRequest(field, error.value, error.rule) from None


class CompletionRequest(SamplingBody):
    prompt: Any  # str | list[str] | list[int] | list[list[int]] | list[ContentPart]: see `prompts`
    echo: bool | None = None
    best_of: Int | None = None
    logprobs: Int | None = None
    add_special_tokens: bool = True

    @property
    def max_tokens_field(self) -> str | None:
        """None: the client gave no limit."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def is_prompt_only(self) -> bool:
        """Return whether the echo is all that is wanted."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, seed: int) -> SamplingParams:
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.is_prompt_only:
            limit = 1  # an engine draws one, and nobody hears of it
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of", self.best_of, "must be absent or equal to n")
        echoed = self.logprobs if self.echo else None
        return self.sampling(logprobs=self.logprobs, max_tokens=limit, seed=seed, echoed=echoed)

    def prompts(self) -> list[str | list[int] | tuple[Part, ...]]:
        """One entry per prompt, none empty."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], dict):
            parts = plain_parts(validate(PromptParts, {"prompt": self.prompt}).prompt)
            return [prompt_parts(parts, self.documents_beside)]
        prompts = parse_prompts(self.prompt)
        if self.documents:
            if len(prompts) > 1 or not isinstance(prompts[0], str):
                raise InvalidRequest("documents", len(self.documents), "only with one prompt, of text or of parts")
            return [prompt_parts(prompts[0], self.documents_beside)]
        if len(prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest("prompt", len(prompts), f"prompts x n may be {MAX_SEQUENCES}")
        return prompts


class EmbeddingsRequest(Body):
    model: str
    input: Any  # str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    pooling: Pooling = "last"
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: LastTokens | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    def inputs(self) -> list[Any]:
        """One entry per input, none empty."""
        try:
            inputs = parse_prompts(self.input)
        except InvalidRequest as error:
            field = (error.field or "").replace("prompt", "input", 1)
            raise InvalidRequest(field, error.value, error.rule.replace("prompts", "inputs")) from None
        if len(inputs) > MAX_EMBEDDINGS:
            raise InvalidRequest("input", len(inputs), f"may have {MAX_EMBEDDINGS} texts")
        return inputs


class TokenizeRequest(Conversation):
    model: str | None = None
    prompt: Text | None = None
    documents: Documents | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class ForkRequest(Body):
    session_id: str | None = None  # of the new session; None: one is drawn


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool = False


def template_variables(given: Mapping[str, Any] | None, tools: list[Tool] | None = None) -> dict[str, Any]:
    """A client's own variables for the chat template, and the tools that it writes."""
    own = {name: value for name, value in (given or {}).items() if name not in _RESERVED_VARIABLES}
    told = [_told(tool) for tool in tools or () if not tool.function.defer_loading]
    return {**own, "tools": told} if told else own


def _references(messages: Iterable[Message]) -> Iterator[ContentPart]:
    lists = (message.content for message in messages if isinstance(message.content, list))
    parts = (part for content in lists for part in content if isinstance(part, ContentPart))
    return (part for part in parts if part.type == "tool_reference")


def _told(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates take it: only what was given of it."""
    return tool.model_dump(exclude_unset=True, exclude={"function": {"defer_loading"}})


def conversation(messages: list[Message], stand_ins: StandIns) -> list[dict[str, Any]]:
    """The messages as chat templates expect them; `stand_ins` takes their documents."""
    return [message.for_template(i, stand_ins) for i, message in enumerate(messages)]


def parse_prompts(prompt: Any) -> list[Any]:
    """A string, token ids, or a list of either, as a list of prompts; the first element says which.

    Done by hand because a union of four list types would collect an error for each of a million elements.
    """
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_int(prompt[0])):
        _check_prompt("prompt", prompt)
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            "prompt", _brief(prompt), "must be a non-empty string, list of token ids, or list of these"
        )
    for i, item in enumerate(prompt):
        _check_prompt(f"prompt[{i}]", item)
        if type(item) is not type(prompt[0]):
            raise InvalidRequest(f"prompt[{i}]", _brief(item), "prompts are all strings or all token ids")
    return prompt


def _check_prompt(path: str, prompt: Any) -> None:
    """Raise `InvalidRequest` for what is neither text nor token ids, or empty."""
    if not isinstance(prompt, str | list):
        raise InvalidRequest(path, _brief(prompt), "must be a string or a list of token ids")
    if not prompt:
        raise InvalidRequest(path, _brief(prompt), "must not be empty")
    if isinstance(prompt, list):
        for i, token_id in enumerate(prompt):
            if not _is_int(token_id):
                raise InvalidRequest(f"{path}[{i}]", _brief(token_id), "must be a token id")


def parse_logit_bias(logit_bias: Mapping[str, float]) -> dict[int, float]:
    """JSON object keys to token ids."""
    for key in logit_bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest("logit_bias", key, "keys are token ids")
    return {int(key): bias for key, bias in logit_bias.items()}


def _first_breach(error: ValidationError) -> InvalidRequest:
    """The first type error as an `InvalidRequest` that names its path in the body."""
    breaches = error.errors(include_url=False)
    # A union reports each of its branches: the longest path is in the branch that was meant. What else something must
    # have goes by its kind.
    first = max(breaches, key=lambda breach: (breach["type"] == "kind", len(_path(breach["loc"]))))
    same = [_rule(b) for b in breaches if _path(b["loc"]) == _path(first["loc"])]
    value = None if first["type"] == "missing" else _brief(first["input"])
    return InvalidRequest(_path_text(first["loc"]), value, ", or ".join(dict.fromkeys(same)))


def _rule(breach: ErrorDetails) -> str:
    """The rule that was broken, in words that name nothing of ours."""
    kind, limits = breach["type"], breach.get("ctx", {})
    if kind in ("model_type", "dataclass_type", "dict_type"):
        return "must be an object"
    if kind in ("too_short", "too_long"):
        bound, number = ("least", limits["min_length"]) if kind == "too_short" else ("most", limits["max_length"])
        return f"must have at {bound} {number} item{'s' * (number != 1)}"
    return breach["msg"][:1].lower() + breach["msg"][1:]


def _brief(value: Any) -> Any:
    """`value`, or only its size where it is a collection."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else value


def _is_int(value: Any) -> bool:
    return type(value) is int  # bool is not


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    return [p for p in loc if isinstance(p, int) or (p.isidentifier() and p not in _UNION_BRANCHES)]


def _path_text(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in _path(loc):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "body"


Accepts = Callable[[Any], bool]


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {}


def _one_of(*accepted: Any) -> Accepts:
    return lambda value: any(value == other and type(value) is type(other) for other in accepted)


_STRUCTURED = "not supported; `structured_outputs` or `response_format` says what an answer must match"
_FUNCTIONS = "not supported; `tools` and `tool_choice` took its place"
_REFUSED: dict[str, tuple[Accepts, str]] = {
    "functions": (_is_off, _FUNCTIONS),
    "function_call": (_one_of(None, "none", "auto"), _FUNCTIONS),
    "json_schema": (_is_off, _STRUCTURED),
    "regex": (_is_off, _STRUCTURED),
    "ebnf": (_is_off, _STRUCTURED),
    "structural_tag": (_is_off, _STRUCTURED),
    "guided_whitespace_pattern": (_is_off, "blanks are as JSON has them"),
    "audio": (_is_off, "audio is not supported"),
    "modalities": (_one_of(None, [], ["text"]), 'only ["text"] is supported'),
    "web_search_options": (_is_off, "web search is not supported"),
    "mcp_servers": (_is_off, "not supported; clients give their servers' tools as `tools`, and call them"),
    "container": (_is_off, "not supported; nothing is run here"),
    "logits_processors": (_is_off, "logits processors are not supported"),
    "custom_logit_processor": (_is_off, "logits processors are not supported"),
    "use_beam_search": (_is_off, "beam search is not supported"),
    "prompt_embeds": (_is_off, "prompt embeddings are not supported"),
    "chat_template": (_is_off, "the model's own template is used"),
    "suffix": (_one_of(None, ""), "suffixes are not supported"),
}


def validate(model: type[M], body: Mapping[str, Any]) -> M:
    """Check a parsed body against its model; raises `InvalidRequest` for the first breach."""
    for field, (accepts, rule) in _REFUSED.items():
        if field in body and not accepts(body[field]):
            raise InvalidRequest(field, body[field], rule)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _first_breach(error) from None


def ignored_fields(body: Mapping[str, Any], taken: Body) -> str:
    """Return the names of what a body gives and `taken`, which it became, lacks, as the value of a header.

    Those of nested objects stand behind the names of what holds them, without their places in lists. Empty: all is
    known. At most `MAX_IGNORED` names and "..." for more; characters that are not of a name are "?".
    """
    unknown = list(islice(dict.fromkeys(_unknown(body, taken, "", _REFUSED.keys())), MAX_IGNORED + 1))
    return ", ".join(unknown[:MAX_IGNORED] + ["..."] * (len(unknown) > MAX_IGNORED))


@cache
def _attributes(model: type[Body]) -> dict[str, str]:
    """Return a model's fields by all names that they go by."""
    return {each: name for name, field in model.model_fields.items() for each in (name, field.alias or name)}


def _unknown(given: object, taken: object, path: str, known: Collection[str] = ()) -> Iterator[str]:
    if isinstance(taken, list) and isinstance(given, list):
        for each, its_taken in zip(given, taken, strict=False):
            yield from _unknown(each, its_taken, path)
    elif isinstance(taken, LeftOut):
        yield path + _NOT_OF_NAMES.sub("?", taken.type[:MAX_IGNORED_CHARS])
    elif isinstance(taken, Body) and isinstance(given, Mapping) and taken.model_config.get("extra") != "allow":
        attribute_by_name = _attributes(type(taken))
        for name, value in given.items():
            if name in attribute_by_name:
                if isinstance(value, list | Mapping):
                    yield from _unknown(value, getattr(taken, attribute_by_name[name]), f"{path}{name}.")
            elif value is not None and name not in known:
                yield path + _NOT_OF_NAMES.sub("?", name[:MAX_IGNORED_CHARS])
