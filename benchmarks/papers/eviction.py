"""Which pages of a device go first: eviction policies on conversations, simulated with the forest's own code.

Prompt tokens found over prompt tokens, for pools from a part of what the sessions that are alive need to most of it,
at loads without a queue, with a short one and a growing one. A session begins with one of a few system prompts, then
takes turns: it asks, waits for a free place, is answered, thinks, asks again with the whole history. A turn holds its
pages, those of its answer too, for as long as the model would take: uncached prompt tokens at the rate of prefill, then
the answer at that of decode. ShareGPT's lengths as in Pensieve 6.1. Counted, and not timed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mneme.cachetier.names import EvictionPolicyName
from mneme.cachetier.policy.eviction import make_policy
from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.page_store import OutOfPages
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.tree import Owner
from papers.experiment import Experiment, Found, Ours, Point

PAGE_SIZE = 32
_VOCAB = list(range(32_000))
POLICIES: tuple[EvictionPolicyName, ...] = ("density", "lookahead", "lru", "pensieve", "returning")
LOADS = {"no queue": 1.0, "short queue": 1.8, "long queue": 2.5}  # sessions per second: 32 places serve about 1.7
POOLS = (1500, 2500, 4000)  # pages
SEEDS, NUM_SESSIONS = 3, 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """Means of exponential draws, but for `num_turns`, which is geometric."""

    num_sessions: int
    sessions_per_s: float = 1.0
    num_turns: float = 7.58  # ShareGPT as in Pensieve 6.1: turns, tokens asked, tokens answered
    tokens_in: float = 31.26
    tokens_out: float = 180.44
    max_context: int = 2048  # a session ends before it outgrows this
    think_s_per_token: float = 0.1
    min_think_s: float = 5.0
    num_system_prompts: int = 4
    system_tokens: int = 256


class Turn(NamedTuple):
    asked: list[int]
    answer: list[int]
    think_s: float  # before the next turn


class SessionTrace(NamedTuple):
    name: str
    begins_s: float
    system_prompt: list[int]
    turns: list[Turn]


def make_trace(shape: TraceShape, seed: int) -> list[SessionTrace]:
    """Sessions in order of arrival (Poisson); the same for every policy."""
    rng = random.Random(seed)
    prompts = [rng.choices(_VOCAB, k=shape.system_tokens) for _ in range(shape.num_system_prompts)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    begins_s, sessions = 0.0, []
    for index in range(shape.num_sessions):
        begins_s += rng.expovariate(shape.sessions_per_s)
        prompt = rng.choices(prompts, weights)[0]
        turns = _turns(shape, rng, shape.max_context - len(prompt))
        sessions.append(SessionTrace(f"s{index}", begins_s, prompt, turns))
    return sessions


def _turns(shape: TraceShape, rng: random.Random, room: int) -> list[Turn]:
    turns: list[Turn] = []
    while not turns or rng.random() < 1 - 1 / shape.num_turns:
        num_in = 1 + int(rng.expovariate(1 / shape.tokens_in))
        num_out = 1 + int(rng.expovariate(1 / shape.tokens_out))
        room -= num_in + num_out
        if room < 0 and turns:
            break
        think_s = max(shape.min_think_s, shape.think_s_per_token * num_out)
        turns.append(Turn(rng.choices(_VOCAB, k=num_in), rng.choices(_VOCAB, k=num_out), think_s))
    return turns


@dataclass(slots=True)
class Outcome:
    """Sums over all turns."""

    prompt_tokens: int = 0
    found_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.found_tokens / self.prompt_tokens


class _Asked(NamedTuple):
    """A turn from the question to the end of its answer."""

    session: SessionTrace
    number: int  # of the turn, from 0
    prompt: list[int]

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.number]


class _Answered(NamedTuple):
    asked: _Asked
    path: Path


class Replica:
    """Plays one replica of `num_places` running turns."""

    def __init__(
        self,
        trace: list[SessionTrace],
        num_pages: int,
        eviction: EvictionPolicyName,
        *,
        num_places: int = 32,
        prefill_tokens_per_s: float = 4000.0,
        decode_tokens_per_s: float = 50.0,  # of one sequence
    ) -> None:
        self._num_places = num_places
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_tokens_per_s = decode_tokens_per_s
        self._now_s = 0.0
        self._forest = PrefixForest(
            num_pages,
            PAGE_SIZE,
            policy=make_policy(eviction, self._clock, num_pages),
            clock=self._clock,
        )
        self._owner_by_name = {session.name: Owner() for session in trace}
        self._forest.look_ahead(lambda: (self._owner_by_name[asked.session.name] for asked in self._waiting))
        self._waiting: deque[_Asked] = deque()
        self._num_running = 0
        self._serials = itertools.count()
        self._events: list[tuple[float, int, _Asked | _Answered]] = []
        self._outcome = Outcome()
        for session in trace:
            self._at(session.begins_s, _Asked(session, 0, session.system_prompt + session.turns[0].asked))

    def run(self) -> Outcome:
        """Play the whole trace. Raises `OutOfPages` if a turn cannot run even alone."""
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, _Asked):
                self._waiting.append(event)
            else:
                self._end(event)
            while self._waiting and self._num_running < self._num_places and self._begin(self._waiting[0]):
                self._waiting.popleft()
                self._num_running += 1
            if self._waiting and not self._num_running:
                raise OutOfPages
        self._forest.check()
        return self._outcome

    def _clock(self) -> float:
        return self._now_s

    def _at(self, when_s: float, event: _Asked | _Answered) -> None:
        heapq.heappush(self._events, (when_s, next(self._serials), event))

    def _begin(self, asked: _Asked) -> bool:
        """Take the pages of a turn and plan its end; False if they do not fit now."""
        forest, prompt, turn = self._forest, asked.prompt, asked.turn
        ids = prompt + turn.answer
        path = forest.open_path("")
        found = min(path.extend(prompt, len(prompt)), len(prompt) - 1)
        path.extend(ids, len(ids))
        if path.num_new_pages(ids, len(ids)) > forest.store.tiers[0].num_available:
            forest.release(path)
            return False
        path.write(ids, len(ids))
        forest.store.drain_moves()
        self._outcome.prompt_tokens += len(prompt)
        self._outcome.found_tokens += found
        prefill_s = (len(prompt) - found) / self._prefill_tokens_per_s
        self._at(self._now_s + prefill_s + len(turn.answer) / self._decode_tokens_per_s, _Answered(asked, path))
        return True

    def _end(self, answered: _Answered) -> None:
        (session, number, prompt), turn = answered.asked, answered.asked.turn
        self._forest.release(answered.path, self._owner_by_name[session.name])
        self._num_running -= 1
        if number + 1 < len(session.turns):
            history = prompt + turn.answer
            question = session.turns[number + 1].asked
            self._at(self._now_s + turn.think_s, _Asked(session, number + 1, history + question))


class Eviction(Experiment):
    """Pensieve's score (4.3) beside others'."""

    name, title, minutes = "pensieve-eviction", "Pensieve 4.3: which pages of a device go first", 3
    rows = ()
    model = "lengths alone"
    is_timed = False

    def points(self) -> Iterable[Point]:
        grid = itertools.product(LOADS, POOLS, range(self.seed, self.seed + (1 if self.is_quick else SEEDS)))
        return [{"traffic": traffic, "pages": pages, "seed": seed} for traffic, pages, seed in grid]

    def measure(self, point: Point) -> Point:
        shape = TraceShape(num_sessions=NUM_SESSIONS, sessions_per_s=LOADS[point["traffic"]])
        trace = make_trace(shape, point["seed"])
        return {name: Replica(trace, point["pages"], name).run().hit_rate for name in POLICIES}

    def ours(self, found: Found) -> dict[str, Ours]:
        """Return no row: the paper has no figure of its policy alone."""
        return {}


EXPERIMENTS = (Eviction,)
