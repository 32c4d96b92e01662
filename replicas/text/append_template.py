"""Chat templates render whole conversations; this renders what a conversation grows by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mneme.errors import InvalidRequest

_ANSWER = "an answer of 8241 words"  # nothing that a template would write itself
_BEFORE = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER})


class Appended(NamedTuple):
    """The text behind an answer: what closes it, then the new messages."""

    text: str
    num_closing_chars: int


class Render(Protocol):
    """`Tokenizer.render_chat` with a request's own options."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = ...) -> str: ...


def render_appended(render: Render, messages: Sequence[Mapping[str, Any]]) -> Appended:
    """Render a stand-in conversation with and without the messages, and keep what follows its answer.

    Raises `InvalidRequest` as `Tokenizer.render_chat` does, and where the template rewrites the answer.
    """
    ends = [
        text.partition(_ANSWER)[1:]
        for text in (render(_BEFORE, add_generation_prompt=False), render([*_BEFORE, *messages]))
    ]
    if not all(found for found, _ in ends):
        raise InvalidRequest("session.append", True, "this model's chat template cannot go on behind an answer")
    closed, whole = (rest for _, rest in ends)
    return Appended(whole, len(closed) if whole.startswith(closed) else 0)
