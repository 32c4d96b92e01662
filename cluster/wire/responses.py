"""OpenAI's Responses API as types: what a body may say, its items as chat messages, and the objects of answers.

Items are kept as they are told again (`GET /v1/responses/{id}/input_items`): with ids, roles and parts in full.

Chat templates know functions alone: a tool of a namespace is one of the name `namespace__tool`, and a custom tool one
with the string `input`. A grammar of a custom tool becomes that string's pattern, as far as it is regular: the model
writes calls as it always does, and what it writes within them is held to the grammar. `Offered` leads back.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast
from zlib import crc32

from pydantic import ConfigDict, Discriminator, Field, Tag

from mneme.cluster.wire.answers import Response, ResponseAsked, ResponseUsage
from mneme.cluster.wire.anthropic import CacheMark
from mneme.cluster.wire.openai import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    Body,
    Function,
    Int,
    LeftOut,
    ServiceTier,
    Text,
    TextPart,
    tier_of,
    validate,
)
from mneme.errors import InvalidRequest
from mneme.replicas.config import MAX_TIMEOUT_S
from mneme.replicas.request import Grammar, GrammarKind
from mneme.replicas.text.lark import pattern_of
from mneme.replicas.text.tool_calls import MAX_TOOLS

MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512  # OpenAI's
MAX_ITEM_ID_CHARS = 256

MAX_NAME_CHARS = 64  # of a function that stands for a tool of a namespace
TOOL_SEARCH = "tool_search"
REASONING = "reasoning.encrypted_content"  # of `include`: agents that keep no text of reasoning send this back
_SEALED = "mneme:"  # how it begins where it is ours

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


class CallItem(Body):
    """A call of a function, or of a custom tool with its raw input."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"id"})


class FunctionCallItem(CallItem):
    arguments: str


class CustomCallItem(CallItem):
    input: str


class OutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        return {"type": self.type, "call_id": self.call_id, "output": "".join(_texts(self.output))}


class ToolsItem(Body):
    """Brings tools that the model may call from here on: found by a client's search, or given by the developer."""

    type: Literal["tool_search_output", "additional_tools"]
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]
    call_id: str | None = None
    role: str | None = None
    execution: str | None = None
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        found = [tool for tool in self.tools if not isinstance(tool, LeftOut)]
        return {**self.model_dump(exclude_none=True, exclude={"id", "tools"}), "tools": [t.echo() for t in found]}


class ClientItem(Body):
    """A call of a tool that clients run by themselves, or what came of it; its fields go by its kind."""

    model_config = ConfigDict(extra="allow")

    type: str
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        return self.model_dump(exclude={"id"})


class Reference(Body):
    """Stands for an item of a stored response; it is replaced before anybody reads it."""

    type: Literal["item_reference"] = "item_reference"
    id: str

    def item(self) -> dict[str, Any]:
        raise InvalidRequest("input", self.id, "is no item of a stored response")


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None
    id: ItemId | None = None

    def item(self) -> dict[str, Any]:
        parts = {name: [part.model_dump() for part in getattr(self, name) or ()] for name in ("summary", "content")}
        if not parts["content"]:
            thought = _unsealed(self.encrypted_content) or "\n".join(part["text"] for part in parts["summary"])
            parts["content"] = [{"type": "reasoning_text", "text": thought}] if thought else []
        return {"type": self.type, **parts}


# Calls of tools that clients run by themselves, as functions: the name, and the field that has the arguments.
_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": (TOOL_SEARCH, "arguments"),
    "mcp_call": (None, "arguments"),
}
_ITEMS = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    "reasoning": ReasoningItem,
    "item_reference": Reference,
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), OutputItem),
    **dict.fromkeys(("tool_search_output", "additional_tools"), ToolsItem),
    **dict.fromkeys((*_CALLS, "local_shell_call_output", "shell_call_output", "apply_patch_call_output"), ClientItem),
}
# What a server ran or would do, with nothing that a model here could read.
_LEFT_OUT = re.compile(
    r"(web_search|file_search|image_generation|code_interpreter|computer)_call(_output)?|mcp_(list_tools|approval_\w+)"
    r"|agent_message|(context_)?compaction|compaction_trigger|configuration_update|program(_output)?|ghost_snapshot"
)


def _kind(item: Any) -> str:
    """Return an item's tag; no identifier, so that no error names it as a field."""
    given = item if isinstance(item, dict) else {}
    kind = given.get("type", "item_reference" if "id" in given and "role" not in given else "message")
    if isinstance(kind, str) and _LEFT_OUT.fullmatch(kind):
        return "item:LeftOut"
    return f"item:{_ITEMS[kind].__name__}" if isinstance(kind, str) and kind in _ITEMS else "item:"


InputItem = Annotated[
    Annotated[MessageItem, Tag("item:MessageItem")]
    | Annotated[FunctionCallItem, Tag("item:FunctionCallItem")]
    | Annotated[CustomCallItem, Tag("item:CustomCallItem")]
    | Annotated[OutputItem, Tag("item:OutputItem")]
    | Annotated[ReasoningItem, Tag("item:ReasoningItem")]
    | Annotated[ToolsItem, Tag("item:ToolsItem")]
    | Annotated[ClientItem, Tag("item:ClientItem")]
    | Annotated[Reference, Tag("item:Reference")]
    | Annotated[LeftOut, Tag("item:LeftOut")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="type must be message, reasoning, a call or what came of it, or another of OpenAI's",
    ),
]


class Offered(NamedTuple):
    """Says what a function of a chat request is here."""

    kind: Literal["function_call", "custom_tool_call", "tool_search_call"]
    name: str
    namespace: str | None
    function: dict[str, Any]
    path: str = "input"  # of the tool in the body
    is_told: bool = False  # its grammar goes round, and is told to the model alone

    @property
    def flat(self) -> str:
        name: str = self.function["name"]
        return name


class FunctionTool(Function):
    type: Literal["function"]

    def offered(self, namespace: str | None = None) -> Iterator[Offered]:
        """Yield what chat completions call it."""
        given = self.model_dump(exclude={"type"}, exclude_unset=True)
        yield Offered("function_call", self.name, namespace, {**given, "name": flat_name(namespace, self.name)})

    def echo(self) -> dict[str, Any]:
        return self.model_dump(exclude={"defer_loading"})


class InputFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """Takes a text, which a grammar may say more of."""

    type: Literal["custom"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    format: InputFormat | None = None
    defer_loading: bool | None = None

    def offered(self, namespace: str | None = None) -> Iterator[Offered]:
        """Yield it as a function with one string, which is told the grammar and held to what a pattern says of it."""
        about, text = [self.description or ""], {"type": "string"}
        grammar = self.grammar("tools")
        if grammar is not None:
            is_regex = grammar.kind == "regex"
            about.append(f"Its input matches this {'regex' if is_regex else 'lark'} grammar:\n{grammar.text}")
            pattern = grammar.text if is_regex else pattern_of(grammar.text)
            text |= {} if pattern is None else {"pattern": f"^(?:{pattern})$"}
        is_told = grammar is not None and "pattern" not in text
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        more = {"defer_loading": True} if self.defer_loading else {}
        function = {"description": "\n\n".join(filter(None, about)), "parameters": schema, **more}
        function = {"name": flat_name(namespace, self.name), **function}
        yield Offered("custom_tool_call", self.name, namespace, function, is_told=is_told)

    def grammar(self, path: str) -> Grammar | None:
        """Return what its input matches; None: any text. Raises `InvalidRequest`."""
        if self.format is None or self.format.type == "text":
            return None
        if self.format.syntax is None or self.format.definition is None:
            name = "syntax" if self.format.syntax is None else "definition"
            raise InvalidRequest(f"{path}.format.{name}", None, "is needed")
        kind: GrammarKind = "regex" if self.format.syntax == "regex" else "grammar"
        return Grammar(kind, self.format.definition, f"{path}.format.definition")

    def echo(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class SearchTool(Body):
    """Looks for tools; where its client runs it, it is a function."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def offered(self) -> Iterator[Offered]:
        given = {"description": self.description, "parameters": self.parameters}
        function = {"name": TOOL_SEARCH, **{name: value for name, value in given.items() if value is not None}}
        yield Offered("tool_search_call", TOOL_SEARCH, None, function)

    def echo(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: Text
    description: str | None = None
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)]

    def offered(self) -> Iterator[Offered]:
        for tool in self.tools:
            yield from () if isinstance(tool, LeftOut) else tool.offered(self.name)

    def echo(self) -> dict[str, Any]:
        tools = [tool.echo() for tool in self.tools if not isinstance(tool, LeftOut)]
        return {"type": self.type, "name": self.name, "description": self.description or "", "tools": tools}


def _tool_kind(tool: Any) -> str:
    """Return a tool's tag; those that a server would run are left out."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind == TOOL_SEARCH:
        return "tool:tool_search" if tool.get("execution") == "client" else "tool:"
    told = kind if isinstance(kind, str) else "function"  # which refuses it
    return f"tool:{told}" if told in ("function", "custom", "namespace") else "tool:"


_Named = Annotated[FunctionTool, Tag("tool:function")] | Annotated[CustomTool, Tag("tool:custom")]
_OtherTool = Annotated[LeftOut, Tag("tool:")]
NamedTool = Annotated[
    _Named | _OtherTool,
    Discriminator(_tool_kind, custom_error_type="tool_type", custom_error_message="must be function or custom"),
]
AnyTool = Annotated[
    _Named
    | Annotated[NamespaceTool, Tag("tool:namespace")]
    | Annotated[SearchTool, Tag("tool:tool_search")]
    | _OtherTool,
    Discriminator(_tool_kind),
]


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of the function that a tool of a namespace is to the model, as vLLM; long ones are cut."""
    whole = re.sub(r"[^A-Za-z0-9_.\-]", "_", f"{namespace}__{name}") if namespace else name
    if len(whole) <= MAX_NAME_CHARS:
        return whole
    return f"{whole[: MAX_NAME_CHARS - 9]}_{crc32(whole.encode()):08x}"


class CalledTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


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
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | CalledTool | None = None
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

    @property
    def references(self) -> list[tuple[int, str]]:
        """Return the ids of stored items that the input names, with their places."""
        given = () if isinstance(self.input, str) else self.input
        return [(index, each.id) for index, each in enumerate(given) if isinstance(each, Reference)]

    def items(
        self,
        response_id: str,
        before: Iterable[Mapping[str, Any]] = (),
        found: Mapping[str, dict[str, Any]] | None = None,
    ) -> Items:
        """Return the input as it is told again behind the items of `before`; items without an id get one.

        found  stored items that the input refers to, by id: what is in `before` is not told twice

        What is left out is an empty item, so that all keep their places. Raises `InvalidRequest` for an id that is
        another's: lists of items go on behind one of them.
        """
        given = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        hexes = response_id.removeprefix("resp_")
        taken = {item["id"] for item in before}
        items: Items = []
        for index, each in enumerate(given):
            if isinstance(each, LeftOut) or (isinstance(each, Reference) and each.id in taken):
                items.append({})
                continue
            stored = (found or {})[each.id] if isinstance(each, Reference) else each.item()
            items.append({"id": each.id or f"item_{hexes}_{index}", "status": "completed", **stored})
            if items[-1]["id"] in taken:
                raise InvalidRequest(f"input[{index}].id", items[-1]["id"], "each item has an id of its own")
            taken.add(items[-1]["id"])
        return items

    def offered(self, items: Iterable[Mapping[str, Any]]) -> dict[str, Offered]:
        """Return the functions that the tools are, by name, and those of items, which are defined where these stand.

        Where no client searches for the deferred ones, all are there from the start.
        """
        tools = [tool for tool in self.tools or () if not isinstance(tool, LeftOut)]
        searches = any(isinstance(tool, SearchTool) for tool in tools)
        offered: dict[str, Offered] = {}
        for each in (
            each._replace(path=f"tools[{index}]")
            for index, tool in enumerate(self.tools or ())
            for each in (() if isinstance(tool, LeftOut) else tool.offered())
        ):
            if each.flat in offered:
                raise InvalidRequest("tools", each.flat, "each tool has a name of its own")
            if not searches:
                each.function.pop("defer_loading", None)
            offered[each.flat] = each
        for each in (each for item in items for each in _brought(item)):
            each.function["defer_loading"] = True
            offered.setdefault(each.flat, each)
        return offered

    def grammars(self) -> Iterator[Grammar]:
        """Yield the grammars of custom tools, which must be sound."""
        for index, tool in enumerate(self.tools or ()):
            inner = (
                {f".tools[{i}]": each for i, each in enumerate(tool.tools)} if isinstance(tool, NamespaceTool) else {}
            )
            for path, each in {"": tool, **inner}.items():
                grammar = each.grammar(f"tools[{index}]{path}") if isinstance(each, CustomTool) else None
                if grammar is not None:
                    yield grammar

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

    def chat(self, messages: Sequence[dict[str, Any]], offered: Mapping[str, Offered]) -> dict[str, Any]:
        """Return the chat request that asks for the same of these messages, and may call what is offered."""
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
        if isinstance(choice, CalledTool):
            flat = flat_name(choice.namespace, choice.name)
            choice = {"type": "function", "function": {"name": flat}}
        if offered:
            own["tools"] = [{"type": "function", "function": each.function} for each in offered.values()]
        form = None if self.text is None or self.text.format is None else self.text.format.response_format()
        return {
            **own,
            "messages": list(messages),
            "tool_choice": choice,
            "max_completion_tokens": 1 if self.is_prewarm else self.max_output_tokens,
            "response_format": form,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }

    def echo(self) -> ResponseAsked:
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
            "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, CalledTool) else choice or "auto",
            "tools": [tool.echo() for tool in self.tools or () if not isinstance(tool, LeftOut)],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


class StoredResponse(NamedTuple):
    """A response as it is kept with its session: whoever goes on from it needs no other response."""

    response: Response
    items: Items  # all that led to its output, those of earlier responses too

    def packed(self) -> bytes:
        return zlib.compress(json.dumps(self._asdict(), separators=(",", ":")).encode(), 1)

    @staticmethod
    def unpacked(note: bytes) -> StoredResponse:
        return StoredResponse(**json.loads(zlib.decompress(note)))

    @property
    def history(self) -> Items:
        return [*self.items, *cast(Items, self.response["output"])]


def usage_of(response: Response) -> ResponseUsage:
    """Return the usage of a response that is whole."""
    assert response["usage"] is not None
    return response["usage"]


def chat_messages(items: Iterable[Mapping[str, Any]]) -> Items:
    """Return items as messages of a chat: what an assistant thought, said and called at once is one message."""
    messages: Items = []
    is_open = False  # the last message is an assistant's that may still call something
    for item in filter(None, items):
        kind, call = item["type"], _call(item)
        if kind == "additional_tools":
            messages.append({"role": "developer", "content": _references(item)})
        elif kind.endswith("_output"):
            content = _references(item) if kind == "tool_search_output" else _output(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id") or item["id"], "content": content})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item)})
        else:
            if not is_open or (call is None and messages[-1]["content"] is not None):
                messages.append({"role": "assistant", "content": None})
            last = messages[-1]
            if kind == "message":
                last["content"] = _text(item)
            elif call is not None:
                last.setdefault("tool_calls", []).append(call)
            else:
                last["reasoning_content"] = "".join(part["text"] for part in item["content"])
            if kind == "mcp_call":  # it has what came of it
                told = item.get("output") or item.get("error") or ""
                messages.append({"role": "tool", "tool_call_id": item["id"], "content": _output(told)})
        is_open = messages[-1]["role"] == "assistant"
    return messages


def _call(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the call of a function that an item is, as the model wrote it, or would have."""
    kind = item["type"]
    name, arguments = item.get("name"), item.get("arguments")
    if kind == "custom_tool_call":
        arguments = {"input": item["input"]}
    elif kind in _CALLS:
        name, arguments = _CALLS[kind][0] or name, item.get(_CALLS[kind][1])
    elif kind != "function_call":
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    function = {"name": flat_name(item.get("namespace"), str(name)), "arguments": text}
    return {"id": item.get("call_id") or item["id"], "type": "function", "function": function}


class RawInput:
    """Takes the arguments of a custom tool's call piece by piece, and gives the text that their `input` stands for."""

    _HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _WHOLE = re.compile(
        r"""(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[H]{4}|\\u[H]{0,3}(?=[^H])"""
        r"""|\\u[dD][89abAB][H]{2}(?:\\u[H]{4}|(?=[^\\]|\\[^u]|\\u[H]{0,3}[^H])))*""".replace("H", "0-9a-fA-F")
    )
    # What a backslash may stand before; before others, as models write patterns, it is itself.
    _ESCAPES = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')

    def __init__(self) -> None:
        self._arguments = ""
        self._begin = 0  # of what was not told; 0: the string has not begun

    @classmethod
    def of(cls, arguments: str) -> str:
        """Return the text of a whole call."""
        raw = cls()
        return raw.push(arguments) + raw.end()

    def push(self, arguments: str) -> str:
        """Return what is certain by now: half an escape, or half a character, waits for the rest."""
        self._arguments += arguments
        if not self._begin and (head := self._HEAD.match(self._arguments)):
            self._begin = head.end()
        whole = self._WHOLE.match(self._arguments, self._begin) if self._begin else None
        if whole is None or not whole[0]:
            return ""
        self._begin = whole.end()
        text = self._ESCAPES.sub(lambda found: found[0] if found[1] else r"\\", whole[0])
        return self._decoded(f'"{text}"', "")

    def end(self) -> str:
        """Return what is left: all that was written, where that was no call as it should be."""
        is_cut = '{"input": "'.startswith(self._arguments)
        return "" if self._begin or is_cut else self._decoded(self._arguments, self._arguments)

    def _decoded(self, text: str, otherwise: str) -> str:
        try:
            given = json.loads(text, strict=False)
        except ValueError:
            return otherwise
        said = given.get("input", otherwise) if isinstance(given, dict) else given
        said = said if isinstance(said, str) else otherwise
        return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # text has no half characters


def _output(given: Any) -> str:
    """Return what came of a call as text: of a shell's commands what they wrote."""
    if isinstance(given, list) and all(isinstance(each, Mapping) for each in given):
        return "".join(str(each.get(name) or "") for each in given for name in ("stdout", "stderr", "text"))
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False) if given else ""


def _brought(item: Mapping[str, Any]) -> list[Offered]:
    """Return the functions that an item brings."""
    if item.get("type") not in ("tool_search_output", "additional_tools"):
        return []
    tools = validate(ToolsItem, item).tools
    return [each for tool in tools if not isinstance(tool, LeftOut) for each in tool.offered()]


def _references(item: Mapping[str, Any]) -> Items:
    return [{"type": "tool_reference", "name": each.flat} for each in _brought(item)]


def sealed(thought: str) -> str:
    """Return reasoning as `encrypted_content`; it hides nothing, as its text is told too."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def _unsealed(given: str | None) -> str:
    """Return the reasoning that was sealed here; of others' nothing is known."""
    if given is None or not given.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


def _text(item: Mapping[str, Any]) -> str | Items:
    """Return a message's text, or its parts where there are several, which stand on lines of their own."""
    texts = [part["text"] for part in item["content"]]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _texts(content: str | Sequence[ItemPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.said for part in content]
