"""`mneme chat`: a conversation with a running server, in a terminal or through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
_STATUS_OF_SIGPIPE = 128 + 13  # as of any program that a closed pipe ends
_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


class ChatFailed(Exception):
    """The server cannot be reached or refused; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFigures:
    """What one answer took, as this client saw it."""

    ttft_s: float
    tokens_per_s: float  # after the first token; 0 where there was only one
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def __str__(self) -> str:
        return (
            f"[TTFT {self.ttft_s * 1e3:.0f} ms, {self.tokens_per_s:.1f} tokens/s, "
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached]"
        )


@dataclass(slots=True)
class Conversation:
    """One session: the history goes with every request, its KV stays on the server."""

    http: httpx.Client
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """A new session; a system message stays."""
        self.session_id = uuid.uuid4().hex
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def ask(self, text: str, show: Callable[[str], object]) -> AnswerFigures:
        """Show the answer as it comes; the history grows only when it is whole. Raises `ChatFailed`."""
        asked = [*self.messages, {"role": "user", "content": text}]
        reader = _AnswerReader(self.clock)
        for piece in reader.pieces(self._events(asked)):
            show(piece)
        self.messages = [*asked, {"role": "assistant", "content": reader.text}]
        return reader.figures()

    def _events(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        headers = {"X-Session-ID": self.session_id}
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    raise ChatFailed(_message(response.read()))
                yield from _server_sent_events(response)
        except httpx.HTTPError as error:
            raise ChatFailed(f"{self.http.base_url}: {error}") from error


class _AnswerReader:
    """Text and times of one stream."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = self._last_s = clock()
        self._first_s: float | None = None
        self._usage: dict[str, Any] = {}
        self.text = ""

    def pieces(self, events: Iterator[dict[str, Any]]) -> Iterator[str]:
        for event in events:
            if "error" in event:
                raise ChatFailed(event["error"]["message"])
            self._usage = event.get("usage") or self._usage
            for choice in event["choices"]:
                self._last_s = self._clock()
                self._first_s = self._last_s if self._first_s is None else self._first_s
                piece = choice["delta"].get("content") or ""
                self.text += piece
                yield piece

    def figures(self) -> AnswerFigures:
        first_s = self._last_s if self._first_s is None else self._first_s
        num_tokens = self._usage.get("completion_tokens", 0)
        spent_s = self._last_s - first_s
        return AnswerFigures(
            ttft_s=first_s - self._started_s,
            tokens_per_s=(num_tokens - 1) / spent_s if num_tokens > 1 and spent_s > 0 else 0.0,
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            cached_tokens=self._usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            completion_tokens=num_tokens,
        )


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="of a running server (default: %(default)s)")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--max-tokens", type=int, help="per answer")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--api-key", default=os.environ.get("MNEME_API_KEY"), help="default: $MNEME_API_KEY")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: all answers' figures")


def run_chat(args: argparse.Namespace) -> int:
    """Returns the exit status; standard input that is no terminal is one message."""
    timeout = httpx.Timeout(10, read=600)
    try:
        with httpx.Client(base_url=args.url, headers=_headers(args), timeout=timeout) as http:
            conversation = _open(http, args)
            talk = _talk if sys.stdin.isatty() else _answer_once
            figures = talk(conversation, sys.stdin, sys.stdout)
        if args.json:
            sys.stdout.write(json.dumps({"answers": [asdict(each) for each in figures]}) + "\n")
        sys.stdout.flush()
    except (ChatFailed, httpx.HTTPError, httpx.InvalidURL) as error:
        sys.stderr.write(f"mneme chat: {error or type(error).__name__}\n")
        return 1
    except BrokenPipeError:  # who read the answer has enough
        _forget_output()
        return _STATUS_OF_SIGPIPE
    return 0


def _headers(args: argparse.Namespace) -> dict[str, str]:
    key: str | None = args.api_key
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key.strip() == key):
        raise ChatFailed("--api-key: must be one line of ASCII text without spaces around it")
    return {"Authorization": f"Bearer {key}"}


def _forget_output() -> None:
    """What is still buffered goes nowhere: the interpreter would fail to write it at its exit."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: no file underneath
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _open(http: httpx.Client, args: argparse.Namespace) -> Conversation:
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    given = {name: value for name, value in options.items() if value is not None}
    conversation = Conversation(http, args.model or _first_model(http), given)
    if args.system:
        conversation.messages.append({"role": "system", "content": _whole_text("--system", args.system)})
    return conversation


def _first_model(http: httpx.Client) -> str:
    try:
        response = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatFailed(f"{http.base_url} does not answer ({error}); is `mneme serve` running?") from error
    if response.status_code != 200:
        raise ChatFailed(_message(response.content))
    name: str = response.json()["data"][0]["id"]
    return name


def _whole_text(origin: str, text: str) -> str:
    """Raises `ChatFailed` for surrogates, in which Python keeps the bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ChatFailed(f"{origin} is not valid UTF-8") from None
    return text


def _answer_once(conversation: Conversation, source: TextIO, sink: TextIO) -> list[AnswerFigures]:
    try:
        text = _whole_text("standard input", source.read().strip())
    except UnicodeDecodeError:
        raise ChatFailed("standard input is not valid UTF-8") from None
    if not text:
        raise ChatFailed("nothing to say on standard input")
    figures = conversation.ask(text, _shower(sink))
    sink.write(f"\n{figures}\n")
    return [figures]


def _talk(conversation: Conversation, source: TextIO, sink: TextIO) -> list[AnswerFigures]:
    """Until /exit or the end of input; a failed answer does not end the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` line editing)
    sink.write(f"{conversation.model} at {conversation.http.base_url}. {_HELP}.\n")
    all_figures: list[AnswerFigures] = []
    for text in _lines():
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            sink.write(f"{_HELP}\n")
        elif (figures := _answer(conversation, text, sink)) is not None:
            all_figures.append(figures)
    return all_figures


def _answer(conversation: Conversation, text: str, sink: TextIO) -> AnswerFigures | None:
    try:
        figures = conversation.ask(_whole_text("the line", text), _shower(sink))
    except KeyboardInterrupt:
        sink.write("\n[stopped; the question is not part of the conversation]\n")
        return None
    except ChatFailed as error:
        sink.write(f"\n[{error}]\n")
        return None
    sink.write(f"\n{figures}\n")
    return figures


def _lines() -> Iterator[str]:
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/exit":
            return
        if text:
            yield text


def _shower(sink: TextIO) -> Callable[[str], None]:
    def show(piece: str) -> None:
        sink.write(piece)
        sink.flush()

    return show


def _server_sent_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _message(body: bytes) -> str:
    """What an error answer says, whoever gave it."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "the server refused without a reason"
