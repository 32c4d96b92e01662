"""Sessions that share an engine, turn by turn, more than its tiers hold; for bench_tiers.py.

Lengths are ShareGPT's (`conversations.py`) with answers cut to a quarter, so that prompts are most of the work. The
order of turns is drawn once: every arm takes the same turns in the same order. A session's next turn is sent as soon
as there is a place, but never before its last one has ended. Whether requests queue is a matter of the places and the
pool: a pool that has room for as many contexts as there are places never lets one wait.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cache_engines import request
from conversations import SHAPES, Conversation, Turn, draw_turns

from mneme.errors import MnemeError
from mneme.replicas.engine.engine import BLOCKED_S, Engine
from mneme.replicas.request import PromptUsage
from mneme.replicas.sequence import Chunk

CONTEXT = 2048
WARM_UP_SHARE = 0.2  # of the turns, which do not count
ANSWER_SHARE = 0.25
NUM_PLACES = 4  # requests in the engine at once; all of them run if the pool holds as many contexts


class Taken(NamedTuple):
    """One turn."""

    ttft_s: float  # from when it was sent
    usage: PromptUsage
    history: int  # tokens of its prompt that its conversation has said before


class Ran(NamedTuple):
    """The turns that count."""

    turns: list[Taken]
    busy_s: float  # inside of steps
    blocked_s: float  # between them, while all there was to do waited for the cache tier
    prefill_s: float  # inside of steps that computed rows of prompts
    num_waiting: float  # requests that were not admitted yet, on average over steps

    @property
    def device_s(self) -> float:
        """For which nobody else could have had the device."""
        return self.busy_s + self.blocked_s

    def tokens_from(self, tier: str) -> int:
        return sum(each.usage.kv_details()[tier] for each in self.turns)

    @property
    def prompt_tokens(self) -> int:
        return sum(each.usage.prompt_tokens for each in self.turns)


def make_sessions(num_sessions: int, seed: int) -> list[Conversation]:
    """Whole conversations, cut answers."""
    rng = random.Random(f"{seed}.sessions")
    found = []
    for _ in range(num_sessions):
        turns = [Turn(t.num_in, max(int(t.num_out * ANSWER_SHARE), 1)) for t in _turns(rng)]
        found.append(Conversation(0.0, turns, 0, rng.getrandbits(48)))
    return found


def _turns(rng: random.Random) -> list[Turn]:
    """With questions as much longer as answers are shorter: histories are as long as ShareGPT's."""
    return [
        Turn(turn.num_in + turn.num_out - int(turn.num_out * ANSWER_SHARE), turn.num_out)
        for turn in draw_turns(SHAPES["sharegpt"], CONTEXT, rng)
    ]


def make_order(sessions: Sequence[Conversation], seed: int) -> list[int]:
    """Which session takes the next turn: drawn from those that have turns left."""
    rng = random.Random(f"{seed}.order")
    left = {index: len(each.turns) for index, each in enumerate(sessions)}
    order = []
    while left:
        index = rng.choice(sorted(left))
        order.append(index)
        left[index] -= 1
        if not left[index]:
            del left[index]
    return order


def prompt_rows(chunk: Chunk) -> int:
    """How many rows of its prompt a sequence computes in a step."""
    num_prompt = len(chunk.sequence.request.prompt_token_ids)
    return sum(max(min(end, num_prompt) - start, 0) for start, end in chunk.spans)


class Workload:
    """The turns on one engine, at most so many at once."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sequence[Conversation],
        order: Sequence[int],
        *,
        num_places: int = NUM_PLACES,
    ) -> None:
        self._engine, self._sessions, self._num_places = engine, sessions, num_places
        self._unsent = list(enumerate(order))
        self._ids: list[list[int]] = [[] for _ in sessions]
        self._turn = [0] * len(sessions)
        self._running: dict[str, tuple[int, int, int, float]] = {}  # session, number in the order, history, sent
        self._num_warm_up = int(WARM_UP_SHARE * len(order))
        self._turns: list[Taken] = []
        self._busy_s = self._blocked_s = self._prefill_s = 0.0
        self._num_steps = self._num_waited = 0
        self.scheduled: list[Chunk] = []  # of the last step

    def run(self) -> Ran:
        """Raises `MnemeError` if a turn fails."""
        with self.noted_chunks():
            while self._unsent or self._running:
                self._send()
                self._step()
        mean_waiting = self._num_waited / max(self._num_steps, 1)
        return Ran(self._turns, self._busy_s, self._blocked_s, self._prefill_s, mean_waiting)

    def _step(self) -> None:
        blocked_s = self._wait() if self._engine.is_blocked else 0.0
        stepped_s = time.perf_counter()
        events = self._engine.step()
        ended_s = time.perf_counter()
        if self._is_warm:
            self._blocked_s += blocked_s
            self._busy_s += ended_s - stepped_s
            self._prefill_s += ended_s - stepped_s if any(map(prompt_rows, self.scheduled)) else 0.0
            self._num_steps += 1
            self._num_waited += len(self._engine.scheduler.waiting)
        for event in events:
            if event.finish_reason == "error":
                raise MnemeError(f"{event.request_id}: {event.error}")
            self._take(event.request_id, event.token_ids, event.usage, ended_s)
            if event.finish_reason is not None:
                del self._running[event.request_id]

    def _wait(self) -> float:
        """For the cache tier, a little; how long."""
        began_s = time.perf_counter()
        time.sleep(BLOCKED_S)
        return time.perf_counter() - began_s

    @contextmanager
    def noted_chunks(self) -> Iterator[None]:
        """What steps compute is noted as it is scheduled."""
        scheduler = self._engine.scheduler
        schedule = scheduler.schedule

        def noted() -> list[Chunk]:
            self.scheduled = schedule()
            return self.scheduled

        scheduler.schedule = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            scheduler.schedule = schedule  # type: ignore[method-assign]

    @property
    def _is_warm(self) -> bool:
        return len(self._unsent) <= self._num_turns - self._num_warm_up

    @property
    def _num_turns(self) -> int:
        return sum(len(each.turns) for each in self._sessions)

    def _send(self) -> None:
        busy = {session for session, *_ in self._running.values()}
        while len(self._running) < self._num_places:
            place = next((p for p, (_, session) in enumerate(self._unsent) if session not in busy), None)
            if place is None:
                return
            number, session = self._unsent.pop(place)
            busy.add(session)
            history = len(self._ids[session])
            self._ids[session] += self._sessions[session].question(self._turn[session])
            num_out = self._sessions[session].turns[self._turn[session]].num_out
            self._turn[session] += 1
            name = f"{session}.{self._turn[session]}"
            self._running[name] = (session, number, history, time.perf_counter())
            self._engine.submit(request(name, self._ids[session], num_out))

    def _take(self, name: str, token_ids: Sequence[int], usage: PromptUsage | None, now_s: float) -> None:
        session, number, history, sent_s = self._running[name]
        self._ids[session] += token_ids
        if usage is not None and number >= self._num_warm_up:
            self._turns.append(Taken(now_s - sent_s, usage, history))
