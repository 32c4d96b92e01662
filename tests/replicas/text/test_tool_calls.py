"""Tool calls and reasoning found in text: each family's way, whole and in pieces, and text that is neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from mneme.replicas.request import Grammar
from mneme.replicas.text.calls.answer_parser import AnswerParser, CallPiece, Spoken, whole_calls
from mneme.replicas.text.calls.dialects import FORMATS, REASONINGS
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import Dialect
from tests.replicas.tiny_tokenizer import byte_level_backend

TOOLS: dict[str, dict[str, Any]] = {"f": {}, "g": {}}
F, G = ("f", '{"a": "}{\\"", "b": {"c": 1}}'), ("g", "{}")


def _hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    )


def _listed(key: str, *calls: tuple[str, str]) -> str:
    told = ", ".join(f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls)
    return f"[{told}]"


def _said(parser: AnswerParser, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """What an answer says: content, reasoning and calls, where its text comes in pieces of this size."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    spoken = [parser.push(piece, is_last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    calls = whole_calls(piece for each in spoken for piece in each.calls)
    assert len({call.id for call in calls}) == len(calls) == parser.num_calls
    told = [(call.name, call.arguments) for call in calls]
    return "".join(each.content for each in spoken), "".join(each.reasoning for each in spoken), told


THINKS = {"reasoning": REASONINGS["qwen3"]}
OPEN = {**THINKS, "is_open": True}


@pytest.mark.parametrize(
    ("family", "how", "text", "content", "reasoning", "calls"),
    [
        ("hermes", {}, _hermes(F, G), "", "", [F, G]),
        ("hermes", {}, "Let me see.\n" + _hermes(F), "Let me see.", "", [F]),
        ("hermes", {}, "a < b <tool 1 ", "a < b <tool 1 ", "", []),
        ("hermes", {}, '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>', "", "", [("g", '{"a": 1}')]),
        (
            "hermes",
            {},
            '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            "",
            [("g", '{"a": 1}')],
        ),
        ("hermes", {}, '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", "", [G]),
        ("hermes", {}, _hermes(G) + " done", "done", "", [G]),
        ("hermes", {}, f"I will. {_hermes(F)} {_hermes(G)}\nDone.", "I will. Done.", "", [F, G]),
        ("hermes", {}, f"I will.{_hermes(G)}\nDone.", "I will.\nDone.", "", [G]),
        ("hermes", {}, f"I will.{_hermes(G)}Done.", "I will.Done.", "", [G]),
        ("hermes", {}, _hermes(G).replace("}\n<", "}} }\n<") + " } done", "} done", "", [G]),
        ("hermes", {}, _hermes(G).replace("}\n<", "} so\n<") + "\ndone", "so\n\ndone", "", [G]),
        ("hermes", {}, _hermes(G).replace("}\n<", "\n<") + " done", "done", "", [G]),
        (
            "hermes",
            {},
            '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "g"}</tool_call>',
            "",
            "",
            [("g", '{"a": "</tool_call>"}')],
        ),
        ("hermes", {}, _hermes(G)[:-3], "", "", [G]),
        ("hermes", {}, _hermes(G) + "\n<tool_call>\n{no}\n</tool_call>", "<tool_call>\n{no}\n</tool_call>", "", [G]),
        ("hermes", {}, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", "", [("f", '{"a": 1')]),
        ("hermes", THINKS, f"<think>\nhm hm\n</think>\n\n{_hermes(G)}", "", "hm hm", [G]),
        ("hermes", THINKS, "  <think", "  <think", "", []),
        ("hermes", OPEN, "hm\n\nhm\n</think>\n\nyes  ", "yes  ", "hm\n\nhm", []),
        ("hermes", OPEN, "hm </thin", "", "hm </thin", []),
        (None, THINKS, "<think>a</think>b <tool_call>", "b <tool_call>", "a", []),
        ("llama3_json", {}, '{"name": "g", "parameters": {}}', "", "", [G]),
        ("llama3_json", {}, '{"name": "g", "parameters": {}}; {"name": "g", "parameters": {}}', "", "", [G, G]),
        ("llama3_json", {}, '<|python_tag|>{"name": "g", "parameters": {}}', "", "", [G]),
        ("llama3_json", {}, '{"name": "g", "parameters": {}}} ok', "ok", "", [G]),
        ("llama3_json", {}, '{"type": "function", "function": {"name": "g", "parameters": {}}}', "", "", [G]),
        ("llama3_json", {}, ' {"name": 2} is JSON', ' {"name": 2} is JSON', "", []),
        ("llama3_json", {}, "   ", "   ", "", []),
        ("mistral", {}, "[TOOL_CALLS] " + _listed("arguments", F, G), "", "", [F, G]),
        ("mistral_args", {}, "so[TOOL_CALLS]f[ARGS]" + F[1] + "[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}", "so", "", [F, G]),
        ("json", {}, _listed("parameters", F, G), "", "", [F, G]),
        ("json", {}, "[1, 2] are numbers", "[1, 2] are numbers", "", []),
    ],
)
def test_what_a_text_says_does_not_depend_on_how_it_comes(
    family: str | None, how: Any, text: str, content: str, reasoning: str, calls: Any
) -> None:
    for size in (1, 2, 3, 7, 1000):
        parser = AnswerParser(FORMATS[family] if family else None, TOOLS, **how)
        found = _said(parser, text, size)
        assert found == (content, reasoning, calls)


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize(
    "text",
    ['{"name": "other", "arguments": {}}', '{"name": "f"', "}{", "[[[", '{"name": {"f": 1}}', '"f"', "f[ARGS]", "\\"],
)
def test_what_is_no_call_is_content_as_it_was_written(family: str, text: str) -> None:
    opening, closing = (marks[0] if marks else "" for marks in (FORMATS[family].openings, FORMATS[family].closings))
    text = f"{opening}{text}{closing} "
    for size in (1, 4, 1000):
        assert _said(AnswerParser(FORMATS[family], TOOLS), text, size) == (text, "", [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", _hermes(F, G)),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}'),
        ("mistral", "[TOOL_CALLS] " + _listed("arguments", F, G)),
        ("mistral_args", f"[TOOL_CALLS]f[ARGS]{F[1]}[TOOL_CALLS]g[ARGS]{{}}"),
        ("json", _listed("parameters", F, G)),
    ],
)
def test_a_forced_answer_has_no_content_wherever_it_is_cut_off(family: str, text: str) -> None:
    for end in range(len(text) + 1):
        for size in (1, 1000):
            parser = AnswerParser(FORMATS[family], TOOLS, is_forced=True)
            content, _, calls = _said(parser, text[:end], size)
            assert content == ""
            assert all(name in TOOLS for name, _ in calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(FORMATS["hermes"], TOOLS)
    assert parser.push('Hm <tool_call>{"name": "f"') == Spoken("Hm")
    (first,) = parser.push(', "arguments": ').calls or parser.push("{").calls[:1]
    assert (first.call, first.name, first.arguments) == (0, "f", "")
    assert first.id is not None
    assert first.id.startswith("call_")
    assert parser.push('"a": "b').calls == (CallPiece(0, '"a": "b'),)
    assert parser.push('c"}').calls == (CallPiece(0, 'c"}'),)
    assert parser.push("}</tool_call>", is_last=True) == Spoken()


def _dialect(template: str, *added: str, parser: str = "auto") -> Dialect:
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())  # its own, as tokens are added
    backend.add_tokens(list(added))
    return Dialect(Tokenizer(backend, eos_token_ids=(0,), chat_template=template), parser)


@pytest.mark.parametrize(
    ("template", "added", "family"),
    [
        ("{{ tools }} <tool_call>", (), "hermes"),
        ("{{ tools }} <tool_call> <function=", (), "qwen3_coder"),
        ("{{ tools }} [TOOL_CALLS]", (), "mistral"),
        ("{{ tools }} [TOOL_CALLS]", ("[ARGS]",), "mistral_args"),
        ("{{ tools }}", ("<|python_tag|>",), "llama3_json"),
        ("{{ tools }}", (), None),
        ("<tool_call>", (), None),
    ],
)
def test_a_family_is_known_by_its_template_and_vocabulary(template: str, added: Any, family: str | None) -> None:
    assert _dialect(template, *added).tool_format == (FORMATS[family] if family else None)


def test_a_configured_parser_stands() -> None:
    assert _dialect("", parser="hermes").tool_format == FORMATS["hermes"]
    assert _dialect("{{ tools }} <tool_call>", parser="none").tool_format is None


def test_calls_are_free_until_the_token_that_opens_one() -> None:
    tools = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    marked = _dialect("{{ tools }} <tool_call>", "<tool_call>", "</tool_call>")
    grammar = marked.call_grammar(tools, is_forced=False, is_one=True)
    assert isinstance(grammar, Grammar)
    assert grammar.after == marked.opening_id
    forced = marked.call_grammar(tools, is_forced=True, is_one=True)
    assert forced is not None
    assert forced.after is None
    assert _dialect("{{ tools }} <tool_call>").call_grammar(tools, is_forced=False, is_one=True) is None
    assert json.dumps(tools["f"])[1:-1] in forced.text
