"""Asks an OpenAI-compatible server over HTTP and times what it streams. A fault ends in an `Answer` that names it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx

from mneme.lab.bench.measure import Answer

_MAX_EVENT_BYTES = 4_000_000
_MAX_DETAIL_CHARS = 200
_KINDS = (  # the first that fits
    (httpx.TimeoutException, "cannot connect in time"),
    (httpx.ConnectError, "cannot connect"),
    (httpx.NetworkError, "connection lost"),
    (httpx.RemoteProtocolError, "connection lost"),
    (httpx.HTTPError, "HTTP fault"),
    (Exception, "cannot connect"),
)


class BadAnswer(Exception):
    """A server's answer cannot be used: of which kind, and what it said."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def connect(url: str, headers: dict[str, str] | None = None, connect_s: float = 30.0) -> httpx.AsyncClient:
    """Return a client that connects when it is first used, as often as there are requests at once.

    A whole answer's time is bounded by `ChatClient`.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=httpx.Timeout(None, connect=connect_s), limits=limits
    )


class ChatClient:
    """Asks for chat completions as streams.

    options         further fields of each body
    session_header  whether each request names its session in X-Session-ID
    timeout_s       of a whole answer
    """

    def __init__(
        self, http: httpx.AsyncClient, options: dict[str, Any], *, session_header: bool, timeout_s: float
    ) -> None:
        self._http, self._options = http, options
        self._session_header, self._timeout_s = session_header, timeout_s

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int, session: str) -> Answer:
        """Return when the stream has ended, however it does."""
        body = {
            "messages": messages, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True},
            **self._options,
        }  # fmt: skip
        headers = {"X-Session-ID": quote(session, errors="replace")} if self._session_header else {}
        clock = asyncio.get_running_loop().time
        answer = Answer(session=session, sent_s=clock())
        pieces: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                    if response.status_code != 200:
                        raise BadAnswer(
                            f"HTTP {response.status_code}", (await response.aread()).decode(errors="replace")
                        )
                    await _read(response, answer, pieces)
        except TimeoutError:
            answer.error, answer.detail = "timeout", f"no whole answer in {self._timeout_s:g} s"
        except BadAnswer as bad:
            answer.error, answer.detail = bad.kind, " ".join(bad.detail.split())[:_MAX_DETAIL_CHARS]
        except (httpx.HTTPError, OSError, ValueError, OverflowError) as error:  # the last three: not httpx's own
            kind = next(kind for cls, kind in _KINDS if isinstance(error, cls))
            answer.error, answer.detail = kind, str(error) or type(error).__name__
        answer.ended_s = clock()
        # A character of two surrogates may come in two chunks; one alone cannot be sent back in the history.
        answer.text = "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return answer


async def _read(response: httpx.Response, answer: Answer, pieces: list[str]) -> None:
    clock = asyncio.get_running_loop().time
    is_finished = has_events = False
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        if (data := line[5:].strip()) == b"[DONE]":
            break
        has_events = True
        try:
            is_finished |= _take(json.loads(data), answer, pieces, clock())
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadAnswer("garbage in the stream", data.decode(errors="replace")) from error
    if not has_events:
        raise BadAnswer("no stream", f"an answer without events, of type {response.headers.get('content-type')}")
    if not is_finished:
        raise BadAnswer("ended early", "the stream ended without a finish_reason")
    if answer.first_s is None:
        raise BadAnswer("empty", "the stream had no chunk")


def _take(event: dict[str, Any], answer: Answer, pieces: list[str], now_s: float) -> bool:
    """Keep what one event says; returns whether it finishes the answer."""
    if event.get("error"):
        raise BadAnswer("error in the stream", str(event["error"]))
    if (usage := event.get("usage")) is not None:
        answer.prompt_tokens, answer.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        answer.cached_tokens = None if cached is None else int(cached)
    if not event.get("choices"):
        return False
    choice = event["choices"][0]
    delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
    if reason == "error":
        raise BadAnswer("error in the stream", "finish_reason: error")
    if reason is None and set(delta) <= {"role", "content"} and "role" in delta and not delta.get("content"):
        return False  # the opening: no token is behind it
    if delta.get("content"):
        pieces.append(str(delta["content"]))
    if answer.first_s is None or answer.last_s is None:
        answer.first_s = now_s
    else:
        answer.itl_s.append(now_s - answer.last_s)
    answer.last_s = now_s
    return reason is not None


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines as server-sent events have them; httpx's own end at U+2028 too, which may stand in JSON."""
    rest = b""
    async for read in response.aiter_bytes():
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > _MAX_EVENT_BYTES:
            raise BadAnswer("garbage in the stream", f"a line of over {_MAX_EVENT_BYTES} bytes")
    if rest:
        yield rest
