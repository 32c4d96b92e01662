"""Load on the doors of pods: streams of one greedy prompt, whose texts must be alike, and sessions that append turns.

Each request is a new connection to a door that the service would choose. The client of `lab/bench` is another: it keeps
to one address and its connections, and sends histories, not turns that append.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

PROMPT = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "temperature": 0, "stream": True}
MAX_TOKENS = 24
_MAX_TURNS = 20
_TIMEOUT_S = 120.0
_PAUSE_S = 0.2


class Asked(NamedTuple):
    """One request; `problem` None: it ended well."""

    kind: str  # stream or turn
    began: float
    ended: float
    door: str
    problem: str | None
    text: str = ""
    found: float | None = None  # share of the history whose KV was found


class Load:
    """Runs `num_streams` and `num_sessions` clients until `stop`; `asked` has what came of it."""

    def __init__(self, doors: Callable[[], list[str]], num_streams: int, num_sessions: int) -> None:
        self.asked: list[Asked] = []
        self._doors = doors
        self._rng = random.Random(0)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._stream) for _ in range(num_streams)]
        self._threads += [threading.Thread(target=self._talk, args=(number,)) for number in range(num_sessions)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _ask(self, kind: str, path: str, body: dict[str, Any]) -> tuple[Asked, list[dict[str, Any]]]:
        """Send a request and read its answer as events."""
        began, events = time.monotonic(), list[dict[str, Any]]()
        doors = self._doors()
        door = self._rng.choice(doors) if doors else ""
        problem: str | None = None if doors else "no door is ready"
        try:
            url = f"http://{door}:8000{path}"
            with httpx.Client(timeout=_TIMEOUT_S) as client, client.stream("POST", url, json=body) as answer:
                lines = answer.iter_lines()
                if answer.status_code != 200:
                    problem = f"{answer.status_code} {next(lines, '')[:120]}"
                for line in lines:
                    if line.startswith("data: {"):
                        events.append(json.loads(line[6:]))
        except httpx.HTTPError as error:
            problem = problem or type(error).__name__
        problem = problem or next((str(event["error"])[:120] for event in events if "error" in event), None)
        return Asked(kind, began, time.monotonic(), door, problem), events

    def _stream(self) -> None:
        while not self._is_over.is_set():
            asked, events = self._ask("stream", "/v1/completions", PROMPT)
            text = "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
            self._note(asked._replace(text=text))

    def _talk(self, number: int) -> None:
        """Sessions, one after the other; a turn that failed is asked again."""
        session, turn, history = 0, 0, 0
        while not self._is_over.is_set():
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"Tell me more about day {turn} of journey {number}."}],
                "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True},
                "session": {"id": f"{number}-{session}", "append": turn > 0},
            }  # fmt: skip
            asked, events = self._ask("turn", "/v1/chat/completions", body)
            usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
            if asked.problem is None and usage is not None:
                found = min(usage["prompt_tokens_details"]["cached_tokens"] / history, 1.0) if history else None
                self._note(asked._replace(found=found))
                history, turn = usage["total_tokens"] - 1, turn + 1  # the last token has no KV yet
            else:
                self._note(asked)
            if turn == _MAX_TURNS:
                session, turn, history = session + 1, 0, 0
            time.sleep(_PAUSE_S)

    def _note(self, asked: Asked) -> None:
        self.asked.append(asked)
        if asked.problem is not None:
            time.sleep(1.0)
