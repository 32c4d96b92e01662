"""A breaker: what does not answer is left alone for a while, then tried once."""

from __future__ import annotations

from mneme.cachetier.distributed.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(3):
        assert breaker.allows()
        breaker.failed()
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(Clock())
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_open


def test_after_a_pause_one_try_is_allowed_and_a_success_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.allows()
    clock.now_s += 1.0
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert [breaker.allows() for _ in range(3)] == [True] * 3


def test_pauses_grow_to_a_bound() -> None:
    clock = Clock()
    breaker = opened(clock)
    waits = []
    for _ in range(12):
        start_s = clock.now_s
        while not breaker.allows():
            clock.now_s += 0.25
        waits.append(clock.now_s - start_s)
        breaker.failed()
    assert waits == sorted(waits)
    assert waits[0] <= 0.5
    assert waits[-1] == 16.0


def test_a_try_whose_end_is_never_told_does_not_close_it_for_ever() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now_s += 1.0
    assert breaker.allows()
    clock.now_s += 20.0
    assert breaker.allows()
