"""What the offline API returns, and how it is collected from events."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from mneme.errors import MnemeError
from mneme.replicas.request import GenerationRequest, Logprobs, PromptUsage, TokenEvent
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.tokenizer import Tokenizer

_NOT_A_LIST = (
    "LLM.chat answers one conversation with one RequestOutput (its text: .outputs[0].text); "
    "for a list, as vLLM gives, pass a list of conversations: llm.chat([messages])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: str  # "stop" or "length"
    logprobs: tuple[Logprobs, ...] | None = field(repr=False)


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

    request_id: str
    prompt: str | None  # the text, of a chat the rendered one; None for token ids
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """Whether every choice has ended: `LLM` returns when they have."""
        return all(choice.finish_reason for choice in self.outputs)

    def __iter__(self) -> NoReturn:
        raise TypeError(_NOT_A_LIST)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(_NOT_A_LIST)


@contextmanager
def progress_of(num_choices: int, shown: bool | None) -> Iterator[Callable[[TokenEvent], None]]:
    """Show on stderr how far choices are; the body tells it of their events.

    shown  None: for several, where stderr is a terminal
    """
    if not (sys.stderr.isatty() and num_choices > 1 if shown is None else shown):
        yield lambda event: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rate = TextColumn("{task.fields[num_tokens]} tokens, {task.fields[tokens_per_s]:.0f}/s")
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), rate)
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=num_choices, num_tokens=0, tokens_per_s=0.0)

        def take(event: TokenEvent) -> None:
            nonlocal num_tokens
            num_tokens += len(event.token_ids)
            per_s = num_tokens / max(bars.tasks[0].elapsed or 0.0, 1e-3)
            is_end = event.finish_reason is not None
            bars.update(task, advance=1 if is_end else 0, num_tokens=num_tokens, tokens_per_s=per_s)

        yield take


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
        first = self.requests[0]
        return RequestOutput(
            request_id=first.request_id.partition(".")[0],
            prompt=first.prompt_text,
            prompt_token_ids=first.prompt_token_ids,
            outputs=tuple(choice.output() for choice in self._choices.values()),
            metrics=metrics,
        )


class _Choice:
    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        params = request.sampling
        self._index = request.choice_index
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
            index=self._index,
            text=self._stream.text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )
