"""OpenAI's Responses API as types: what a body may say, its items as chat messages, and the objects of answers.

Items are kept as they are told again (`GET /v1/responses/{id}/input_items`): with ids, roles and parts in full.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from mneme.cluster.wire.anthropic import CacheMark
from mneme.cluster.wire.openai import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    Body,
    Function,
    Int,
    ServiceTier,
    TextPart,
    is_tool,
    tier_of,
)
from mneme.errors import InvalidRequest
from mneme.replicas.config import MAX_TIMEOUT_S
from mneme.replicas.text.tool_calls import MAX_TOOLS

MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512  # OpenAI's
MAX_ITEM_ID_CHARS = 256

Items = list[dict[str, Any]]
CacheTtl = Literal["30m", "12h"]
LOGPROBS = "message.output_text.logprobs"  # of `include`; whatever else it names there is none of
_TTL_S = {"30m": 1800.0, "12h": 43200.0}


class Breakpoint(Body):
    """The prompt up to here is kept for so long at least."""

    mode: Literal["explicit"] = "explicit"
    ttl: CacheTtl | None = None


class ItemPart(TextPart):
    prompt_cache_breakpoint: Breakpoint | None = None


Content = str | Annotated[list[ItemPart], Field(max_length=MAX_CONTENT_PARTS)]
ItemId = Annotated[str, Field(max_length=MAX_ITEM_ID_CHARS)]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self.role == "assistant" else {}
        parts = [{"type": kind, "text": text, **more} for text in _texts(self.content)]
        return {"type": "message", "role": self.role, "content": parts}


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        return {"type": self.type, "call_id": self.call_id, "name": self.name, "arguments": self.arguments}


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        return {"type": self.type, "call_id": self.call_id, "output": "".join(_texts(self.output))}


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        parts = {name: [part.model_dump() for part in getattr(self, name) or ()] for name in ("summary", "content")}
        return {"type": self.type, **parts}


def _kind(item: Any) -> str:
    """Return an item's tag; no identifier, so that no error names it as a field."""
    return f"item:{item.get('type', 'message')}" if isinstance(item, dict) else "item:message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("item:message")]
    | Annotated[FunctionCallItem, Tag("item:function_call")]
    | Annotated[FunctionOutputItem, Tag("item:function_call_output")]
    | Annotated[ReasoningItem, Tag("item:reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="type must be message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Function):
    type: Annotated[Literal["function"], is_tool("function")]

    def tool(self) -> dict[str, Any]:
        """Return what chat completions call it."""
        return {"type": self.type, "function": self.model_dump(exclude={"type"}, exclude_unset=True)}


class ToolChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def response_format(self) -> dict[str, Any]:
        """Return what chat completions call it."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise InvalidRequest("text.format.schema", None, "must be given with this type")
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_, "strict": self.strict}}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None


class CacheOptions(Body):
    """All prefixes are cached; `ttl` keeps the prompt resident; `mode: explicit`: up to its breakpoints only."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: CacheTtl | None = None
    prewarm: bool = False
    comparison_response_id: str | None = None


class ResponsesRequest(Body):
    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    user: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    # This server's own, as chat completions take them.
    seed: Int | None = None
    top_k: Int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    @property
    def is_prewarm(self) -> bool:
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @property
    def keeps(self) -> bool:
        return self.store is not False and not self.is_prewarm

    def check(self) -> None:
        """Raise `InvalidRequest` for what is not offered, or out of OpenAI's bounds."""
        if self.background:
            raise InvalidRequest("background", True, "responses are not computed in the background; stream them")
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise InvalidRequest(name, None, "not supported; previous_response_id goes on from a response")
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise InvalidRequest("metadata", len(metadata), f"may have {MAX_METADATA} entries")
        for key, value in metadata.items():
            if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_CHARS:
                rule = f"keys may have {MAX_METADATA_KEY_CHARS} characters, values {MAX_METADATA_CHARS}"
                raise InvalidRequest("metadata", key, rule)

    def items(self, response_id: str, before: Iterable[Mapping[str, Any]] = ()) -> Items:
        """Return the input as it is told again behind the items of `before`; items without an id get one.

        Raises `InvalidRequest` for an id that is another's: lists of items go on behind one of them.
        """
        given = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        hexes = response_id.removeprefix("resp_")
        items = [
            {"id": each.id or f"item_{hexes}_{index}", "status": "completed", **each.item()}
            for index, each in enumerate(given)
        ]
        taken = {item["id"] for item in before}
        for index, item in enumerate(items):
            if item["id"] in taken:
                raise InvalidRequest(f"input[{index}].id", item["id"], "each item has an id of its own")
            taken.add(item["id"])
        return items

    def marks(self, num_before: int, items: Items) -> list[CacheMark]:
        """Return what is to be kept of the prompt whose messages are `num_before` others and then those of `items`."""
        options, given = self.prompt_cache_options, [] if isinstance(self.input, str) else self.input
        default = (options.ttl if options is not None else None) or "30m"
        last = {  # by time: what comes before it is kept with it
            mark.ttl or default: (index, number)
            for index, item in enumerate(given)
            if isinstance(item, MessageItem) and not isinstance(item.content, str)
            for number, part in enumerate(item.content)
            if (mark := part.prompt_cache_breakpoint) is not None
        }
        found = [
            CacheMark(num_before + len(chat_messages(items[: index + 1])), number + 1, _TTL_S[ttl])
            for ttl, (index, number) in last.items()
        ]
        if options is not None and options.ttl is not None and options.mode == "implicit":
            found.append(CacheMark(num_before + len(chat_messages(items)), None, _TTL_S[options.ttl]))
        return found

    def chat(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the chat request that asks for the same of these messages."""
        same = (
            "model",
            "stream",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "ignore_eos",
            "prompt_cache_key",
            "service_tier",
        )
        own = self.model_dump(include={*same, "parallel_tool_calls", "cache_salt", "timeout_s"}, exclude_none=True)
        if self.top_logprobs is not None or LOGPROBS in (self.include or ()):
            own |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        choice: Any = self.tool_choice
        if isinstance(choice, ToolChoice):
            choice = {"type": choice.type, "function": {"name": choice.name}}
        if self.tools:
            own["tools"] = [tool.tool() for tool in self.tools]
        form = None if self.text is None or self.text.format is None else self.text.format.response_format()
        return {
            **own,
            "messages": list(messages),
            "tool_choice": choice,
            "max_completion_tokens": 1 if self.is_prewarm else self.max_output_tokens,
            "response_format": form,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }

    def echo(self) -> dict[str, Any]:
        """Return the fields of a response that say what was asked for."""
        form = None if self.text is None or self.text.format is None else self.text.format
        text: dict[str, Any] = {
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        }
        if self.text is not None and self.text.verbosity is not None:
            text["verbosity"] = self.text.verbosity
        options, choice = self.prompt_cache_options, self.tool_choice
        cache = None if options is None else {**options.model_dump(exclude={"prewarm"}), "ttl": options.ttl or "30m"}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_options": cache,
            "reasoning": {"effort": None, "summary": None} if self.reasoning is None else self.reasoning.model_dump(),
            "safety_identifier": self.safety_identifier,
            "service_tier": tier_of(self.service_tier),
            "store": self.keeps,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": text,
            "tool_choice": choice.model_dump() if isinstance(choice, ToolChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


class Kept(NamedTuple):
    """A response as it is kept with its session: whoever goes on from it needs no other response."""

    response: dict[str, Any]
    items: Items  # all that led to its output, those of earlier responses too

    def packed(self) -> bytes:
        return zlib.compress(json.dumps(self._asdict(), separators=(",", ":")).encode(), 1)

    @staticmethod
    def unpacked(note: bytes) -> Kept:
        return Kept(**json.loads(zlib.decompress(note)))

    @property
    def history(self) -> Items:
        return [*self.items, *self.response["output"]]


def chat_messages(items: Iterable[Mapping[str, Any]]) -> Items:
    """Return items as messages of a chat: what an assistant thought, said and called at once is one message."""
    messages: Items = []
    is_open = False  # the last message is an assistant's that may still call something
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item)})
        else:
            if not is_open or (kind != "function_call" and messages[-1]["content"] is not None):
                messages.append({"role": "assistant", "content": None})
            last = messages[-1]
            if kind == "message":
                last["content"] = _text(item)
            elif kind == "reasoning":
                last["reasoning_content"] = "".join(part["text"] for part in item["content"])
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                last.setdefault("tool_calls", []).append(call)
        is_open = messages[-1]["role"] == "assistant"
    return messages


def _text(item: Mapping[str, Any]) -> str | Items:
    """Return a message's text, or its parts where there are several, which stand on lines of their own."""
    texts = [part["text"] for part in item["content"]]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _texts(content: str | Sequence[ItemPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.said for part in content]
