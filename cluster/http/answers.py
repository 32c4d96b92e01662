"""Turns the engine's events into what a client is told: of each choice, and in the words of the two completion APIs.

A stream's chunks are put together from bytes prepared once per request: building and dumping a dictionary
for every token would be most of the ingress's work.
"""

from __future__ import annotations

import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from json.encoder import encode_basestring
from typing import Any, NamedTuple, cast

import numpy as np

from mneme.cluster.http.error_response import error_object
from mneme.cluster.wire.answers import (
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    CompletionLogprobs,
    Embedding,
    Embeddings,
    EmbeddingsUsage,
    Logprob,
    Metrics,
    PromptLogprobsShown,
    ShownKv,
    TokenLogprobs,
    Usage,
)
from mneme.cluster.wire.openai import EmbeddingsRequest
from mneme.errors import ContextLengthExceeded, InvalidRequest, MnemeError
from mneme.replicas.request import GenerationRequest, Logprobs, PromptLogprobs, PromptUsage, TokenEvent
from mneme.replicas.text.calls.answer_parser import AnswerParser, CallPiece, merged, whole_calls
from mneme.replicas.text.detokenizer import TextStream
from mneme.replicas.text.tokenizer import Tokenizer

MAX_DELTAS = 64  # steps that a client may be behind before they are told as one
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_REASONING = ("reasoning_content", "reasoning")  # DeepSeek's name, and vLLM's
_LEAST = -9999.0  # JSON has no -Infinity; OpenAI uses this number for it


class FieldNames(NamedTuple):
    """Knows what a client calls the fields that engines name in their refusals."""

    prompt: str
    max_tokens: str  # the prompt's name where the client gave no limit
    offers: str = ""  # said of what is too long: how the client may have it shortened

    def worded(self, error: InvalidRequest) -> InvalidRequest:
        """The refusal in the client's words."""
        field = {"prompt": self.prompt, "max_tokens": self.max_tokens}.get(error.field or "", error.field)
        return type(error)(field, error.value, error.rule + self.offers * isinstance(error, ContextLengthExceeded))


class Delta(NamedTuple):
    """Carries what one step brought of one choice, or several steps where its client is slow."""

    choice: int  # its index in the answer
    text: str  # may be empty: half a character, or what a stop string may begin with
    logprobs: list[Logprobs] | None  # None: not asked for
    finish_reason: str | None
    num_tokens: int
    is_first: bool
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    of_prompt: PromptLogprobs | None = None  # with the first, where they were asked for
    prompt_token_ids: tuple[int, ...] = ()  # with these


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
    parser: AnswerParser | None = None  # finds calls and reasoning; None: all is text
    embedding: tuple[float, ...] | None = None
    is_prompt_only: bool = False  # nothing is told of what is drawn
    num_tokens: int = 0
    num_told: int = 0  # of these tokens, those that were taken
    finish_reason: str | None = None  # what clients are told: "tool_calls" where all that was called is whole
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
        parser: AnswerParser | None = None,
    ) -> Choice:
        params = request.sampling
        return Choice(
            index=index,
            prompt_index=prompt_index,
            request=request,
            stream=TextStream.of(tokenizer, params),
            fields=fields,
            usage=PromptUsage(len(request.prompt_token_ids), 0),
            parser=parser,
        )

    @property
    def decode_s(self) -> float:
        """Seconds from its first token to its last."""
        return 0.0 if self.first_s is None else self.last_s - self.first_s

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
        num_tokens, of_prompt = len(event.token_ids), event.prompt_logprobs
        ids = () if of_prompt is None else self.request.prompt_token_ids
        delta = Delta(self.index, text, logprobs, reason, num_tokens, is_first, reasoning, calls, of_prompt, ids)
        self._deltas.append(delta)

    def refused(self, error: InvalidRequest) -> InvalidRequest:
        """Return the engine's refusal in the client's words; one of the calls' grammar names the function."""
        name = None if self.parser is None or error.field != "tools" else self.parser.open_call
        if name is not None:
            return InvalidRequest(error.field, error.value, f"{error.rule} (in the arguments of {name})")
        return self.fields.worded(error)

    def take(self) -> Iterator[Delta]:
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
        num_tokens=sum(delta.num_tokens for delta in deltas),
        is_first=deltas[0].is_first,
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(piece for delta in deltas for piece in delta.calls),
        of_prompt=deltas[0].of_prompt,
        prompt_token_ids=deltas[0].prompt_token_ids,
    )


def usage_object(choices: Iterable[Choice]) -> Usage:
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
    usages = list(usage_by_prompt.values())
    usage = PromptUsage._make([*map(sum, zip(*(each[:-1] for each in usages), strict=True)), usages[0].blend])
    kv_details = cast(ShownKv, usage.kv_details())
    if usage.blend is not None:  # documents come with one prompt only
        kv_details["blend"] = usage.blend.as_json()
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": num_completion,
        "total_tokens": usage.prompt_tokens + num_completion,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "kv_details": kv_details,
    }


def metrics_object(choices: Sequence[Choice]) -> Metrics | None:
    """vLLM's `metrics`, by its names and meanings; None where they would be of several choices."""
    if len(choices) != 1:
        return None
    (choice,) = choices
    usage, num_more = choice.usage, choice.num_tokens - 1
    inference_s = usage.prefill_s + choice.decode_s
    found: Metrics = {
        "queue_time_ms": round(usage.queue_s * 1e3, 3),
        "time_to_first_token_ms": round(usage.prefill_s * 1e3, 3),  # without the queue
        "generation_time_ms": round(choice.decode_s * 1e3, 3),
    }
    if num_more > 0:
        found["mean_itl_ms"] = round(choice.decode_s / num_more * 1e3, 3)
    if inference_s > 0:
        found["tokens_per_second"] = round(choice.num_tokens / inference_s, 3)
    return found


class Answer(ABC):
    """Words the answers of one API, whole and as a stream of server-sent events."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> Mapping[str, object]:
        """The body when every choice has finished; `deltas` holds all of each."""

    @abstractmethod
    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta], usage: Callable[[], str]) -> bytes:
        """What deltas are told as; `usage` gives what a chunk of OpenAI's says behind its choices."""

    @abstractmethod
    def end(self, choices: Sequence[Choice], *, has_usage: bool) -> bytes:
        """What ends a whole stream; `has_usage`: the client asks for it."""

    async def keep(self, choices: Sequence[Choice]) -> None:  # noqa: B027  # most APIs keep nothing
        """Keep what an API keeps of a whole answer, all of which was worded; its end is told after that."""

    def failed(self, error: MnemeError) -> bytes:
        """What ends a stream that broke; a client must not take that for a whole answer."""
        return event(json.dumps(error_object(error)))


class OpenAiAnswer(Answer):
    """What OpenAI's two completion APIs have in common."""

    def __init__(
        self,
        answer_id: str,
        kind: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        service_tier: str | None = None,
        num_prompt_top: int | None = None,
    ) -> None:
        """`num_prompt_top`: the likeliest that are told beside each token of the prompt; None: nothing of it is."""
        self._fields: dict[str, Any] = {"id": answer_id, "object": kind, "created": created, "model": model}
        if service_tier is not None:
            self._fields["service_tier"] = service_tier
        self._head = json.dumps(self._fields, separators=(",", ":"))[:-1] + ',"choices":['
        self._tokenizer = tokenizer
        self._num_top, self._num_prompt_top = num_top, num_prompt_top

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> Mapping[str, object]:
        """See `Answer`."""
        entries = [
            {
                "index": delta.choice,
                **self._said(delta),
                "logprobs": None if delta.logprobs is None else self._logprobs(delta, delta.logprobs),
                "finish_reason": delta.finish_reason,
            }
            for delta in deltas
        ]
        return {**self._fields, "choices": entries, **_figures(choices)}

    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta], usage: Callable[[], str]) -> bytes:
        """See `Answer`."""
        return b"".join(event(chunk) for delta in deltas for chunk in self._chunks(delta, usage()))

    def end(self, choices: Sequence[Choice], *, has_usage: bool) -> bytes:
        """See `Answer`; the chunk with usage has no choices."""
        return (event(f"{self._head}],{_dumped(_figures(choices))[1:]}") if has_usage else b"") + DONE

    @abstractmethod
    def _chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        """The JSON of a delta's events, of which the last has its text; `usage` is what follows `choices`."""

    @abstractmethod
    def _said(self, delta: Delta) -> dict[str, Any]:
        """The text of a whole choice."""

    def _prompt_logprobs(self, delta: Delta) -> PromptLogprobsShown | None:
        """Return vLLM's `prompt_logprobs`: for each token of the prompt but the first, tokens by id."""
        of_prompt = delta.of_prompt
        if self._num_prompt_top is None or of_prompt is None:
            return None
        told: PromptLogprobsShown = [None]
        for item, rank in zip(of_prompt.each(), of_prompt.ranks.tolist(), strict=True):
            likeliest = [(*top, place) for place, top in enumerate(item.top[: self._num_prompt_top], 1)]
            told.append(
                {
                    str(token_id): {
                        "logprob": _finite(logprob),
                        "rank": place,
                        "decoded_token": self._tokenizer.token_text(token_id),
                    }
                    for token_id, logprob, place in [(item.token_id, item.logprob, rank), *likeliest]
                }
            )
        return told

    @abstractmethod
    def _logprobs(self, delta: Delta, logprobs: Sequence[Logprobs]) -> ChatLogprobs | CompletionLogprobs:
        """`choices[i].logprobs`; of a stream's chunks in their order."""

    def _end(self, delta: Delta, usage: str) -> str:
        """Return what follows the text in a chunk."""
        is_told = delta.logprobs is not None and (delta.logprobs or delta.of_prompt is not None)
        logprobs = _dumped(self._logprobs(delta, delta.logprobs or ())) if is_told else "null"
        reason = "null" if delta.finish_reason is None else _quoted(delta.finish_reason)
        return f',"logprobs":{logprobs},"finish_reason":{reason}}}]{usage}}}'


class ChatAnswer(OpenAiAnswer):
    """`chat.completion`, or `chat.completion.chunk` in a stream; `has_reasoning`: the client wants it."""

    def __init__(self, *args: Any, has_reasoning: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_reasoning = has_reasoning

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> Mapping[str, object]:
        """See `Answer`."""
        told = {} if self._num_prompt_top is None else {"prompt_logprobs": self._prompt_logprobs(deltas[0])}
        return {**super().whole(choices, deltas), **told}

    def _chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        """A choice begins with its role alone, as OpenAI's: what follows it are tokens."""
        choice = f'{self._head}{{"index":{delta.choice},"delta":'
        if delta.is_first:
            role = '{"role":"assistant","content":""}'
            yield f'{choice}{role},"logprobs":null,"finish_reason":null}}]{usage}}}'
        said = []
        if delta.reasoning and self._has_reasoning:
            said += [f'"{name}":{_quoted(delta.reasoning)}' for name in _REASONING]
        if delta.calls:
            said.append(f'"tool_calls":[{",".join(map(_call_piece, merged(delta.calls)))}]')
        if delta.text or (delta.num_tokens and not said):
            said.append(f'"content":{_quoted(delta.text)}')
        yield f"{choice}{{{','.join(said)}}}{self._end(delta, usage)}"

    def _said(self, delta: Delta) -> dict[str, Any]:
        calls: list[ChatToolCall] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in whole_calls(delta.calls)
        ]
        text = delta.text or (None if calls else "")
        message: ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        if delta.reasoning and self._has_reasoning:
            message["reasoning_content"] = message["reasoning"] = delta.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _logprobs(self, delta: Delta, logprobs: Sequence[Logprobs]) -> ChatLogprobs:
        return {"content": token_logprobs(self._tokenizer, logprobs, self._num_top), "refusal": None}


class CompletionAnswer(OpenAiAnswer):
    """`text_completion`; `echoes` are the prompts' texts, by choice, where they were asked for."""

    def __init__(self, *args: Any, echoes: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # by choice: where the next token's text begins

    def _chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        yield f'{self._head}{{"index":{delta.choice},"text":{_quoted(self._text(delta))}{self._end(delta, usage)}'

    def _said(self, delta: Delta) -> dict[str, Any]:
        told = {} if self._num_prompt_top is None else {"prompt_logprobs": self._prompt_logprobs(delta)}
        return {"text": self._text(delta), **told}

    def _text(self, delta: Delta) -> str:
        echo = self._echoes[delta.choice] if self._echoes and delta.is_first else ""
        return echo + delta.text

    def _logprobs(self, delta: Delta, logprobs: Sequence[Logprobs]) -> CompletionLogprobs:
        """Tell those of the prompt before others where it is echoed; its first token has none."""
        offset, told = self._offsets.get(delta.choice, 0), list(logprobs)
        tokens, offsets = [], list[int]()
        echo = self._echoes[delta.choice] if self._echoes and delta.is_first and delta.of_prompt is not None else None
        if echo is not None and delta.of_prompt is not None:
            prompt_ids = delta.prompt_token_ids
            tokens = [self._tokenizer.token_text(token_id) for token_id in prompt_ids]
            offsets = self._echo_offsets(echo, prompt_ids, tokens)
            offset, told = len(echo), [*delta.of_prompt.each(), *told]
        fresh = [self._tokenizer.token_text(item.token_id) for item in logprobs]
        *further, self._offsets[delta.choice] = accumulate(map(len, fresh), initial=offset)
        first = [] if echo is None else [None]
        return {
            "tokens": tokens + fresh,
            "token_logprobs": [*first, *(_finite(item.logprob) for item in told)],
            "top_logprobs": [*first, *map(self._top_by_text, told)],
            "text_offset": offsets + further,
        }

    def _echo_offsets(self, echo: str, token_ids: Sequence[int], tokens: Sequence[str]) -> list[int]:
        """Say where in the echo each of its tokens begins; special ones that it does not show take no place."""
        offsets, offset = list[int](), 0
        for token_id, text in zip(token_ids, tokens, strict=True):
            offsets.append(min(offset, len(echo)))
            if token_id not in self._tokenizer.special_token_ids or echo.startswith(text, offset):
                offset += len(text)
        return offsets

    def _top_by_text(self, item: Logprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one; of two with the same text the likelier counts."""
        best: dict[str, float] = {}
        for token_id, logprob in (*item.top[: self._num_top], (item.token_id, item.logprob)):
            best.setdefault(self._tokenizer.token_text(token_id), _finite(logprob))
        return best


class EmbeddingsAnswer(Answer):
    """OpenAI's list of embeddings; there is no stream of it."""

    def __init__(self, model: str, body: EmbeddingsRequest) -> None:
        self._model = model
        self._body = body

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> Embeddings:
        """See `Answer`; raises `InvalidRequest` for more dimensions than there are."""
        num_tokens = sum(choice.usage.prompt_tokens for choice in choices)
        data: list[Embedding] = [
            {"object": "embedding", "index": choice.index, "embedding": self._vector(choice)} for choice in choices
        ]
        usage: EmbeddingsUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _vector(self, choice: Choice) -> list[float] | str:
        if choice.embedding is None:
            raise MnemeError("the replica answered without an embedding")
        vector, wanted = np.array(choice.embedding), self._body.dimensions
        if wanted is not None:
            if wanted > len(vector):
                raise InvalidRequest("dimensions", wanted, f"this model's embeddings have {len(vector)}")
            vector = vector[:wanted]
        if self._body.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        floats: list[float] = vector.astype(np.float32).tolist()
        return floats

    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta], usage: Callable[[], str]) -> bytes:
        raise NotImplementedError

    def end(self, choices: Sequence[Choice], *, has_usage: bool) -> bytes:
        raise NotImplementedError


def _figures(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return what the end of an answer says of it."""
    metrics = metrics_object(choices)
    return {"usage": usage_object(choices), **({} if metrics is None else {"metrics": metrics})}


def token_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Logprobs], num_top: int) -> list[TokenLogprobs]:
    """Return what OpenAI's chat and responses say of tokens, with so many of the likeliest in their places."""

    def entry(token_id: int, logprob: float) -> Logprob:
        text, of_bytes = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(of_bytes)}

    return [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*top) for top in item.top[:num_top]]}
        for item in logprobs
    ]


def event(payload: str, name: str | None = None) -> bytes:
    """A server-sent event; Anthropic's have names."""
    return f"{'' if name is None else f'event: {name}{chr(10)}'}data: {payload}\n\n".encode()


def _call_piece(piece: CallPiece) -> str:
    begin = "" if piece.id is None else f'"id":{_quoted(piece.id)},"type":"function",'
    name = "" if piece.name is None else f'"name":{_quoted(piece.name)},'
    return f'{{"index":{piece.call},{begin}"function":{{{name}"arguments":{_quoted(piece.arguments)}}}}}'


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > _LEAST else _LEAST


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _quoted(text: str) -> str:
    """A JSON string without what Python's `splitlines` takes for the end of a line, as careless clients do."""
    quoted = encode_basestring(text)
    return quoted if quoted.isascii() else quoted.translate(_LINE_ENDS)
