"""Knows how a model writes calls and reasoning: finds its dialect, makes the parser of its answers, forces calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mneme.errors import InvalidRequest
from mneme.replicas.request import Grammar, History
from mneme.replicas.text.calls.answer_parser import AnswerParser, Spoken, value_types, whole_calls
from mneme.replicas.text.calls.dialects import FORMATS, TABLE, Reasoning, Table, ToolFormat
from mneme.replicas.text.grammar import JSON_OPTIONS, name_options, schema_of
from mneme.replicas.text.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_CALLS = 16  # of a forced answer: models that are not used to calls go on and on
HISTORY_NOTE = b"\0said"  # how a session's note of its last answer begins
# Keywords of JSON schema that name further properties of an object, and those that combine it from several schemas.
_OPENING_KEYWORDS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COMBINING_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf")
# llguidance's words for a schema that a line of a grammar holds, before it quotes the lines around that.
_REFUSED_SCHEMA = re.compile(
    r"is not supported: at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?: \d+ \| .*| \.\.\. .*)?$"
)
_MARK = re.compile(r"(<[^<>\s\"{}]+>|\[/?[A-Z_]+\])")  # in a grammar's texts: one token, where there is one


class Dialect:
    """Knows how one model writes calls and reasoning.

    tool_parser       a format, or a name of `FORMATS`; "auto": found by the chat template and the vocabulary; "none"
    reasoning_parser  likewise, of `REASONINGS`
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_parser: str | ToolFormat = "auto",
        reasoning_parser: str | Reasoning = "auto",
        table: Table = TABLE,
    ) -> None:
        self._tokenizer = tokenizer
        if tool_parser == "auto":
            tool_parser = _detected(tokenizer, table) if "tools" in tokenizer.tool_template_source else "none"
        if tool_parser == "mistral" and tokenizer.token_id("[ARGS]") is not None:
            tool_parser = "mistral_args"
        if reasoning_parser == "auto":
            templates = (tokenizer.tool_template_source, tokenizer.chat_template_source)
            found = (_detected_reasoning(template, table) for template in templates)
            reasoning_parser = next((name for name in found if name != "none"), "none")
        self.tool_format = table.formats.get(tool_parser) if isinstance(tool_parser, str) else tool_parser
        self.reasoning = (
            table.reasonings.get(reasoning_parser) if isinstance(reasoning_parser, str) else reasoning_parser
        )
        openings = self.tool_format.openings if self.tool_format is not None else ()
        self.opening_id = tokenizer.token_id(openings[0]) if openings else None
        self.end_think_id = tokenizer.token_id(self.reasoning.closing) if self.reasoning is not None else None

    @property
    def parsers(self) -> tuple[ToolFormat | str, Reasoning | str]:
        """Return what makes the same dialect of the same tokenizer elsewhere."""
        return self.tool_format or "none", self.reasoning or "none"

    def shows_special_tokens(self, *, has_tools: bool) -> bool:
        """Return whether the parser has to see special tokens: some of its marks are."""
        tool_format = self.tool_format if has_tools else None
        marks = [] if tool_format is None else [*tool_format.openings, *tool_format.closings]
        marks += [] if self.reasoning is None else [self.reasoning.opening, self.reasoning.closing]
        ids = (self._tokenizer.token_id(token) for mark in marks for token in _MARK.findall(mark))
        return not self._tokenizer.special_token_ids.isdisjoint(ids)

    def is_thinking(self, prompt_text: str) -> bool:
        """Return whether an answer to this prompt begins within the reasoning: some templates open it."""
        return self.reasoning is not None and prompt_text.rstrip().endswith(self.reasoning.opening)

    def parser(
        self,
        tools: Mapping[str, Mapping[str, Any]] | Collection[str],
        *,
        is_forced: bool = False,
        is_thinking: bool = False,
    ) -> AnswerParser | None:
        """Make the parser of an answer that may call these functions; None where its text is all there is.

        tools        arguments' schemas by name; names alone are enough where a dialect writes arguments as JSON
        is_forced    it is calls, as `call_grammar` has them
        is_thinking  it begins within the reasoning
        """
        tool_format = self.tool_format or (FORMATS["json"] if is_forced else None) if tools else None
        if tool_format is None and self.reasoning is None:
            return None
        ends = self._tokenizer.eos_token_ids if self.shows_special_tokens(has_tools=bool(tools)) else ()
        return AnswerParser(
            tool_format,
            tools if isinstance(tools, Mapping) else {name: {} for name in tools},
            is_forced=is_forced,
            reasoning=self.reasoning,
            is_open=is_thinking,
            ends=tuple(map(self._tokenizer.token_text, ends)),
        )

    def read_schemas(self, tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return what the parser reads of these schemas."""
        if self.tool_format is None or self.tool_format.pairs is None:
            return {name: {} for name in tools}
        read: dict[str, Mapping[str, Any]] = {}
        for name, schema in tools.items():
            found, known = schema.get("properties"), dict[int, frozenset[str]]()
            found = found if isinstance(found, Mapping) else {}
            types = {key: value_types(each, schema, known) for key, each in found.items()}
            read[name] = {"properties": {key: {"type": [*each]} for key, each in types.items()}}
        return read

    def call_grammar(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        is_forced: bool,
        is_one: bool,
        otherwise: Grammar | None = None,
        is_strict: bool = False,
    ) -> Grammar | None:
        """Write the grammar of calls of these functions: arguments' schemas by name.

        is_forced  the answer is calls; else it may become calls, at the token that opens one. None: there is no such
        is_one     only one call
        otherwise  what an answer that calls nothing matches
        is_strict  arguments must be valid: a call of a family that writes no JSON is an object then, as forced ones are

        Raises `InvalidRequest` if it is too long.
        """
        tool_format = self.tool_format or (FORMATS["json"] if is_forced else None)
        starts_free = not is_forced and otherwise is None
        is_held = tool_format is not None and (tool_format.pairs is None or is_strict)
        if tool_format is None or (starts_free and (self.opening_id is None or not is_held)):
            return otherwise
        first, between, last = (part and self._in_tokens(part, tool_format) for part in tool_format.grammar)
        call = self._in_tokens(tool_format.call, tool_format)
        if starts_free:
            first = (first or "").removeprefix(f"<[{self.opening_id}]>")
        more = "" if is_one or between is None else f"({between} call){{0,{MAX_CALLS - 1}}}"
        rules = [f"start: calls{'' if otherwise is None else ' | answer'}"]
        if otherwise is not None:
            rules.append(f"answer: {_lark(otherwise)}")
        rules.append(f"calls: {first} call {more} {last}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for index, (name, schema) in enumerate(tools.items()):
            rules.append(f"call_{index}: {call.format(name=name, arguments=f'args_{index}')}")
            rules.append(f"args_{index}: %json {json.dumps(_of_arguments(name, schema), ensure_ascii=False)}")
        return Grammar("grammar", "\n".join(rules), "tools", after=self.opening_id if starts_free else None)

    def _in_tokens(self, rule: str, tool_format: ToolFormat) -> str:
        """Write the marks of a rule as tokens, where they are some."""
        words = {"OPEN": tool_format.openings[:1], "CLOSE": tool_format.closings[:1]}

        def written(found: re.Match[str]) -> str:
            texts = words[found[0]] if found[0] in words else _MARK.split(found[0][1:-1])
            ids = [(text, self._tokenizer.token_id(text) if _MARK.fullmatch(text) else None) for text in texts if text]
            return " ".join(f'"{text}"' if token_id is None else f"<[{token_id}]>" for text, token_id in ids)

        return re.sub(r'\b(?:OPEN|CLOSE)\b|"(?:[^"\\]|\\.)*"', written, rule)


def _detected(tokenizer: Tokenizer, table: Table) -> str:
    """Find the family's way by its template and vocabulary."""
    for name, each in table.formats.items():
        is_template = all(text in tokenizer.tool_template_source for text in each.in_template)
        is_vocabulary = all(tokenizer.token_id(text) is not None for text in each.in_vocabulary)
        if is_template and is_vocabulary and (each.in_template or each.in_vocabulary):
            return name
    return "none"


def _detected_reasoning(template: str, table: Table) -> str:
    signs = {name: each.in_template or (each.opening,) for name, each in table.reasonings.items()}
    return next((name for name, texts in signs.items() if all(text in template for text in texts)), "none")


def _lark(grammar: Grammar) -> str:
    """Write what an answer must match as a rule's right side; raises `InvalidRequest`."""
    if grammar.kind in ("json_schema", "json_object"):
        try:
            schema = schema_of(grammar.text)
            options = {**JSON_OPTIONS, **name_options(schema)}
        except ValueError as error:
            raise InvalidRequest(grammar.field, None, str(error)) from None
        schema = {**schema, "x-guidance": options} if isinstance(schema, dict) else schema
        return f"%json {json.dumps(schema, ensure_ascii=False)}"
    raise InvalidRequest(grammar.field, grammar.kind, "only a JSON schema can be combined with tools")


def _of_arguments(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that is written as chat templates write it; raises `InvalidRequest`."""
    try:
        own = schema_of({"type": "object"} | _closed(schema or {"properties": {}}))
        names = name_options(own)
    except ValueError as error:
        raise InvalidRequest("tools", name, str(error)) from None
    guidance = {**names, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**own, "x-guidance": guidance}


def refused_arguments(grammar: Grammar, rule: str) -> tuple[int, str] | None:
    """Return which function's arguments a refusal of a `call_grammar` is about and why, without the grammar's rules."""
    found = _REFUSED_SCHEMA.match(rule)
    line = None if found is None else re.match(r"args_(\d+):", grammar.text.split("\n")[int(found[1]) - 1])
    return None if found is None or line is None else (int(line[1]), f"is not supported: {found[2]}")


def _closed(schema: Any) -> Any:
    """Bar properties that an object does not name, where it does not say: models then do not make any up.

    What several schemas say together is left as it is, as each may name properties of the one object. So is an object
    that requires what it does not name.
    """
    if not isinstance(schema, Mapping) or any(key in schema for key in _COMBINING_KEYWORDS):
        return schema
    own = {key: _closed(each) if key in ("items", "additionalProperties") else each for key, each in schema.items()}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return own
    own["properties"] = {name: _closed(each) for name, each in properties.items()}
    names = [*properties]  # what is required may be anything, also what no mapping could hold
    is_open = isinstance(required, list) and any(each not in names for each in required)
    if not is_open and not any(key in schema for key in _OPENING_KEYWORDS):
        own["additionalProperties"] = False
    return own


def message_digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Digest a chat message and what was said before it: of an answer what it says and calls, not how it is written."""
    told = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
    if told.get("role") == "assistant":
        calls = [each["function"] for each in told.get("tool_calls") or ()]
        return answer_digest(before, told.get("content") or "", [(each["name"], each["arguments"]) for each in calls])
    return _digest(before, told)


def answer_digest(before: bytes, content: str, calls: Iterable[tuple[str, Any]]) -> bytes:
    """Digest an answer; arguments are JSON, or what it stands for."""
    return _digest(before, [content.strip(), [[name, _value(arguments)] for name, arguments in calls]])


def _digest(before: bytes, said: object) -> bytes:
    return hashlib.blake2b(before + json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def history_note(tokenizer: Tokenizer, history: History, said: str) -> bytes:
    """Return what a session keeps to know this answer again: a mark, whether it has reasoning, and a digest."""
    parser = Dialect(tokenizer, *history.parsers).parser(
        history.tools, is_forced=history.is_forced, is_thinking=history.is_thinking
    )
    spoken = Spoken(said) if parser is None else parser.push(said, is_last=True)
    calls = [(call.name, call.arguments) for call in whole_calls(spoken.calls)]
    return HISTORY_NOTE + bytes([bool(spoken.reasoning)]) + answer_digest(history.prompt, spoken.content, calls)


def is_known(note: bytes, history: History) -> bool:
    """Return whether a session that keeps this note has had the conversation."""
    if not history.said or not note.startswith(HISTORY_NOTE):
        return False
    has_reasoning, digest = note[len(HISTORY_NOTE)], note[len(HISTORY_NOTE) + 1 :]
    return digest == history.said and (history.drops_reasoning or not has_reasoning)
