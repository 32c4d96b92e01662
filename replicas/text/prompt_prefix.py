"""What all conversations have in common that begin with the same messages, in tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mneme.errors import InvalidRequest
from mneme.replicas.text.append_template import Render

# First user messages that begin as differently as they can: what is the same before these is the same before any.
_STAND_INS = ("a question", "\n\n- 1", " 42", "\u4e16\u754c", "<b>")
_SYSTEM_ROLES = ("system", "developer")


def conversation_prefix(
    render: Render, encode: Callable[[str], list[int]], messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The ids that a conversation begins with, whatever a user says next; behind a user, what an answer goes on from.

    Raises `InvalidRequest` as `Tokenizer.render_chat` does, and if the template puts nothing of it first.
    """
    if messages[-1]["role"] in ("user", "tool"):
        return encode(render(messages))
    texts = [render([*messages, {"role": "user", "content": content}]) for content in _STAND_INS]
    shared = encode(texts[0])
    for text in texts[1:]:
        shared = shared[: _num_common(shared, encode(text))]
    if not shared:
        raise InvalidRequest("messages", f"{len(messages)} messages", "the chat template puts what follows before them")
    return shared


def num_system_tokens(
    render: Render, encode: Callable[[str], list[int]], messages: Sequence[Mapping[str, Any]], ids: Sequence[int]
) -> int:
    """How many of a rendered conversation's first ids are its system prompt, up to where what follows it differs."""
    num_messages = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM_ROLES), len(messages))
    if not num_messages:
        return 0
    return _num_common(conversation_prefix(render, encode, messages[:num_messages]), ids)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
