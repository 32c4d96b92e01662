"""One streamed request, as those benchmarks read it that look at each event, or at `usage`, or kill who answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx


class BadStream(Exception):
    """A stream ended with an error, or not as it should."""


class Heard(NamedTuple):
    """A whole answer."""

    text: str
    completion: str  # its id
    first_s: float  # from before the request to the first token
    pause_s: float  # the longest gap between two events
    usage: dict[str, Any]


def stream(
    http: httpx.Client, path: str, body: dict[str, Any], on_piece: Callable[[int], object] = lambda _: None,
    headers: dict[str, str] | None = None,
) -> Heard:  # fmt: skip
    """Ask for an answer and read it; `on_piece` hears how many pieces of text there are, from 0 on.

    Raises `BadStream`, and `httpx.HTTPError` if the connection breaks.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text, completion, usage, num_pieces, is_done = "", "", dict[str, Any](), 0, False
    began_s = last_s = time.perf_counter()
    first_s = pause_s = 0.0
    with http.stream("POST", path, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise BadStream(f"HTTP {answer.status_code}: {answer.read().decode(errors='replace')[:120]}")
        on_piece(0)
        for line in answer.iter_lines():
            is_done |= line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            now_s = time.perf_counter()
            pause_s, last_s = max(pause_s, now_s - last_s), now_s
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise BadStream(str(event["error"].get("message")))
            completion, usage = event["id"], event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content")
                is_opening = not piece and "delta" in choice and not choice.get("finish_reason")
                first_s = first_s or (0.0 if is_opening else now_s - began_s)
                if piece:
                    text += piece
                    num_pieces += 1
                    on_piece(num_pieces)
    if not is_done:
        raise BadStream("ended early")
    return Heard(text, completion, first_s, pause_s, usage)
