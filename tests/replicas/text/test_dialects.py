"""Every dialect of the table: its calls, as families publish their ways, however their text comes; what is found by a
template; and what is forced.
"""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.cluster.config import HttpConfig
from mneme.errors import ConfigError
from mneme.replicas.text.calls.answer_parser import AnswerParser, CallPiece, Spoken, value_types, whole_calls
from mneme.replicas.text.calls.dialects import FORMATS, REASONINGS, with_plugin
from mneme.replicas.text.matcher import Grammars
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.tool_calls import Dialect
from tests.budget import examples
from tests.replicas.tiny_tokenizer import byte_level_backend

Calls = Sequence[tuple[str, Mapping[str, Any]]]
HARMONY = REASONINGS["openai_gptoss"]
FIRST_NAMES = {id(each): name for name, each in reversed(FORMATS.items())}  # one of each format
DIALECTS = list(FIRST_NAMES.values())
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": STRING,
            "days": INTEGER,
            "exact": {"type": "boolean"},
            "near": {"type": "array", "items": STRING},
            "at": {"$ref": "#/$defs/point"},
            "unit": {"anyOf": [{"enum": ["c", "f"]}, {"type": "null"}]},
            "share": {"type": ["number", "null"]},
            "any": {},
        },
        "$defs": {"point": {"type": "object"}},
    },
    "now": {},
}


class Said(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    open_call: str | None = None


def said(parser: AnswerParser, pieces: Sequence[str]) -> Said:
    """What an answer says that comes in these pieces."""
    spoken = [parser.push(piece, is_last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    calls = whole_calls(piece for each in spoken for piece in each.calls)
    assert len({call.id for call in calls}) == len(calls) == parser.num_calls
    content, reasoning = ("".join(texts) for texts in zip(*(each[:2] for each in spoken), strict=True))
    return Said(content, reasoning, [(call.name, call.arguments) for call in calls], parser.open_call)


def parts(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]


# How a dialect writes calls.


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {_json(arguments)}}}' for name, arguments in calls]


def _list(calls: Calls, key: str = "arguments") -> str:
    return f"[{', '.join(_objects(calls, key))}]"


def _tagged(opening: str, closing: str) -> Callable[[Calls], str]:
    def pairs(arguments: Mapping[str, Any]) -> str:
        return "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())

    return lambda calls: "\n".join(
        f"{opening}\n<function={name}>\n{pairs(arguments)}</function>\n{closing}" for name, arguments in calls
    )


def _python(calls: Calls) -> list[str]:
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in each.items())})" for name, each in calls]


def _glm(calls: Calls) -> str:
    def pairs(arguments: Mapping[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in arguments.items()
        )

    return "\n".join(f"<tool_call>{name}\n{pairs(arguments)}</tool_call>" for name, arguments in calls)


def _minimax(calls: Calls) -> str:
    def pairs(arguments: Mapping[str, Any]) -> str:
        return "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items())

    told = "".join(f'<invoke name="{name}">\n{pairs(arguments)}</invoke>\n' for name, arguments in calls)
    return f"<minimax:tool_call>\n{told}</minimax:tool_call>"


def _dsml(calls: Calls) -> str:
    def pairs(arguments: Mapping[str, Any]) -> str:
        return "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_text(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )

    told = "".join(f'<｜DSML｜invoke name="{name}">\n{pairs(each)}</｜DSML｜invoke>\n' for name, each in calls)
    return f"<｜DSML｜function_calls>\n{told}</｜DSML｜function_calls>"


def _deepseek(call: Callable[[str, str], str], between: str) -> Callable[[Calls], str]:
    def written(calls: Calls) -> str:
        told = between.join(
            f"<｜tool▁call▁begin｜>{call(name, _json(arguments))}<｜tool▁call▁end｜>" for name, arguments in calls
        )
        return f"<｜tool▁calls▁begin｜>{told}<｜tool▁calls▁end｜>"

    return written


def _kimi(calls: Calls) -> str:
    told = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{told}<|tool_calls_section_end|>"


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _between(opening: str, closing: str) -> Callable[[Calls], str]:
    return lambda calls: "\n".join(f"{opening}\n{each}\n{closing}" for each in _objects(calls))


WRITERS: dict[str, Callable[[Calls], str]] = {
    "openai": _harmony,
    "deepseek_v32": _dsml,
    "deepseek_v3": _deepseek(lambda name, told: f"function<｜tool▁sep｜>{name}\n```json\n{told}\n```", "\n"),
    "deepseek_v31": _deepseek(lambda name, told: f"{name}<｜tool▁sep｜>{told}", ""),
    "kimi_k2": _kimi,
    "minimax_m2": _minimax,
    "seed_oss": _tagged("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": _glm,
    "qwen3_coder": _tagged("<tool_call>", "</tool_call>"),
    "nemotron_json": lambda calls: f"<TOOLCALL>{_list(calls)}</TOOLCALL>",
    "longcat": _between("<longcat_tool_call>", "</longcat_tool_call>"),
    "phi4_mini_json": lambda calls: f"functools{_list(calls)}",
    "granite": lambda calls: f"<|tool_call|>{_list(calls)}",
    "granite-20b-fc": lambda calls: " ".join(f"<function_call> {each}" for each in _objects(calls)),
    "jamba": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "olmo3": lambda calls: "<function_calls>\n" + "\n".join(_python(calls)) + "\n</function_calls>",
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(_python(calls))}]<|tool_call_end|>",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{', '.join(_python(calls))}]<|python_end|>",
    "hermes": _between("<tool_call>", "</tool_call>"),
    "mistral_args": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(each)}" for name, each in calls),
    "mistral": lambda calls: f"[TOOL_CALLS] {_list(calls)}",
    "pythonic": lambda calls: f"[{', '.join(_python(calls))}]",
    "llama3_json": lambda calls: "; ".join(_objects(calls, "parameters")),
    "json": lambda calls: _list(calls, "parameters"),
}
assert set(WRITERS) == set(DIALECTS)

JSON_STRINGS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=6),
        st.sampled_from(
            ["{", "}", '"', "\\", "'", "[", ")", ",", "\n", "</tool_call>", "<tool_call>", "```", "<|end|>"]
        ),
        st.sampled_from(
            ["</parameter>", "</arg_value>", "</think>", "[TOOL_CALLS]", "<|call|>", "null", "3", "世界🙂"]
        ),
    ),
    max_size=5,
).map("".join)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), JSON_STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(JSON_STRINGS, inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda key: key not in ("from", "is"))
CALLS = st.lists(
    st.tuples(st.sampled_from(("f", "g-1", "h.x_y")), st.dictionaries(KEYS, JSON_VALUES, max_size=4)),
    min_size=1,
    max_size=3,
)
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def schemas_of(calls: Calls) -> dict[str, dict[str, Any]]:
    """Schemas by which these calls are valid, of one function for each call."""
    return {
        name: {"properties": {key: {"type": TYPES.get(type(value), "null")} for key, value in arguments.items()}}
        for name, arguments in calls
    }


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=examples(25))
@given(calls=CALLS, before=st.sampled_from(["", "Hm. ", "a < b\n\n"]), behind=st.sampled_from(["", "\n", " Ok."]))
def test_calls_that_a_dialect_writes_are_found(name: str, calls: Calls, before: str, behind: str) -> None:
    calls = [(f"{function}{i}", arguments) for i, (function, arguments) in enumerate(calls)]
    tool_format = FORMATS[name]
    if tool_format.pairs is not None and tool_format.pairs.value_end:
        end = tool_format.pairs.value_end  # cannot be written within a value
        calls = [(each, {key: value for key, value in told.items() if end not in _text(value)}) for each, told in calls]
    if tool_format.pairs is not None and not tool_format.pairs.value_end:
        calls = [(each.replace("-", "_"), told) for each, told in calls]
    before = "" if tool_format.may_be_bare else before
    text = before + WRITERS[name](calls) + behind
    for pieces in ([text], parts(text, 1)):
        found = said(
            AnswerParser(tool_format, schemas_of(calls), reasoning=HARMONY if name == "openai" else None), pieces
        )
        assert [each for each, _ in found.calls] == [each for each, _ in calls]
        assert [json.loads(told) for _, told in found.calls] == [told for _, told in calls]
        assert found.content.split() == (before + behind).split()
        assert found.open_call is None


_PIECES = """f g other } { ] [ " \\ ' ( ) a= =1 ``` function functools functions. :0 to= to=functions.f f( <parameter=a>
</parameter> <function=f> </function> <arg_key>a</arg_key> <arg_value> </arg_value> </invoke> < 世🙂 3 null <think>
</think> <|message|> <|channel|> final analysis commentary <|constrain|> json""".split()  # noqa: SIM905
FRAGMENTS = st.sampled_from(
    [
        *_PIECES, '{"name": "f", "arguments": ', '{"a": "x"}', ", ", "```json\n", '<invoke name="f">',
        '<parameter name="a">', "text ", "  ", "\n",
    ]
)  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_what_a_text_says_does_not_depend_on_how_it_comes(name: str, data: st.DataObject) -> None:
    tool_format = FORMATS[name]
    marks = st.sampled_from([*tool_format.openings, *tool_format.closings, *HARMONY.silent, HARMONY.opening])
    calls = CALLS.map(lambda calls: [("f", told) for _, told in calls]).map(WRITERS[name])
    pieces = st.one_of(marks, FRAGMENTS, st.text(max_size=4), calls)
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text  # cut off
    how: dict[str, Any] = {
        "is_forced": data.draw(st.booleans()),
        "reasoning": data.draw(st.sampled_from([None, HARMONY, REASONINGS["qwen3"], REASONINGS["kimi_k2"]])),
    }
    how["is_open"] = how["reasoning"] is not None and data.draw(st.booleans())
    tools = {"f": {"properties": {"a": data.draw(st.sampled_from([STRING, INTEGER, {}]))}}, "g": {}}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = said(AnswerParser(tool_format, tools, **how), [text])
    for pieces in (
        parts(text, 1),
        [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)],
        [*parts(text, 3), ""],
    ):
        assert said(AnswerParser(tool_format, tools, **how), pieces) == whole


W, N = "get_weather", ("now", "{}")
_HERMES_NOW = WRITERS["hermes"]([("now", {})])
WRITTEN: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [  # content None: all of it, no call
    ("qwen3_coder", 'So:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSan\nJosé "SJ"\n</parameter>\n'
     "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=near>\n['a', \"b\"]\n"
     '</parameter>\n<parameter=at>\n{"x": 1.50}\n</parameter>\n<parameter=unit>\nNone\n</parameter>\n'
     "</function>\n</tool_call>\nDone.", "So:\nDone.",
     [(W, '{"city": "San\\nJosé \\"SJ\\"", "days": 3, "exact": true, "near": ["a", "b"], "at": {"x": 1.50}, '
       '"unit": null}')]),
    # A value of another type is told as text.
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>many</parameter><parameter=x>7</parameter>"
     "<parameter=y>a b</parameter><parameter=city>12</parameter></function></tool_call>", "",
     [(W, '{"days": "many", "x": 7, "y": "a b", "city": "12"}')]),
    # A close tag within a value; stray text before the first; a function that is not closed.
    ("qwen3_coder", "<tool_call><function=get_weather>\nso\n<parameter=city>\n<b></parameter> x\n</parameter>\n"
     "<parameter=days>2</parameter></tool_call>", "", [(W, '{"city": "<b></parameter> x", "days": 2}')]),
    # The form of its older relatives.
    ("qwen3_coder", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [N]),
    ("qwen3_coder", "<tool_call>\n<function=nope>\n</function>\n</tool_call>", None, []),
    ("qwen3_coder", "Type <tool_call> to call <function=later> here.", None, []),
    # Models leave out the mark before a call, and the end of a value.
    ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n</function>\n"
     "</tool_call>", "", [(W, '{"city": "Paris", "days": 3}')]),
    # A line that begins as a key, but is none of the function's, is of the value.
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n<parameter=b>\nc\n</parameter>\n"
     "</function>\n</tool_call>", "", [(W, '{"city": "a\\n<parameter=b>\\nc"}')]),
    ("glm45", "  \n  <tool_call>now\n</tool_call>", "", [N]),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value> 北京\n</arg_value><arg_key>days</arg_key>\n"
     "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>", "", [(W, '{"city": " 北京\\n", "days": 2}'), N]),
    ("glm45", "<tool_call>get<arg_key>city</arg_key><arg_value>B</arg_value></tool_call>", None, []),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">A<b</parameter>\n'
     '<parameter name="near">["x"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', "",
     [(W, '{"city": "A<b", "near": ["x"]}'), N]),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
     '<｜DSML｜parameter name="any" string="true">5</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     "</｜DSML｜function_calls>", "", [(W, '{"any": "5", "days": 5}')]),
    ("deepseek_v3", "Let me.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
     '{"city": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Let me.", [(W, '{"city": "```"}'), N]),
    ("deepseek_v31", "Hm.<｜tool▁calls▁begin｜>get_weather", None, []),
    ("kimi_k2", "Two. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 "
     '<|tool_call_argument_begin|> {"city": "<div>"} <|tool_call_end|><|tool_call_begin|>now:1'
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "Two.",
     [(W, '{"city": "<div>"}'), N]),
    ("pythonic", "[get_weather(city='Martha\\'s \"V\"', days=3, at={'x': [1, {}]}, unit=None, exact=True), now()]", "",
     [(W, '{"city": "Martha\'s \\"V\\"", "days": 3, "at": {"x": [1, {}]}, "unit": null, "exact": true}'), N]),
    ("pythonic", "[1] says now(x).", None, []),
    ("pythonic", "[see get_weather and now()]", None, []),
    ("llama4_pythonic", "<|python_start|>[get_weather(days=1, exact=true)]<|python_end|>", "",
     [(W, '{"days": 1, "exact": true}')]),
    ("olmo3", '<function_calls>\nget_weather(city="a, b)")\nnow()\n</function_calls>', "",
     [(W, '{"city": "a, b)"}'), N]),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', "", [N]),
    ("phi4_mini_json", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", [N]),
    ("hermes", "a < b <tool 1 ", None, []),
    ("hermes", '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "now"}</tool_call>', "",
     [("now", '{"a": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [N]),
    ("hermes", f"I will. {_HERMES_NOW} {_HERMES_NOW}\nDone.", "I will. Done.", [N, N]),
    ("hermes", f"I will.{_HERMES_NOW}\nDone.", "I will.\nDone.", [N]),
    ("hermes", _HERMES_NOW.replace("}\n<", "}} }\n<") + " } done", "} done", [N]),
    ("hermes", _HERMES_NOW.replace("}\n<", "} so\n<") + "\ndone", "so\n\ndone", [N]),
    ("hermes", _HERMES_NOW.replace("}\n<", "\n<") + " done", "done", [N]),
    ("hermes", _HERMES_NOW[:-3], "", [N]),
    ("hermes", _HERMES_NOW + "\n<tool_call>\n{no}\n</tool_call>", "<tool_call>\n{no}\n</tool_call>", [N]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"days": 1', "", [(W, '{"days": 1')]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [N]),
    ("llama3_json", '{"name": "now", "parameters": {}}} ok', "ok", [N]),
    ("llama3_json", '{"type": "function", "function": {"name": "now", "parameters": {}}}', "", [N]),
    ("llama3_json", ' {"name": 2} is JSON', None, []),
    ("llama3_json", "   ", None, []),
    ("mistral_args", 'so[TOOL_CALLS]get_weather[ARGS]{"days": 1}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}', "so",
     [(W, '{"days": 1}'), N]),
    ("json", "[1, 2] are numbers", None, []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRITTEN)
def test_what_families_write_is_read(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    for size in (1, 2, 3, 7, 1000):
        found = said(AnswerParser(FORMATS[name], TOOLS), parts(text, size))
        assert found[:3] == (text if content is None else content, "", calls)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"days": 1}<|call|>'
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"{FINAL}Hi <b>\n", "Hi <b>\n", "", 0),
        (f"{ANALYSIS}Easy.{NEXT}{FINAL}Hi<|return|>", "Hi", "Easy.", 0),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}Hi", "Hi", "a\nb", 0),
        (f"{ANALYSIS}Hm{NEXT}{CALL}", "", "Hm", 1),
        (f"{ANALYSIS}Hm{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}", "I look.", "Hm", 1),
        (f"{CALL}<|start|>assistant{CALL}<|start|>assistant{FINAL}Done.", "Done.", "", 2),
        (f"<|channel|>commentary<|message|>One.{NEXT}{ANALYSIS}x{NEXT}{FINAL}Two.", "One.\nTwo.", "x", 0),
        (' to=functions.get_weather<|channel|>commentary json<|message|>{"days": 1}<|call|>', "", "", 1),
        (f'{ANALYSIS}x{NEXT} to=functions.get_weather<|channel|>commentary<|message|>{{"days": 1}}', "", "x", 1),
        (f"{ANALYSIS}thought that was cut off <|", "", "thought that was cut off <|", 0),
    ],
)
def test_channels_part_reasoning_content_and_calls(text: str, content: str, reasoning: str, calls: int) -> None:
    for size in (1, 3, 1000):
        found = said(AnswerParser(FORMATS["openai"], TOOLS, reasoning=HARMONY), parts(text, size))
        assert found[:3] == (content, reasoning, [(W, '{"days": 1}')] * calls)
        if not calls:
            assert said(AnswerParser(None, {}, reasoning=HARMONY), parts(text, size)) == found


QWEN_OPEN = {"reasoning": REASONINGS["qwen3"], "is_open": True}  # a template has opened it


@pytest.mark.parametrize(
    ("how", "text", "content", "reasoning"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
        ("mistral", "[THINK]Hm.[/THINK]Yes.", "Yes.", "Hm."),
        ("seed_oss", "<seed:think>Hm.</seed:think>Yes.", "Yes.", "Hm."),
        ("granite", "Here is my thought process: Hm. Here is my response: Yes.", "Yes.", "Hm."),
        ("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "\nYes.", "Hm."),
        ("kimi_k2", "<think>Hm.<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", "Hm."),
        ("qwen3", "Say <think> to think.", "Say <think> to think.", ""),
        ("qwen3", "  <think", "  <think", ""),
        (QWEN_OPEN, "hm\n\nhm\n</think>\n\nyes  ", "yes  ", "hm\n\nhm"),
        (QWEN_OPEN, "hm </thin", "", "hm </thin"),
    ],
)
def test_reasoning_is_parted_from_content(how: Any, text: str, content: str, reasoning: str) -> None:
    options = {"reasoning": REASONINGS[how]} if isinstance(how, str) else how
    for size in (1, 4, 1000):
        assert said(AnswerParser(None, {}, **options), parts(text, size))[:2] == (content, reasoning)


def test_a_call_behind_reasoning_is_found() -> None:
    text = f"<think>\nhm hm\n</think>\n\n{_HERMES_NOW}"
    assert said(AnswerParser(FORMATS["hermes"], TOOLS, reasoning=REASONINGS["qwen3"]), parts(text, 3))[:3] == (
        "", "hm hm", [N]
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"name": "other", "arguments": {}}',
            '{"arguments": {}, "name": "other"}',
            '{"function": {"name": "other"}}',
        ),
        *('{"name": "now"', "}{", "[[[", '{"name": {"f": 1}}', "f[ARGS]", "\\"),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(name: str, text: str) -> None:
    opening, closing = (marks[0] if marks else "" for marks in (FORMATS[name].openings, FORMATS[name].closings))
    text = f"{opening}{text}{closing} "
    for size in (1, 4, 1000):
        assert said(AnswerParser(FORMATS[name], TOOLS), parts(text, size))[:3] == (text, "", [])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_args", "json"])
def test_a_forced_answer_has_no_content_wherever_it_is_cut_off(name: str) -> None:
    text = WRITERS[name]([(W, {"days": 1}), ("now", {})])
    for end in range(len(text) + 1):
        for size in (1, 1000):
            content, _, calls, _ = said(AnswerParser(FORMATS[name], TOOLS, is_forced=True), parts(text[:end], size))
            assert content == ""
            assert all(each in TOOLS for each, _ in calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(FORMATS["hermes"], TOOLS)
    assert parser.push('Hm <tool_call>{"name": "now"') == Spoken("Hm")
    (first,) = parser.push(', "arguments": ').calls or parser.push("{").calls[:1]
    assert (first.call, first.name, first.arguments, first.id[:5]) == (0, "now", "", "call_")
    assert parser.push('"a": "b').calls == (CallPiece(0, '"a": "b'),)
    assert parser.push('c"}').calls == (CallPiece(0, 'c"}'),)
    assert parser.push("}</tool_call>", is_last=True) == Spoken()


def test_a_value_that_is_text_is_told_as_it_comes() -> None:
    parser = AnswerParser(FORMATS["qwen3_coder"], TOOLS)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nK")
    assert [piece.arguments for piece in parser.push("öln\n").calls] == ["öln"]
    assert parser.open_call == "get_weather"
    assert parser.push("</para", is_last=True).calls == ()
    assert parser.open_call == "get_weather"  # it was cut off


def test_an_id_that_a_model_writes_is_kept_where_it_is_the_only_one() -> None:
    text = _kimi([("now", {}), ("now", {})])
    calls = whole_calls(AnswerParser(FORMATS["kimi_k2"], TOOLS).push(text + _kimi([("now", {})]), is_last=True).calls)
    assert [call.id for call in calls[:2]] == ["functions.now:0", "functions.now:1"]
    assert calls[2].id not in ("functions.now:0", "functions.now:1")


def tokenizer_of(template: str, *added: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())  # its own, as tokens are added
    backend.add_special_tokens(list(added))
    return Tokenizer(backend, eos_token_ids=(2,), chat_template=template)


@pytest.mark.parametrize("name", [name for name in DIALECTS if FORMATS[name].in_template + FORMATS[name].in_vocabulary])
def test_a_dialect_is_found_by_its_template_and_vocabulary(name: str) -> None:
    tool_format = FORMATS[name]
    template = "{{ tools }} " + " ".join(tool_format.in_template)
    assert Dialect(tokenizer_of(template, *tool_format.in_vocabulary)).tool_format == tool_format
    assert Dialect(tokenizer_of(template.replace("tools", "x"), *tool_format.in_vocabulary)).tool_format is None
    assert Dialect(tokenizer_of(""), name).tool_format in (tool_format, FORMATS["mistral_args"])


def test_calls_are_free_until_the_token_that_opens_one() -> None:
    tools = {"f": {"type": "object", "properties": {"a": INTEGER}}}
    template = "{{ tools }} <tool_call>"
    marked = Dialect(tokenizer_of(template, "<tool_call>", "</tool_call>"))
    assert marked.call_grammar(tools, is_forced=False, is_one=True).after == marked.opening_id
    assert marked.call_grammar(tools, is_forced=True, is_one=True).after is None
    assert Dialect(tokenizer_of(template)).call_grammar(tools, is_forced=False, is_one=True) is None
    assert Dialect(tokenizer_of(template), "none").tool_format is None


@pytest.mark.parametrize("name", REASONINGS)
def test_reasoning_is_found_by_its_template(name: str) -> None:
    reasoning = REASONINGS[name]
    template = " ".join(reasoning.in_template or (reasoning.opening,))
    assert Dialect(tokenizer_of(template)).reasoning == reasoning
    assert Dialect(tokenizer_of(""), "none", name).reasoning == reasoning
    assert Dialect(tokenizer_of(template), "none", "none").parser(()) is None


def test_marks_that_are_special_tokens_are_shown() -> None:
    thinking = Dialect(tokenizer_of("[THINK]", "[THINK]", "[/THINK]"))
    assert thinking.shows_special_tokens(has_tools=False)
    calling = Dialect(tokenizer_of("{{ tools }} [TOOL_CALLS]", "[TOOL_CALLS]"))
    assert calling.shows_special_tokens(has_tools=True)
    assert not calling.shows_special_tokens(has_tools=False)
    assert not Dialect(tokenizer_of("{{ tools }} [TOOL_CALLS]")).shows_special_tokens(has_tools=True)


FORCED = {
    "f": {"type": "object", "properties": {"a": {"enum": ["x", 'y"']}, "b": INTEGER | {"maximum": 99, "minimum": 0}}},
    "g": {"type": "object", "properties": {}},
}
MARKS = re.compile(r"<[^<>\s\"{}]+>|\[[A-Z_]+\]")


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", [*DIALECTS, "none"])
def test_what_a_grammar_lets_through_is_found(name: str, has_tokens: bool) -> None:
    """Walks through the grammar at random: what it ends with is calls, all of them valid, and nothing else."""
    tool_format = FORMATS.get(name)
    written = [] if tool_format is None else [*tool_format.openings, *tool_format.closings, tool_format.call]
    marks = {mark for text in written for mark in MARKS.findall(text)} if has_tokens else ()
    tokenizer = tokenizer_of("", *sorted(marks))
    dialect = Dialect(tokenizer, name, HARMONY if name == "openai" else "none")
    draw, grammars = random.Random(name), Grammars(tokenizer)
    for is_one in (True, False):
        grammar = dialect.call_grammar(FORCED, is_forced=True, is_one=is_one)
        assert grammar is not None
        for _ in range(3):
            text = walk(grammars, tokenizer, grammar, draw)
            parser = dialect.parser(FORCED, is_forced=True)
            assert parser is not None
            found = said(parser, parts(text, 3))
            assert not found.content, text
            assert len(found.calls) == 1 if is_one else found.calls, text
            assert found.open_call is None
            for each, arguments in found.calls:
                assert set(json.loads(arguments)) <= set(FORCED[each]["properties"])


def walk(grammars: Grammars, tokenizer: Tokenizer, grammar: Any, draw: random.Random, begun: Sequence[int] = ()) -> str:
    matcher, ids = grammars.matcher(grammar, begun), [*begun]
    while not matcher.is_over and len(ids) < 2000:
        mask = matcher.mask(())
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i >> 5] >> (i & 31) & 1]
        token_id = draw.choice(allowed)
        if token_id in tokenizer.eos_token_ids:
            break
        matcher.push(token_id)
        assert matcher.error is None
        ids.append(token_id)
    return tokenizer.decode(ids)


@pytest.mark.parametrize("name", [name for name in DIALECTS if FORMATS[name].pairs is not None])
def test_calls_that_no_grammar_can_hold_are_free_unless_they_must_be_valid(name: str) -> None:
    opening = (FORMATS[name].openings or ("<x>",))[0]
    tokenizer = tokenizer_of("", opening)
    dialect = Dialect(tokenizer, name)
    assert dialect.call_grammar(FORCED, is_forced=False, is_one=True) is None
    strict = dialect.call_grammar(FORCED, is_forced=False, is_one=True, is_strict=True)
    assert (strict is None) == (not FORMATS[name].openings)
    if strict is not None:
        assert strict.after == dialect.opening_id
        text = walk(Grammars(tokenizer), tokenizer, strict, random.Random(1), [dialect.opening_id or 0])
        parser = dialect.parser(FORCED)
        assert parser is not None
        assert len(said(parser, [text]).calls) == 1


def test_a_schema_names_the_types_of_a_value() -> None:
    root = {"$defs": {"p": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}
    for schema, types in (
        ({}, set()),
        (True, set()),
        ({"type": ["string", "null"]}, {"string", "null"}),
        (
            {"enum": ["a", 1, None, True, 1.5, [], {}]},
            {"string", "integer", "null", "boolean", "number", "array", "object"},
        ),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, {"string"}),
        ({"$ref": "#/$defs/p"}, {"object"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/nowhere"}, set()),
    ):
        assert value_types(schema, root, {}) == types
    read = Dialect(tokenizer_of(""), "qwen3_coder").read_schemas({"f": TOOLS["get_weather"], "g": {}})
    assert read["f"]["properties"]["at"] == {"type": ["object"]}
    assert Dialect(tokenizer_of(""), "hermes").read_schemas(TOOLS) == {"get_weather": {}, "now": {}}


IMPORT = "from mneme.replicas.text.calls.dialects import Reasoning, ToolFormat\n"


def test_references_that_meet_again_are_followed_once() -> None:
    """Each of these definitions stands ten times in the one before it: 10 ** 15 ways lead to the last."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"} for _ in range(10)]} for i in range(15)}
    root = {"$defs": {**defs, "d15": {"type": "integer"}}}
    assert value_types({"$ref": "#/$defs/d12"}, root, {}) == {"integer"}
    assert value_types({"$ref": "#/$defs/d0"}, root, {}) == set()  # too deep to say


DOCS = Path(__file__).parents[3] / "docs" / "tools.md"


def test_the_example_of_a_plug_in_works(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(# my_dialect.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    file = tmp_path / "my_dialect.py"
    file.write_text(example)
    config = HttpConfig(tool_parser_plugin=str(file), tool_call_parser="my_dialect", reasoning_parser="my_dialect")
    dialect = Dialect(
        tokenizer_of(""), config.tool_call_parser, config.reasoning_parser, with_plugin(config.tool_parser_plugin)
    )
    text = '<thought>Hm.</thought>So: CALL get_weather WITH {"days": 2} END'
    parser = Dialect(tokenizer_of(""), *pickle.loads(pickle.dumps(dialect.parsers))).parser(TOOLS)  # in a replica
    assert parser is not None
    assert said(parser, parts(text, 2))[:3] == ("So:", "Hm.", [(W, '{"days": 2}')])
    assert dialect.call_grammar(FORCED, is_forced=True, is_one=True) is not None


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("x = 1", "neither FORMATS nor REASONINGS"),
        ("FORMATS = {'a': 1}", "FORMATS of .* must map names to ToolFormat"),
        ("1 / 0", "cannot be loaded: division by zero"),
        (f"{IMPORT}REASONINGS = {{'a': Reasoning(opening='<x>', closing='')}}", "opening, closing"),
        (f"{IMPORT}FORMATS = {{'a': ToolFormat()}}", "may_be_bare"),
        (f"{IMPORT}FORMATS = {{'a': ToolFormat(openings=('<',), head='(')}}", "head, .*cannot be read: missing"),
        (f"{IMPORT}FORMATS = {{'a': ToolFormat(openings=('<',), head='x')}}", r"need the groups \(\?P<name>"),
        (f"{IMPORT}FORMATS = {{'a': ToolFormat(openings='<')}}", "openings: must be a tuple of texts"),
        (f"{IMPORT}FORMATS = {{'a': ToolFormat(openings=('<',), call='{{x}}')}}", "call: cannot be read: 'x'"),
        (None, "cannot be loaded"),
    ],
)
def test_a_plug_in_that_is_wrong_is_said_before_the_start(tmp_path: Path, source: str | None, named: str) -> None:
    file = tmp_path / "plugin.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ConfigError, match=rf"http.tool_parser_plugin: .*{named}"):
        HttpConfig(tool_parser_plugin=str(file))
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=rf"http.{field}: must be one of auto, none, .*qwen3.*got 'nope'"):
            HttpConfig(**{field: "nope"})
