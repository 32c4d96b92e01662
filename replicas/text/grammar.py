"""Writes grammars as llguidance reads them, and refuses where requests come in what costs too much to compile.

Engines compile what `GrammarChecker` let through (`matcher.py`).
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mneme.errors import InvalidRequest, Overloaded
from mneme.primitives import Bounded, read_float
from mneme.replicas.request import Grammar
from mneme.replicas.text.grammar_worker import brief
from mneme.replicas.text.schema import parts, rewritten
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.worker import Worker

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

MAX_KNOWN = 256  # verdicts, each with its grammar of at most 128 KB
_SCRIPT = Path(__file__).resolve().with_name("grammar_worker.py")
_MAX_WAIT_S = 60.0  # for a process whose work is bounded by processor time: the machine is not well then
# They come last, so that no schema sets them: `lenient` and `coerce_one_of` would let invalid answers through, and
# without a bound a model may write blanks for ever. 20 are enough for a line's end and an indent.
JSON_OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
}
# Without `\u`: a name that a schema gives could be written with it once more, as one that is free.
_ESCAPES = 'nrbtf"\\'
# Control characters that need it, as text has them and as a pattern may write them.
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_PATTERN_CONTROLS = re.compile(r"\\(x[017]|u00[017]|[xu]\{|[Uacv0-7])|\[[^\]]*(&&|--|~~)")

# Else llguidance looks for all text that must follow: of `/a+/ start` without end. It comes last: the last one holds.
_NO_FORCING = '\n%llguidance {"no_forcing": true}'

# llguidance's limits. They bound what follows a grammar: 20 ms for a token and 100 MB of an answer's states at most. Of
# what compiles it they bound the usual (0.1 s for the largest objects: the time grows with the square of the number of
# optional properties) and not all: that is left to `grammar_worker.py`.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 5_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
NO_TOKENIZER = "needs a tokenizer with an end token; this model has none"
STRANGE_TOKENIZER = "this model's tokenizer cannot be used with grammars"


class GrammarChecker:
    """Says which grammars an engine may be given. Thread-safe.

    Each is compiled in a process that may be killed (`grammar_worker.py`) and nowhere else: on a thread, which cannot
    be, one would hold up all others for as long as its client likes. The process starts with the first grammar, and
    anew where it has ended; it ends with its checker.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # of `_fault_by_grammar`
        self._trying = threading.Lock()  # held by who asks the worker
        self._worker: Worker | None = None
        self._fault_by_grammar: Bounded[Grammar, str] = Bounded(MAX_KNOWN)  # "": it has none

    def knows(self, grammar: Grammar) -> bool:
        """Return whether it was checked of late."""
        return self._known(grammar) is not None

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequest`, which names what is not supported, or `Overloaded` where that cannot be said now.

        Takes 2 s of processor time at most where it is new, usually some milliseconds. New ones are compiled one after
        the other, so that whatever many ask for at once takes one core and leaves the others to who generates.
        """
        fault = self._known(grammar)
        if fault is None:
            with self._trying:
                fault = self._known(grammar)
                if fault is None:
                    fault = self._tried(grammar)
                    with self._lock:
                        self._fault_by_grammar[grammar] = fault
        if fault:
            raise InvalidRequest(grammar.field, None, fault)

    def _known(self, grammar: Grammar) -> str | None:
        with self._lock:
            return self._fault_by_grammar.get(grammar)

    def _tried(self, grammar: Grammar) -> str:
        if not self._tokenizer.eos_token_ids:
            return NO_TOKENIZER
        deadline = time.monotonic() + _MAX_WAIT_S
        try:
            question = json.dumps({"source": source_of(grammar)}).encode()
        except ValueError as error:
            return brief(str(error))
        try:
            if self._worker is not None and not self._worker.is_sound:
                self._worker.close()
                self._worker = None
            if self._worker is None:
                first = {**tokens_arguments(self._tokenizer, 0), "limits": LIMITS}
                self._worker = Worker(_SCRIPT, first, deadline)
        except ValueError as error:  # whatever is strange about a checkpoint's tokenizer
            logger.warning("tokenizer not usable with grammars error=%s", error)
            return STRANGE_TOKENIZER
        except (OSError, EOFError) as error:
            raise Overloaded("the process that compiles grammars did not start") from error
        try:
            answer = self._worker.ask(question, deadline)
        except (OSError, EOFError) as error:
            raise Overloaded("the process that compiles grammars has ended") from error
        if "error" in answer:
            raise Overloaded(f"the grammar could not be compiled now: {answer['error']}")
        return answer["fault"] or ""


def tokens_arguments(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return `tokens_of`'s arguments; `vocab_size`: of the model, which may have more tokens than its tokenizer."""
    return {
        "tokenizer": tokenizer.to_json(),
        "vocab_size": max(vocab_size, tokenizer.vocab_size),
        "eos_token_ids": list(tokenizer.eos_token_ids),
    }


def source_of(grammar: Grammar) -> str:
    """Write a grammar as llguidance reads it."""
    from llguidance import LLMatcher

    text = grammar.text
    if grammar.kind in ("json_schema", "json_object"):
        schema = schema_of(text)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), None, {**JSON_OPTIONS, **name_options(schema)})
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if grammar.kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(text + _NO_FORCING)


def schema_of(given: str | Mapping[str, Any]) -> Any:
    """Return a schema, given as JSON or as what that means, as llguidance is to have it; raises `ValueError`."""
    try:
        return rewritten(json.loads(given, parse_float=read_float) if isinstance(given, str) else given)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def name_options(schema: Any) -> JsonCompileOptions:
    r"""Return the options under which what an object's names say holds; raises `ValueError` where there are none.

    llguidance counts a free name twice that is written twice, and does not know that `\u0061` is an `a`. Without `\u`
    it leaves out of a text what can be written in no other way.
    """
    has_controls = is_open = False
    for part in parts(schema):
        if isinstance(part, str):
            has_controls |= _CONTROLS.search(part) is not None
        if not isinstance(part, Mapping):
            continue
        num_least, required = part.get("minProperties"), part.get("required")
        num_required = len(set(map(str, required))) if isinstance(required, list | tuple) else 0
        if isinstance(num_least, int | float) and num_least > num_required + 1:
            raise ValueError('is not supported: "minProperties" that counts more than one name that is not required')
        names, by_pattern = part.get("properties"), part.get("patternProperties")
        is_open |= bool(names or by_pattern) and part.get("additionalProperties") is not False
        patterns = [part.get("pattern"), *(by_pattern if isinstance(by_pattern, Mapping) else ())]
        for pattern in patterns:
            if isinstance(pattern, str) and (_PATTERN_CONTROLS.search(pattern) or _CONTROLS.search(pattern)):
                has_controls = True
    if has_controls and is_open:
        raise ValueError('is not supported: control characters, unless "additionalProperties" is false')
    return {"json_allowed_escapes": _ESCAPES + ("u" if has_controls else "")}
