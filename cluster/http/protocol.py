"""What a request body may say: types here, ranges in `SamplingParams`, what is refused in `unsupported.py`.

Types are strict (no "5" for 5, no 5.0 for 5), numbers finite. Every breach is an `InvalidRequest` whose
`field` is the path in the body, such as `messages[0].content`. Fields that no model here names are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

from mneme.cluster.http.request_values import (
    fields_named,
    first_breach,
    parse_logit_bias,
    parse_prompts,
    template_message,
)
from mneme.cluster.http.unsupported import refuse_unsupported
from mneme.errors import InvalidRequest
from mneme.replicas.config import MAX_TIMEOUT_S, MAX_TTL_S, MIN_TTL_S
from mneme.replicas.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_STOPS, SamplingParams
from mneme.replicas.truncation import Keep, Strategy

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MAX_SEQUENCES = 128  # prompts x n of one request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only

M = TypeVar("M", bound="Body")
_RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class Body(BaseModel):
    """Strict about what it names, silent about the rest."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SessionOptions(Body):
    """`append`: messages or prompt are only what is new; `ttl_s`: how long the session is kept unused."""

    id: str | None = None
    append: bool = False
    ttl_s: float | None = None

    @field_validator("ttl_s")
    @classmethod
    def _in_range(cls, ttl_s: float | None) -> float | None:
        return checked_ttl(ttl_s)


class TruncationOptions(Body):
    """What happens if the prompt does not fit; what is left out is as configured. Ranges: `Truncation`."""

    model_config = ConfigDict(extra="forbid")  # ours alone: a name that is not known is misspelt

    strategy: Strategy = "error"
    ratio: float = 0.5
    keep_first: int = 0
    keep: Keep | None = None

    def given(self) -> dict[str, Any]:
        return self.model_dump(include=self.model_fields_set)


class SamplingBody(Body):
    """What both completion APIs take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    session: SessionOptions | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    truncation: TruncationOptions | None = None
    timeout_s: float | None = None  # from the arrival of the request at this server to the end of its answer

    @field_validator("timeout_s")
    @classmethod
    def _is_a_day_at_most(cls, timeout_s: float | None) -> float | None:
        if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"must be over 0 and at most {MAX_TIMEOUT_S:g} seconds")
        return timeout_s

    def sampling(self, *, logprobs: int | None, max_tokens: int | None, seed: int) -> SamplingParams:
        """Raises `InvalidRequest` for values out of range; `seed` is taken where none is given."""
        plain = ("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        flags = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
        names = (*plain, "presence_penalty", "frequency_penalty", *flags)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            seed=seed if self.seed is None else self.seed,
            logit_bias=parse_logit_bias(self.logit_bias or {}),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
        )

    @property
    def appends(self) -> bool:
        return self.session is not None and self.session.append

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", None, "only allowed when stream is true")


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; `content` may be null only where an assistant said nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None

    def for_template(self, index: int) -> dict[str, str]:
        if self.tool_calls:
            raise InvalidRequest(f"messages[{index}].tool_calls", None, "tool calling is not supported")
        content = [part.text for part in self.content] if isinstance(self.content, list) else self.content
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        return template_message(index, self.role, content, others)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(SamplingBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = None

    @property
    def max_tokens_field(self) -> str:
        """The one that counts."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling_params(self, seed: int) -> SamplingParams:
        name = self.max_tokens_field
        limit: int | None = getattr(self, name)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", self.top_logprobs, "only allowed when logprobs is true")
        with fields_named({"max_tokens": name, "logprobs": "top_logprobs"}):
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            return self.sampling(logprobs=logprobs, max_tokens=limit, seed=seed)

    def template_variables(self) -> Mapping[str, Any]:
        return template_variables(self.chat_template_kwargs)


class CompletionRequest(SamplingBody):
    prompt: Any  # str | list[str] | list[int] | list[list[int]]: see `parse_prompts`
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def max_tokens_field(self) -> str | None:
        """None: the client gave no limit."""
        return None if self.max_tokens is None else "max_tokens"

    def sampling_params(self, seed: int) -> SamplingParams:
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of", self.best_of, "must be absent or equal to n")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo", True, "log-probabilities of the prompt are not supported")
        return self.sampling(logprobs=self.logprobs, max_tokens=limit, seed=seed)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, none empty."""
        prompts = parse_prompts(self.prompt)
        if len(prompts) * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest("prompt", len(prompts), f"prompts x n may be {MAX_SEQUENCES}")
        return prompts


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class ForkRequest(Body):
    session_id: str | None = None  # of the new session; None: one is drawn


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool = False


def checked_ttl(ttl_s: float | None) -> float | None:
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise ValueError(f"must be from {MIN_TTL_S:g} to {MAX_TTL_S:g} seconds")
    return ttl_s


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A client's own variables for the chat template."""
    return {name: value for name, value in (given or {}).items() if name not in _RESERVED_VARIABLES}


def conversation(messages: list[Message]) -> list[dict[str, str]]:
    """The messages as chat templates expect them."""
    return [message.for_template(i) for i, message in enumerate(messages)]


def validate(model: type[M], body: Mapping[str, Any]) -> M:
    """Check a parsed body against its model; raises `InvalidRequest` for the first breach."""
    refuse_unsupported(body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise first_breach(error) from None
