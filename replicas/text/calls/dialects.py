"""The table of dialects: how each family of models writes calls and reasoning, as data that `AnswerParser` reads by.

Names are vLLM's where it has one. A format of one's own comes from a file: `with_plugin`.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import regex

from mneme.errors import ConfigError, shown

_NAME = r"(?P<name>[\w.\-]{1,128})"
OBJECT_HEAD = r'\{\s*"name"\s*:\s*"' + _NAME + r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_ARGUMENTS_CALL = r'"{{\"name\": \"{name}\", \"arguments\": " {arguments} "}}"'
_PARAMETERS_CALL = r'"{{\"name\": \"{name}\", \"parameters\": " {arguments} "}}"'
_LIST = ('"["', '", "', '"]"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Describes arguments that are written one by one, each with its key.

    key      expression of what stands before a value, with a group `key`, the name; a group `kind` that is "true" says
             that the value is text as it stands
    opening  how a key begins, where `value_end` is given
    value_end  stands behind a value; empty: values are literals, parted by commas
    end      stands behind the last value; empty: what closes the call does
    trims    a line's end at either side of a value is not of it; a line that begins with a key of the tool's ends one
    """

    key: str
    opening: str = ""
    value_end: str = ""
    end: str = ""
    trims: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    r"""Describes how a family writes calls. Behind a mark, a call may also be an object with a name and arguments.

    openings   marks of which one stands before a call, or before the first; none: what begins as a call is calls
    closings   stand behind a call, or behind the last
    may_be_bare  an answer that begins as a call is one also without a mark
    separators characters that may stand between calls, besides blanks
    head       expression of a call up to its arguments, with a group `name` and perhaps one `id`; "": calls are objects
    pairs      how arguments are written that are no JSON
    grammar    (before the first call, between two or None where there may be one only, behind the last), in Lark's
               notation; OPEN and CLOSE stand for the first marks; each mark in a text is one token, if there is one
    call       a call in Lark's notation: {name} as a JSON string's inside, {arguments} as a rule
    id_chars   how long ids are; 0: as OpenAI's
    in_template, in_vocabulary  texts by which it is known: all of them are there
    """

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    may_be_bare: bool = False
    separators: str = ""
    head: str = ""
    pairs: Pairs | None = None
    grammar: tuple[str, str | None, str] = ("", None, "")
    call: str = _ARGUMENTS_CALL
    id_chars: int = 0
    in_template: tuple[str, ...] = ()
    in_vocabulary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` if nothing can be read by it: a plug-in's author sees that at the start."""
        for field in ("openings", "closings", "in_template", "in_vocabulary"):
            given = getattr(self, field)
            if not isinstance(given, tuple) or not all(isinstance(each, str) and each for each in given):
                raise ConfigError(f"{field}: must be a tuple of texts (got {shown(given)})")
        if not self.openings and not self.may_be_bare:
            raise ConfigError("openings: there must be one, unless may_be_bare")
        pairs = self.pairs or Pairs(key="(?P<key>)")
        if bool(pairs.opening) != bool(pairs.value_end):
            raise ConfigError("pairs: opening and value_end go together")
        try:
            groups = {*regex.compile(self.head or _NAME).groupindex, *regex.compile(pairs.key).groupindex}
            self.call.format(name="", arguments="")
        except (regex.error, ValueError, LookupError) as error:
            raise ConfigError(f"head, pairs.key or call: cannot be read: {error}") from None
        if not {"name", "key"} <= groups:
            raise ConfigError("head, pairs.key: need the groups (?P<name>...) and (?P<key>...)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Describes how a family writes its reasoning.

    opening  stands before it
    closing  stands behind it
    stops    also end it, and belong to what follows
    recurs   it may stand anywhere in an answer, more than once; else an answer begins with it
    silent   marks around content, of which nothing is told
    in_template  texts by which it is known: all of them are there
    """

    opening: str
    closing: str
    stops: tuple[str, ...] = ()
    recurs: bool = False
    silent: tuple[str, ...] = ()
    in_template: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` if one of its marks is missing."""
        if not self.opening or not self.closing:
            raise ConfigError("opening, closing: a text stands at either side of reasoning")


def _between(opening: str, closing: str, *in_template: str) -> ToolFormat:
    """Describe objects between two marks, each in its own."""
    return ToolFormat(
        openings=(opening,),
        closings=(closing,),
        grammar=(r'OPEN "\n"', r'"\n" CLOSE "\n" OPEN "\n"', r'"\n" CLOSE'),
        in_template=in_template or (opening,),
    )


def _listed(opening: str, closing: str = "", *in_template: str, also: tuple[str, ...] = ()) -> ToolFormat:
    """Describe a list of objects behind a mark."""
    first, between, last = _LIST
    return ToolFormat(
        openings=(opening, *also),
        closings=(closing,) if closing else (),
        separators="[],",
        grammar=(f"OPEN {first}", between, f"{last} CLOSE" if closing else last),
        in_template=in_template or (opening,),
    )


def _tagged(opening: str, closing: str, *in_template: str) -> ToolFormat:
    """Describe `<function=NAME><parameter=KEY>` between two marks, of which models leave out the first at times."""
    return ToolFormat(
        openings=(opening, "<function="),
        closings=(closing,),
        head=r"(?:<function=)?\s*" + _NAME + r"\s*>",
        pairs=Pairs(
            key=r"<parameter=\s*(?P<key>[^>\n]{1,256}?)\s*>",
            opening="<parameter=",
            value_end="</parameter>",
            end="</function>",
            trims=True,
        ),
        grammar=(r'OPEN "\n"', r'"\n" CLOSE "\n" OPEN "\n"', r'"\n" CLOSE'),
        in_template=in_template or (opening,),
    )


def _invoked(opening: str, closing: str, prefix: str = "") -> ToolFormat:
    """Describe `<invoke name="NAME"><parameter name="KEY">` between two marks."""
    return ToolFormat(
        openings=(opening,),
        closings=(closing,),
        head=rf'<{prefix}invoke\s+name="?' + _NAME + r'"?\s*>',
        pairs=Pairs(
            key=rf'<{prefix}parameter\s+name="?(?P<key>[^">\n]{{1,256}})"?(?:\s+string="(?P<kind>true|false)")?\s*>',
            opening=f"<{prefix}parameter",
            value_end=f"</{prefix}parameter>",
            end=f"</{prefix}invoke>",
        ),
        grammar=(r'OPEN "\n"', r'"\n"', r'"\n" CLOSE'),
        in_template=(prefix or opening,),
    )


def _pythonic(opening: str = "", closing: str = "", *, in_template: str = "", in_vocabulary: str = "") -> ToolFormat:
    """Describe Python's calls with keyword arguments, usually in a list."""
    first, between, last = _LIST
    return ToolFormat(
        openings=(opening,) if opening else (),
        closings=(closing,) if closing else (),
        may_be_bare=not in_template or not opening,
        separators="[],",
        head=_NAME + r"\(",
        pairs=Pairs(key=r"(?P<key>\w{1,256})\s*=\s*", end=")"),
        grammar=(f"OPEN {first}" if opening else first, between, f"{last} CLOSE" if closing else last),
        in_template=(in_template,) if in_template else (),
        in_vocabulary=(in_vocabulary,) if in_vocabulary else (),
    )


_DEEPSEEK_MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_HARMONY_HEADS = tuple(f"{header} to=functions." for header in ("<|channel|>commentary", "<|channel|>analysis"))

# The first whose signs are all there is a model's: what is written in few templates comes first.
FORMATS: dict[str, ToolFormat] = {
    "openai": ToolFormat(  # gpt-oss. The recipient may stand before the channel
        openings=(*_HARMONY_HEADS, "<|start|>assistant to=functions.", "to=functions."),
        closings=("<|call|>", "<|end|>"),
        head=_NAME + r"(?:<\|channel\|>\w{1,16})?(?:\s|<\|constrain\|>|\w){0,64}<\|message\|>\s*(?=\{)",
        call='"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>" {arguments}',
        in_template=("<|channel|>", "<|message|>"),
    ),
    "deepseek_v32": _invoked("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    "deepseek_v3": ToolFormat(  # R1 too
        openings=_DEEPSEEK_MARKS,
        closings=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        head=r"(?:function)?<｜tool▁sep｜>" + _NAME + r"\s*```json\s*(?=\{)",
        grammar=("OPEN", r'"\n"', '"<｜tool▁calls▁end｜>"'),
        call=r'"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n" {arguments} "\n```<｜tool▁call▁end｜>"',
        in_template=(_DEEPSEEK_MARKS[0], "```json"),
    ),
    "deepseek_v31": ToolFormat(
        openings=_DEEPSEEK_MARKS,
        closings=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        head=_NAME + r"\s*<｜tool▁sep｜>\s*(?=\{)",
        grammar=("OPEN", "", '"<｜tool▁calls▁end｜>"'),
        call='"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>" {arguments} "<｜tool▁call▁end｜>"',
        in_template=(_DEEPSEEK_MARKS[0],),
    ),
    "kimi_k2": ToolFormat(  # ids are the model's: its template writes them back
        openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        closings=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        head=r"(?P<id>(?:functions\.)?" + _NAME + r":\d{1,9})\s*<\|tool_call_argument_begin\|>\s*(?=\{)",
        grammar=("OPEN", "", '"<|tool_calls_section_end|>"'),
        call='"<|tool_call_begin|>functions.{name}:" /[0-9]{{1,2}}/ "<|tool_call_argument_begin|>" {arguments}'
        ' "<|tool_call_end|>"',
        in_template=("<|tool_call_begin|>",),
    ),
    "minimax_m2": _invoked("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": _tagged("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": ToolFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        head=_NAME + r"\s*(?=<arg_key>|</tool_call>)",
        pairs=Pairs(
            key=r"<arg_key>\s*(?P<key>[^<]{1,256}?)\s*</arg_key>\s*<arg_value>",
            opening="<arg_key>",
            value_end="</arg_value>",
        ),
        grammar=("OPEN", "CLOSE OPEN", "CLOSE"),
        in_template=("<tool_call>", "<arg_key>"),
    ),
    "qwen3_coder": _tagged("<tool_call>", "</tool_call>", "<tool_call>", "<function="),
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "longcat": _between("<longcat_tool_call>", "</longcat_tool_call>"),
    "phi4_mini_json": _listed("<|tool_call|>", "<|/tool_call|>", "<|tool|>", also=("functools",)),
    "granite": _listed("<|tool_call|>", "", also=("<tool_call>",)),
    "granite-20b-fc": ToolFormat(
        openings=("<function_call>",), grammar=('OPEN " "', '" " OPEN " "', ""), in_template=("<function_call>",)
    ),
    "jamba": _listed("<tool_calls>", "</tool_calls>"),
    "olmo3": _pythonic("<function_calls>", "</function_calls>", in_template="<function_calls>"),
    "lfm2": _pythonic("<|tool_call_start|>", "<|tool_call_end|>", in_vocabulary="<|tool_call_start|>"),
    "llama4_pythonic": _pythonic("<|python_start|>", "<|python_end|>", in_vocabulary="<|python_start|>"),
    "hermes": _between("<tool_call>", "</tool_call>"),  # Qwen 2.5 and 3, Granite 4
    "mistral_args": ToolFormat(  # from tokenizer v11 on
        openings=("[TOOL_CALLS]",),
        head=_NAME + r"(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)",
        grammar=("OPEN", "OPEN", ""),
        call='"{name}[ARGS]" {arguments}',
        id_chars=9,
        in_template=("[TOOL_CALLS]",),
        in_vocabulary=("[ARGS]",),
    ),
    "mistral": ToolFormat(
        openings=("[TOOL_CALLS]",),
        separators="[],",
        grammar=('OPEN " "? "["', '", "', '"]"'),
        id_chars=9,
        in_template=("[TOOL_CALLS]",),
    ),
    "pythonic": _pythonic(in_template="[func_name1("),
    "llama3_json": ToolFormat(
        openings=("<|python_tag|>",),
        may_be_bare=True,
        separators=";",
        call=_PARAMETERS_CALL,
        in_vocabulary=("<|python_tag|>",),
    ),
    # What vLLM forces where a family has no format: a list.
    "json": ToolFormat(may_be_bare=True, separators="[],", grammar=_LIST, call=_PARAMETERS_CALL),
}
FORMATS |= {
    other: FORMATS[name]
    for name, others in {
        "hermes": ("granite4",),
        "qwen3_coder": ("qwen3_xml", "mimo", "step3p5", "nemotron_v3"),
        "glm45": ("glm47",),
        "jamba": ("hunyuan_a13b",),
        "llama3_json": ("llama4_json",),
        "json": ("xlam",),
    }.items()
    for other in others
}

_THINK = Reasoning(opening="<think>", closing="</think>")
REASONINGS: dict[str, Reasoning] = {
    "openai_gptoss": Reasoning(
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        stops=("<|start|>", "<|channel|>", "<|return|>"),
        recurs=True,
        silent=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|channel|>final <|constrain|>json<|message|>",
            "<|end|>",
            "<|return|>",
        ),
    ),
    "seed_oss": Reasoning(opening="<seed:think>", closing="</seed:think>"),
    "mistral": Reasoning(opening="[THINK]", closing="[/THINK]"),
    "granite": Reasoning(opening="Here is my thought process:", closing="Here is my response:"),
    "hunyuan_a13b": Reasoning(
        opening="<think>", closing="</think>", silent=("<answer>", "</answer>"), in_template=("<think>", "<answer>")
    ),
    "kimi_k2": Reasoning(
        opening="<think>",
        closing="</think>",
        stops=("<|tool_calls_section_begin|>",),
        in_template=("<think>", "<|tool_calls_section_begin|>"),
    ),
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "glm47", "minimax_m2", "mimo"), _THINK),
    **dict.fromkeys(("nemotron_v3", "olmo3", "step3", "step3p5", "holo2", "ernie45"), _THINK),
}


class Table(NamedTuple):
    """Holds the formats that may be named."""

    formats: Mapping[str, ToolFormat]
    reasonings: Mapping[str, Reasoning]

    def check(self, tool_parser: str, reasoning_parser: str) -> None:
        """Raise `ConfigError` for a name that is not there."""
        for field, names, name in (
            ("tool_call_parser", self.formats, tool_parser),
            ("reasoning_parser", self.reasonings, reasoning_parser),
        ):
            if name not in ("auto", "none", *names):
                listed = ", ".join(("auto", "none", *names))
                raise ConfigError(f"http.{field}: must be one of {listed} (got {shown(name)})")


TABLE = Table(FORMATS, REASONINGS)


@lru_cache(maxsize=16)
def with_plugin(file: str | None) -> Table:
    """Return the table with the formats that a Python file has in its `FORMATS` and `REASONINGS`, by name.

    Raises `ConfigError`. The file is run once in a process: who sets it may run code here anyway.
    """
    if file is None:
        return TABLE
    try:
        found = runpy.run_path(str(Path(file).expanduser()))
    except Exception as error:  # whatever the file raises
        reason = str(error) or type(error).__name__
        raise ConfigError(f"http.tool_parser_plugin: {file} cannot be loaded: {reason}") from error
    formats, reasonings = found.get("FORMATS", {}), found.get("REASONINGS", {})
    for name, given, kind in (("FORMATS", formats, ToolFormat), ("REASONINGS", reasonings, Reasoning)):
        if not isinstance(given, dict) or not all(isinstance(each, kind) for each in given.values()):
            raise ConfigError(f"http.tool_parser_plugin: {name} of {file} must map names to {kind.__name__}")
    if not formats and not reasonings:
        raise ConfigError(f"http.tool_parser_plugin: {file} has neither FORMATS nor REASONINGS")
    return Table(formats | FORMATS | formats, reasonings | REASONINGS | reasonings)  # its own are looked for first
