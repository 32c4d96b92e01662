"""Words answers of chat and text completions, and embeddings, as OpenAI and vLLM do.

A stream's chunks are put together from bytes prepared once per request: building and dumping a dictionary
for every token would be most of the ingress's work.
"""

from __future__ import annotations

import base64
import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from json.encoder import encode_basestring
from typing import Any, ClassVar, cast

import numpy as np

from mneme.cluster.http.api_state import ApiState
from mneme.cluster.http.stream import Answer, E, W, event
from mneme.cluster.wire.answers import (
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    Completion,
    CompletionChunk,
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
from mneme.cluster.wire.openai import ChatRequest, CompletionRequest, EmbeddingsRequest, StreamOptions
from mneme.errors import InvalidRequest, MnemeError
from mneme.replicas.choices import Choice, Delta
from mneme.replicas.request import Logprobs, PromptUsage, SamplingParams
from mneme.replicas.text.calls.answer_parser import CallPiece, merged, whole_calls
from mneme.replicas.text.document_parts import EncodedPrompt
from mneme.replicas.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_REASONING = ("reasoning_content", "reasoning")  # DeepSeek's name, and vLLM's
_LEAST = -9999.0  # JSON has no -Infinity; OpenAI uses this number for it


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


class OpenAiAnswer(Answer[W, E]):
    """What OpenAI's two completion APIs have in common."""

    _prefix: ClassVar[str]  # of ids
    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]  # in a stream

    def __init__(
        self, api: ApiState, request_id: str, body: ChatRequest | CompletionRequest, params: SamplingParams
    ) -> None:
        self._fields: dict[str, Any] = {
            "id": f"{self._prefix}-{request_id}",
            "object": self._chunk_kind if body.stream else self._kind,
            "created": int(api.wall_clock()),
            "model": api.model.id,
        }
        if body.used_tier is not None:
            self._fields["service_tier"] = body.used_tier
        self._head = _dumped(self._fields)[:-1] + ',"choices":['
        self._tokenizer = api.tokenizer
        self._num_top, self._num_prompt_top = params.logprobs or 0, body.prompt_logprobs
        self._options = body.stream_options or StreamOptions()

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> W:
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
        return cast(W, {**self._fields, "choices": entries, **_figures(choices)})

    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta]) -> bytes:
        """See `Answer`."""
        return b"".join(event(chunk) for delta in deltas for chunk in self._chunks(delta, self._usage(choices)))

    async def end(self, choices: Sequence[Choice]) -> bytes:
        """See `Answer`; the chunk with usage, if the client asks for it, has no choices."""
        has_usage = self._options.include_usage
        return (event(f"{self._head}],{_dumped(_figures(choices))[1:]}") if has_usage else b"") + DONE

    def _usage(self, choices: Sequence[Choice]) -> str:
        """Return what follows `choices` in a chunk: nothing, null, or the usage so far."""
        if not self._options.include_usage:
            return ""
        if not self._options.continuous_usage_stats:
            return ',"usage":null'
        return f',"usage":{json.dumps(usage_object(choices))}'

    @abstractmethod
    def _chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        """The JSON of a delta's events, of which the last has its text; `usage` is what follows `choices`."""

    @abstractmethod
    def _said(self, delta: Delta) -> dict[str, Any]:
        """The text of a whole choice."""

    def _prompt_logprobs(self, delta: Delta) -> PromptLogprobsShown | None:
        """Return vLLM's `prompt_logprobs`: of each token of the prompt but the first, by id; None: not asked."""
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


class ChatAnswer(OpenAiAnswer[ChatCompletion, ChatChunk]):
    """`chat.completion`, or `chat.completion.chunk` in a stream."""

    _prefix, _kind, _chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, api: ApiState, request_id: str, body: ChatRequest, params: SamplingParams) -> None:
        super().__init__(api, request_id, body, params)
        self._has_reasoning = body.include_reasoning is not False

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> ChatCompletion:
        """See `Answer`."""
        answer = super().whole(choices, deltas)
        if (told := self._prompt_logprobs(deltas[0])) is not None:
            answer["prompt_logprobs"] = told
        return answer

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


class CompletionAnswer(OpenAiAnswer[Completion, CompletionChunk]):
    """`text_completion`."""

    _prefix, _kind, _chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        api: ApiState,
        request_id: str,
        body: CompletionRequest,
        params: SamplingParams,
        echoes: Sequence[EncodedPrompt],
    ) -> None:
        """`echoes`: the prompts, by choice, where they were asked for."""
        super().__init__(api, request_id, body, params)
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # by choice: where the next token's text begins

    def _chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        yield f'{self._head}{{"index":{delta.choice},"text":{_quoted(self._text(delta))}{self._end(delta, usage)}'

    def _said(self, delta: Delta) -> dict[str, Any]:
        told = self._prompt_logprobs(delta)
        return {"text": self._text(delta), **({} if told is None else {"prompt_logprobs": told})}

    def _text(self, delta: Delta) -> str:
        echo = self._echoes[delta.choice].text if self._echoes and delta.is_first else ""
        return f"{echo}{delta.text}"

    def _logprobs(self, delta: Delta, logprobs: Sequence[Logprobs]) -> CompletionLogprobs:
        """Tell those of the prompt before others where it is echoed; its first token has none."""
        offset, told = self._offsets.get(delta.choice, 0), list(logprobs)
        tokens, offsets = [], list[int]()
        echo = self._echoes[delta.choice] if self._echoes and delta.is_first and delta.of_prompt is not None else None
        if echo is not None and delta.of_prompt is not None:
            tokens = [self._tokenizer.token_text(token_id) for token_id in echo.token_ids]
            offsets = self._echo_offsets(echo.text or "", echo.token_ids, tokens)
            offset, told = len(echo.text or ""), [*delta.of_prompt.each(), *told]
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


class EmbeddingsAnswer(Answer[Embeddings, None]):
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

    def events(self, choices: Sequence[Choice], deltas: Iterable[Delta]) -> bytes:
        raise NotImplementedError

    async def end(self, choices: Sequence[Choice]) -> bytes:
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
