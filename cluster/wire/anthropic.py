"""What a body of Anthropic's API may say, and the chat request that it becomes.

`system` is the first message, a document block a document part (docs/documents.md), `tool_use` and `tool_result` blocks
an assistant's calls and messages of tools, `thinking` blocks the reasoning of their message. What no answer would heed
is refused: images, and an assistant's message to go on from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mneme.cluster.wire.openai import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    WHOLE,
    ArgumentsSchema,
    BlendBody,
    Body,
    Int,
    SessionOptions,
    TruncationOptions,
    is_tool,
)
from mneme.errors import InvalidRequest, ThreadNotFound
from mneme.replicas.config import MAX_TIMEOUT_S
from mneme.replicas.request import MAX_STOPS
from mneme.replicas.text.tool_calls import MAX_TOOLS

MAX_CACHE_MARKS = 4
_TTL_S = {"5m": 300.0, "1h": 3600.0}
# What agents write at the head of a system prompt, and change with every request.
_CLIENT_LINES = re.compile(r"(?:\s*x-anthropic-[\w-]+:[^\n]*(?:\n|$))+")


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


def _no_image(kind: object) -> object:
    if kind == "image":
        raise PydanticCustomError("kind", "images are not supported")
    return kind


class TextBlock(Body):
    """Text, or a document whose text it holds; its title is its first line."""

    type: Annotated[Literal["text", "document"], BeforeValidator(_no_image)]
    text: str | None = None
    source: TextSource | None = None
    title: str | None = None
    cache_control: CacheControl | None = None

    def part(self, path: str) -> dict[str, Any]:
        """Return it as a content part of chat messages."""
        text = self.text if self.type == "text" else None if self.source is None else self.source.data
        if text is None:
            raise InvalidRequest(f"{path}.{'text' if self.type == 'text' else 'source'}", None, "is needed")
        title = {"title": self.title} if self.type == "document" and self.title else {}
        return {"type": self.type, "text": text, **title}


class Block(TextBlock):
    """A block of a message: which fields it has goes by its type."""

    type: Annotated[  # type: ignore[assignment]
        Literal["text", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"],
        BeforeValidator(_no_image),
    ]
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    is_error: bool | None = None
    thinking: str | None = None

    def needed(self, path: str, *names: str) -> None:
        """Raise `InvalidRequest` where one of these fields is not given."""
        for name in names:
            if getattr(self, name) is None:
                raise InvalidRequest(f"{path}.{name}", None, "is needed")


class Turn(Body):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1, max_length=MAX_CONTENT_PARTS)]

    def messages(self, path: str) -> list[dict[str, Any]]:
        """Return the chat messages that it is: of a user's, results of tools come before what is said."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        said: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thought = ""
        for index, block in enumerate(self.content):
            where = f"{path}.content[{index}]"
            if block.type in ("text", "document"):
                said.append(block.part(where))
            elif block.type == "tool_result" and self.role == "user":
                block.needed(where, "tool_use_id")
                content = _content(block.content or "", f"{where}.content")
                content = _failed(content) if block.is_error else content
                others.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            elif block.type == "tool_use" and self.role == "assistant":
                block.needed(where, "id", "name", "input")
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append({"id": block.id, "function": {"name": block.name, "arguments": arguments}})
            elif block.type in ("thinking", "redacted_thinking") and self.role == "assistant":
                thought += block.thinking or ""
            else:
                raise InvalidRequest(f"{where}.type", block.type, f"is not a block of the {self.role}'s")
        if said or not others:
            message = {"role": self.role, "content": said, "tool_calls": calls, "reasoning_content": thought}
            others.append({key: value for key, value in message.items() if value or key == "content"})
        return others


class AnthropicTool(Body):
    name: str
    description: str | None = None
    input_schema: ArgumentsSchema
    strict: bool | None = None
    type: Annotated[Literal["custom"] | None, is_tool("custom", None)] = None
    cache_control: CacheControl | None = None

    def tool(self) -> dict[str, Any]:
        """Return it as chat completions have it."""
        given = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {**given, "strict": self.strict}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def chat(self) -> dict[str, Any]:
        """Return the fields that say so in chat completions."""
        if self.type == "tool" and self.name is None:
            raise InvalidRequest("tool_choice.name", None, "is needed")
        named = {"type": "function", "function": {"name": self.name}}
        choice = {"any": "required", "tool": named}.get(self.type, self.type)
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class CacheMark(NamedTuple):
    """Says up to where a prompt is kept: behind `num_messages` chat messages, of the last its first `num_parts` parts.

    No message: up to the end of the tools. No number of parts: the whole message.
    """

    num_messages: int
    num_parts: int | None
    ttl_s: float


class CountRequest(Body):
    """What a prompt is made of."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    thinking: dict[str, Any] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None  # as if on the last block

    def chat(self, *, reasons: bool = False, strips: bool = True) -> dict[str, Any]:
        """Return what the chat request that it is has of the prompt.

        reasons  the model thinks before it answers
        strips   lines of the client's own at the head of the system prompt are left out
        """
        if self.messages[-1].role == "assistant":
            raise InvalidRequest("messages", None, "the last one must be the user's: an answer is not gone on from")
        chosen = {} if self.tool_choice is None else self.tool_choice.chat()
        tools = {"tools": [tool.tool() for tool in self.tools]} if self.tools else {}
        turns = [message for path, turn in self._turns() for message in turn.messages(path)]
        messages = [*self.system_messages(strips=strips), *turns]
        return {"model": self.model, "messages": messages, **tools, **chosen, **self._thinking(reasons=reasons)}

    def system_messages(self, *, strips: bool) -> list[dict[str, Any]]:
        """Return the system prompt as a message, or none."""
        system = _content(self.system or "", "system")
        if strips and isinstance(system, str):
            system = _stripped(system)
        elif strips and not isinstance(system, str):
            while system and not _stripped(system[0]["text"]):
                system = system[1:]
            system = [{**system[0], "text": _stripped(system[0]["text"])}, *system[1:]] if system else []
        return [{"role": "system", "content": system}] if system else []

    def cache_marks(self, *, strips: bool) -> list[CacheMark]:
        """Return where prompts are kept up to, in order; raises `InvalidRequest` for too many."""
        system = self.system_messages(strips=strips)
        marks = [_mark(0, None, tool.cache_control) for tool in self.tools or () if tool.cache_control]
        blocks = self.system if isinstance(self.system, list) else []
        num_left_out = len(blocks) - (len(system[0]["content"]) if system else 0)
        marks += [_mark(1, max(i + 1 - num_left_out, 0), each.cache_control) for i, each in enumerate(blocks) if system]
        num_messages = len(system)
        for path, turn in self._turns():
            marks += _marks_of(turn, num_messages)
            num_messages += len(turn.messages(path))
        marks.append(_mark(num_messages, None, self.cache_control))
        kept = [mark for mark in marks if mark.ttl_s]
        if len(kept) > MAX_CACHE_MARKS:
            raise InvalidRequest("cache_control", len(kept), f"at most {MAX_CACHE_MARKS} blocks may be marked")
        return kept

    def _turns(self) -> Iterator[tuple[str, Turn]]:
        return ((f"messages[{index}]", turn) for index, turn in enumerate(self.messages))

    def _thinking(self, *, reasons: bool) -> dict[str, Any]:
        kind = None if self.thinking is None else self.thinking.get("type")
        if not reasons and kind not in (None, "disabled", "adaptive"):
            raise InvalidRequest("thinking", None, 'this model does not think: leave it out, or {"type": "disabled"}')
        return {} if kind is None or not reasons else {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}


class Diagnostics(Body):
    previous_message_id: str | None = None


class Thread(Body):
    """Begins or goes on with a conversation that the server would hold."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None


class MessagesRequest(CountRequest):
    """Anthropic's fields, and those of this server that chat completions take too."""

    max_tokens: Annotated[int, Field(ge=0), WHOLE]  # 0: the prompt is computed, and nothing said
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    diagnostics: Diagnostics | None = None
    thread: Thread | None = None
    output_config: OutputConfig | None = None
    seed: Int | None = None
    session: SessionOptions | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    truncation: TruncationOptions | None = None
    blend: BlendBody | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for what is not offered."""
        if self.thread is not None and self.thread.type == "continue":
            rule = "no thread is held here; send the whole conversation, of which the prefix is cached"
            raise ThreadNotFound("thread.previous_message_id", self.thread.previous_message_id, rule)

    def chat(self, *, reasons: bool = False, strips: bool = True) -> dict[str, Any]:
        """Return the chat request that it is."""
        ours = {"stream", "temperature", "top_p", "top_k", "seed", "session", "session_id", "cache_salt"}
        own = self.model_dump(include=ours | {"truncation", "blend", "timeout_s"}, exclude_unset=True)
        prompt = super().chat(reasons=reasons, strips=strips)
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"schema": self.output_config.format.schema_}
            own["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**own, **prompt, "max_tokens": self.max_tokens or 1, "stop": self.stop_sequences or []}


def _content(given: str | Iterable[TextBlock], path: str) -> str | list[dict[str, Any]]:
    return given if isinstance(given, str) else [block.part(f"{path}[{i}]") for i, block in enumerate(given)]


def _failed(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Say of a tool's result that it is an error, where it does not begin so: chat messages have no field for that."""
    text = content if isinstance(content, str) else content[0]["text"]
    if text.lstrip().lower().startswith("error:"):
        return content
    text = f"Error: {text}"
    return text if isinstance(content, str) else [{**content[0], "text": text}, *content[1:]]


def _stripped(text: str) -> str:
    found = _CLIENT_LINES.match(text)
    return text if found is None else text[found.end() :]


def _mark(num_messages: int, num_parts: int | None, control: CacheControl | None) -> CacheMark:
    """Return a mark; without seconds where there is none."""
    return CacheMark(num_messages, num_parts, 0.0 if control is None else _TTL_S[control.ttl])


def _marks_of(turn: Turn, num_before: int) -> Iterator[CacheMark]:
    """Yield the marks of a turn's blocks: a tool's result is a message of its own, before what is said."""
    if isinstance(turn.content, str):
        return
    num_results = sum(block.type == "tool_result" for block in turn.content)
    num_said = num_result = 0
    for block in turn.content:
        num_said += block.type in ("text", "document")
        num_result += block.type == "tool_result"
        if block.type == "tool_result":
            for number, part in enumerate(block.content if isinstance(block.content, list) else (), 1):
                yield _mark(num_before + num_result, number, part.cache_control)
            yield _mark(num_before + num_result, None, block.cache_control)
        elif block.type in ("text", "document"):
            yield _mark(num_before + num_results + 1, num_said, block.cache_control)
        else:
            yield _mark(num_before + num_results + 1, None, block.cache_control)
