"""The bodies of completions, whole and as server-sent events.

A stream's chunks are put together from bytes prepared once per request: building and dumping a dictionary
for every token would be most of the ingress's work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from mneme.cluster.http.choices import Choice, Delta, metrics_object, usage_object
from mneme.cluster.http.logprob_format import chat_logprobs, completion_logprobs
from mneme.replicas.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


class Answer(Protocol):
    """How one API words its answers."""

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> dict[str, Any]:
        """The body when every choice has finished; `deltas` holds all of each."""
        ...

    def chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        """The JSON of a delta's events, of which the last has its text; `usage` is what follows `choices`."""
        ...

    def usage_chunk(self, choices: Sequence[Choice]) -> str:
        """The last event's JSON, which has no choices."""
        ...


class _Named:
    """What all chunks of an answer have in common."""

    def __init__(self, answer_id: str, kind: str, created: int, model: str, tokenizer: Tokenizer) -> None:
        self.fields = {"id": answer_id, "object": kind, "created": created, "model": model}
        self.tokenizer = tokenizer
        self.head = json.dumps(self.fields, separators=(",", ":"))[:-1] + ',"choices":['

    def usage_chunk(self, choices: Sequence[Choice]) -> str:
        return f"{self.head}],{_dumped(_figures(choices))[1:]}"


class ChatAnswer(_Named):
    """`chat.completion`, or `chat.completion.chunk` in a stream."""

    def __init__(
        self, answer_id: str, created: int, model: str, tokenizer: Tokenizer, *, num_top: int, is_stream: bool
    ) -> None:
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
        super().__init__(answer_id, kind, created, model, tokenizer)
        self._num_top = num_top

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> dict[str, Any]:
        entries = [
            {
                "index": delta.choice,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            for delta in deltas
        ]
        return {**self.fields, "choices": entries, **_figures(choices)}

    def chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        """A choice begins with its role alone, as OpenAI's: what follows it are tokens."""
        choice = f'{self.head}{{"index":{delta.choice},"delta":'
        if delta.is_first:
            role = '{"role":"assistant","content":""}'
            yield f'{choice}{role},"logprobs":null,"finish_reason":null}}]{usage}}}'
        content = f'"content":{_quoted(delta.text)}' if delta.text or delta.num_tokens else ""
        logprobs = _dumped(self._logprobs(delta)) if delta.logprobs else "null"
        yield (
            f'{choice}{{{content}}},"logprobs":{logprobs},'
            f'"finish_reason":{_quoted_or_null(delta.finish_reason)}}}]{usage}}}'
        )

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(self.tokenizer, delta.logprobs, self._num_top)


class CompletionAnswer(_Named):
    """`text_completion`; `echoes` are the prompts' texts, by choice, where they were asked for."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(answer_id, "text_completion", created, model, tokenizer)
        self._num_top = num_top
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # by choice: where the next token's text begins

    def whole(self, choices: Sequence[Choice], deltas: Sequence[Delta]) -> dict[str, Any]:
        entries = [
            {
                "index": delta.choice,
                "text": self._text(delta),
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            for delta in deltas
        ]
        return {**self.fields, "choices": entries, **_figures(choices)}

    def chunks(self, delta: Delta, usage: str) -> Iterator[str]:
        logprobs = _dumped(self._logprobs(delta)) if delta.logprobs else "null"
        yield (
            f'{self.head}{{"index":{delta.choice},"text":{_quoted(self._text(delta))},"logprobs":{logprobs},'
            f'"finish_reason":{_quoted_or_null(delta.finish_reason)}}}]{usage}}}'
        )

    def _text(self, delta: Delta) -> str:
        echo = self._echoes[delta.choice] if self._echoes and delta.is_first else ""
        return echo + delta.text

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        offset = self._offsets.get(delta.choice, 0)
        self._offsets[delta.choice] = offset + sum(
            len(self.tokenizer.token_text(item.token_id)) for item in delta.logprobs
        )
        return completion_logprobs(self.tokenizer, delta.logprobs, self._num_top, offset)


def _figures(choices: Sequence[Choice]) -> dict[str, Any]:
    """What the end of an answer says of it."""
    metrics = metrics_object(choices)
    return {"usage": usage_object(choices), **({} if metrics is None else {"metrics": metrics})}


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _quoted(text: str) -> str:
    """A JSON string without what Python's `splitlines` takes for the end of a line, as careless clients do."""
    quoted = encode_basestring(text)
    return quoted if quoted.isascii() else quoted.translate(_LINE_ENDS)


def _quoted_or_null(text: str | None) -> str:
    return "null" if text is None else _quoted(text)
