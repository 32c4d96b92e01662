"""Load on the doors of pods: streams of one greedy prompt, whose texts must be alike, and sessions that append turns.

Each request is a new connection to a door that the service would choose. The client of `lab/bench` is another: it
keeps to one address and its connections, and sends histories, not turns that append.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
from streams import BadStream, Heard, stream

PROMPT = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
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

    def _ask(self, kind: str, path: str, body: dict[str, Any]) -> tuple[Asked, Heard | None]:
        """Send a request and read its answer."""
        began, heard = time.monotonic(), None
        problem: str | None = None
        if not (doors := self._doors()):
            return Asked(kind, began, began, "", "no door is ready"), None
        door = self._rng.choice(doors)
        try:
            with httpx.Client(base_url=f"http://{door}:8000", timeout=_TIMEOUT_S) as http:
                heard = stream(http, path, body)
        except (httpx.HTTPError, BadStream) as error:
            problem = str(error) or type(error).__name__
        return Asked(kind, began, time.monotonic(), door, problem, heard.text if heard else ""), heard

    def _stream(self) -> None:
        while not self._is_over.is_set():
            self._note(self._ask("stream", "/v1/completions", PROMPT)[0])

    def _talk(self, number: int) -> None:
        """Sessions, one after the other; a turn that failed is asked again."""
        session, turn, history = 0, 0, 0
        while not self._is_over.is_set():
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"Tell me more about day {turn} of journey {number}."}],
                "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0,
                "session": {"id": f"{number}-{session}", "append": turn > 0},
            }  # fmt: skip
            asked, heard = self._ask("turn", "/v1/chat/completions", body)
            if heard is not None and heard.usage:
                usage = heard.usage
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
