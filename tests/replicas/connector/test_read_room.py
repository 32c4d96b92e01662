"""The room of what is read ahead: who waits for it is let through when it becomes urgent, or nobody wants it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mneme.replicas.connector.read_room import ReadRoom

TIMEOUT_S = 30.0


@pytest.mark.parametrize(("is_over", "is_taken"), [(False, True), (True, False)])
def test_who_waits_for_room_hears_of_urgency(is_over: bool, is_taken: bool) -> None:
    room, asked, urgent = ReadRoom(0), threading.Event(), threading.Event()

    def is_urgent() -> bool:
        asked.set()
        return urgent.is_set()

    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(room.take, 100, is_urgent, lambda: is_over and urgent.is_set())
        assert asked.wait(TIMEOUT_S)
        urgent.set()
        room.wake()
        assert taken.result(TIMEOUT_S) is is_taken
    assert room.num_used == (100 if is_taken else 0)
