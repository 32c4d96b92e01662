"""The load loop against an engine made of a clock: order, times, and what counts."""

from __future__ import annotations

import math

import pytest
from conversations import Conversation, Turn
from session_load import Load, Served, Window, counted, kv_per_turn, percentile, point_of

from mneme.errors import MnemeError
from mneme.replicas.request import GenerationRequest, PromptUsage, TokenEvent
from tests.lab.played_loop import PlayedLoop, play

STEP_S = 0.5


class OneAtATime:
    """An engine that makes a token of the oldest request in each step of half a second."""

    def __init__(self) -> None:
        self.loop = PlayedLoop()
        self._queue: list[tuple[GenerationRequest, int]] = []  # with the tokens made
        self.submitted: list[tuple[float, GenerationRequest]] = []
        self.aborted: list[str] = []
        self.fails = False

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def submit(self, request: GenerationRequest) -> None:
        self.submitted.append((self.loop.now_s, request))
        self._queue.append((request, 0))

    def step(self) -> list[TokenEvent]:
        self.loop.now_s += STEP_S
        request, made = self._queue.pop(0)
        ends = made + 1 == request.sampling.max_tokens
        if not ends:
            self._queue.insert(0, (request, made + 1))
        usage = None if made else PromptUsage(len(request.prompt_token_ids), 0)
        reason, error = ("error", "broken") if self.fails else ("length" if ends else None, None)
        return [TokenEvent(request.request_id, (7,), reason, None, usage, error)]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def take_events(self) -> list[TokenEvent]:
        return []


def load(trace: list[Conversation], *, keeps_sessions: bool = True) -> tuple[Load, OneAtATime]:
    engine = OneAtATime()
    return Load(engine, trace, think_scale=1.0, keeps_sessions=keeps_sessions), engine  # type: ignore[arg-type]


def test_a_question_waits_for_the_answer_and_its_reader() -> None:
    played, engine = load([Conversation(1.0, [Turn(3, 2), Turn(4, 100), Turn(1, 1)], 0, 5)])
    play(played.play(200.0), engine.loop)
    times = [at - 100 for at, _ in engine.submitted]
    # Asked at 1, answered at 2, read for 5 s; asked at 7, answered at 57, read for 10 s.
    assert times == pytest.approx([1.0, 7.0, 67.0])
    first, second, third = (request.prompt_token_ids for _, request in engine.submitted)
    assert second[: len(first) + 2] == (*first, 7, 7)
    assert (len(first), len(second), len(third)) == (3, 3 + 2 + 4, 3 + 2 + 4 + 100 + 1)
    assert [turn.s_per_token for turn in played.served] == pytest.approx([0.5] * 3)
    assert {request.session_id for _, request in engine.submitted} == {"s0"}


def test_latency_counts_from_when_a_question_is_due() -> None:
    """The second one falls due during a step and waits for the first."""
    played, engine = load([Conversation(0.0, [Turn(1, 4)], 0, 1), Conversation(0.25, [Turn(1, 1)], 0, 2)])
    play(played.play(10.0), engine.loop)
    assert engine.submitted[1][0] == pytest.approx(100.5)
    assert [turn.ended_s - played.began_s for turn in played.served] == pytest.approx([2.0, 2.5])
    assert played.served[1].s_per_token == pytest.approx(2.25)
    assert played.busy_s == pytest.approx(2.5)


def test_what_runs_at_the_end_is_aborted() -> None:
    played, engine = load([Conversation(0.0, [Turn(1, 100)], 0, 1)])
    play(played.play(3.0), engine.loop)
    assert played.served == []
    assert engine.aborted == ["s0.0"]


def test_histories_are_brought_before_the_trace_where_they_are_kept() -> None:
    live = Conversation(0.0, [Turn(3, 4), Turn(2, 2)], 1, 1)
    kept, engine = load([live])
    kept.warm_up()
    assert [len(request.prompt_token_ids) for _, request in engine.submitted] == [7]
    play(kept.play(5.0), engine.loop)
    assert kept.served[0].prompt_tokens == 9
    assert engine.submitted[1][1].prompt_token_ids[:7] == engine.submitted[0][1].prompt_token_ids
    forgotten, engine = load([live], keeps_sessions=False)
    forgotten.warm_up()
    assert engine.submitted == []
    play(forgotten.play(5.0), engine.loop)
    assert forgotten.served[0].prompt_tokens == 9
    assert engine.submitted[0][1].session_id is None


def test_a_failure_ends_the_run() -> None:
    played, engine = load([Conversation(0.0, [Turn(1, 2)], 0, 1)])
    engine.fails = True
    with pytest.raises(MnemeError, match="broken"):
        play(played.play(5.0), engine.loop)


def test_only_turns_that_end_in_the_window_count() -> None:
    def served(due_s: float, ended_s: float, device: int) -> Served:
        kv = {"device": device, "host": 0, "recomputed": 10 - device}
        return Served(session="", sent_s=due_s, due_s=due_s, ended_s=ended_s, output_tokens=2, kv_details=kv)

    window = Window(2.0, 10.0)
    turns = [*counted([served(0, 1, 9), served(0, 2, 4), served(3, 11, 8), served(5, 12, 9)], 0.0, window)]
    assert [turn.ended_s for turn in turns] == [2, 11]
    assert point_of(turns, window, 3.0) == (3.0, 0.2, 4.0, 2)
    assert kv_per_turn(turns) == {"device": 6.0, "recomputed": 4.0}
    assert point_of([], window, 3.0) == (3.0, 0.0, math.inf, 0)


def test_percentiles_are_values_that_occur() -> None:
    assert percentile(range(1, 11), 90) == 9
    assert percentile([5.0], 90) == 5.0
    assert percentile([], 90) == math.inf
