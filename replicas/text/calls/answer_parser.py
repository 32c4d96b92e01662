"""Finds calls and reasoning in what a model says, as its text comes: one machine that reads by the table of `dialects`.

What is no call of a function that was offered is content, as the model wrote it. Blanks that only separate (before the
first call, around reasoning) belong to nothing; of those around a call between two texts one side's stay.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import regex

from mneme.replicas.text.calls.dialects import OBJECT_HEAD, Reasoning, ToolFormat

_MAX_HEAD_CHARS = 512  # of a call, up to its arguments; of a key
_MAX_SCHEMA_DEPTH = 16  # of what says a value's type
_STRAY = r"}\])"  # may stand behind a call that its model closed once too often
_OBJECT_HEAD = regex.compile(OBJECT_HEAD)
# How an object begins that may be a call; what begins otherwise is content at once.
_OBJECT_START = regex.compile(r'\{\s*"(?:name|arguments|parameters|id|type|function)"')
_JSON_CHARS = frozenset(string.whitespace + string.digits + string.ascii_lowercase + 'E+-.,:{}[]"')  # outside strings


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
    arguments: list[list[str]] = []
    for piece in pieces:
        if piece.id is not None and piece.name is not None:
            calls.append(ToolCall(piece.id, piece.name, ""))
            arguments.append([])
        arguments[piece.call].append(piece.arguments)
    return [call._replace(arguments="".join(said)) for call, said in zip(calls, arguments, strict=True)]


def merged(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Join what is said at once of each call: clients take two pieces of one index for two calls."""
    by_call: dict[int, CallPiece] = {}
    for piece in pieces:
        begun = by_call.get(piece.call)
        by_call[piece.call] = piece if begun is None else begun._replace(arguments=begun.arguments + piece.arguments)
    return list(by_call.values())


class AnswerParser:
    """Takes an answer's text piece by piece; what it says does not depend on how the text was cut."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        is_forced: bool = False,
        reasoning: Reasoning | None = None,
        is_open: bool = False,
        ends: Sequence[str] = (),
    ) -> None:
        """Begin an answer.

        tool_format  how calls are written; None: it has none
        tools      arguments' schemas by the name of the function: they say of which type a value is that is no JSON
        is_forced  it is calls: the beginning of one with which it ends, where it was cut off, is no content
        is_open    it begins within the reasoning
        ends       texts of tokens that end an answer
        """
        self.num_calls = 0
        self._tools, self._is_forced, self._ends, self._thought = tools, is_forced, ends, reasoning
        self._format = tool_format or ToolFormat(may_be_bare=True)
        self._has_calls = tool_format is not None
        openings, closings, separators = self._format.openings, self._format.closings, self._format.separators
        self._head = regex.compile(self._format.head) if self._format.head else None
        self._call_marks = _Marks((*openings, *closings))
        self._skipped = re.compile(rf"(?:{self._call_marks.pattern}|[\s{re.escape(separators)}])*")
        self._stray = re.compile(rf"[\s{_STRAY}{re.escape(separators)}]*")
        self._silent = reasoning.silent if reasoning is not None else ()
        inner = (reasoning.opening,) if reasoning is not None and reasoning.recurs else ()
        self._marks = _Marks((*openings, *inner, *self._silent))
        self._marks_behind_call = _Marks((*openings, *inner, *self._silent, *closings))
        self._thought_ends = _Marks((reasoning.closing, *reasoning.stops) if reasoning is not None else ())
        if self._format.pairs is not None:
            pairs = self._format.pairs
            self._pairs, self._key = pairs, regex.compile(pairs.key)
            self._pair_marks = _Marks((pairs.opening, pairs.end, *closings, *openings))
            self._next_opening = f"\n{pairs.opening}" if pairs.trims else ""
            ends = (f"\n{pairs.value_end}" if pairs.trims else "", pairs.value_end)
            self._value_ends = _Marks((*ends, self._next_opening))
        self._text = ""  # what was not taken yet
        self._raw = ""  # of the call that is being read, from its opening: content if it is none
        self._called: str | None = None  # the function of the last call
        self._is_unclosed = False  # no mark has closed the last call yet
        self._ids: set[str] = set()
        self._is_object = False  # the call's arguments are a part of an object
        self._nesting = _Nesting()
        self._pieces: list[str] = []  # of an object that may be a call, or of a value
        self._num_values = 0  # of the call that is being read
        self._value_key: str | None = None
        self._value_types: frozenset[str] = frozenset()
        self._known_types: dict[int, frozenset[str]] = {}
        self._is_raw_value = self._is_fresh_value = False  # it is told as it comes; nothing of it has come
        self._is_ended = False
        self._content, self._reasoning, self._calls = "", "", list[CallPiece]()
        self._content_flow, self._reasoning_flow = _Flow(), _Flow()
        begins = reasoning is not None and not reasoning.recurs
        self._step = self._reason if is_open else self._begin if begins else self._begin_content

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
            self._content += self._content_flow.rest()
        spoken = Spoken(self._content, self._reasoning, tuple(self._calls))
        self._content, self._reasoning, self._calls = "", "", []
        return spoken

    @property
    def open_call(self) -> str | None:
        """Return the function of the last call, if its arguments have not ended."""
        within = (self._read_arguments, self._read_pair, self._read_value, self._read_keyword, self._read_literal)
        return self._called if self._step in within else None

    # Each step takes some of the text and returns whether there may be more to take.

    def _begin(self) -> bool:
        """Look whether the answer begins with reasoning."""
        assert self._thought is not None
        text, opening = self._text.lstrip(), self._thought.opening
        if text.startswith(opening):
            self._text, self._step = text[len(opening) :], self._reason
        elif not opening.startswith(text) or self._is_ended:
            self._step = self._begin_content
        else:
            return False
        return True

    def _reason(self) -> bool:
        assert self._thought is not None
        said, mark, rest = self._thought_ends.find(self._text, is_last=self._is_ended)
        self._text = rest if mark in ("", self._thought.closing) else mark + rest
        self._reasoning += self._reasoning_flow.add(said, strips=True)
        if mark:
            self._reasoning_flow.end()
            self._step = self._begin_behind
        return bool(mark)

    def _begin_behind(self) -> bool:
        """Drop the blanks behind the reasoning."""
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._begin_content
        return bool(self._text)

    def _begin_content(self) -> bool:
        """Look whether the answer is a call from its first character."""
        text = self._text.lstrip()
        if not self._has_calls or not self._format.may_be_bare or (self._is_ended and not text):
            self._step = self._say
        elif text:
            separators = self._format.separators
            is_any = self._head is not None and not separators
            self._step = self._seek if is_any or text[0] in f"{{{separators}" else self._say
        return bool(text) or self._step == self._say

    def _say(self) -> bool:
        marks = self._marks_behind_call if self._is_unclosed else self._marks
        said, mark, self._text = marks.find(self._text, is_last=self._is_ended and not self._is_forced)
        self._content += self._content_flow.add(said)
        if mark in self._format.openings:
            self._raw, self._is_unclosed, self._step = mark, False, self._seek
        elif self._thought is not None and mark == self._thought.opening:
            self._content_flow.end()
            self._step = self._reason
        elif mark in self._silent:
            self._content_flow.end()
        elif mark:
            self._is_unclosed = False
        return bool(mark)

    def _seek(self) -> bool:
        """Look for the next call behind what may stand before it."""
        for skipped in (self._stray, self._skipped) if self._is_unclosed else (self._skipped,):
            num_open = 0 if self._is_ended else self._call_marks.num_open(self._text)
            found = skipped.match(self._text, 0, len(self._text) - num_open)
            assert found is not None
            self._raw += found[0]
            self._text = self._text[found.end() :]
            self._is_unclosed = self._is_unclosed and not self._call_marks.find(found[0], is_last=True)[1]
        if not self._text or self._call_marks.begins(self._text) is None:
            if self._is_ended:
                self._text = "" if self.num_calls else self._text
                self._refuse(is_cut_off=True)
            return self._is_ended and self._text != ""
        self._step = self._read_head
        return True

    def _read_head(self) -> bool:
        """Read a call up to its arguments; an object as a whole where these do not come last."""
        found = self._matched(self._head) if self._head is not None else None
        self._is_object = self._text[0] == "{"
        if found is None and self._is_object:
            found = self._matched(_OBJECT_HEAD)
        if found is not None and not found.partial:
            if found["name"] not in self._tools:
                self._refuse()
                return True
            self._text = self._text[found.end() :]
            self._call(found["name"], found.groupdict().get("id"))
            if self._is_object or self._format.pairs is None:
                self._nesting, self._step = _Nesting(), self._read_arguments
            else:
                self._num_values = 0
                self._step = self._read_pair if self._pairs.value_end else self._read_keyword
            return True
        start = self._matched(_OBJECT_START) if self._is_object else None
        if not self._is_ended and any(each is not None and each.partial for each in (found, start)):
            return False
        if start is not None:
            self._nesting, self._pieces, self._step = _Nesting(is_json=True), [], self._read_object
        else:
            self._refuse(is_cut_off=found is not None)
        return True

    def _matched(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Match what begins here; the match is partial where more text may make it whole."""
        found = pattern.match(self._text, endpos=_MAX_HEAD_CHARS, partial=True)
        return None if found is not None and found.partial and len(self._text) >= _MAX_HEAD_CHARS else found

    def _read_object(self) -> bool:
        end = self._nesting.end(self._text)
        if end is None and not self._nesting.is_broken and not self._is_ended:
            self._pieces.append(self._text)
            self._text = ""
            self._nesting.forget()
            return False
        before = "".join(self._pieces)
        self._text = before + self._text
        call = None if end is None else _parsed_call(self._text[: len(before) + end])
        if end is None or call is None or call[0] not in self._tools:
            self._refuse(is_cut_off=end is None and not self._nesting.is_broken)
            return True
        self._text = self._text[len(before) + end :]
        self._call(call[0])
        self._argue(call[1])
        self._step = self._seek
        return True

    def _read_arguments(self) -> bool:
        end = self._nesting.end(self._text)
        said, self._text = self._text[:end], "" if end is None else self._text[end:]
        self._nesting.forget()
        self._argue(said)
        if end is not None:
            self._nesting = _Nesting(depth=1, is_json=True)
            self._step = self._close if self._is_object else self._seek
        return end is not None

    def _close(self) -> bool:
        """Read to the end of the object that the arguments are a part of."""
        end = self._nesting.end(self._text)
        self._text = self._text[self._nesting.num_seen :]
        self._nesting.forget()
        is_over = end is not None or self._nesting.is_broken  # by the mark of a model that forgot its end
        if is_over:
            self._step = self._seek
        return is_over

    def _read_pair(self) -> bool:
        """Read a key, or the end; what else stands here is dropped."""
        _, mark, rest = self._pair_marks.find(self._text, is_last=False)
        self._text = rest if mark in ("", self._pairs.end) else mark + rest
        if mark == self._pairs.opening:
            found = self._matched(self._key)
            if found is None:
                self._text = rest
            elif not found.partial:
                self._begin_value(found)
                self._step = self._read_value
            return found is None or not found.partial
        if mark:
            self._end_pairs()
        return bool(mark)

    def _read_value(self) -> bool:
        """Read a value up to the mark that ends it, which is one where a key, or the end, stands behind it."""
        if self._is_fresh_value and self._pairs.trims:
            if not self._text:
                return False
            self._text = self._text.removeprefix("\n")
        self._is_fresh_value = False
        said, mark, rest = self._value_ends.find(self._text, is_last=False)
        if mark and mark == self._next_opening:
            return self._meet_key(said, rest)
        follows = self._pair_marks.begins(rest.lstrip()) if mark and rest.strip() else None
        is_end = bool(mark) and (follows or (follows is None and self._is_ended))
        self._text = mark + rest if mark and follows is None and not is_end else rest
        self._add_to_value(said if is_end or follows is None else said + mark)
        if is_end:
            self._end_value()
            self._step = self._read_pair
        return bool(is_end or follows is False)

    def _meet_key(self, said: str, rest: str) -> bool:
        """End a value whose own end was forgotten, if what stands behind it is a key of the tool's."""
        self._text = self._pairs.opening + rest
        found = self._matched(self._key)
        self._add_to_value(said)
        if found is not None and found.partial and not self._is_ended:
            self._text = self._next_opening + rest
            return False
        if found is not None and not found.partial and found["key"] in self._properties():
            self._end_value()
            self._step = self._read_pair
        else:
            self._add_to_value(self._next_opening)
            self._text = rest
        return True

    def _properties(self) -> Mapping[str, Any]:
        """Return the schemas of the called tool's arguments, as far as it says them."""
        schema = self._tools[self._called or ""]
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}

    def _read_keyword(self) -> bool:
        """Read the key of a literal, or the end; a value without a key is dropped."""
        self._text = self._text.lstrip(" \t\n,")
        if self._text.startswith(self._pairs.end):
            self._text = self._text[len(self._pairs.end) :]
            self._end_pairs()
            return True
        found = self._matched(self._key) if self._text else None
        if not self._text or (found is not None and found.partial):
            return False
        self._begin_value(found)
        self._nesting = _Nesting(depth=1, brackets="([{)]}", quotes="'\"", stop=",")
        self._step = self._read_literal
        return True

    def _read_literal(self) -> bool:
        end = self._nesting.end(self._text)
        said, self._text = self._text[:end], "" if end is None else self._text[end:]
        self._nesting.forget()
        self._pieces.append(said if end is None else said[:-1])
        if end is not None:
            self._end_value()
            if said[-1] == ",":
                self._step = self._read_keyword
            else:
                self._end_pairs()
        return end is not None

    def _begin_value(self, key: regex.Match[str] | None) -> None:
        """Begin the value behind this key."""
        self._value_key, self._pieces, self._is_fresh_value = None, [], True
        self._is_raw_value = False
        if key is None:
            return
        self._text = self._text[key.end() :]
        self._value_key = key["key"]
        if self._pairs.value_end:
            own, schema = self._properties().get(self._value_key), self._tools[self._called or ""]
            self._value_types = value_types(own, schema, self._known_types)
            self._is_raw_value = key.groupdict().get("kind") == "true" or self._value_types == {"string"}
        if self._is_raw_value:
            self._argue(f'{self._next_key()}"')

    def _add_to_value(self, said: str) -> None:
        if self._is_raw_value:
            self._argue(json.dumps(said, ensure_ascii=False)[1:-1])
        else:
            self._pieces.append(said)

    def _end_value(self) -> None:
        if self._is_raw_value:
            self._argue('"')
        elif self._value_key is not None:
            value = _written("".join(self._pieces), self._value_types, has_quotes=not self._pairs.value_end)
            self._argue(self._next_key() + value)

    def _next_key(self) -> str:
        self._num_values += 1
        return f"{'{' if self._num_values == 1 else ', '}{json.dumps(self._value_key, ensure_ascii=False)}: "

    def _end_pairs(self) -> None:
        self._argue("}" if self._num_values else "{}")
        self._step = self._seek

    def _call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call; an id of the model's own is kept, as its template writes it back."""
        self._raw, self._is_unclosed = "", True
        self._content_flow.end("")
        if call_id is None or call_id in self._ids:
            num_chars = self._format.id_chars
            call_id = secrets.token_hex(8)[:num_chars] if num_chars else f"call_{secrets.token_hex(12)}"
        self._ids.add(call_id)
        self._called = name
        self._calls.append(CallPiece(self.num_calls, "", call_id, name))
        self.num_calls += 1

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallPiece(self.num_calls - 1, arguments))

    def _refuse(self, *, is_cut_off: bool = False) -> None:
        """What was taken for the beginning of a call is content; what closed the last one is not."""
        raw, self._raw, self._step = self._raw, "", self._say
        if self._is_forced and is_cut_off:
            raw, self._text = "", ""
        elif self.num_calls:
            begin = min((raw.find(each) for each in self._format.openings if each in raw), default=len(raw))
            lead = raw[:begin]
            self._content_flow.end(lead[len(lead.rstrip()) :])
            raw = raw[begin:]
        self._content += self._content_flow.add(raw)


class _Flow:
    """Holds the blanks at the end of what is said back, until it goes on."""

    def __init__(self) -> None:
        self._blanks: list[str] = []
        self._is_said = self._is_whole = False  # what ends it has come

    def add(self, said: str, *, strips: bool = False) -> str:
        """Return what may be told; `strips`: no blanks stand at its beginning."""
        told = said.rstrip()
        blanks = said[len(told) :]
        if not told:
            self._blanks.append(blanks)
            return ""
        told = "".join(self._blanks) + told
        if strips and not self._is_said:
            told = told.lstrip()
        self._blanks, self._is_said, self._is_whole = [blanks], True, False
        return told

    def end(self, joint: str = "\n") -> None:
        """Part what was said from what is said next: by its own blanks, or by `joint` if it has none."""
        blanks = "".join(self._blanks) or joint
        self._blanks = [blanks] if self._is_said else []
        self._is_whole = True

    def rest(self) -> str:
        """Return the blanks at the end, if they belong to what was said."""
        blanks, self._blanks = "".join(self._blanks), []
        return "" if self._is_whole else blanks


class _Marks:
    """Finds the first of some texts, of those that begin at one place the longest."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self.pattern = "|".join(map(re.escape, self._marks)) or "(?!)"
        self._search = re.compile(self.pattern).search
        self._firsts = {mark[0] for mark in self._marks}
        self._num_held = max(map(len, self._marks), default=1) - 1

    def begins(self, text: str) -> bool | None:
        """Return whether `text` begins with a mark; None: it may, with more text."""
        if text.startswith(tuple(self._marks)):
            return True
        return None if any(mark.startswith(text) for mark in self._marks) else False

    def find(self, text: str, *, is_last: bool) -> tuple[str, str, str]:
        """Return what stands before a mark, the mark, and the rest: without a mark that with which one may begin."""
        found = self._search(text)
        if found is not None:
            rest = text[found.start() :]
            if is_last or not any(len(mark) > len(rest) and mark.startswith(rest) for mark in self._marks):
                return text[: found.start()], found[0], text[found.end() :]
            return text[: found.start()], "", rest
        num_open = 0 if is_last else self.num_open(text)
        return text[: len(text) - num_open], "", text[len(text) - num_open :]

    def num_open(self, text: str) -> int:
        """Return how many characters at the end may be a mark with more text."""
        for start in range(max(len(text) - self._num_held, 0), len(text)):
            if text[start] in self._firsts:
                rest = text[start:]
                if any(len(mark) > len(rest) and mark.startswith(rest) for mark in self._marks):
                    return len(rest)
        return 0


class _Nesting:
    """Finds where an object, or a literal, ends in text that comes in pieces: each call has what is new behind it."""

    def __init__(
        self, depth: int = 0, *, brackets: str = "{}", quotes: str = '"', stop: str = "", is_json: bool = False
    ) -> None:
        """Begin within `depth` brackets.

        stop     a character that ends it outside of all brackets but one
        is_json  what cannot be JSON breaks it
        """
        half = len(brackets) // 2
        self._opening, self._closing, self._quotes, self._stop = brackets[:half], brackets[half:], quotes, stop
        self._depth, self._is_json = depth, is_json
        self._quote = ""  # of the string that has begun
        self._is_escaped = self.is_broken = False
        self.num_seen = 0  # characters of the text

    def end(self, text: str) -> int | None:
        """Return where it ends in `text`, of which it has seen the first part before."""
        for index in range(self.num_seen, len(text)):
            char = text[index]
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped, self._quote = char == "\\", "" if char == self._quote else self._quote
            elif char in self._quotes:
                self._quote = char
            elif char in self._opening:
                self._depth += 1
            elif char in self._closing or (char == self._stop and self._depth == 1):
                self._depth -= char in self._closing
                if self._depth == 0 or char == self._stop:
                    self.num_seen = index + 1
                    return index + 1
            elif self._is_json and char not in _JSON_CHARS:
                self.is_broken, self.num_seen = True, index
                return None
        self.num_seen = len(text)
        return None

    def forget(self) -> None:
        """Begin anew with the next text, which goes on from this."""
        self.num_seen = 0


def value_types(
    schema: object, root: object, known: dict[int, frozenset[str]], depth: int = _MAX_SCHEMA_DEPTH
) -> frozenset[str]:
    """Return JSON's types that a schema names; none: it may be any.

    known  those of schemas within `root` that were looked at: references may lead to one on very many ways
    """
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if id(schema) not in known:
        known[id(schema)] = frozenset()  # where it leads back to itself
        known[id(schema)] = _named_types(schema, root, known, depth)
    return known[id(schema)]


def _named_types(
    schema: Mapping[str, Any], root: object, known: dict[int, frozenset[str]], depth: int
) -> frozenset[str]:
    reference, given = schema.get("$ref"), schema.get("type")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = root
        for key in reference[2:].split("/"):
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return value_types(found, root, known, depth - 1)
    if isinstance(given, str | list):
        return frozenset({given} if isinstance(given, str) else (each for each in given if isinstance(each, str)))
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return frozenset(map(_type, listed))
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(keyword), list) and schema[keyword]:
            each = [value_types(one, root, known, depth - 1) for one in schema[keyword]]
            if keyword == "allOf":
                each = [types for types in each if types]
            return frozenset[str]().union(*each) if all(each) else frozenset()
    return frozenset()


def _type(value: object) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _written(raw: str, types: frozenset[str], *, has_quotes: bool) -> str:
    """Return a value as JSON: of one of its types if it can be read so, else a string.

    has_quotes  strings are written with quotes; else it is one where its types allow that and nothing else fits
    """
    text, numbers = raw.strip(), {"integer", "number"}
    for found in (_json(text), _python(text) if has_quotes or types else None):
        if found is not None:
            own = _type(found[0])
            fits = own in types or (own in numbers and not types.isdisjoint(numbers))
            if has_quotes or not types or (own != "string" and fits):
                return found[1]
    return json.dumps(text if has_quotes else raw, ensure_ascii=False)


def _json(text: str) -> tuple[Any, str] | None:
    """Return what JSON stands for, and as what it is written; None: it is none."""
    try:
        return json.loads(text, parse_constant=_refused_constant), text
    except (ValueError, RecursionError):
        return None


def _python(text: str) -> tuple[Any, str] | None:
    """Return what Python's literal stands for, and how JSON writes it; None: it is none, or JSON has no such value."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(text)
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refused_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _parsed_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of an object that is a call, in whatever order; None: it is none."""
    found = _json(text)
    call = None if found is None else found[0]
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):
        inner = _json(arguments)
        return (name, arguments) if inner is not None and isinstance(inner[0], dict) else None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments or {}, ensure_ascii=False)
