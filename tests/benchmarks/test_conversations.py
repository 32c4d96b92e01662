"""Lengths, arrivals and thinking of the conversations that engines are measured with."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from conversations import CONTEXT, MIN_TURNS, SHAPES, Conversation, Traffic, Turn, draw_requests, draw_turns, make_trace

NOMINAL_S_PER_TOKEN = 0.01


def traffic(name: str = "sharegpt", *, think_scale: float = 0.2, seed: int = 0) -> Traffic:
    return Traffic(shape=SHAPES[name], think_scale=think_scale, nominal_s_per_token=NOMINAL_S_PER_TOKEN, seed=seed)


@pytest.mark.parametrize("name", SHAPES)
def test_means_after_both_cuts_are_the_papers(name: str) -> None:
    shape, rng = SHAPES[name], random.Random(3)
    drawn = [draw_turns(shape, CONTEXT, rng) for _ in range(20_000)]
    turns = [turn for each in drawn for turn in each]
    means = (
        statistics.mean(map(len, drawn)),
        statistics.mean(turn.num_in for turn in turns),
        statistics.mean(turn.num_out for turn in turns),
    )
    assert means == pytest.approx(shape.table, rel=0.015)
    assert min(map(len, drawn)) == MIN_TURNS
    assert max(sum(turn.num_in + turn.num_out for turn in each) for each in drawn) <= CONTEXT
    assert min(min(turn) for turn in turns) == 1


@pytest.mark.parametrize("name", SHAPES)
def test_a_larger_context_cuts_the_same_conversations_later(name: str) -> None:
    cut, whole = (
        [draw_turns(SHAPES[name], context, random.Random(seed)) for seed in range(2000)]
        for context in (CONTEXT, 8 * CONTEXT)
    )
    same = [(a, b) for a, b in zip(cut, whole, strict=True) if b[: len(a)] == a]
    assert len(same) > 0.9 * len(cut)  # but for those that were left out
    assert statistics.mean(map(len, whole)) > statistics.mean(map(len, cut))


def test_thinking_is_scaled_with_its_minimum() -> None:
    assert Turn(1, 200).think_s(1.0) == pytest.approx(20.0)
    assert Turn(1, 10).think_s(1.0) == pytest.approx(5.0)
    assert Turn(1, 10).think_s(0.2) == pytest.approx(1.0)
    assert Turn(1, 200).think_s(0.2) == pytest.approx(4.0)


def test_conversations_arrive_by_poisson() -> None:
    coming = [each.begins_s for each in make_trace(traffic(), 100.0, 120.0) if each.first_turn == 0]
    gaps = [b - a for a, b in itertools.pairwise(coming)]
    conversations_per_s = 100 / SHAPES["sharegpt"].table[0]
    assert 1 / statistics.mean(gaps) == pytest.approx(conversations_per_s, rel=0.08)
    # An exponential's deviation is its mean, and e^-1 of it lies beyond the mean.
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.08)
    beyond = sum(gap > statistics.mean(gaps) for gap in gaps) / len(gaps)
    assert beyond == pytest.approx(0.368, abs=0.02)


def test_another_rate_stretches_the_same_conversations() -> None:
    slow, fast = (make_trace(traffic(), rate, 40.0) for rate in (5.0, 10.0))
    fresh_slow, fresh_fast = ([each for each in trace if each.first_turn == 0] for trace in (slow, fast))
    for a, b in zip(fresh_slow, fresh_fast, strict=False):
        assert (a.turns, a.seed) == (b.turns, b.seed)
        assert a.begins_s == pytest.approx(2 * b.begins_s)
    assert len(fresh_fast) > len(fresh_slow)
    assert make_trace(traffic(seed=1), 5.0, 40.0) != slow


def questions_due_s(trace: list[Conversation], think_scale: float) -> list[float]:
    """When questions are asked if every answer takes its nominal time."""
    due: list[float] = []
    for each in trace:
        asks_s = each.begins_s
        for turn in each.turns[each.first_turn :]:
            due.append(asks_s)
            asks_s += turn.num_out * NOMINAL_S_PER_TOKEN + turn.think_s(think_scale)
    return due


def test_a_trace_begins_in_the_midst_of_its_traffic() -> None:
    rates = []
    for seed in range(20):
        due = questions_due_s(make_trace(traffic(seed=seed), 10.0, 20.0), 0.2)
        rates.append([sum(low <= at < low + 10 for at in due) / 10 for low in (0, 10)])
    first, second = (statistics.mean(each) for each in zip(*rates, strict=True))
    assert first == pytest.approx(10.0, rel=0.1)
    assert second == pytest.approx(10.0, rel=0.1)


def test_what_is_live_has_a_history_and_a_turn_to_take() -> None:
    live = [each for each in make_trace(traffic(), 10.0, 20.0) if each.first_turn]
    assert live
    for each in live:
        assert each.begins_s >= 0
        assert each.first_turn < len(each.turns)
        assert len(each.history()) == each.num_history > 0
        assert each.history() == each.history()
        assert len(each.question(each.first_turn)) == each.turns[each.first_turn].num_in


def test_requests_carry_the_turns_before_them() -> None:
    drawn = draw_requests(SHAPES["lmsys"], CONTEXT, 2000, 0)
    assert len(drawn) == 2000
    assert max(prompt + out for prompt, out in drawn) <= CONTEXT
    # The mean of what is before a turn, with long conversations counted as often as they have turns.
    assert statistics.mean(prompt for prompt, _ in drawn) == pytest.approx(500, rel=0.1)
