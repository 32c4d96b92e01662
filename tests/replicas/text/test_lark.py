"""Grammars of Lark's notation as regular expressions: which have one, and that it says the same."""

from __future__ import annotations

import json
import re

import pytest

from mneme.replicas.request import Grammar
from mneme.replicas.text.lark import MAX_PATTERN_CHARS, pattern_of
from mneme.replicas.text.matcher import Grammars
from tests.replicas.tiny_tokenizer import IM_END, tiny_tokenizer

PATCH = """
start: begin hunk+ end          // a patch
begin: "*** Begin" LF
end: "*** End" LF?

hunk: add | delete
add: "*** Add: " name LF line+
delete: "*** Delete: " name LF -> gone
name: /(.+)/
?line: ("+" | "-" | " ") /(.*)/ LF
!mode: "x"
%import common.LF
"""


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (
            PATCH,
            ["*** Begin\n*** Add: a\n+b\n- c\n*** End", "*** Begin\n*** Delete: a\n*** End\n"],
            ["", "*** Begin\n"],
        ),
        ('start: "a.b" | "c"i', ["a.b", "C"], ["axb", "A.b"]),
        ('start: a ~ 2..3 [B]\na: "x"\nB: /[0-9]\\/y/', ["xx", "xxx1/y"], ["x", "xxxx"]),
        ('start: ("a" | b)* "."\nb: "b" "c"\n | "d"', [".", "abcd."], ["bc", "b."]),
        ("start: /a|b/ /./", ["ab", "bb"], ["a", "b", "a\n"]),
        ("start: /./s", ["\n"], ["ab"]),
        ('start: "<a-b> {#1}"', ["<a-b> {#1}"], ["a-b"]),
        ('start: "é\\n"~2', ["é\né\n"], ["é\n"]),
        ("start: WORD WS_INLINE\n%import common.WORD\n%import common.WS_INLINE", ["ab "], ["1 "]),
        ('start: "(" start2 ")"\nstart2: "x" | "y"', ["(x)", "(y)"], ["x", "((x))"]),
    ],
)
def test_a_pattern_matches_what_the_grammar_does(grammar: str, matching: list[str], others: list[str]) -> None:
    pattern = pattern_of(grammar)
    assert pattern is not None
    assert [text for text in matching if not re.fullmatch(pattern, text)] == []
    assert [text for text in others if re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'start: a\na: "(" a ")" | "x"',  # goes round
        "start: b",
        'first: "a"',
        'start: "a"\n%ignore " "',
        'start: X\n%import common.NUMBER_OF_THINGS\nX: "x"',
        'start: "a".."z"',
        'start.2: "a"',
        'start: _sep{"a", ","}\n_sep{x, y}: x (y x)*',
        'start: ("a"',
        'start: "a")',
        "start: /a/x",
        'start: "\\d"',
        'start: "a" ~',
        "",
        "start: " + "a " * 50_000 + '\na: "' + "x" * 16_000 + '"',
        "start: " + "a | " * 20_000 + 'a\na: "' + "x" * 16_000 + '"',
        "".join(f"{'start' if i == 0 else f'a{i}'}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"',
    ],
)
def test_other_grammars_have_none(grammar: str) -> None:
    assert pattern_of(grammar) is None


def test_a_pattern_is_bounded() -> None:
    pattern = pattern_of(
        "".join(f"{'start' if i == 0 else f'a{i}'}: a{i + 1} a{i + 1}\n" for i in range(8)) + 'a8: "x"'
    )
    assert pattern is not None
    assert len(pattern) < MAX_PATTERN_CHARS


def _takes(pattern: str, text: str) -> bool:
    """Whether an answer that is held to an object with such a string may be this text."""
    tokenizer = tiny_tokenizer()
    value = {"type": "string", "pattern": f"^(?:{pattern})$"}
    schema = {"type": "object", "properties": {"input": value}, "required": ["input"], "additionalProperties": False}
    matcher = Grammars(tokenizer).matcher(Grammar("json_schema", json.dumps(schema), "tools"), [])
    said = json.dumps({"input": text}, separators=(",", ":"), ensure_ascii=False)
    for token_id in [*tokenizer.encode(said, add_special_tokens=False), IM_END]:
        if not matcher.mask(())[token_id >> 5] >> (token_id & 31) & 1:
            return False
        matcher.push(token_id)
    return True


def test_a_json_string_is_held_to_it_with_its_escapes() -> None:
    pattern = pattern_of(PATCH)
    assert pattern is not None
    said = '*** Begin\n*** Add: a "b"\n+x \\ y\té\n*** Delete: <c>\n*** End'
    assert _takes(pattern, said)
    assert not _takes(pattern, said.replace("+x", "x"))
    assert not _takes(pattern, said.replace("<c>", "\n"))
