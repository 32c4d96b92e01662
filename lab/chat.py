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
from functools import partial
from typing import Any, TextIO

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
_STATUS_OF_SIGPIPE = 128 + 13  # as of any program that a closed pipe ends
_MAX_PORT = 65_535
_COMMANDS = ("/exit", "/help", "/reset")
_HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer or clears the line"
_PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk", "peer": "on another node"}
# Fewer tokens or less time say nothing: they came in one or two reads, however fast the server is.
_MIN_RATE_TOKENS, _MIN_RATE_S = 8, 0.05


class ChatFailed(Exception):
    """The server cannot be reached or refused; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFigures:
    """Holds what one answer took, as this client saw it."""

    ttft_s: float
    tokens_per_s: float | None  # after the first token; None: too few of them to tell
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    places: dict[str, int] = field(default_factory=dict)  # tokens by where their KV was; none: the server does not say

    def __str__(self) -> str:
        rate = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:.1f}"
        found = ", ".join(f"{count:,} {_PLACES[name]}" for name, count in self.places.items() if count)
        return (
            f"[TTFT {self.ttft_s * 1e3:.0f} ms, {rate} tokens/s, "
            f"{self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens cached{found and f': {found}'}]"
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
        started_s, times_s, pieces = self.clock(), list[float](), list[str]()
        usage: dict[str, Any] = {}
        for event in self._events(asked):
            if "error" in event:
                raise ChatFailed(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    times_s.append(self.clock())
                    pieces.append(piece)
                    show(piece)
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        first_s, last_s = (times_s[0], times_s[-1]) if times_s else (started_s, started_s)
        num_tokens = usage.get("completion_tokens", 0)
        can_tell = num_tokens >= _MIN_RATE_TOKENS and last_s - first_s >= _MIN_RATE_S
        return AnswerFigures(
            ttft_s=first_s - started_s,
            tokens_per_s=(num_tokens - 1) / (last_s - first_s) if can_tell else None,
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            completion_tokens=num_tokens,
            places={name: usage.get("kv_details", {}).get(name, 0) for name in _PLACES},
        )

    def _events(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        body = {
            "model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True},
            **self.options,
        }  # fmt: skip
        headers = {"X-Session-ID": self.session_id}
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatFailed(_message(response))
                yield from _server_sent_events(response)
        except httpx.HTTPError as error:
            raise ChatFailed(f"{self.http.base_url}: {error}") from error


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command takes that calls a running server."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="a running server, with or without /v1 (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get("MNEME_API_KEY"), help="default: $MNEME_API_KEY"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.set_defaults(run=run_chat)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="per answer at most (default: what the context leaves)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="from 0 (greedy) to 2 (default: the server's)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: all answers' figures")


def run_chat(args: argparse.Namespace) -> int:
    """Returns the exit status; standard input that is no terminal is one message."""
    timeout = httpx.Timeout(10, read=600)
    try:
        with httpx.Client(base_url=base_url(args.url), headers=auth_headers(args), timeout=timeout) as http:
            conversation = _open(http, args)
            talk = _talk if sys.stdin.isatty() else _answer_once
            figures = talk(conversation, sys.stdin, sys.stdout)
        if args.json:
            sys.stdout.write(json.dumps({"answers": [asdict(each) for each in figures]}) + "\n")
        sys.stdout.flush()
    except httpx.InvalidURL as error:
        sys.stderr.write(f"mneme chat: --url {args.url}: {error}\n")
        return 1
    except ChatFailed as error:
        sys.stderr.write(f"mneme chat: {error}\n")
        return 1
    except BrokenPipeError:  # who read the answer has enough
        _forget_output()
        return _STATUS_OF_SIGPIPE
    return 0


def base_url(url: str) -> str:
    """The server's root: what OpenAI's clients are given ends in /v1 or in the route, and a scheme is often left out.

    Raises `httpx.InvalidURL`, also for a port that no server can have: httpx finds that only when it connects.
    """
    root = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    port = httpx.URL(root).port
    if port is not None and not 1 <= port <= _MAX_PORT:
        raise httpx.InvalidURL(f"the port must be from 1 to {_MAX_PORT}")
    return root


def auth_headers(args: argparse.Namespace) -> dict[str, str]:
    """Return what a request with the given key has. Raises `ChatFailed`."""
    key: str | None = args.api_key
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key.strip() == key):
        raise ChatFailed("--api-key: must be one line of ASCII text without spaces around it")
    return {"Authorization": f"Bearer {key}"}


def _forget_output() -> None:
    """Discard what is still buffered: the interpreter would fail to write it at its exit."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: no file underneath
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _open(http: httpx.Client, args: argparse.Namespace) -> Conversation:
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    given = {name: value for name, value in options.items() if value is not None}
    conversation = Conversation(http, args.model or first_model(http), given)
    if args.system:
        conversation.messages.append({"role": "system", "content": _whole_text("--system", args.system)})
    return conversation


def first_model(http: httpx.Client) -> str:
    """Return the first model that the server lists. Raises `ChatFailed`, also if nobody answers."""
    try:
        response = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatFailed(f"{http.base_url} does not answer ({error}); is `mneme serve` running?") from error
    if response.status_code != 200:
        raise ChatFailed(f"{response.url}: {_message(response)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ChatFailed(
            f"{response.url}: the answer is no list of models; is this an OpenAI-compatible server?"
        ) from None


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
    figures = conversation.ask(text, partial(print, end="", file=sink, flush=True))
    sink.write(f"\n{_dim(str(figures), sink)}\n")
    return [figures]


def _talk(conversation: Conversation, source: TextIO, sink: TextIO) -> list[AnswerFigures]:
    """Talk until /exit or the end of input; a failed answer does not end the conversation."""
    with contextlib.suppress(ImportError):  # `input` edits lines with it, and completes commands
        import readline

        readline.set_completer(_complete)
        readline.set_completer_delims("")
        readline.parse_and_bind("tab: complete")
    sink.write(f"{conversation.model} at {conversation.http.base_url}\n{_dim(_HELP, sink)}\n")
    all_figures: list[AnswerFigures] = []
    for text in _lines():
        if text == "/reset":
            conversation.reset()
            sink.write(f"{_dim('[a new conversation]', sink)}\n")
        elif text.startswith("/"):
            unknown = "" if text == "/help" else f"unknown command {text}: "
            sink.write(f"{_dim(unknown + _HELP, sink)}\n")
        elif (figures := _answer(conversation, text, sink)) is not None:
            all_figures.append(figures)
    return all_figures


def _answer(conversation: Conversation, text: str, sink: TextIO) -> AnswerFigures | None:
    try:
        figures = conversation.ask(_whole_text("the line", text), partial(print, end="", file=sink, flush=True))
    except KeyboardInterrupt:
        sink.write("\n[stopped; the question is not part of the conversation]\n")
        return None
    except ChatFailed as error:
        sink.write(f"\n[{error}]\n")
        return None
    sink.write(f"\n{_dim(str(figures), sink)}\n")
    return figures


def _lines() -> Iterator[str]:
    """Lines until the end of input, /exit, or two Ctrl-C in a row: one drops what was typed."""
    is_interrupted = False
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if is_interrupted:
                return
            is_interrupted = True
            continue
        is_interrupted = False
        if text == "/exit":
            return
        if text:
            yield text


def _complete(text: str, state: int) -> str | None:
    """The `state`-th command that begins with `text`, as readline asks for them."""
    found = [command for command in _COMMANDS if text and command.startswith(text)]
    return found[state] if state < len(found) else None


def _dim(text: str, sink: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sink.isatty() and not os.environ.get("NO_COLOR") else text


def _server_sent_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _message(response: httpx.Response) -> str:
    """Return what an error answer says, whoever gave it."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = " ".join(response.text.split())[:200]
        return f"status {response.status_code}: {text or 'no reason given'}"
