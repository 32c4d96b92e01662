"""Sessions that share a few places of an engine, turn by turn, more than its tiers hold; for bench_tiers.py.

Lengths are ShareGPT's (`conversations.py`) with answers cut to a quarter, so that prompts are most of the work. The
order of turns is drawn once: every arm takes the same turns in the same order. A session's next turn is sent as soon
as there is a place, but never before its last one has ended.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache_engines import request
from conversations import SHAPES, Conversation, Turn, draw_turns

from mneme.errors import MnemeError
from mneme.replicas.engine import BLOCKED_S, Engine
from mneme.replicas.request import PromptUsage

CONTEXT = 2048
WARM_UP_SHARE = 0.2  # of the turns, which do not count
ANSWER_SHARE = 0.25
NUM_PLACES = 4  # requests in the engine at once; those beyond what fits wait, and are looked ahead to


class Taken(NamedTuple):
    """One turn."""

    ttft_s: float  # from when it was sent
    usage: PromptUsage


class Ran(NamedTuple):
    """The turns that count."""

    turns: list[Taken]
    wall_s: float
    busy_s: float  # inside of steps
    prefill_s: float  # inside of steps that computed more than a row of some prompt

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


class Workload:
    """The turns on one engine."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sequence[Conversation],
        order: Sequence[int],
        after_step: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._sessions, self._after_step = engine, sessions, after_step
        self._unsent = list(enumerate(order))
        self._ids: list[list[int]] = [[] for _ in sessions]
        self._turn = [0] * len(sessions)
        self._running: dict[str, tuple[int, int, float]] = {}  # session, number in the order, sent
        self._num_warm_up = int(WARM_UP_SHARE * len(order))
        self._turns: list[Taken] = []
        self._wall_s = self._busy_s = self._prefill_s = 0.0

    def run(self) -> Ran:
        """Raises `MnemeError` if a turn fails."""
        while self._unsent or self._running:
            self._send()
            began_s, num_prompt = time.perf_counter(), self._num_computed
            if self._engine.is_blocked:
                time.sleep(BLOCKED_S)
            stepped_s = time.perf_counter()
            events = self._engine.step()
            self._after_step()
            ended_s = time.perf_counter()
            if self._is_warm:
                self._wall_s += ended_s - began_s
                self._busy_s += ended_s - stepped_s
                self._prefill_s += ended_s - stepped_s if self._num_computed > num_prompt else 0.0
            for event in events:
                if event.finish_reason == "error":
                    raise MnemeError(f"{event.request_id}: {event.error}")
                self._take(event.request_id, event.token_ids, event.usage, ended_s)
                if event.finish_reason is not None:
                    del self._running[event.request_id]
        return Ran(self._turns, self._wall_s, self._busy_s, self._prefill_s)

    @property
    def _is_warm(self) -> bool:
        return len(self._unsent) <= self._num_turns - self._num_warm_up

    @property
    def _num_turns(self) -> int:
        return sum(len(each.turns) for each in self._sessions)

    @property
    def _num_computed(self) -> int:
        """Prompt tokens so far; a step in which it grows has ended a prompt."""
        return self._engine.num_tokens["prompt"]

    def _send(self) -> None:
        busy = {session for session, _, _ in self._running.values()}
        while len(self._running) < NUM_PLACES:
            place = next((p for p, (_, session) in enumerate(self._unsent) if session not in busy), None)
            if place is None:
                return
            number, session = self._unsent.pop(place)
            busy.add(session)
            self._ids[session] += self._sessions[session].question(self._turn[session])
            num_out = self._sessions[session].turns[self._turn[session]].num_out
            self._turn[session] += 1
            name = f"{session}.{self._turn[session]}"
            self._running[name] = (session, number, time.perf_counter())
            self._engine.submit(request(name, self._ids[session], num_out))

    def _take(self, name: str, token_ids: Sequence[int], usage: PromptUsage | None, now_s: float) -> None:
        session, number, sent_s = self._running[name]
        self._ids[session] += token_ids
        if usage is not None and number >= self._num_warm_up:
            self._turns.append(Taken(now_s - sent_s, usage))
