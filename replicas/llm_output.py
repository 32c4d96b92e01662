"""What the offline API returns, and how it is collected from events."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mneme.errors import MnemeError
from mneme.replicas.detokenizer import TextStream
from mneme.replicas.request import GenerationRequest, Logprobs, PromptUsage, TokenEvent
from mneme.replicas.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str  # "stop" or "length"
    logprobs: tuple[Logprobs, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Figures of one request; times begin when its prompt has been tokenized."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int  # of the first choice
    truncated_tokens: int = 0  # dropped so that the others fit; not part of `prompt_tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All choices of one prompt."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics


class Job:
    """Collects the events of one prompt's choices."""

    def __init__(self, tokenizer: Tokenizer, requests: list[GenerationRequest]) -> None:
        self.requests = requests
        self._started_s = time.perf_counter()
        self._choices = {request.request_id: _Choice(tokenizer, request) for request in requests}
        self._first_s: float | None = None
        self._last_s = self._started_s
        self._usage = PromptUsage(0, 0)

    def take(self, event: TokenEvent) -> None:
        self._last_s = time.perf_counter()
        if event.finish_reason == "error":
            raise event.refusal or MnemeError(f"{event.request_id}: {event.error}")
        if self._first_s is None and event.token_ids:
            self._first_s = self._last_s
        if event.usage is not None and event.request_id == self.requests[0].request_id:
            self._usage = event.usage
        self._choices[event.request_id].take(event)

    def output(self) -> RequestOutput:
        metrics = RequestMetrics(
            ttft_s=(self._first_s or self._last_s) - self._started_s,
            total_s=self._last_s - self._started_s,
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=self._usage.cached_tokens,
            truncated_tokens=self._usage.truncated_tokens,
        )
        return RequestOutput(
            prompt_token_ids=self.requests[0].prompt_token_ids,
            outputs=tuple(choice.output() for choice in self._choices.values()),
            metrics=metrics,
        )


class _Choice:
    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        params = request.sampling
        self._stream = TextStream.of(tokenizer, params)
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self._finish_reason = ""

    def take(self, event: TokenEvent) -> None:
        self._token_ids.extend(event.token_ids)
        self._stream.push(event.token_ids)
        if self._logprobs is not None and event.logprobs:
            self._logprobs.extend(event.logprobs)
        self._finish_reason = event.finish_reason or self._finish_reason

    def output(self) -> CompletionOutput:
        self._stream.finish()
        return CompletionOutput(
            token_ids=tuple(self._token_ids),
            text=self._stream.text,
            finish_reason=self._finish_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )
