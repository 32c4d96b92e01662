"""Log-probabilities in the shapes of the two completion APIs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mneme.replicas.request import Logprobs
from mneme.replicas.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no -Infinity; OpenAI uses this number for it


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Logprobs], num_top: int) -> dict[str, Any]:
    """`choices[i].logprobs` of a chat completion."""
    content = [
        {
            **_entry(tokenizer, item.token_id, item.logprob),
            "top_logprobs": [_entry(tokenizer, *top) for top in item.top[:num_top]],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[Logprobs], num_top: int, first_offset: int
) -> dict[str, Any]:
    """`choices[i].logprobs` of a completion; `first_offset` is where the first token's text begins."""
    tokens = [tokenizer.token_text(item.token_id) for item in logprobs]
    offsets = [first_offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(item.logprob) for item in logprobs],
        "top_logprobs": [_top_by_text(tokenizer, item, num_top) for item in logprobs],
        "text_offset": offsets[:-1],
    }


def _top_by_text(tokenizer: Tokenizer, item: Logprobs, num_top: int) -> dict[str, float]:
    """The most likely tokens and the chosen one; of two with the same text the likelier counts."""
    best: dict[str, float] = {}
    for token_id, logprob in (*item.top[:num_top], (item.token_id, item.logprob)):
        best.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return best


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > _LEAST else _LEAST
