"""One choice of an answer, from the engine's events to what its client is told next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mneme.errors import InvalidRequest
from mneme.replicas.request import GenerationRequest, Logprobs, PromptUsage, TokenEvent
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.tokenizer import Tokenizer

MAX_DELTAS = 64  # steps that a client may be behind before they are told as one


class FieldNames(NamedTuple):
    """What a client calls the fields that engines name in their refusals."""

    prompt: str
    max_tokens: str  # the prompt's name where the client gave no limit

    def worded(self, error: InvalidRequest) -> InvalidRequest:
        """The refusal in the client's words."""
        field = {"prompt": self.prompt, "max_tokens": self.max_tokens}.get(error.field or "", error.field)
        return type(error)(field, error.value, error.rule)


class Delta(NamedTuple):
    """What one step brought of one choice; of several steps where its client is slow."""

    choice: int  # its index in the answer
    text: str  # may be empty: half a character, or what a stop string may begin with
    logprobs: list[Logprobs] | None  # None: not asked for
    finish_reason: str | None
    num_tokens: int
    is_first: bool


@dataclass(slots=True, kw_only=True)
class Choice:
    """Collects events; what the client has not taken yet piles up here, at most `max_tokens` of it.

    A stream has a chunk for every step that gives it a token, as load tools count chunks as tokens; a client that is
    `MAX_DELTAS` steps behind gets what it missed in one.
    """

    index: int  # in the answer
    prompt_index: int  # choices with one prompt share its usage
    request: GenerationRequest
    stream: TextStream
    fields: FieldNames
    usage: PromptUsage
    num_tokens: int = 0
    num_told: int = 0  # of these tokens, those that were taken
    finish_reason: str | None = None
    first_s: float | None = None  # when its first token came, by the ingress's clock
    last_s: float = 0.0
    _deltas: list[Delta] = field(default_factory=list)

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
        )

    @property
    def decode_s(self) -> float:
        """From its first token to its last."""
        return 0.0 if self.first_s is None else self.last_s - self.first_s

    def add(self, event: TokenEvent) -> None:
        if len(self._deltas) == MAX_DELTAS:
            self._deltas = [joined(self._deltas)]
        is_first = not self.num_tokens and not self._deltas
        self.num_tokens += len(event.token_ids)
        text = self.stream.push(event.token_ids)
        if event.usage is not None:
            self.usage = event.usage
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            text += self.stream.finish()
        logprobs = None if self.request.sampling.logprobs is None else list(event.logprobs or ())
        self._deltas.append(Delta(self.index, text, logprobs, event.finish_reason, len(event.token_ids), is_first))

    def take(self) -> Iterator[Delta]:
        """What is new, one by one: `num_told` counts what was taken."""
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            self.num_told += delta.num_tokens
            yield delta


def joined(deltas: Sequence[Delta]) -> Delta:
    """What several steps brought of one choice."""
    logprobs = None if deltas[0].logprobs is None else [item for delta in deltas for item in delta.logprobs or ()]
    return Delta(
        choice=deltas[0].choice,
        text="".join(delta.text for delta in deltas),
        logprobs=logprobs,
        finish_reason=deltas[-1].finish_reason,
        num_tokens=sum(delta.num_tokens for delta in deltas),
        is_first=deltas[0].is_first,
    )


def usage_object(choices: Iterable[Choice]) -> dict[str, Any]:
    """OpenAI's `usage`: each prompt once, the output that was told; and where the prompts' KV came from.

    `cached_tokens` counts prompt tokens that no choice of this answer computed, `cache_write_tokens` the others: what
    is computed stays.
    """
    usage_by_prompt: dict[int, PromptUsage] = {}
    num_completion = 0
    for choice in choices:
        num_completion += choice.num_told
        known = usage_by_prompt.setdefault(choice.prompt_index, choice.usage)
        if choice.usage.cached_tokens < known.cached_tokens:
            usage_by_prompt[choice.prompt_index] = choice.usage
    usage = PromptUsage(*map(sum, zip(*usage_by_prompt.values(), strict=True)))
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": usage.prompt_tokens + num_completion,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "kv_details": usage.kv_details(),
    }


def metrics_object(choices: Sequence[Choice]) -> dict[str, float] | None:
    """vLLM's `metrics`, by its names and meanings; None where they would be of several choices."""
    if len(choices) != 1:
        return None
    (choice,) = choices
    usage, num_more = choice.usage, choice.num_tokens - 1
    inference_s = usage.prefill_s + choice.decode_s
    found = {
        "queue_time_ms": usage.queue_s * 1e3,
        "time_to_first_token_ms": usage.prefill_s * 1e3,  # without the queue
        "generation_time_ms": choice.decode_s * 1e3,
        "mean_itl_ms": choice.decode_s / num_more * 1e3 if num_more > 0 else None,
        "tokens_per_second": choice.num_tokens / inference_s if inference_s > 0 else None,
    }
    return {name: round(value, 3) for name, value in found.items() if value is not None}
