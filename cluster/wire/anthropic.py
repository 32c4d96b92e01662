"""What a body of Anthropic's API may say, and the chat request that it becomes.

`system` is the first message, a document block a document part (docs/documents.md), `tool_use` and `tool_result` blocks
an assistant's calls and messages of tools, `thinking` blocks the reasoning of their message. What no answer would heed
is refused: images, and an assistant's message to go on from. What Anthropic's own servers would run, or have run, is
left out, and named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mneme.cluster.wire.openai import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    WHOLE,
    ArgumentsSchema,
    BlendBody,
    Body,
    Int,
    LeftOut,
    SessionOptions,
    TruncationOptions,
)
from mneme.errors import InvalidRequest, ThreadNotFound
from mneme.replicas.config import MAX_TIMEOUT_S
from mneme.replicas.request import MAX_STOPS
from mneme.replicas.text.tool_calls import MAX_TOOLS

MAX_CACHE_MARKS = 4
_TTL_S = {"5m": 300.0, "1h": 3600.0}
# What agents write at the head of a system prompt, and change with every request.
_CLIENT_LINES = re.compile(r"(?:\s*x-anthropic-[\w-]+:[^\n]*(?:\n|$))+")
# Blocks that say what their servers did, and what no model here could be told of.
_LEFT_OUT = re.compile(
    r"(server|mcp)_tool_use|\w+_tool_result|mcp_tool_listing|container_upload|tool_(addition|removal)|fallback|browser_state"
)
_TOOL_SEARCH = "tool_search_tool"  # how their own search for deferred tools begins
_TEXT, _FLAG, _NUMBER = ({"type": kind} for kind in ("string", "boolean", "integer"))
_EDITS = {"insert_line": _NUMBER, "view_range": {"type": "array", "items": _NUMBER}}
_EDITS |= dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT)
# Tools that clients run and models of theirs know without a schema, by how their kinds begin: what they do and take.
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": ("Run a command in a shell that stays open.", {"command": _TEXT, "restart": _FLAG}),
    "text_editor_": (
        "View, create and edit files.",
        {"command": {"enum": ["view", "create", "str_replace", "insert"]}, **_EDITS},
    ),
    "memory_": (
        "View, create, edit, rename and delete files below /memories, which outlive this conversation.",
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDITS,
            **dict.fromkeys(("old_path", "new_path"), _TEXT),
        },
    ),
}


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


TextKind = Literal["text", "document", "search_result", "tool_reference"]


class TextBlock(Body):
    """Text, or a document whose text it holds; its title is its first line.

    A `search_result` is text, too, and a `tool_reference` the definition of a tool.
    """

    type: Annotated[TextKind, BeforeValidator(_no_image)]
    text: str | None = None
    source: TextSource | str | None = None
    title: str | None = None
    content: list[TextBlock] | None = None
    tool_name: str | None = None
    cache_control: CacheControl | None = None

    def needed(self, path: str, *names: str) -> None:
        """Raise `InvalidRequest` where one of these fields is not given."""
        for name in names:
            if getattr(self, name) is None:
                raise InvalidRequest(f"{path}.{name}", None, "is needed")

    def part(self, path: str) -> dict[str, Any]:
        """Return it as a content part of chat messages."""
        if self.type == "tool_reference":
            self.needed(path, "tool_name")
            return {"type": self.type, "name": self.tool_name}
        if self.type == "search_result":
            self.needed(path, "content")
            found = [block.text for block in self.content or () if isinstance(block, TextBlock)]
            source = self.source if isinstance(self.source, str) else None
            return {"type": "text", "text": "\n".join(each for each in (self.title, source, *found) if each)}
        text = self.text if self.type == "text" else self.source.data if isinstance(self.source, TextSource) else None
        if text is None:
            raise InvalidRequest(f"{path}.{'text' if self.type == 'text' else 'source'}", None, "is needed")
        title = {"title": self.title} if self.type == "document" and self.title else {}
        return {"type": self.type, "text": text, **title}


def _by_kind(given: Any) -> str:
    """Return which of two a block or a tool is; no identifier, so that no error names it as a field."""
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    return "kind:left_out" if isinstance(kind, str) and _LEFT_OUT.fullmatch(kind) else "kind:told"


_LeftOut = Annotated[LeftOut, Tag("kind:left_out")]
Result = Annotated[Annotated[TextBlock, Tag("kind:told")] | _LeftOut, Discriminator(_by_kind)]


BlockKind = Literal[TextKind, "tool_use", "tool_result", "thinking", "redacted_thinking", "compaction"]


class Block(TextBlock):
    """A block of a message: which fields it has goes by its type."""

    type: Annotated[BlockKind, BeforeValidator(_no_image)]  # type: ignore[assignment]
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Result], Field(max_length=MAX_CONTENT_PARTS)] | None = None  # type: ignore[assignment]
    is_error: bool | None = None
    thinking: str | None = None

    @property
    def is_said(self) -> bool:
        return self.type not in ("tool_use", "tool_result", "thinking", "redacted_thinking")

    def part(self, path: str) -> dict[str, Any]:
        """See `TextBlock`."""
        if self.type == "compaction":
            return {"type": "text", "text": self.content if isinstance(self.content, str) else ""}
        return super().part(path)


AnyBlock = Annotated[Annotated[Block, Tag("kind:told")] | _LeftOut, Discriminator(_by_kind)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(min_length=1, max_length=MAX_CONTENT_PARTS)]

    @property
    def blocks(self) -> list[Block]:
        """Return what it says, without what is left out."""
        if isinstance(self.content, str):
            return [Block(type="text", text=self.content)]
        return [block for block in self.content if isinstance(block, Block)]

    @property
    def has_calls(self) -> bool:
        return any(block.type == "tool_use" for block in self.blocks)

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
            if isinstance(block, LeftOut):
                continue
            if block.is_said:
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
                raise InvalidRequest(f"{where}.type", block.type, f"cannot be in a message of role {self.role}")
        if said or not others:
            message = {"role": self.role, "content": said, "tool_calls": calls, "reasoning_content": thought}
            others.append({key: value for key, value in message.items() if value or key == "content"})
        return others

    def with_note(self, blocks: list[Block]) -> Turn:
        """Return this turn of a user's with blocks behind it; behind results of tools alone they are the last one's.

        Many templates keep reasoning only behind the last message of a user's: none is added.
        """
        own = self.blocks
        if not own or any(block.is_said for block in own):
            return self.model_copy(update={"content": [*own, *blocks]})
        last = own[-1]
        told = [TextBlock(type="text", text=last.content)] if isinstance(last.content, str) else last.content or []
        return self.model_copy(update={"content": [*own[:-1], last.model_copy(update={"content": [*told, *blocks]})]})


class AnthropicTool(Body):
    name: str
    description: str | None = None
    input_schema: ArgumentsSchema
    strict: bool | None = None
    defer_loading: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_schema(cls, given: Any) -> Any:
        if (known := _client_tool(given)) is None:
            return given
        schema = {"type": "object", "properties": known[1], "required": ["command"] * ("path" in known[1])}
        return {"description": known[0], "input_schema": schema, **given}

    def tool(self, *, defers: bool) -> dict[str, Any]:
        """Return it as chat completions have it; `defers`: it may be left to where it is found."""
        given = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {**given, "strict": self.strict, "defer_loading": (defers and self.defer_loading) or None}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _client_tool(given: Any) -> tuple[str, dict[str, Any]] | None:
    kind = given.get("type") if isinstance(given, Mapping) and "input_schema" not in given else None
    return next((each for begin, each in _CLIENT_TOOLS.items() if str(kind).startswith(begin)), None)


def _whose_tool(given: Any) -> str:
    """Return whether a tool is told to the model, or left out as a server would run it."""
    if not isinstance(given, Mapping):
        return "kind:left_out" if isinstance(given, LeftOut) else "kind:told"
    kind = given.get("type")
    is_told = not isinstance(kind, str) or kind == "custom" or "input_schema" in given or _client_tool(given)
    return "kind:told" if is_told else "kind:left_out"


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


class Thinking(Body):
    type: str


Tool = Annotated[Annotated[AnthropicTool, Tag("kind:told")] | _LeftOut, Discriminator(_whose_tool)]


class CountRequest(Body):
    """What a prompt is made of."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    thinking: Thinking | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None  # as if on the last block

    def chat(self, *, reasons: bool = False) -> dict[str, Any]:
        """Return what the chat request that it is has of the prompt; `reasons`: the model thinks before it answers."""
        if self.messages[-1].role == "assistant":
            raise InvalidRequest("messages", None, "the last one must be the user's: an answer is not gone on from")
        chosen = {} if self.tool_choice is None else self.tool_choice.chat()
        tools = {"tools": told} if (told := self._tools()) else {}
        turns = [message for path, turn in self._turns() for message in turn.messages(path)]
        messages = [*self.system_messages(), *turns]
        return {"model": self.model, "messages": messages, **tools, **chosen, **self._thinking(reasons=reasons)}

    @property
    def has_notes(self) -> bool:
        """Return whether system messages stand among the others."""
        return any(turn.role == "system" for turn in self.messages)

    def placed(self, *, folds: bool) -> Self:
        """Return the request with its first system messages in `system`, and no others between calls and results.

        folds  what the others say becomes a part of the turns beside them

        Whatever comes later, an earlier turn stays as it was, so that its KV is found. Raises `InvalidRequest`.
        """
        for path, turn in self._turns():  # what is wrong is named by the place where it was given
            turn.messages(path)
        first = next((i for i, turn in enumerate(self.messages) if turn.role != "system"), len(self.messages))
        if first == len(self.messages):
            raise InvalidRequest("messages", None, "needs a message of the user, not of the system alone")
        own = [TextBlock(type="text", text=self.system)] if isinstance(self.system, str) else self.system or []
        turns: list[Turn] = []
        held: list[Turn] = []
        for turn in self.messages[first:]:
            if turn.role == "system" and turns and turns[-1].has_calls:
                held.append(turn)
            else:
                turns += [turn, *held]
                held = []
        turns += held
        system = [*own, *(block for turn in self.messages[:first] for block in turn.blocks)]
        return self.model_copy(update={"system": system, "messages": _folded(turns) if folds else turns})

    def _tools(self) -> list[dict[str, Any]]:
        """Return the tools that a client runs; where their server would find the deferred ones, all from the start."""
        tools = self.tools or []
        defers = not any(isinstance(tool, LeftOut) and tool.type.startswith(_TOOL_SEARCH) for tool in tools)
        return [tool.tool(defers=defers) for tool in tools if isinstance(tool, AnthropicTool)]

    def system_messages(self) -> list[dict[str, Any]]:
        """Return the system prompt as a message, or none; lines of the client's own at its head are left out."""
        system = _content(self.system or "", "system")
        if isinstance(system, str):
            system = _stripped(system)
        else:
            while system and not _stripped(system[0].get("text", "-")):
                system = system[1:]
            if system and "text" in system[0]:
                system = [{**system[0], "text": _stripped(system[0]["text"])}, *system[1:]]
        return [{"role": "system", "content": system}] if system else []

    def cache_marks(self) -> list[CacheMark]:
        """Return where prompts are kept up to, in order; raises `InvalidRequest` for too many."""
        system = self.system_messages()
        marks = [_mark(0, None, tool.cache_control) for tool in self.tools or () if not isinstance(tool, LeftOut)]
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
        if self.thinking is None or not reasons:
            return {}
        return {"chat_template_kwargs": {"enable_thinking": self.thinking.type != "disabled"}}


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
    output_format: OutputFormat | None = None  # as the beta had it
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

    def chat(self, *, reasons: bool = False) -> dict[str, Any]:
        """Return the chat request that it is."""
        ours = {"stream", "temperature", "top_p", "top_k", "seed", "session", "session_id", "cache_salt"}
        own = self.model_dump(include=ours | {"truncation", "blend", "timeout_s"}, exclude_unset=True)
        prompt = super().chat(reasons=reasons)
        output = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        if output is not None:
            schema = {"schema": output.schema_}
            own["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**own, **prompt, "max_tokens": self.max_tokens or 1, "stop": self.stop_sequences or []}


def _content(given: str | Iterable[TextBlock | LeftOut], path: str) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    return [block.part(f"{path}[{i}]") for i, block in enumerate(given) if isinstance(block, TextBlock)]


def _failed(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Say of a tool's result that it is an error, where it does not begin so: chat messages have no field for that."""
    text = content if isinstance(content, str) else content[0].get("text", "") if content else ""
    if text.lstrip().lower().startswith("error:"):
        return content
    if not isinstance(content, str) and not text:
        return [{"type": "text", "text": "Error:"}, *content]
    text = f"Error: {text}"
    return text if isinstance(content, str) else [{**content[0], "text": text}, *content[1:]]


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """Put what system messages say behind the user's turn before them, else at the head of the next one.

    For templates without a place for them.
    """
    told: list[Turn] = []
    held: list[Block] = []  # behind an assistant's turn
    for turn in turns:
        if turn.role == "system" and told and told[-1].role == "user":
            told[-1] = told[-1].with_note(turn.blocks)
        elif turn.role == "system":
            held += turn.blocks
        else:
            if held and turn.role == "user":
                turn = turn.model_copy(update={"content": [*held, *turn.blocks]})
            elif held:
                told.append(Turn.model_construct(role="user", content=held))
            told.append(turn)
            held = []
    return [*told, Turn.model_construct(role="user", content=held)] if held else told


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
    num_results = sum(block.type == "tool_result" for block in turn.blocks)
    num_said = num_result = 0
    for block in turn.blocks:
        num_said += block.is_said
        num_result += block.type == "tool_result"
        if block.type == "tool_result":
            told = block.content if isinstance(block.content, list) else ()
            for number, part in enumerate([each for each in told if isinstance(each, TextBlock)], 1):
                yield _mark(num_before + num_result, number, part.cache_control)
            yield _mark(num_before + num_result, None, block.cache_control)
        elif block.is_said:
            yield _mark(num_before + num_results + 1, num_said, block.cache_control)
        else:
            yield _mark(num_before + num_results + 1, None, block.cache_control)
