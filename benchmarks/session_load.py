"""Conversations against an engine in real time: questions are sent when they are due, the engine steps in between.

One thread does both, as `LLM.generate` does. Nothing is simulated: a step takes as long as it takes, and a question
that falls due meanwhile waits for its end, which counts as latency.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conversations import Conversation
from engines import request
from rate_search import Point

from mneme.errors import MnemeError
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest, TokenEvent


class Window(NamedTuple):
    """What of a run is counted: the turns that end from `ramp_s` on."""

    ramp_s: float
    counted_s: float

    @property
    def ends_s(self) -> float:
        return self.ramp_s + self.counted_s


class Served(NamedTuple):
    """A turn that was answered; seconds since the trace began."""

    due_s: float
    ended_s: float
    num_prompt: int
    num_out: int
    kv_details: dict[str, int]

    @property
    def s_per_token(self) -> float:
        """Normalized latency (Pensieve 6.1): from when the question is sent to its last token, per token of output."""
        return (self.ended_s - self.due_s) / self.num_out


@dataclass(slots=True, eq=False)
class _Talker:
    """One conversation as its client sees it: the whole history, its own ids."""

    conversation: Conversation
    name: str
    turn: int
    ids: list[int]
    due_s: float
    num_prompt: int = 0
    kv_details: dict[str, int] = field(default_factory=dict)


class Load:
    """Plays one trace on one engine."""

    def __init__(
        self,
        engine: Engine,
        trace: Sequence[Conversation],
        *,
        think_scale: float,
        keeps_sessions: bool,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._think_scale = think_scale
        self._keeps_sessions = keeps_sessions
        self._clock, self._sleep = clock, sleep
        self._talkers = [
            _Talker(each, f"s{index}", each.first_turn, each.history(), each.begins_s)
            for index, each in enumerate(trace)
        ]
        self._due = [(talker.due_s, index, talker) for index, talker in enumerate(self._talkers)]
        heapq.heapify(self._due)
        self._asking: dict[str, _Talker] = {}
        self.busy_s = 0.0  # inside of steps
        self.served: list[Served] = []

    def warm_up(self) -> None:
        """Bring the histories of what goes on at 0 where the engine keeps such: untimed, before the trace begins."""
        for talker in self._talkers if self._keeps_sessions else ():
            if talker.ids:
                self._engine.submit(self._request(talker, f"{talker.name}.history", max_tokens=1))
                while self._engine.has_work:  # one by one: as turns of long ago, in the order in which they are due
                    _raise_failures(self._engine.step())

    def play(self, ends_s: float) -> None:
        """From second 0 to `ends_s` of the trace; what runs then is aborted."""
        started_s = self._clock()
        while (now_s := self._clock() - started_s) < ends_s:
            while self._due and self._due[0][0] <= now_s:
                self._ask(heapq.heappop(self._due)[2])
            if self._engine.has_work:
                self._step(started_s)
            else:
                next_s = self._due[0][0] if self._due else ends_s
                self._sleep(max(min(next_s, ends_s) - now_s, 0.0))
        for request_id in list(self._asking):
            self._engine.abort(request_id)
        self._engine.take_events()

    def _ask(self, talker: _Talker) -> None:
        conversation = talker.conversation
        talker.ids += conversation.question(talker.turn)
        request_id = f"{talker.name}.{talker.turn}"
        self._asking[request_id] = talker
        num_out = conversation.turns[talker.turn].num_out
        self._engine.submit(self._request(talker, request_id, max_tokens=num_out))

    def _request(self, talker: _Talker, request_id: str, max_tokens: int) -> GenerationRequest:
        session_id = talker.name if self._keeps_sessions else None
        return request(request_id, talker.ids, max_tokens, session_id=session_id)

    def _step(self, started_s: float) -> None:
        begun_s = self._clock()
        events = self._engine.step()
        ended_s = self._clock()
        self.busy_s += ended_s - begun_s
        _raise_failures(events)
        for event in events:
            talker = self._asking[event.request_id]
            if event.usage is not None:
                talker.num_prompt, talker.kv_details = event.usage.prompt_tokens, event.usage.kv_details()
            talker.ids += event.token_ids
            if event.finish_reason is not None:
                self._end(event, talker, ended_s - started_s)

    def _end(self, event: TokenEvent, talker: _Talker, now_s: float) -> None:
        del self._asking[event.request_id]
        turns = talker.conversation.turns
        turn = turns[talker.turn]
        if len(talker.ids) != talker.num_prompt + turn.num_out:
            raise MnemeError(f"{event.request_id}: {len(talker.ids) - talker.num_prompt} tokens, not {turn.num_out}")
        self.served.append(Served(talker.due_s, now_s, talker.num_prompt, turn.num_out, talker.kv_details))
        talker.turn += 1
        if talker.turn < len(turns):
            talker.due_s = now_s + turn.think_s(self._think_scale)
            heapq.heappush(self._due, (talker.due_s, len(self.served) + len(self._talkers), talker))


def _raise_failures(events: Sequence[TokenEvent]) -> None:
    for event in events:
        if event.finish_reason == "error":
            raise MnemeError(f"{event.request_id}: {event.error}")


def counted(served: Sequence[Served], window: Window) -> Iterator[Served]:
    return (turn for turn in served if window.ramp_s <= turn.ended_s < window.ends_s)


def point_of(served: Sequence[Served], window: Window, offered_per_s: float) -> Point:
    """What a run comes to; a p90 of infinity where nothing was served."""
    turns = list(counted(served, window))
    p90_s = percentile([turn.s_per_token for turn in turns], 90)
    return Point(offered_per_s, len(turns) / window.counted_s, p90_s, len(turns))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not pass; infinity if there is none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] if ordered else math.inf


def kv_per_turn(served: Sequence[Served], window: Window) -> dict[str, float]:
    """Where a prompt's KV came from, tokens per turn."""
    turns = list(counted(served, window))
    total: Counter[str] = Counter()
    for turn in turns:
        total.update(turn.kv_details)
    return {name: count / len(turns) for name, count in total.items() if count} if turns else {}
