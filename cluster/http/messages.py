"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same engines.

A body becomes a chat request (`wire/anthropic.py`). Every prompt prefix is cached as long as there is room; a
`cache_control` mark (`CacheMark`) pins it for its time, and changes no token: it becomes `GenerationRequest.pinned`,
which `replicas/engine/pins.py` pins when the answer ends. `cache_read_input_tokens` counts what was found.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from starlette.requests import Request

from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.completions import renamed, run_chat
from mneme.cluster.http.error_response import anthropic_error
from mneme.cluster.http.stream import AnswerInParts, Part, RunResponse, event
from mneme.cluster.wire import answers
from mneme.cluster.wire.anthropic import CountRequest, MessagesRequest
from mneme.cluster.wire.openai import IGNORED_HEADER, ChatRequest, validate
from mneme.errors import ContextLengthExceeded, InvalidRequest, MnemeError
from mneme.replicas.choices import Choice
from mneme.replicas.request import SamplingParams
from mneme.replicas.text.prompts import num_common

B = TypeVar("B", bound=CountRequest)

_BLOCK_TOKENS = 64
# What chat completions call the fields of a body here.
_FIELDS = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name",
    r"tools(\[\d+\])\.function\.parameters": r"tools\1.input_schema",
    r"tools(\[\d+\])\.function": r"tools\1",
}
_STOP_REASONS: Mapping[str, answers.StopReason] = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
_CHANGES: Sequence[tuple[str, answers.MissType]] = (
    *(("model", "model_changed"), ("tools", "tools_changed"), ("system", "system_changed")),
)


async def messages(
    api: ApiState, request: Request, body: MessagesRequest
) -> RunResponse[answers.AnthropicMessage, answers.AnthropicEvent]:
    """Answer a conversation, as Anthropic's API does."""
    body.check()
    body, chat = await _placed(api, request, body)
    marks = body.cache_marks()
    tenant: str = request.state.tenant

    def worded(_params: SamplingParams) -> MessagesAnswer:
        return MessagesAnswer(request.state.request_id, api.model.id, is_silent=not body.max_tokens, compare=compare)

    def compare(message_id: str, prompt_token_ids: Sequence[int]) -> answers.CacheMissReason | None:
        """Remember the prompt of a message, and say how it differs from an earlier one."""
        if body.diagnostics is None:
            return None
        own = PromptRecord.of(chat, prompt_token_ids)
        api.prompts[tenant, message_id] = own
        previous = body.diagnostics.previous_message_id
        return None if previous is None else own.miss_reason(api.prompts.get((tenant, previous)))

    def limit_of(left: int, asked: int | None) -> int | None:
        """Cut what was asked for to what is left, and say so: agents ask for as much as their own models may say."""
        if asked is None or asked <= left:
            return asked
        if left <= 0:  # agents know by these words that they are to compact
            most = api.model.max_context
            raise ContextLengthExceeded("messages", None, f"prompt is too long: {most - left} tokens > {most} maximum")
        request.state.answer_headers.append((b"x-mneme-max-tokens", str(left).encode()))
        return None

    try:
        return await run_chat(api, request, chat, worded, marks=marks, limit_of=limit_of)
    except InvalidRequest as error:
        raise renamed(error, _FIELDS) from None


async def count_tokens(api: ApiState, request: Request, body: CountRequest) -> answers.InputTokens:
    """Count the tokens of a prompt, without running it."""
    _, chat = await _placed(api, request, body)
    prompt = await api.render(chat.messages, add_generation_prompt=True, template_variables=chat.variables)
    return {"input_tokens": len(prompt.token_ids)}


async def _placed(api: ApiState, request: Request, body: B) -> tuple[B, ChatRequest]:
    """Return the body with system messages where the template takes them, and the chat request that it is."""
    if body.thinking is not None and body.thinking.type != "disabled" and api.dialect.reasoning is None:
        request.state.answer_headers.append((IGNORED_HEADER, b"thinking"))
    if body.has_notes:
        body = body.placed(folds=not await api.takes_notes())
    given = body.chat(reasons=api.dialect.reasoning is not None)
    try:
        return body, validate(ChatRequest, given)
    except InvalidRequest as error:
        raise renamed(error, _FIELDS) from None


class PromptRecord(NamedTuple):
    """Tells whether a later prompt goes on from this one: digests, so that nothing of what was said is kept."""

    model: str
    tools: int
    system: int
    messages: tuple[int, ...]
    others: int  # what else the prompt depends on
    blocks: array[int]  # of its ids
    num_tokens: int

    @staticmethod
    def of(chat: ChatRequest, prompt_token_ids: Sequence[int]) -> PromptRecord:
        dumped = [hash(message.model_dump_json()) for message in chat.messages]
        num_system = int(chat.messages[0].role == "system")
        ids = tuple(prompt_token_ids)
        return PromptRecord(
            chat.model,
            hash(json.dumps(chat.variables.get("tools"))),
            hash(tuple(dumped[:num_system])),
            tuple(dumped[num_system:]),
            hash(json.dumps([chat.chat_template_kwargs, chat.tool_choice == "none"])),
            array("q", [hash(ids[i : i + _BLOCK_TOKENS]) for i in range(0, len(ids), _BLOCK_TOKENS)]),
            len(ids),
        )

    def miss_reason(self, previous: PromptRecord | None) -> answers.CacheMissReason | None:
        """Say why this prompt does not go on from the previous one; None: it does."""
        if previous is None:
            return {"type": "previous_message_not_found"}
        num_found = num_common(self.blocks, previous.blocks) * _BLOCK_TOKENS
        num_missed = max(previous.num_tokens - num_found, 0)
        for name, kind in _CHANGES:
            if getattr(self, name) != getattr(previous, name):
                return {"type": kind, "cache_missed_input_tokens": num_missed}
        if self.messages[: len(previous.messages)] != previous.messages:
            return {"type": "messages_changed", "cache_missed_input_tokens": num_missed}
        return None if self.others == previous.others else {"type": "unavailable"}


class MessagesAnswer(AnswerInParts[answers.AnthropicMessage, answers.AnthropicEvent]):
    """A `message`, or the events of one: blocks of thinking, text and calls, one after the other."""

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        is_silent: bool,
        compare: Callable[[str, Sequence[int]], answers.CacheMissReason | None],
    ) -> None:
        """`compare`: given its id and its prompt, says why that did not go on from an earlier one."""
        super().__init__(is_silent=is_silent)
        self._request_id = request_id
        message_id = f"msg_{request_id}"
        self._head: answers.AnthropicHead = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._compare = compare

    def failed(self, error: MnemeError) -> bytes:
        """See `Answer`."""
        return event(json.dumps(anthropic_error(error, self._request_id)), "error")

    def _whole(self, choice: Choice) -> answers.AnthropicMessage:
        return self._message(choice, self._ending(choice))

    def _begin(self, choice: Choice) -> Iterator[answers.AnthropicEvent]:
        message = self._message(choice, {"stop_reason": None, "stop_sequence": None})
        yield {"type": "message_start", "message": message}

    def _message(self, choice: Choice, ending: answers.AnthropicEnding) -> answers.AnthropicMessage:
        return {
            **self._head,
            **self._diagnostics(choice),
            "content": list(map(_block, self.parts)),
            **ending,
            "usage": self._usage(choice),
        }

    def _begin_part(self, part: Part) -> Iterator[answers.AnthropicEvent]:
        yield {"type": "content_block_start", "index": part.index, "content_block": _block(part)}

    def _grow_part(self, part: Part, text: str) -> Iterator[answers.AnthropicEvent]:
        delta: answers.AnthropicDelta
        if part.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        elif part.kind == "message":
            delta = {"type": "text_delta", "text": text}
        elif text:
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            return
        yield {"type": "content_block_delta", "index": part.index, "delta": delta}

    def _end_part(self, part: Part, *, is_cut: bool) -> Iterator[answers.AnthropicEvent]:
        if part.kind == "reasoning":
            signed: answers.AnthropicDelta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": part.index, "delta": signed}
        yield {"type": "content_block_stop", "index": part.index}

    def _end(self, choice: Choice) -> Iterator[answers.AnthropicEvent]:
        yield {"type": "message_delta", "delta": self._ending(choice), "usage": self._usage(choice)}
        yield {"type": "message_stop"}

    def _ending(self, choice: Choice) -> answers.AnthropicEnding:
        reason = "max_tokens" if self._is_silent else _STOP_REASONS.get(choice.finish_reason or "")
        stop = choice.stream.stop_string if reason == "end_turn" else None
        return {"stop_reason": reason if stop is None else "stop_sequence", "stop_sequence": stop}

    def _diagnostics(self, choice: Choice) -> answers.AnthropicDiagnosed:
        reason = self._compare(self._head["id"], choice.request.prompt_token_ids)
        return {} if reason is None else {"diagnostics": {"cache_miss_reason": reason}}

    def _usage(self, choice: Choice) -> answers.AnthropicUsage:
        """Count the prompt's tokens: found ones, those computed up to a mark, and the others."""
        usage, begin = choice.usage, choice.usage.cached_tokens
        created = dict.fromkeys((300.0, 3600.0), 0)
        for num_tokens, ttl_s in sorted(choice.request.pinned):
            end = max(min(num_tokens, usage.prompt_tokens), begin)  # fewer, where it was truncated
            created[ttl_s] += end - begin
            begin = end
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - sum(created.values()),
            "cache_creation_input_tokens": sum(created.values()),
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created[300.0],
                "ephemeral_1h_input_tokens": created[3600.0],
            },
            "output_tokens": 0 if self._is_silent else choice.num_told,
        }


def _block(part: Part) -> answers.AnthropicBlock:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "message":
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": part.arguments}
