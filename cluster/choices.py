"""One choice of an answer, from the engine's events to what its client is told next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mneme.errors import InvalidRequest
from mneme.replicas.detokenizer import TextStream
from mneme.replicas.request import GenerationRequest, Logprobs, PromptUsage, TokenEvent
from mneme.replicas.tokenizer import Tokenizer


class FieldNames(NamedTuple):
    """What a client calls the fields that engines name in their refusals."""

    prompt: str
    max_tokens: str  # the prompt's name where the client gave no limit

    def worded(self, error: InvalidRequest) -> InvalidRequest:
        """The refusal in the client's words."""
        field = {"prompt": self.prompt, "max_tokens": self.max_tokens}.get(error.field or "", error.field)
        return type(error)(field, error.value, error.rule)


class Delta(NamedTuple):
    """What is new of one choice since its client was last told."""

    choice: int  # its index in the answer
    text: str
    logprobs: list[Logprobs] | None  # None: not asked for
    finish_reason: str | None
    is_first: bool


@dataclass(slots=True, kw_only=True)
class Choice:
    """Collects events; what the client has not taken yet piles up here, at most `max_tokens` of it."""

    index: int  # in the answer
    prompt_index: int  # choices with one prompt share its usage
    request: GenerationRequest
    stream: TextStream
    fields: FieldNames
    usage: PromptUsage
    num_tokens: int = 0
    finish_reason: str | None = None
    _text: str = ""
    _logprobs: list[Logprobs] | None = None
    _is_first: bool = True
    _has_told_end: bool = False

    @staticmethod
    def start(
        index: int,
        prompt_index: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        fields: FieldNames,
    ) -> Choice:
        params = request.sampling
        return Choice(
            index=index,
            prompt_index=prompt_index,
            request=request,
            stream=TextStream.of(tokenizer, params),
            fields=fields,
            usage=PromptUsage(len(request.prompt_token_ids), 0),
            _logprobs=None if params.logprobs is None else [],
        )

    def add(self, event: TokenEvent) -> None:
        self.num_tokens += len(event.token_ids)
        self._text += self.stream.push(event.token_ids)
        if self._logprobs is not None and event.logprobs:
            self._logprobs.extend(event.logprobs)
        if event.usage is not None:
            self.usage = event.usage
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self._text += self.stream.finish()

    @property
    def has_news(self) -> bool:
        return bool(self._text or self._logprobs) or (self.finish_reason is not None and not self._has_told_end)

    def take(self) -> Delta:
        delta = Delta(self.index, self._text, self._logprobs, self.finish_reason, self._is_first)
        self._text, self._is_first = "", False
        self._logprobs = None if self._logprobs is None else []
        self._has_told_end = self.finish_reason is not None
        return delta


def usage_object(choices: Iterable[Choice]) -> dict[str, Any]:
    """OpenAI's `usage`: each prompt once, all output; and where the prompts' KV came from.

    `cached_tokens` counts prompt tokens that no choice of this answer computed.
    """
    usage_by_prompt: dict[int, PromptUsage] = {}
    num_completion = 0
    for choice in choices:
        num_completion += choice.num_tokens
        known = usage_by_prompt.setdefault(choice.prompt_index, choice.usage)
        if choice.usage.cached_tokens < known.cached_tokens:
            usage_by_prompt[choice.prompt_index] = choice.usage
    usage = PromptUsage(*map(sum, zip(*usage_by_prompt.values(), strict=True)))
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": usage.prompt_tokens + num_completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "kv_details": usage.kv_details(),
    }
