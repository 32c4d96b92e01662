"""Prompts that are a part of a conversation: what it grows by, and what all that begin alike have in common.

Chat templates render whole conversations only, so both render stand-ins and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from mneme.errors import InvalidRequest

_ANSWER = "an answer of 8241 words"  # nothing that a template would write itself
_BEFORE = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER})
# First user messages that begin as differently as they can: what is the same before these is the same before any.
_STAND_INS = ("a question", "\n\n- 1", " 42", "\u4e16\u754c", "<b>")
_NOTE = "a note of 5113 words"
_SYSTEM_ROLES = ("system", "developer")
ROLES = (*_SYSTEM_ROLES, "user", "assistant", "tool")  # of messages


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


def render_unfinished(render: Render, messages: Sequence[Mapping[str, Any]]) -> str:
    """Render a conversation up to the end of its last message's text, for an answer that goes on with it.

    Raises `InvalidRequest` as `Tokenizer.render_chat` does, and where the template rewrites that text.
    """
    last = messages[-1]["content"]
    before, found, behind = render(messages, add_generation_prompt=False).rpartition(last.strip())
    if not found:
        raise InvalidRequest("continue_final_message", True, "this model's chat template rewrites the last message")
    blanks = last[len(last.rstrip()) :]
    return before + found + (blanks if behind.startswith(blanks) else "")


def takes_notes(render: Render) -> bool:
    """Return whether the template writes a system message within a conversation where it stands, and as the system's.

    Other templates refuse it, leave it out, put it first, or write it as somebody else's.
    """
    said = [{"role": "system", "content": "be brief"}, *_BEFORE, {"role": "user", "content": "another question"}]

    def with_note(place: int, role: str) -> str:
        return render([*said[:place], {"role": role, "content": _NOTE}, *said[place:]])

    for place in (len(said) - 1, len(said)):
        try:
            plain, noted = render(said), with_note(place, "system")
        except InvalidRequest:
            return False
        begin = num_common(plain, noted)
        is_added = noted == plain[:begin] + noted[begin : begin - len(plain) or None] + plain[begin:]
        is_behind = noted.find(_NOTE) > noted.find(said[place - 1]["content"])
        if noted.count(_NOTE) != 1 or not is_added or not is_behind:
            return False
        for role in ("user", "assistant"):
            with suppress(InvalidRequest):  # who bars two in a row knows the difference
                if noted == with_note(place, role):
                    return False
    return True


def conversation_prefix(
    render: Render, encode: Callable[[str], list[int]], messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the ids that a conversation begins with, whatever a user says next; behind a user, the whole prompt.

    Raises `InvalidRequest` as `Tokenizer.render_chat` does, and if the template puts nothing of it first.
    """
    if messages[-1]["role"] in ("user", "tool"):
        return encode(render(messages))
    texts = [render([*messages, {"role": "user", "content": content}]) for content in _STAND_INS]
    shared = encode(texts[0])
    for text in texts[1:]:
        shared = shared[: num_common(shared, encode(text))]
    if not shared:
        raise InvalidRequest("messages", f"{len(messages)} messages", "the chat template puts what follows before them")
    return shared


def num_system_tokens(
    render: Render, encode: Callable[[str], list[int]], messages: Sequence[Mapping[str, Any]], ids: Sequence[int]
) -> int:
    """Count the first ids of a rendered conversation that are its system prompt, up to where what follows differs."""
    num_messages = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM_ROLES), len(messages))
    if not num_messages:
        return 0
    return num_common(conversation_prefix(render, encode, messages[:num_messages]), ids)


def num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """Count the first items that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
