"""What is checked and resolved when an engine takes a request. Policy only: no tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mneme.errors import ContextLengthExceeded, InvalidRequest
from mneme.replicas.config import MAX_TIMEOUT_S
from mneme.replicas.request import GenerationRequest
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.truncation import MAX_WINDOWS

if TYPE_CHECKING:
    from mneme.replicas.text.tokenizer import Tokenizer


def check_request(request: GenerationRequest, vocab_size: int, window: int, *, is_windowed: bool = False) -> None:
    """Raise `InvalidRequest` for what no engine of this vocabulary and context window could run.

    is_windowed  whether some of the model's layers do not see the whole context
    """
    _check_token_ids(request, vocab_size)
    _check_truncation(request, window, is_windowed)
    _check_timeout(request)


def _check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    params = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt", None, "must have at least one token")
    listed = {
        "prompt": request.prompt_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, values in listed.items():
        if values and not 0 <= min(values) <= max(values) < vocab_size:
            worst = max(values) if min(values) >= 0 else min(values)
            raise InvalidRequest(name, worst, f"token ids are from 0 to {vocab_size - 1}")


def _check_truncation(request: GenerationRequest, window: int, is_windowed: bool) -> None:
    if request.truncation is None:
        return
    if request.truncation.strategy == "reuse_kv" and request.session_id is None:
        raise InvalidRequest("truncation.strategy", "reuse_kv", "needs a session")
    request.truncation.check_window(window)
    if is_windowed:
        request.truncation.check_sliding_windows()


def _check_timeout(request: GenerationRequest) -> None:
    timeout_s = request.timeout_s
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest("timeout_s", timeout_s, f"must be over 0 and at most {MAX_TIMEOUT_S:g} seconds")


def max_output_tokens(request: GenerationRequest, num_prompt: int, capacity: int) -> int:
    """Output tokens the request may have; raises `ContextLengthExceeded` if what it asks for can never fit.

    `capacity` is in tokens: of the context window or the whole page pool, whichever is smaller.
    """
    wanted, room = request.sampling.max_tokens, capacity - num_prompt
    if request.truncation is not None and (wanted or 1) <= MAX_WINDOWS * capacity:  # makes room when it is needed
        return wanted or max(room, int(request.truncation.ratio * capacity), 1)
    if room >= 1 and (wanted or 1) <= room:
        return wanted or room
    if request.truncation is not None:
        rule = f"at most {MAX_WINDOWS} windows of {capacity} tokens, however often it is truncated"
        raise ContextLengthExceeded("max_tokens", wanted, rule)
    asked = f"{num_prompt} prompt tokens" + (f" and {wanted} more" if wanted else "")
    rule = f"prompt and output must fit {capacity} tokens together; this asks for {asked}"
    raise ContextLengthExceeded("max_tokens" if room >= 1 else "prompt", None, rule)


def stop_stream(request: GenerationRequest, tokenizer: Tokenizer | None) -> TextStream | None:
    """What follows the output to find stop strings; it has read what was emitted before a resumption."""
    params, offset = request.sampling, request.output_offset
    if not params.stop:
        return None
    if tokenizer is None:
        raise InvalidRequest("stop", params.stop, "needs a tokenizer; this engine has none")
    emitted = request.prompt_token_ids[len(request.prompt_token_ids) - offset :]
    stream = TextStream.of(tokenizer, params, min_tokens=params.min_tokens + offset if params.min_tokens else 0)
    stream.push(emitted)
    if stream.stopped:  # in what was emitted under `min_tokens` that are used up: passed over again
        stream = TextStream.of(tokenizer, params, min_tokens=offset)
        stream.push(emitted)
    return stream
