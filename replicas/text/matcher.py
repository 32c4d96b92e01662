"""Keeps an answer inside a grammar: says after each token which may follow. The automata are llguidance's.

A matcher's state is a function of the grammar and of the tokens emitted, so whoever has these can make it anew.
llguidance is imported when the first grammar is compiled: engines without grammars run where it is not installed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mneme.errors import InvalidRequest
from mneme.primitives import Bounded
from mneme.replicas.request import Grammar
from mneme.replicas.text.grammar import LIMITS, NO_TOKENIZER, STRANGE_TOKENIZER, source_of, tokens_arguments
from mneme.replicas.text.grammar_worker import MAX_COMPILED_BYTES, brief, compiled, fault_of, tokens_of
from mneme.replicas.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

# What an engine keeps: 512 MB at worst, as each was let through with at most `MAX_COMPILED_BYTES`; a usual one has less
# than 0.5 MB. What was dropped is compiled again, in milliseconds and beside the steps.
MAX_COMPILED = (512 << 20) // MAX_COMPILED_BYTES

# What one request may cost the others of its steps, in seconds of its thread: so much for each token on average, and
# more where tokens before took less. A usual token takes some 0.05 ms; the first ones of a large schema take 10. The
# request's choices share it, so that many are held to some times the usual: each has `_LEAST_TOKEN_S` for a token, and
# of what is saved a share of `_MAX_SHARES`.
_TOKEN_S, _MAX_SAVED_S = 0.001, 0.25
_MAX_SHARES, _LEAST_TOKEN_S = 20, 0.0002

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
                return NO_TOKENIZER
            try:
                self._tokens = tokens_of(**tokens_arguments(self._tokenizer, self._vocab_size))
            except Exception:  # whatever is strange about a checkpoint's tokenizer
                logger.exception("tokenizer not usable with grammars")
                return STRANGE_TOKENIZER
        try:
            return compiled(self._tokens, source_of(grammar), LIMITS)
        except ValueError as error:
            return brief(str(error))
