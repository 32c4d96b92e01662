"""Keeps an answer inside a grammar: says after each token which may follow. The automata are llguidance's.

Where requests come in, `GrammarChecker` refuses what costs too much to compile; engines compile what it let through.
A matcher's state is a function of the grammar and of the tokens emitted, so whoever has these can make it anew.
llguidance is imported when the first grammar is compiled: engines without grammars run where it is not installed.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mneme.errors import InvalidRequest, Overloaded
from mneme.primitives import Bounded, read_float
from mneme.replicas.request import Grammar
from mneme.replicas.text.grammar_worker import MAX_COMPILED_BYTES, brief, compiled, fault_of, tokens_of
from mneme.replicas.text.schema import parts, rewritten
from mneme.replicas.text.tokenizer import Tokenizer
from mneme.replicas.text.worker import Worker

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

MAX_KNOWN = 256  # verdicts, each with its grammar of at most 128 KB
# What an engine keeps: 512 MB at worst, as each was let through with at most `MAX_COMPILED_BYTES`; a usual one has less
# than 0.5 MB. What was dropped is compiled again, in milliseconds and beside the steps.
MAX_COMPILED = (512 << 20) // MAX_COMPILED_BYTES
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

# What one request may cost the others of its steps, in seconds of its thread: so much for each token on average, and
# more where tokens before took less. A usual token takes some 0.05 ms; the first ones of a large schema take 10. The
# request's choices share it, so that many are held to some times the usual: each has `_LEAST_TOKEN_S` for a token, and
# of what is saved a share of `_MAX_SHARES`.
_TOKEN_S, _MAX_SAVED_S = 0.001, 0.25
_MAX_SHARES, _LEAST_TOKEN_S = 20, 0.0002
# Else llguidance looks for all text that must follow: of `/a+/ start` without end. It comes last: the last one holds.
_NO_FORCING = '\n%llguidance {"no_forcing": true}'

# llguidance's limits. They bound what follows a grammar: 20 ms for a token and 100 MB of an answer's states at most. Of
# what compiles it they bound the usual (0.1 s for the largest objects: the time grows with the square of the number of
# optional properties) and not all: that is left to `grammar_worker.py`.
_LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 5_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_NO_TOKENIZER = "needs a tokenizer with an end token; this model has none"
_STRANGE_TOKENIZER = "this model's tokenizer cannot be used with grammars"

Mask = npt.NDArray[np.int32]  # bit i of word j: token 32 j + i


def without(mask: Mask, barred_ids: Sequence[int]) -> Mask:
    """Return the mask without these tokens, or as it is where it has no others."""
    if not barred_ids:
        return mask
    left = mask.copy()
    for token_id in barred_ids:
        if token_id < 32 * len(left):
            left[token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)
    return left if left.any() else mask


class Matcher:
    """Follows one answer through a grammar."""

    def __init__(
        self,
        compiled: LLMatcher,
        emitted: Sequence[int],
        after: int | None,
        clock: Callable[[], float],
        num_choices: int = 1,
    ) -> None:
        """Take ownership of `compiled`.

        emitted      tokens that the answer has already
        after        as in `Grammar`
        num_choices  of its request
        """
        self._state, self._clock = compiled, clock
        share = 1 / min(num_choices, _MAX_SHARES)
        self._token_s, self._max_saved_s = max(share * _TOKEN_S, _LEAST_TOKEN_S), share * _MAX_SAVED_S
        self._left_s = self._max_saved_s  # what it may take until the next token
        self._awaited = after
        if after is not None and after in emitted:
            self._awaited, emitted = None, emitted[emitted.index(after) + 1 :]
        self.is_over = False  # the grammar has ended: nothing may follow
        self.error: str | None = None
        if emitted and not self.is_waiting:
            compiled.consume_tokens(list(emitted))
        self._mask: Mask | None = None  # None: not computed for this state
        self._look()
        self.is_over = False  # what ended before has its end token yet to come

    @property
    def is_waiting(self) -> bool:
        """Return whether the token that it begins behind was not drawn yet: any may follow."""
        return self._awaited is not None

    def push(self, token_id: int) -> None:
        """Go on with a token; `error` says why it cannot."""
        if self.is_waiting:
            self._awaited = None if token_id == self._awaited else self._awaited
            return
        began_s = self._clock()
        self._state.consume_token(token_id)
        self._mask = None
        self._look()
        self._left_s = min(self._left_s + self._token_s, self._max_saved_s)
        self._charge(began_s)

    def mask(self, barred_ids: Sequence[int]) -> Mask:
        """Return which tokens may follow; of those, barred ones only where there are no others.

        Computed here and not by `push`, so that a device computes the logits meanwhile. Where that fails no token may
        follow, and `error` says why.
        """
        if self._mask is None:
            began_s = self._clock()
            bits = self._state.compute_bitmask()
            self._mask = np.frombuffer(bits, np.int32)
            self._look(bits)
            self._charge(began_s)
            if self.error is not None:
                self._mask = np.zeros_like(self._mask)
        return without(self._mask, barred_ids)

    def _charge(self, began_s: float) -> None:
        self._left_s -= self._clock() - began_s
        if self._left_s < 0 and self.error is None:
            self.error = f"the grammar is too complex: its tokens take more than {1000 * self._token_s:.2g} ms each"

    def _look(self, bits: bytes | None = None) -> None:
        if self._state.is_stopped():  # so it is after an error too
            self.is_over = True
        elif bits is None:
            return
        self.error = self.error or fault_of(self._state, bits)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones. Thread-safe.

    For engines: what a client sent has passed `GrammarChecker`, so it is compiled right here, and no process is started
    beside steps. `LLM` has no such check in front: who hands it a grammar of others may wait for it without end.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int = 0, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """`vocab_size`: of the model, which may have more tokens than its tokenizer. `clock`: of the calling thread."""
        self._tokenizer, self._vocab_size, self._clock = tokenizer, vocab_size, clock
        self._lock = threading.Lock()  # of `_compiled`
        self._compiling = threading.Lock()  # held by who checks one that is not known
        self._tokens: LLTokenizer | None = None
        self._compiled: Bounded[Grammar, LLMatcher | str] = Bounded(MAX_COMPILED)

    def check(self, grammar: Grammar) -> None:
        """Compile it, new ones one after the other; raises `InvalidRequest`, which names what is not supported."""
        with self._lock:
            is_known = self._compiled.get(grammar) is not None
        with nullcontext() if is_known else self._compiling:
            self._compile(grammar)

    def matcher(self, grammar: Grammar, emitted: Sequence[int], num_choices: int = 1) -> Matcher:
        """Make the matcher of one of so many choices, behind `emitted`; raises `InvalidRequest`."""
        matcher = Matcher(self._compile(grammar).deep_copy(), emitted, grammar.after, self._clock, num_choices)
        matcher.mask(())
        if matcher.error is not None:
            raise InvalidRequest(grammar.field, None, matcher.error)
        return matcher

    def mask_of(self, token_ids: Sequence[int]) -> Mask:
        """Return the mask of these tokens alone, as long as those of matchers are."""
        num_tokens = max(self._vocab_size, 0 if self._tokenizer is None else self._tokenizer.vocab_size)
        bits = np.zeros(32 * -(-num_tokens // 32), np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled_anew(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
        if isinstance(compiled, str):
            raise InvalidRequest(grammar.field, None, compiled)
        return compiled

    def _compiled_anew(self, grammar: Grammar) -> LLMatcher | str:
        """Return the compiled grammar, or why there is none."""
        if self._tokens is None:
            if self._tokenizer is None or not self._tokenizer.eos_token_ids:
                return _NO_TOKENIZER
            try:
                self._tokens = tokens_of(**_tokens_arguments(self._tokenizer, self._vocab_size))
            except Exception:  # whatever is strange about a checkpoint's tokenizer
                logger.exception("tokenizer not usable with grammars")
                return _STRANGE_TOKENIZER
        try:
            return compiled(self._tokens, _source(grammar), _LIMITS)
        except ValueError as error:
            return brief(str(error))


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
            return _NO_TOKENIZER
        deadline = time.monotonic() + _MAX_WAIT_S
        try:
            question = json.dumps({"source": _source(grammar)}).encode()
        except ValueError as error:
            return brief(str(error))
        try:
            if self._worker is not None and not self._worker.is_sound:
                self._worker.close()
                self._worker = None
            if self._worker is None:
                first = {**_tokens_arguments(self._tokenizer, 0), "limits": _LIMITS}
                self._worker = Worker(_SCRIPT, first, deadline)
        except ValueError as error:  # whatever is strange about a checkpoint's tokenizer
            logger.warning("tokenizer not usable with grammars error=%s", error)
            return _STRANGE_TOKENIZER
        except (OSError, EOFError) as error:
            raise Overloaded("the process that compiles grammars did not start") from error
        try:
            answer = self._worker.ask(question, deadline)
        except (OSError, EOFError) as error:
            raise Overloaded("the process that compiles grammars has ended") from error
        if "error" in answer:
            raise Overloaded(f"the grammar could not be compiled now: {answer['error']}")
        return answer["fault"] or ""


def _tokens_arguments(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return `tokens_of`'s arguments; `vocab_size`: of the model, which may have more tokens than its tokenizer."""
    return {
        "tokenizer": tokenizer.to_json(),
        "vocab_size": max(vocab_size, tokenizer.vocab_size),
        "eos_token_ids": list(tokenizer.eos_token_ids),
    }


def _source(grammar: Grammar) -> str:
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
