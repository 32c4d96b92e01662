from __future__ import annotations

from typing import Any

import pytest

from mneme.errors import Overloaded
from mneme.replicas.request import GenerationRequest, SamplingParams
from mneme.replicas.sessions import MAX_QUEUED_PER_SESSION, Sessions


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def make(ttl_s: float = 10, max_sessions: int = 3, max_tokens: int = 10**6) -> tuple[Sessions, Clock]:
    clock = Clock()
    return Sessions(encode, clock, ttl_s=ttl_s, max_sessions=max_sessions, max_tokens=max_tokens), clock


def turn(name: str, session: str | None, text: str | None = "ab", index: int = 0, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{name}.{index}", prompt_token_ids=tuple(encode(text or "ab")), sampling=SamplingParams(),
        session_id=session, prompt_text=text, choice_index=index, **more,
    )  # fmt: skip


def answer(sessions: Sessions, request: GenerationRequest, output_ids: list[int], text: str) -> None:
    ids = sessions.begin(request)
    assert ids is not None
    assert sessions.end(request, ids + output_ids, (request.prompt_text or "") + text) == []


def test_stored_ids_are_used_where_the_stored_text_begins_the_new_one() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s"), [1000, 1001], "cd")  # ids that encoding "cd" would not give
    assert sessions.begin(turn("2", "s", "abcdef")) == [97, 98, 1000, 1001, *encode("ef")]


def test_other_text_falls_back_to_the_requests_own_ids() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s"), [1000], "c")
    assert sessions.begin(turn("2", "s", "abX")) == encode("abX")
    assert sessions.begin(turn("3", None, "abc")) == encode("abc")


def test_a_moved_request_keeps_the_output_it_brought() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s"), [1000], "c")
    moved = turn("2", "s", "abcd")
    moved = GenerationRequest(
        request_id="2.0", prompt_token_ids=(*moved.prompt_token_ids, 7, 8), sampling=SamplingParams(),
        session_id="s", prompt_text="abcd", output_offset=2,
    )  # fmt: skip
    assert sessions.begin(moved) == [97, 98, 1000, ord("d"), 7, 8]


def test_tenants_have_their_own_sessions() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s", salt="one"), [1000], "c")
    assert sessions.begin(turn("2", "s", "abc", salt="two")) == encode("abc")


def test_turns_wait_in_order_and_choices_go_together() -> None:
    sessions, _ = make()
    first = turn("1", "s")
    assert sessions.begin(first) is not None
    later = [turn("2", "s", index=0), turn("2", "s", index=1), turn("3", "s")]
    assert [sessions.begin(request) for request in later] == [None, None, None]
    assert sessions.num_queued == 3
    assert sessions.end(first, None, "") == later[:2]
    assert [sessions.begin(request) is not None for request in later[:2]] == [True, True]
    assert sessions.end(later[0], None, "") == []
    assert sessions.end(later[1], None, "") == [later[2]]


def test_the_first_choice_is_the_one_that_is_kept() -> None:
    sessions, _ = make()
    choices = [turn("1", "s", index=i) for i in range(2)]
    for choice in choices:
        sessions.begin(choice)
    sessions.end(choices[1], [1], "abZ")
    sessions.end(choices[0], [2], "abY")
    assert sessions.begin(turn("2", "s", "abY")) == [2]


def test_surplus_sessions_go_but_never_one_that_is_answering() -> None:
    sessions, _ = make(max_sessions=3)
    busy = turn("busy", "busy")
    sessions.begin(busy)
    for name in "abc":
        answer(sessions, turn(name, name), [1], "c")
    sessions.expire()
    assert len(sessions) == 3
    assert sessions.begin(turn("a2", "a", "abc")) == encode("abc")  # the oldest went
    assert sessions.begin(turn("c2", "c", "abc")) == [97, 98, 1]
    sessions.expire()
    assert sessions.end(busy, [1], "abc") == []


def test_old_sessions_go_also_when_they_are_asked_for() -> None:
    sessions, clock = make(ttl_s=10)
    answer(sessions, turn("1", "s"), [1000], "c")
    clock.now = 10
    second = turn("2", "s", "abc")
    assert sessions.begin(second) == [97, 98, 1000]
    sessions.end(second, [97, 98, 1000], "abc")
    clock.now = 21
    assert sessions.begin(turn("3", "s", "abc")) == encode("abc")


def test_token_logs_are_bounded_together() -> None:
    sessions, _ = make(max_sessions=100, max_tokens=10)
    for name in "abcd":
        answer(sessions, turn(name, name), [1], "c")  # three tokens each
    sessions.expire()
    assert len(sessions) == 3


def test_a_session_that_cannot_be_encoded_is_not_locked() -> None:
    sessions, _ = make()
    answer(sessions, turn("1", "s"), [1], "c")
    sessions._encode = lambda text: 1 // 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        sessions.begin(turn("2", "s", "abcd"))
    assert sessions.begin(turn("3", "s", "abc")) == [97, 98, 1]


def test_one_session_cannot_queue_without_bound() -> None:
    sessions, _ = make()
    sessions.begin(turn("0", "s"))
    for index in range(MAX_QUEUED_PER_SESSION):
        assert sessions.begin(turn(f"{index + 1}", "s")) is None
    with pytest.raises(Overloaded):
        sessions.begin(turn("late", "s"))
    assert sessions.num_queued == MAX_QUEUED_PER_SESSION


def test_a_queued_turn_can_be_taken_out() -> None:
    sessions, _ = make()
    first, second = turn("1", "s"), turn("2", "s")
    sessions.begin(first)
    sessions.begin(second)
    assert sessions.cancel_queued("2.0") is second
    assert sessions.cancel_queued("2.0") is None
    assert sessions.end(first, None, "") == []
