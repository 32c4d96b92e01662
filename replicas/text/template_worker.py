"""Renders one model's chat template: what `text/worker.py` runs in a process of its own, and nobody imports.

A template comes with a checkpoint and is code of unknown origin. Jinja's sandbox keeps it from reaching
Python, but not from looping for ever or building a terabyte; only a process of its own can be ended at any
moment. This one bounds its own memory and CPU time.

Its first question is `{"template": str}`; each later one is the template's variables, answered by `{"text": str}`.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 1 << 30
MAX_CPU_S = 3  # per render, at most; rounded to seconds, so 2 at least
MAX_RENDERED_CHARS = 1 << 24


class GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Compile with the settings, filters and globals that `transformers` gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render piece by piece, so that endless output ends at its cap."""
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(variables):
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise ValueError(f"the rendered prompt has more than {MAX_RENDERED_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def begin(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Bound this process; the template is compiled with the first render, whose deadline it has."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    template: jinja2.Template | None = None

    def answer(variables: dict[str, Any]) -> dict[str, Any]:
        nonlocal template
        _allow_cpu_time()
        template = template or compile_template(first["template"])
        return {"text": render(template, variables)}

    return answer


def _allow_cpu_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + MAX_CPU_S, hard))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escaping HTML, as Jinja's own filter would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)
