"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, of text and documents, over the same engines.

A body becomes a chat request: `system` is its first message, a document block a document part (docs/documents.md).
Every prompt prefix is cached, so `cache_control` marks change nothing; what was found is told as
`cache_read_input_tokens`. Tools, images, thinking and an assistant's message to go on from are refused, as no answer
would heed them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request

from mneme.cluster.http.answers import Answer, Choice, Delta, event
from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.completions import run_chat
from mneme.cluster.http.error_response import anthropic_error
from mneme.cluster.http.protocol import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    BlendBody,
    Body,
    ChatRequest,
    SessionOptions,
    TruncationOptions,
    validate,
)
from mneme.cluster.http.stream import RunResponse
from mneme.errors import InvalidRequest, MnemeError
from mneme.replicas.config import MAX_TIMEOUT_S
from mneme.replicas.request import MAX_STOPS

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class TextSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class Block(Body):
    """Text, or a document whose text it holds; its title is its first line."""

    type: Literal["text", "document"]
    text: str | None = None
    source: TextSource | None = None
    title: str | None = None

    def part(self, path: str) -> dict[str, Any]:
        """Return it as a content part of chat messages."""
        text = self.text if self.type == "text" else None if self.source is None else self.source.data
        if text is None:
            raise InvalidRequest(f"{path}.{'text' if self.type == 'text' else 'source'}", None, "is needed")
        title = {"title": self.title} if self.type == "document" and self.title else {}
        return {"type": self.type, "text": text, **title}


Content = str | Annotated[list[Block], Field(min_length=1, max_length=MAX_CONTENT_PARTS)]


class Turn(Body):
    role: Literal["user", "assistant"]
    content: Content


class CountRequest(Body):
    """What a prompt is made of."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[Block], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> dict[str, Any]:
        """Return model and messages of the chat request that it is."""
        if self.thinking is not None and self.thinking.get("type") not in ("disabled", "adaptive"):
            raise InvalidRequest("thinking", None, 'not supported: leave it out, or {"type": "disabled"}')
        if self.messages[-1].role == "assistant":
            raise InvalidRequest("messages", None, "the last one must be the user's: an answer is not gone on from")
        system = [{"role": "system", "content": _content(self.system, "system")}] if self.system else []
        turns = [
            {"role": turn.role, "content": _content(turn.content, f"messages[{index}].content")}
            for index, turn in enumerate(self.messages)
        ]
        return {"model": self.model, "messages": [*system, *turns]}


class MessagesRequest(CountRequest):
    """Anthropic's fields, and those of this server that chat completions take too."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    session: SessionOptions | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    truncation: TruncationOptions | None = None
    blend: BlendBody | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None

    def chat(self) -> dict[str, Any]:
        """Return the chat request that it is."""
        own = self.model_dump(exclude={"messages", "system", "thinking", "stop_sequences"}, exclude_unset=True)
        return {**own, **super().chat(), "stop": self.stop_sequences or []}


async def messages(api: ApiState, request: Request, body: MessagesRequest) -> RunResponse:
    """Answer a conversation, as Anthropic's API does."""
    chat = validate(ChatRequest, body.chat())
    return await run_chat(api, request, chat, lambda _params, model: MessagesAnswer(request.state.request_id, model.id))


async def count_tokens(api: ApiState, request: Request, body: CountRequest) -> dict[str, Any]:
    """Count the tokens of a prompt, without running it."""
    chat = validate(ChatRequest, body.chat())
    prompt = await api.render(chat.messages, api.model(chat.model), add_generation_prompt=True)
    return {"input_tokens": len(prompt.token_ids)}


class MessagesAnswer(Answer):
    """A `message`, or the events of one."""

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._has_begun = False

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> dict[str, Any]:
        """See `Answer`."""
        (choice,), (delta,) = choices, deltas
        content = [{"type": "text", "text": delta.text}] if delta.text else []
        return {**self._head, "content": content, **_ending(choice), "usage": _usage(choice)}

    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta], usage: Callable[[], str]) -> bytes:
        """See `Answer`."""
        (choice,), said = choices, b""
        for delta in deltas:
            said += self._begin(choice)
            if delta.text:
                text = {"type": "text_delta", "text": delta.text}
                said += _event("content_block_delta", index=0, delta=text)
        return said

    def end(self, choices: Sequence[Choice], *, has_usage: bool) -> bytes:
        """See `Answer`; usage is told to everyone."""
        (choice,) = choices
        block = self._begin(choice) + _event("content_block_stop", index=0)
        return block + _event("message_delta", delta=_ending(choice), usage=_usage(choice)) + _event("message_stop")

    def failed(self, error: MnemeError) -> bytes:
        """See `Answer`."""
        return event(json.dumps(anthropic_error(error, self._request_id)), "error")

    def _begin(self, choice: Choice) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(choice)}
        block = _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        return _event("message_start", message={**self._head, **empty}) + block


def _content(given: Content, path: str) -> str | list[dict[str, Any]]:
    return given if isinstance(given, str) else [block.part(f"{path}[{i}]") for i, block in enumerate(given)]


def _ending(choice: Choice) -> dict[str, Any]:
    stop, reason = choice.stream.stop_string, _STOP_REASONS.get(choice.finish_reason or "")
    return {"stop_reason": reason if stop is None else "stop_sequence", "stop_sequence": stop}


def _usage(choice: Choice) -> dict[str, int]:
    usage = choice.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": choice.num_told,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event(json.dumps({"type": kind, **fields}), kind)
