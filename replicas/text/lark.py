"""Writes grammars of Lark's notation as one regular expression, so that a JSON string can be held to them.

That is possible where no rule leads back to itself, as in the grammars of patches and commands that agents give.
Others, and those with what is not read here (`%ignore`, priorities, templates), have none: `pattern_of` returns None.
"""

from __future__ import annotations

import json
import re

MAX_PATTERN_CHARS = 1 << 14  # rules that name others twice, over and over, would grow without end
_TOKEN = re.compile(
    r"""^[ \t]*[?!]*(?P<head>[A-Za-z_]\w*)[ \t]*:|(?P<blank>\s|//[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)"""
    r"|(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)|%import[ \t]+common[ \t]*\.[ \t]*(?P<import>\w+)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<mark>->|\.\.|[()\[\]|?*+~])",
    re.MULTILINE,
)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
}


class _NotRegular(Exception):
    """It is not read here, or no regular expression says it."""


def pattern_of(grammar: str) -> str | None:
    """Return the regular expression of all that a grammar's `start` may be; None: there is none here."""
    try:
        return _Writer(*_rules(grammar)).rule("start")
    except (_NotRegular, RecursionError):
        return None


def _rules(grammar: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Cut a grammar into its rules' tokens by name, and what is imported."""
    rules: dict[str, list[str]] = {}
    imported: dict[str, str] = {}
    tokens: list[str] | None = None  # of the rule at hand
    end = 0
    while end < len(grammar):
        found = _TOKEN.match(grammar, end)
        if found is None:
            raise _NotRegular
        end, kind = found.end(), found.lastgroup or ""
        if kind == "head":
            tokens = rules[found[kind]] = []
        elif kind == "import" and found[kind] in _COMMON:
            imported[found[kind]] = _COMMON[found[kind]]
        elif kind != "blank":
            if tokens is None or kind == "import":
                raise _NotRegular
            tokens.append(found[kind])
    return rules, imported


class _Writer:
    """Writes rules as patterns, each once."""

    def __init__(self, rules: dict[str, list[str]], imported: dict[str, str]) -> None:
        self._rules, self._known = rules, dict(imported)
        self._open: list[str] = []  # rules that are being written
        self._left: list[str] = []  # tokens of the rule at hand, the next one last

    def rule(self, name: str) -> str:
        if name in self._known:
            return self._known[name]
        if name in self._open or name not in self._rules:
            raise _NotRegular
        self._open.append(name)
        outer, self._left = self._left, self._rules[name][::-1]
        pattern = self._alternatives()
        if self._left:
            raise _NotRegular
        self._left = outer
        self._open.pop()
        self._known[name] = pattern
        return pattern

    def _next(self) -> str:
        return self._left[-1] if self._left else ""

    def _alternatives(self) -> str:
        told = self._row()
        is_one = self._next() != "|"
        while self._next() == "|":
            self._left.pop()
            told += f"|{self._row()}"
            if len(told) > MAX_PATTERN_CHARS:
                raise _NotRegular
        return told if is_one else f"(?:{told})"

    def _row(self) -> str:
        told = ""
        while self._next() not in ("", "|", ")", "]"):
            if self._next() == "->":  # an alias
                del self._left[-2:]
            else:
                told += self._repeated(self._one())
            if len(told) > MAX_PATTERN_CHARS:
                raise _NotRegular
        return told

    def _one(self) -> str:
        token = self._left.pop()
        if token in ("(", "["):
            inner = self._alternatives()
            if not self._left or self._left.pop() != {"(": ")", "[": "]"}[token]:
                raise _NotRegular
            return f"(?:{inner})" + "?" * (token == "[")
        if token[0] == "/":
            body, _, flags = token[1:].rpartition("/")
            if set(flags) - {"i", "s"}:
                raise _NotRegular
            return f"(?{flags}:{body.replace(chr(92) + '/', '/')})"
        if token[0] == '"':
            try:
                text = json.loads(token.removesuffix("i"))
            except ValueError:
                raise _NotRegular from None
            told = re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)  # `\<` would be the border of a word
            return f"(?i:{told})" if token.endswith("i") else told
        if not (token[0].isalpha() or token[0] == "_"):
            raise _NotRegular
        return self.rule(token)

    def _repeated(self, one: str) -> str:
        if self._next() in ("?", "*", "+"):
            return f"(?:{one}){self._left.pop()}"
        if self._next() != "~":
            return one
        self._left.pop()
        bounds = [self._left.pop() if self._left else ""]
        if self._next() == "..":
            self._left.pop()
            bounds.append(self._left.pop() if self._left else "")
        if not all(bound.isdecimal() and len(bound) < 4 for bound in bounds):
            raise _NotRegular
        return f"(?:{one}){{{','.join(bounds)}}}"
