"""When turns are sent, on a clock that is played: an event loop whose time jumps to what is due next."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mneme.errors import ConfigError
from mneme.lab.bench.measure import UNSENT, Answer, parse_slo, summarize
from mneme.lab.bench.traffic import SessionPlayer
from mneme.lab.bench.workloads import SHAPES, Session, arrive, content, make_sessions, sessions_of_trace, think
from mneme.lab.cache.traces import read_paced_trace
from tests.lab.played_loop import play

ANSWER_S = 2.0


class Asked:
    """Answers each request after `ANSWER_S`, from `fails_at` on not at all."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.messages: list[list[dict[str, Any]]] = []
        self.sent: list[tuple[float, str]] = []
        self._fails_at = fails_at

    async def __call__(self, messages: list[dict[str, Any]], max_tokens: int, session: str) -> Answer:
        clock = asyncio.get_running_loop().time
        answer = Answer(session=session, sent_s=clock(), text=f"answer {len(self.messages)}")
        self.messages.append(messages)
        self.sent.append((clock() - 100.0, session))
        number = len(self.messages)
        await asyncio.sleep(ANSWER_S)
        answer.first_s = answer.last_s = answer.ended_s = clock()
        answer.error = "connection lost" if number > self._fails_at else None
        return answer


def played(sessions: list[Session], num_users: int | None = None, fails_at: int = 10**9) -> tuple[SessionPlayer, Asked]:
    asked = Asked(fails_at)
    load = SessionPlayer(asked)
    play(load.play(sessions, num_users))
    return load, asked


def test_requests_of_an_open_loop_are_sent_when_they_are_due_however_slow_the_server() -> None:
    sessions = arrive(make_sessions("shared-prefix", SHAPES["shared-prefix"], 200, 3), 10.0, 0.0, 3)
    load, asked = played(sessions)
    due = [session.turns[0].at_s for session in sessions]
    assert [at for at, _ in asked.sent] == pytest.approx(due)
    assert 200 / due[-1] == pytest.approx(10.0, rel=0.3)
    assert max(answer.sent_s - answer.due_s for answer in load.answers) == pytest.approx(0.0)


def test_a_session_waits_for_its_answer_and_thinks_and_sends_its_history_back() -> None:
    (session,) = make_sessions("sessions", SHAPES["sessions"], 3, 0)
    thoughtful = think(session, 5.0, random.Random(1))
    _, asked = played([thoughtful])
    gaps = np.diff([at for at, _ in asked.sent])
    assert gaps == pytest.approx([turn.delay_s + ANSWER_S for turn in thoughtful.turns[1:]])
    assert [len(messages) for messages in asked.messages] == [1, 3, 5]
    assert asked.messages[2][:2] == [*asked.messages[0], {"role": "assistant", "content": "answer 0"}]


def test_users_of_a_closed_loop_have_one_request_each() -> None:
    load, asked = played(make_sessions("rag", SHAPES["rag"], 10, 0), num_users=3)
    assert [at for at, _ in asked.sent] == [0.0] * 3 + [2.0] * 3 + [4.0] * 3 + [6.0]
    assert len(load.answers) == 10


def test_turns_behind_a_failed_one_are_counted_and_not_sent() -> None:
    load, asked = played(make_sessions("sessions", SHAPES["sessions"], 5, 0), fails_at=2)
    assert (len(asked.messages), load.num_unsent, load.num_failed) == (3, 2, 1)
    figures = summarize(load.answers, {}, load.num_unsent)
    assert (figures["num_requests"], figures["num_ok"], figures["num_failed"]) == (5, 2, 3)
    assert figures["errors"] == {UNSENT: 2, "connection lost": 1}


def test_the_same_seed_makes_the_same_texts() -> None:
    def texts(workload: str, seed: int) -> list[Any]:
        sessions = make_sessions(workload, SHAPES[workload], 12, seed)
        return [content(turn, "parts") for session in sessions for turn in session.turns]

    for workload in SHAPES:
        assert texts(workload, 1) == texts(workload, 1) != texts(workload, 2)
    kinds = [part["type"] for part in texts("rag", 0)[0]]
    assert kinds == ["document"] * 4 + ["text"]
    assert isinstance(content(make_sessions("rag", SHAPES["rag"], 1, 0)[0].turns[0], "text"), str)


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["a2", 2])
def test_a_trace_says_who_waits_for_whom(tmp_path: Path, name: str | int) -> None:
    size = {"input_length": 10, "output_length": 4}
    trace = lines(
        tmp_path / "t.jsonl",
        {"timestamp": 5000, **size, "session_id": "a", "request_id": "a1"},
        {**size, "session_id": "a", "delay": 3000, "request_id": name},
        {"timestamp": 6000, **size, "session_id": "b"},
        {**size, "session_id": "b", "wait_for": [name], "delay": 1000},
        {"timestamp": 5500, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]},
    )
    sessions = sessions_of_trace(read_paced_trace(trace, 512), 0.75, 0)
    _, asked = played(sessions)
    assert asked.sent == [
        (0.0, "session-a"),
        (0.5, "request-4"),
        (1.0, "session-b"),
        (5.0, "session-a"),  # 2 s of the answer, 3 of delay
        (8.0, "session-b"),
    ]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"session_id": "b"}, "timestamp"),
        ({"timestamp": 1, "wait_for": ["nobody"]}, "wait_for"),
        ({"timestamp": 1, "request_id": "a1"}, "request_id"),
        ({"session_id": "a", "delay": float("nan")}, "delay"),
        ({"timestamp": 1, "hash_ids": [1, 2, 3]}, "hash_ids"),
        ({"timestamp": 1, "session_id": ""}, "session_id"),
    ],
)
def test_a_line_that_cannot_be_is_named(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    size = {"input_length": 10, "output_length": 4}
    trace = lines(
        tmp_path / "t.jsonl", {"timestamp": 0, **size, "session_id": "a", "request_id": "a1"}, {**size, **row}
    )
    with pytest.raises(ConfigError, match=rf"2.*{field}"):
        read_paced_trace(trace, 512)


def test_percentiles_and_goodput_are_of_what_was_measured() -> None:
    rng = np.random.default_rng(0)
    answers = []
    for number in range(101):
        first_s, gaps = float(rng.exponential(0.1)), rng.exponential(0.01, 9).tolist()
        answer = Answer(session=str(number), sent_s=number * 0.05, due_s=number * 0.05, itl_s=gaps)
        answer.first_s = answer.sent_s + first_s
        answer.last_s = answer.ended_s = answer.first_s + sum(gaps)
        answer.prompt_tokens, answer.output_tokens, answer.cached_tokens = 100, 10, 25 if number % 2 else None
        answers.append(answer)
    figures = summarize(answers, parse_slo("ttft=100,itl=30"))
    firsts = np.array([1e3 * (a.latencies_s()["ttft"] or 0) for a in answers])
    gaps = 1e3 * np.array([gap for a in answers for gap in a.itl_s])
    told = [figures["ttft_ms"][f"p{percent}"] for percent in (50, 90, 99)]
    assert told == pytest.approx(np.percentile(firsts, (50, 90, 99)), abs=1e-3)
    assert figures["itl_p99_s"] == pytest.approx(np.percentile(gaps, 99) / 1e3, abs=1e-6)
    assert figures["cached_share"] == pytest.approx(50 * 25 / 10100, abs=1e-4)
    good = sum(first <= 100 and max(a.itl_s) <= 0.03 for first, a in zip(firsts, answers, strict=True))
    assert figures["goodput_per_s"] == pytest.approx(good / figures["duration_s"], rel=1e-3)


@pytest.mark.parametrize("text", ["", "ttft=0", "ttft=nan", "ttft=1,ttft=2", "rps=3"])
def test_a_bound_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slo"):
        parse_slo(text)
