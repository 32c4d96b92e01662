"""Conversations of many turns as Pensieve 6.1 describes them: lengths, arrivals, time to think. No tensors, no model.

Lengths. The number of turns is geometric, questions and answers have exponential lengths (of at least a token). A
conversation ends before the turn that would outgrow 2,048 tokens, and is left out if it then has fewer than five. The
three means to draw from are chosen so that *after* both cuts the means of what is left are those of Pensieve's Table 2;
`tests/benchmarks/test_conversations.py` holds them to that. With a context of 8 x 2,048 the same draws are cut later,
as the same dataset would be, so they have more turns (11.3 and 7.9).

Time. Conversations arrive by Poisson. A question is sent when the answer before it has come and its reader has thought:
100 ms for each of its tokens, at least 5 s, both times one factor. A trace begins in the midst of traffic:
conversations that would have begun earlier stand at the turn that they would have reached.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from workloads import VOCAB_SIZE

MIN_TURNS = 5
THINK_S_PER_TOKEN = 0.1
MIN_THINK_S = 5.0
CONTEXT = 2048
_FIRST_ID = 16  # as in workloads.make_prompts


class Shape(NamedTuple):
    """Means to draw from, before the cuts, and what they come to at a context of 2,048."""

    more_turns: float  # beyond the first four, or one less than there are at least
    tokens_in: float
    tokens_out: float
    table: tuple[float, float, float]  # turns, tokens in, tokens out: Pensieve, Table 2


SHAPES = {
    "sharegpt": Shape(7.3302, 31.113, 198.608, (7.58, 31.26, 180.44)),
    "lmsys": Shape(3.8897, 22.005, 100.685, (7.73, 22.49, 100.67)),
}


class Turn(NamedTuple):
    num_in: int
    num_out: int

    def think_s(self, scale: float) -> float:
        """After its answer, before the next question."""
        return scale * max(MIN_THINK_S, THINK_S_PER_TOKEN * self.num_out)


class Conversation(NamedTuple):
    begins_s: float  # when `first_turn` is asked
    turns: list[Turn]
    first_turn: int  # those before it were taken before the trace begins
    seed: int

    @property
    def num_history(self) -> int:
        """Tokens of the turns before the first one."""
        return sum(turn.num_in + turn.num_out for turn in self.turns[: self.first_turn])

    def question(self, number: int) -> list[int]:
        """Token ids that the turn adds; the same in every run."""
        return _ids(f"{self.seed}.{number}", self.turns[number].num_in)

    def history(self) -> list[int]:
        """Token ids of the turns before the first one, answers made up."""
        return _ids(f"{self.seed}.history", self.num_history)


def _ids(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(_FIRST_ID, VOCAB_SIZE), k=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a trace is made of but for its rate."""

    shape: Shape
    context: int = CONTEXT
    think_scale: float
    nominal_s_per_token: float  # of an answer: only to say how far older conversations have come
    seed: int = 0


def draw_turns(shape: Shape, context: int, rng: random.Random, *, min_turns: int = MIN_TURNS) -> list[Turn]:
    """The turns of one conversation that has five at least, or `min_turns`, and fits the context."""
    while True:
        turns = list(_fitting(shape, context, rng, min_turns))
        if len(turns) >= min_turns:
            return turns


def _fitting(shape: Shape, context: int, rng: random.Random, min_turns: int) -> Iterator[Turn]:
    for _ in range(_num_turns(shape, rng, min_turns)):
        turn = Turn(1 + int(rng.expovariate(1 / shape.tokens_in)), 1 + int(rng.expovariate(1 / shape.tokens_out)))
        context -= turn.num_in + turn.num_out
        if context < 0:
            return
        yield turn


def _num_turns(shape: Shape, rng: random.Random, min_turns: int) -> int:
    """Geometric given that it is so many at least: one less, and a geometric number of more."""
    num = min_turns
    while rng.random() >= 1 / shape.more_turns:
        num += 1
    return num


def mean_turns(traffic: Traffic, num_drawn: int = 4000) -> float:
    """Turns of a conversation: what a rate of requests is divided by to get one of conversations."""
    rng = random.Random(traffic.seed)
    return sum(len(draw_turns(traffic.shape, traffic.context, rng)) for _ in range(num_drawn)) / num_drawn


def make_trace(traffic: Traffic, requests_per_s: float, length_s: float) -> list[Conversation]:
    """Conversations with a turn to take from 0 to `length_s`, by when they ask it.

    Another rate stretches the same gaps, so rates, like systems, are compared on the same conversations.
    """
    gap_s = mean_turns(traffic) / requests_per_s
    coming = _from(traffic, gap_s, length_s)
    live = _until_now(traffic, gap_s)
    return sorted([*live, *coming])


def _from(traffic: Traffic, gap_s: float, length_s: float) -> Iterator[Conversation]:
    rng, begins_s = random.Random(f"{traffic.seed}.coming"), 0.0
    while True:
        begins_s += rng.expovariate(1.0) * gap_s
        if begins_s >= length_s:
            return
        yield Conversation(begins_s, draw_turns(traffic.shape, traffic.context, rng), 0, rng.getrandbits(48))


def _until_now(traffic: Traffic, gap_s: float) -> Iterator[Conversation]:
    """Those that began before 0 and are not over, backwards in time."""
    rng, begins_s = random.Random(f"{traffic.seed}.live"), 0.0
    while begins_s > -_longest_s(traffic):
        begins_s -= rng.expovariate(1.0) * gap_s
        turns, seed = draw_turns(traffic.shape, traffic.context, rng), rng.getrandbits(48)
        asks_s = begins_s
        for number, turn in enumerate(turns):
            if asks_s >= 0:
                yield Conversation(asks_s, turns, number, seed)
                break
            asks_s += turn.num_out * traffic.nominal_s_per_token + turn.think_s(traffic.think_scale)


def _longest_s(traffic: Traffic) -> float:
    """Longer than nearly all conversations take: a context full of answers, twice over."""
    answered_s = traffic.context * (traffic.nominal_s_per_token + THINK_S_PER_TOKEN * traffic.think_scale)
    return 2 * answered_s


def draw_requests(shape: Shape, context: int, count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt tokens, history included; output tokens) of turns drawn from whole conversations."""
    rng = random.Random(f"{seed}.requests")
    found: list[tuple[int, int]] = []
    while len(found) < 20 * count:  # so that no long conversation weighs much
        num_history = 0
        for turn in draw_turns(shape, context, rng):
            found.append((num_history + turn.num_in, turn.num_out))
            num_history += turn.num_in + turn.num_out
    return rng.sample(found, count)
