"""Compiles grammars that come from clients: what `text/worker.py` runs in a process of its own.

No limit of llguidance's bounds its compiler: whether an intersection of patterns is empty takes time that doubles with
each, and `multipleOf` a state for each remainder. So each grammar is tried in a fork of this process, which ends with
it: it has so much processor time and memory, and begins with the tokenizer and nothing of grammars before it.

The first question has the tokenizer and `limits` (`LLParserLimits`' arguments); each later one is `{"source": str}`, a
grammar as llguidance reads it, answered by `{"fault": str | None}`: why it cannot be followed. Engines compile with the
same functions. Of this package nothing is imported, as a worker has only this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CPU_S = 2  # of a usual one: 0.002 s, of 2,000 properties 0.1
MAX_COMPILED_BYTES = 16 << 20  # of a usual one: under 0.5 MB, of 2,000 properties 12
_MAX_ADDED_BYTES = 256 << 20  # of address space, while it is compiled
_MAX_ERROR_CHARS = 400
_TOO_COMPLEX = f"is too complex: it takes more than {MAX_CPU_S} s or {MAX_COMPILED_BYTES >> 20} MB to compile"
_GOOD_ENDS = ("NoExtension", "NoExtensionBias", "EndOfSentence")


def tokens_of(tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """`tokenizer`: as `tokenizer.json` has it."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)


def compiled(tokens: LLTokenizer, source: str, limits: Mapping[str, Any]) -> LLMatcher | str:
    """Return the compiled grammar, or why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits(**limits))
    if matcher.is_error():
        return f"is not supported: {brief(matcher.get_error())}"
    begun = matcher.deep_copy()
    bits = begun.compute_bitmask()
    return fault_of(begun, bits) or matcher


def fault_of(state: LLMatcher, bits: bytes | None = None) -> str | None:
    """Return why a grammar cannot be followed from here; `bits`: which tokens may follow, where that is known."""
    fault = None
    if state.is_error():
        fault = brief(state.get_error())
    elif state.is_stopped() and state.stop_reason() not in _GOOD_ENDS:
        fault = state.stop_reason()
    elif bits is not None and bits == bytes(len(bits)):  # of a schema whose references go round, for one
        fault = "it lets nothing follow and does not end"
    return fault and f"the grammar could not be followed: {fault}"


def brief(error: str) -> str:
    """Put it on one line; of a long one, which quotes the grammar, head and tail say what is wrong."""
    line, half = " ".join(error.split()), _MAX_ERROR_CHARS // 2
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[:half]} ... {line[-half:]}"


def begin(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    tokens = tokens_of(first["tokenizer"], first["vocab_size"], first["eos_token_ids"])
    with contextlib.suppress(OSError, AttributeError):  # not glibc: what is free here is not counted below
        ctypes.CDLL(None).malloc_trim(0)
    return lambda question: _tried(lambda: compiled(tokens, question["source"], first["limits"]))


def _tried(work: Callable[[], LLMatcher | str]) -> dict[str, Any]:
    """Do it in a fork; raises `RuntimeError` if that was ended from outside."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps({"fault": _bounded(work)}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM):
        raise RuntimeError("the fork was ended")
    answer: dict[str, Any] = json.loads(said) if said else {"fault": _TOO_COMPLEX}
    return answer


def _bounded(work: Callable[[], LLMatcher | str]) -> str | None:
    """Return what is wrong with what `work` compiles; ends this process where it does not stay within bounds."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # the parent's socket, and a log that clients must not fill
        os.dup2(nowhere, descriptor)
    total, before = _memory_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (total + _MAX_ADDED_BYTES, total + _MAX_ADDED_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))  # a fork begins with none used
    found = work()
    if isinstance(found, str):
        return found
    _, after = _memory_bytes()
    return _TOO_COMPLEX if after - before > MAX_COMPILED_BYTES else None


def _memory_bytes() -> tuple[int, int]:
    """Return the address space of this process, and what of it is in memory and no file's."""
    with open("/proc/self/statm") as file:
        total, resident, shared = map(int, file.read().split()[:3])
    return total * resource.getpagesize(), (resident - shared) * resource.getpagesize()
