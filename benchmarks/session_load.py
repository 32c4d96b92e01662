"""Conversations against an engine in real time: `mneme bench`'s load, asked of an engine of this process.

One thread does both, as `LLM.generate` does. Nothing is simulated: a step takes as long as it takes, and a question
that falls due meanwhile waits for its end, which counts as latency.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conversations import Conversation
from engines import request
from rate_search import Point

from mneme.errors import MnemeError
from mneme.lab.bench import load, workloads
from mneme.lab.bench.measure import Answer
from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import TokenEvent


class Window(NamedTuple):
    """What of a run is counted: the turns that end from `ramp_s` on."""

    ramp_s: float
    counted_s: float

    @property
    def ends_s(self) -> float:
        return self.ramp_s + self.counted_s


@dataclass(slots=True, kw_only=True)
class Served(Answer):
    """A turn that was answered; its text are ids."""

    kv_details: dict[str, int] = field(default_factory=dict)

    @property
    def s_per_token(self) -> float:
        """Normalized latency (Pensieve 6.1): from when the question is sent to its last token, per token of output."""
        return (self.ended_s - self.due_s) / (self.output_tokens or 1)


class Ids(NamedTuple):
    """Ids in the place of a text."""

    ids: list[int]

    def text(self) -> list[int]:
        return self.ids


def session_of(conversation: Conversation, name: str, think_scale: float) -> workloads.Session:
    """What is left of a conversation; what was said before stands in the place of a system message."""
    turns, first = conversation.turns, conversation.first_turn
    delays_s = [0.0, *(turn.think_s(think_scale) for turn in turns[first:])]
    return workloads.Session(
        name=name,
        system=Ids(conversation.history()) if first else None,  # type: ignore[arg-type]
        turns=[
            workloads.Turn(
                pieces=(Ids(conversation.question(number)),),  # type: ignore[arg-type]
                max_tokens=turns[number].num_out,
                at_s=conversation.begins_s if number == first else 0.0,
                delay_s=delays_s[number - first],
            )
            for number in range(first, len(turns))
        ],
    )


class Load:
    """Plays one trace on one engine."""

    def __init__(
        self, engine: Engine, trace: Sequence[Conversation], *, think_scale: float, keeps_sessions: bool
    ) -> None:
        self._engine, self._keeps_sessions = engine, keeps_sessions
        self._sessions = [session_of(each, f"s{index}", think_scale) for index, each in enumerate(trace)]
        self._serials = itertools.count()
        self._asking: dict[str, tuple[Served, list[int], asyncio.Future[None]]] = {}
        self._has_work = asyncio.Event()
        self._load = load.Load(self._ask, lambda turn: turn.pieces[0].text())
        self.began_s = self.busy_s = 0.0  # when second 0 was; time inside of steps

    @property
    def served(self) -> list[Served]:
        return self._load.answers  # type: ignore[return-value]

    def warm_up(self) -> None:
        """Bring the histories of what goes on at 0 where the engine keeps such: untimed, before the trace begins."""
        for session in self._sessions if self._keeps_sessions else ():
            if session.system is not None:
                ids: Any = session.system.text()
                self._engine.submit(request(f"{session.name}.history", ids, 1, session_id=session.name))
                while self._engine.has_work:  # one by one: as turns of long ago, in the order in which they are due
                    _raise_failures(self._engine.step())

    async def play(self, ends_s: float) -> None:
        """From second 0 to `ends_s` of the trace; what runs then is aborted."""
        self.began_s = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(work) for work in (self._step(), self._load.play(self._sessions))]
        await asyncio.wait(tasks, timeout=ends_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        self._engine.take_events()

    async def _ask(self, messages: list[dict[str, Any]], max_tokens: int, session: str) -> Answer:
        loop = asyncio.get_running_loop()
        ids = [token for message in messages for token in message["content"]]
        request_id = f"{session}.{next(self._serials)}"
        served, said = Served(session=session, sent_s=loop.time()), list[int]()
        ended = loop.create_future()
        self._asking[request_id] = served, said, ended
        self._engine.submit(request(request_id, ids, max_tokens, session_id=session if self._keeps_sessions else None))
        self._has_work.set()
        try:
            await ended
        except asyncio.CancelledError:
            self._engine.abort(request_id)
            raise
        if len(said) != max_tokens:
            raise MnemeError(f"{request_id}: {len(said)} tokens, not {max_tokens}")
        served.output_tokens, served.text = max_tokens, said  # type: ignore[assignment]
        return served

    async def _step(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._has_work.wait()
            begun_s = clock()
            events = self._engine.step()
            ended_s = clock()
            self.busy_s += ended_s - begun_s
            _raise_failures(events)
            for event in events:
                served, said, ended = self._asking[event.request_id]
                if event.usage is not None:
                    served.prompt_tokens, served.kv_details = event.usage.prompt_tokens, event.usage.kv_details()
                said += event.token_ids
                if event.finish_reason is not None:
                    served.ended_s = ended_s
                    ended.set_result(None)
                    del self._asking[event.request_id]
            if not self._engine.has_work:
                self._has_work.clear()
            for _ in range(4):  # a timer's task, and that of an answer, run two rounds later: before the next step
                await asyncio.sleep(0)


def _raise_failures(events: Sequence[TokenEvent]) -> None:
    for event in events:
        if event.finish_reason == "error":
            raise MnemeError(f"{event.request_id}: {event.error}")


def counted(served: Sequence[Served], began_s: float, window: Window) -> Iterator[Served]:
    return (turn for turn in served if window.ramp_s <= turn.ended_s - began_s < window.ends_s)


def point_of(turns: Sequence[Served], window: Window, offered_per_s: float) -> Point:
    """What the counted turns of a run come to; a p90 of infinity where nothing was served."""
    p90_s = percentile([turn.s_per_token for turn in turns], 90)
    return Point(offered_per_s, len(turns) / window.counted_s, p90_s, len(turns))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not pass; infinity if there is none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] if ordered else math.inf


def kv_per_turn(turns: Sequence[Served]) -> dict[str, float]:
    """Where a prompt's KV came from, tokens per turn."""
    total: Counter[str] = Counter()
    for turn in turns:
        total.update(turn.kv_details)
    return {name: count / len(turns) for name, count in total.items() if count} if turns else {}
