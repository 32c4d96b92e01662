"""Collects what engines say of each choice of a request, as text: for HTTP's answers, and for `LLM`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import chain
from typing import NamedTuple

from mneme.replicas.request import GenerationRequest, Logprobs, PromptLogprobs, PromptUsage, TokenEvent
from mneme.replicas.text.calls.answer_parser import AnswerParser, CallPiece
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.tokenizer import Tokenizer

MAX_DELTAS = 64  # steps that a client may be behind before they are told as one
_MAX_TIMES = 128  # of a choice: of a long answer every second, fourth ... token has one


class Delta(NamedTuple):
    """Carries what one step brought of one choice, or several steps where its client is slow."""

    choice: int  # its index in the answer
    text: str  # may be empty: half a character, or what a stop string may begin with
    logprobs: list[Logprobs] | None  # None: not asked for
    finish_reason: str | None
    token_ids: tuple[int, ...]
    is_first: bool
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    of_prompt: PromptLogprobs | None = None  # with the first, where they were asked for

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class Choice:
    """Collects events; what the client has not taken yet piles up here, at most `max_tokens` of it.

    A stream has a chunk for every step that gives it a token, as load tools count chunks as tokens; a client that is
    `MAX_DELTAS` steps behind gets what it missed in one.
    """

    index: int  # in the answer
    prompt_index: int = 0  # choices with one prompt share its usage
    request: GenerationRequest
    tokenizer: InitVar[Tokenizer]
    stream: TextStream = field(init=False)
    usage: PromptUsage = field(init=False)
    parser: AnswerParser | None = None  # finds calls and reasoning; None: all is text
    embedding: tuple[float, ...] | None = None
    is_prompt_only: bool = False  # nothing is told of what is drawn
    num_tokens: int = 0
    num_told: int = 0  # of these tokens, those that were taken
    finish_reason: str | None = None  # what clients are told: "tool_calls" where all that was called is whole
    first_s: float | None = None  # when its first token came, by the clock of who adds its events
    last_s: float = 0.0
    times: list[tuple[int, float]] = field(default_factory=list)  # tokens so far, and when; `add_time`
    _time_every: int = 1  # tokens
    _deltas: list[Delta] = field(default_factory=list)

    def __post_init__(self, tokenizer: Tokenizer) -> None:
        self.stream = TextStream.of(tokenizer, self.request.sampling)
        self.usage = PromptUsage(len(self.request.prompt_token_ids), 0)

    @property
    def decode_s(self) -> float:
        """Seconds from its first token to its last."""
        return 0.0 if self.first_s is None else self.last_s - self.first_s

    def add_time(self, now_s: float) -> None:
        """Note when its tokens so far were there, by the clock of who adds its events; bounded."""
        if not self.times or self.num_tokens >= self.times[-1][0] + self._time_every:
            self.times.append((self.num_tokens, now_s))
            if len(self.times) > _MAX_TIMES:
                del self.times[1:-1:2]  # the first and the last stay
                self._time_every *= 2

    def add(self, event: TokenEvent) -> None:
        if len(self._deltas) == MAX_DELTAS:
            self._deltas = [joined(self._deltas)]
        if self.is_prompt_only:
            event = event._replace(token_ids=(), logprobs=None, finish_reason=event.finish_reason and "length")
        is_first = not self.num_tokens and not self._deltas
        self.num_tokens += len(event.token_ids)
        text = self.stream.push(event.token_ids)
        if event.usage is not None:
            self.usage = event.usage
        if event.embedding is not None:
            self.embedding = event.embedding
        if event.finish_reason is not None:
            text += self.stream.finish()
        logprobs = None if self.request.sampling.logprobs is None else list(event.logprobs or ())
        reason, reasoning = event.finish_reason, ""
        calls: tuple[CallPiece, ...] = ()
        if self.parser is not None:
            text, reasoning, calls = self.parser.push(text, is_last=reason is not None)
            if reason == "stop" and self.parser.num_calls and self.parser.open_call is None:
                reason = "tool_calls"
        self.finish_reason = reason
        of_prompt, said = event.prompt_logprobs, event.token_ids
        self._deltas.append(Delta(self.index, text, logprobs, reason, said, is_first, reasoning, calls, of_prompt))

    def pop_deltas(self) -> Iterator[Delta]:
        """Take what is new, one by one: `num_told` counts what was taken."""
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            self.num_told += delta.num_tokens
            yield delta


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join what several steps brought of one choice."""
    logprobs = None if deltas[0].logprobs is None else [item for delta in deltas for item in delta.logprobs or ()]
    return Delta(
        choice=deltas[0].choice,
        text="".join(delta.text for delta in deltas),
        logprobs=logprobs,
        finish_reason=deltas[-1].finish_reason,
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        is_first=deltas[0].is_first,
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(piece for delta in deltas for piece in delta.calls),
        of_prompt=deltas[0].of_prompt,
    )
