"""Finds tool calls and reasoning in what a model says, as its text comes, and writes the grammars that force calls.

Each family writes calls in its own way; `FORMATS` is the table of these ways, by vLLM's names where it has one. What is
no whole call of a function that was offered is content, as the model wrote it. Whitespace that only separates (before a
call, around reasoning) belongs to nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mneme.errors import InvalidRequest
from mneme.replicas.config import ReasoningParserName, ToolParserName
from mneme.replicas.request import Grammar, History
from mneme.replicas.text.grammar import JSON_OPTIONS, name_options, schema_of
from mneme.replicas.text.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_CALLS = 16  # of a forced answer: models that are not used to calls go on and on
HISTORY_NOTE = b"\0said"  # how a session's note of its last answer begins
THINK, END_THINK = "<think>", "</think>"
_MAX_HEAD_CHARS = 512  # of a call, up to its arguments
# Keywords of JSON schema that name further properties of an object, and those that combine it from several schemas.
_OPENING_KEYWORDS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COMBINING_KEYWORDS = ("$ref", "anyOf", "oneOf", "allOf")
# llguidance's words for a schema that a line of a grammar holds, before it quotes the lines around that.
_REFUSED_SCHEMA = re.compile(
    r"is not supported: at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?: \d+ \| .*| \.\.\. .*)?$"
)
_NAME = r"(?P<name>[\w.\-]{1,64})"


class ToolCall(NamedTuple):
    """Calls a function; `arguments` is JSON as the model wrote it, which need not be valid unless it was forced."""

    id: str
    name: str
    arguments: str


class CallPiece(NamedTuple):
    """Brings a part of one call: the first its id and name, the others more of its arguments."""

    call: int  # its index in its answer
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Spoken(NamedTuple):
    """Says what a piece of an answer's text brings."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


def whole_calls(pieces: Iterable[CallPiece]) -> list[ToolCall]:
    """Join the pieces of one answer."""
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.id is not None and piece.name is not None:
            calls.append(ToolCall(piece.id, piece.name, ""))
        call = calls[piece.call]
        calls[piece.call] = call._replace(arguments=call.arguments + piece.arguments)
    return calls


def merged(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Join what is said at once of each call: clients take two pieces of one index for two calls."""
    by_call: dict[int, CallPiece] = {}
    for piece in pieces:
        begun = by_call.get(piece.call)
        by_call[piece.call] = piece if begun is None else begun._replace(arguments=begun.arguments + piece.arguments)
    return list(by_call.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Describes how a family writes calls.

    opening    stands before a call, or before the first; empty: an answer is calls if it begins as one
    closing    stands behind a call
    may_be_bare  an answer that begins as a call is one also without `opening`
    separators characters that may stand between calls, besides blanks
    head       a call up to its arguments; it begins with one of `starts`
    is_object  the call is an object, of which the arguments are a part
    grammar    (before the first call, between two or None where there may be one only, behind the last), in Lark's
               notation; OPEN and CLOSE stand for the marks
    call       a call in Lark's notation: {name} as a JSON string's inside, {arguments} as a rule
    id_chars   how long ids are; 0: as OpenAI's
    """

    opening: str = ""
    closing: str = ""
    may_be_bare: bool = False
    separators: str = ""
    head: str = r'\{\s*"name"\s*:\s*"' + _NAME + r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    starts: str = "{"
    is_object: bool = True
    grammar: tuple[str, str | None, str] = ("", None, "")
    call: str = r'"{{\"name\": \"{name}\", \"arguments\": " {arguments} "}}"'
    id_chars: int = 0


_PARAMETERS = r'"{{\"name\": \"{name}\", \"parameters\": " {arguments} "}}"'
FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(  # Qwen 2.5 and 3 too
        opening="<tool_call>",
        closing="</tool_call>",
        grammar=(r'OPEN "\n"', r'"\n" CLOSE "\n" OPEN "\n"', r'"\n" CLOSE'),
    ),
    "llama3_json": ToolFormat(opening="<|python_tag|>", may_be_bare=True, separators=";", call=_PARAMETERS),
    "mistral": ToolFormat(
        opening="[TOOL_CALLS]", separators="[],", grammar=('OPEN " "? "["', '", "', '"]"'), id_chars=9
    ),
    "mistral_args": ToolFormat(  # from tokenizer v11 on
        opening="[TOOL_CALLS]",
        head=_NAME + r"(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)",
        starts="",
        is_object=False,
        grammar=("OPEN", "OPEN", ""),
        call='"{name}" ARGS {arguments}',
        id_chars=9,
    ),
    # What vLLM forces where a family has no format: a list.
    "json": ToolFormat(may_be_bare=True, separators="[],", grammar=('"["', '", "', '"]"'), call=_PARAMETERS),
}


class Dialect:
    """Knows how one model writes calls and reasoning.

    tool_parser  a name of `FORMATS`; "auto": found by the chat template and the vocabulary; "none": it has none
    reasoning_parser  a family that reasons between `<think>` and `</think>`; "auto": if its template has these; "none"
    """

    def __init__(
        self, tokenizer: Tokenizer, tool_parser: ToolParserName = "auto", reasoning_parser: ReasoningParserName = "auto"
    ) -> None:
        template = tokenizer.chat_template_source
        self._token_id = tokenizer.token_id
        self.reasons = THINK in template if reasoning_parser == "auto" else reasoning_parser != "none"
        name: str | None = _detected(tokenizer, template) if tool_parser == "auto" else tool_parser
        if name == "mistral" and tokenizer.token_id("[ARGS]") is not None:
            name = "mistral_args"
        self.tool_format = FORMATS.get(name or "none")
        opening = self.tool_format.opening if self.tool_format is not None else ""
        self.opening_id = self._token_id(opening) if opening else None
        self.end_think_id = self._token_id(END_THINK)
        # Special tokens are shown to the parser where one of them opens a call; those that end an answer go with it.
        self.shows_special_tokens = self.opening_id in tokenizer.special_token_ids
        self._end_texts = tuple(map(tokenizer.token_text, tokenizer.eos_token_ids)) if self.shows_special_tokens else ()

    def is_thinking(self, prompt_text: str) -> bool:
        """Return whether an answer to this prompt begins within the reasoning: some templates open it."""
        return self.reasons and prompt_text.rstrip().endswith(THINK)

    def parser(
        self, names: Collection[str], *, is_forced: bool = False, is_thinking: bool = False
    ) -> AnswerParser | None:
        """Make the parser of an answer that may call functions of these names; None where its text is all there is.

        is_forced    it is calls, as `call_grammar` has them
        is_thinking  it begins within the reasoning
        """
        tool_format = self.tool_format or (FORMATS["json"] if is_forced else None) if names else None
        if tool_format is None and not self.reasons:
            return None
        return AnswerParser(
            tool_format,
            frozenset(names),
            is_forced=is_forced,
            reasons=self.reasons,
            is_open=is_thinking,
            ends=self._end_texts,
        )

    def call_grammar(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        is_forced: bool,
        is_one: bool,
        otherwise: Grammar | None = None,
    ) -> Grammar | None:
        """Write the grammar of calls of these functions: arguments' schemas by name.

        is_forced  the answer is calls; else it may become calls, at the token that opens one. None: there is no such
        is_one     only one call
        otherwise  what an answer that calls nothing matches

        Raises `InvalidRequest` if it is too long.
        """
        tool_format = self.tool_format or (FORMATS["json"] if is_forced else None)
        if tool_format is None or (not is_forced and otherwise is None and self.opening_id is None):
            return otherwise
        starts_free = not is_forced and otherwise is None
        marks = {"OPEN": tool_format.opening, "CLOSE": tool_format.closing, "ARGS": "[ARGS]"}

        def marked(rule: str) -> str:
            return re.sub("|".join(marks), lambda found: self._mark(marks[found[0]]), rule)

        first, between, last = tool_format.grammar
        if starts_free:
            first = first.removeprefix("OPEN")
        more = "" if is_one or between is None else f"({between} call){{0,{MAX_CALLS - 1}}}"
        rules = [f"start: calls{'' if otherwise is None else ' | answer'}"]
        if otherwise is not None:
            rules.append(f"answer: {_lark(otherwise)}")
        rules.append(f"calls: {marked(f'{first} call {more} {last}')}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for index, (name, schema) in enumerate(tools.items()):
            rules.append(f"call_{index}: {marked(tool_format.call).format(name=name, arguments=f'args_{index}')}")
            rules.append(f"args_{index}: %json {json.dumps(_of_arguments(name, schema), ensure_ascii=False)}")
        return Grammar("grammar", "\n".join(rules), "tools", after=self.opening_id if starts_free else None)

    def _mark(self, text: str) -> str:
        token_id = self._token_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _detected(tokenizer: Tokenizer, template: str) -> str | None:
    """Find the family's way in a template that takes tools."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else "hermes"  # others write XML inside
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3_json" if tokenizer.token_id("<|python_tag|>") is not None else None


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


class AnswerParser:
    """Takes an answer's text piece by piece; what it says does not depend on how the text was cut."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        names: Collection[str],
        *,
        is_forced: bool = False,
        reasons: bool = False,
        is_open: bool = False,
        ends: Sequence[str] = (),
    ) -> None:
        """Begin an answer.

        is_forced  it is calls: the beginning of one with which it ends, where it was cut off, is no content
        is_open    it begins within the reasoning
        ends       texts of tokens that end an answer
        """
        self.num_calls = 0
        self.has_reasoned = False
        self._format, self._names, self._is_forced, self._ends = tool_format, names, is_forced, ends
        self._head = re.compile(tool_format.head) if tool_format is not None else None
        self._closings = tuple(filter(None, (tool_format.opening, tool_format.closing))) if tool_format else ()
        self._text = ""  # what was not taken yet
        self._blanks = ""  # at the end of what was said: dropped if a call follows
        self._raw = ""  # of the call that is being read, from its opening: content if it is none
        self._called: str | None = None  # the function of the last call
        self._braces = _Braces()
        self._is_ended = False
        self._content, self._reasoning, self._calls = "", "", list[CallPiece]()
        self._step = self._reason if is_open else self._begin if reasons else self._begin_content
        self._is_said = False  # some of the reasoning or content

    def push(self, text: str, *, is_last: bool = False) -> Spoken:
        """Take more text; returns what is certain by now, and all of it with the last text."""
        if is_last:
            self._is_ended = True
            for end in self._ends:
                text = text.removesuffix(end)
        self._text += text
        while self._step():
            pass
        if self._is_ended and not self.num_calls and self._step != self._reason:
            self._content, self._blanks = self._content + self._blanks, ""
        spoken = Spoken(self._content, self._reasoning, tuple(self._calls))
        self._content, self._reasoning, self._calls = "", "", []
        return spoken

    @property
    def open_call(self) -> str | None:
        """Return the function of the last call, if its arguments have not ended."""
        return self._called if self._step == self._read_arguments else None

    # Each step takes some of the text and returns whether there may be more to take.

    def _begin(self) -> bool:
        """Look whether the answer begins with reasoning."""
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text, self._step = text[len(THINK) :], self._reason
        elif not THINK.startswith(text) or self._is_ended:
            self._step = self._begin_content
        else:
            return False
        return True

    def _reason(self) -> bool:
        self.has_reasoned = True
        said, found, rest = self._text.partition(END_THINK)
        self._text = rest
        if not found and not self._is_ended:
            said, self._text = _held_back(said, (END_THINK,))
        self._reasoning += self._without_blanks(said)
        if found:
            self._blanks, self._is_said, self._step = "", False, self._begin_behind
        return bool(found)

    def _begin_behind(self) -> bool:
        """Drop the blanks behind the reasoning."""
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._begin_content
        return bool(self._text)

    def _begin_content(self) -> bool:
        """Look whether the answer is a call from its first character."""
        text = self._text.lstrip()
        if self._format is None or not self._format.may_be_bare or (self._is_ended and not text):
            self._step = self._say
        elif text:
            self._step = self._seek if text[0] in self._format.starts + self._format.separators else self._say
        return bool(text) or self._step == self._say

    def _say(self) -> bool:
        opening = self._format.opening if self._format is not None else ""
        said, found, rest = self._text.partition(opening) if opening else (self._text, "", "")
        self._text = rest
        if opening and not found and (self._is_forced or not self._is_ended):
            said, self._text = _held_back(said, (opening,))
        self._content += self._without_blanks(said)
        if found:
            self._raw, self._step = found, self._seek
        return bool(found)

    def _seek(self) -> bool:
        """Look for the next call behind what may stand before it."""
        assert self._format is not None
        marks = "|".join([*map(re.escape, self._closings), rf"[\s{re.escape(self._format.separators)}]"])
        skipped = re.match(f"(?:{marks})*", self._text)
        assert skipped is not None
        self._raw += skipped[0]
        self._text = self._text[skipped.end() :]
        if _held_back(self._text, self._closings)[0] == "":  # nothing, or what may become a mark
            if self._is_ended:
                self._text = "" if self.num_calls else self._text
                self._refuse()
            return self._is_ended and self._text != ""
        if self._format.starts and self._text[0] not in self._format.starts:
            self._refuse()
        else:
            self._braces, self._step = _Braces(), self._read_head
        return True

    def _read_head(self) -> bool:
        """Read a call up to its arguments, or as a whole where these do not come last."""
        assert self._head is not None
        found = self._head.match(self._text, 0, _MAX_HEAD_CHARS)
        if found is not None and found["name"] in self._names:
            self._raw, self._text = "", self._text[found.end() :]
            self._call(found["name"], "")
            self._braces, self._step = _Braces(), self._read_arguments
            return True
        end = self._braces.end(self._text)
        if end is not None:
            call = _parsed_call(self._text[:end])
            if call is not None and call[0] in self._names:
                self._raw, self._text = "", self._text[end:]
                self._call(*call)
                self._step = self._seek
                return True
        cut = any(mark in self._text for mark in self._closings)
        is_hopeless = not self._format_starts_object() and len(self._text) > _MAX_HEAD_CHARS
        if end is not None or cut or is_hopeless or self._is_ended:
            self._refuse()
            return True
        return False

    def _format_starts_object(self) -> bool:
        return self._format is not None and self._format.is_object

    def _read_arguments(self) -> bool:
        end = self._braces.end(self._text)
        said, self._text = self._text[:end], "" if end is None else self._text[end:]
        self._braces.forget()
        if said:
            self._calls.append(CallPiece(self.num_calls - 1, said))
        if end is None:
            return False
        self._braces = _Braces(depth=1)
        self._step = self._close if self._format_starts_object() else self._seek
        return True

    def _close(self) -> bool:
        """Read to the end of the object that the arguments are a part of."""
        end = self._braces.end(self._text)
        self._text = "" if end is None else self._text[end:]
        self._braces.forget()
        if end is not None:
            self._step = self._seek
        return end is not None

    def _call(self, name: str, arguments: str) -> None:
        assert self._format is not None
        self._blanks = ""
        self._called, call_id = name, _drawn_id(self._format.id_chars)
        self._calls.append(CallPiece(self.num_calls, arguments, call_id, name))
        self.num_calls += 1

    def _refuse(self) -> None:
        """What was taken for the beginning of a call is content; what closed the last one is not."""
        assert self._format is not None
        raw, self._raw, self._step = self._raw, "", self._say
        if self._is_forced and self._is_ended:
            raw, self._text = "", ""
        elif self.num_calls:
            _, opening, rest = raw.rpartition(self._format.opening) if self._format.opening else ("", "", "")
            raw = opening + rest if opening else ""
        self._content += self._without_blanks(raw)

    def _without_blanks(self, said: str) -> str:
        """Hold the blanks at the end back; before the reasoning there are none."""
        text = self._blanks + said
        if self._step == self._reason and not self._is_said:
            text = text.lstrip()
        told = text.rstrip()
        self._blanks = text[len(told) :]
        self._is_said = self._is_said or bool(told)
        return told


class _Braces:
    """Finds where a JSON object ends, in text that comes in pieces: each call has what was not looked at behind it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = self._is_escaped = False
        self._num_seen = 0

    def end(self, text: str) -> int | None:
        """Return where it ends in `text`, of which it has seen the first part before."""
        for index in range(self._num_seen, len(text)):
            char = text[index]
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = char == "\\", char != '"'
            elif char == '"':
                self._is_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if self._depth == 0:
                    self._num_seen = index + 1
                    return index + 1
        self._num_seen = len(text)
        return None

    def forget(self) -> None:
        """Begin anew with the next text, which goes on from this."""
        self._num_seen = 0


def _held_back(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """Cut off the end with which one of the marks may begin."""
    sizes = ((mark, size) for mark in marks for size in range(1, min(len(mark), len(text) + 1)))
    num_held = max((size for mark, size in sizes if text.endswith(mark[:size])), default=0)
    return text[: len(text) - num_held], text[len(text) - num_held :]


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
        history.names, is_forced=history.is_forced, is_thinking=history.is_thinking
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


def _parsed_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of an object that is a call, in whatever order; None: it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return (call["name"], arguments) if _is_object(arguments) else None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments or {}, ensure_ascii=False)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _drawn_id(num_chars: int) -> str:
    return secrets.token_hex(8)[:num_chars] if num_chars else f"call_{secrets.token_hex(12)}"
