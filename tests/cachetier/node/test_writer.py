"""The queue of writes and the thread under it, each alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mneme.cachetier.node.writer import Pending, WriteBehind
from mneme.primitives import Worker
from tests.cachetier.chunks import CHUNK_TOKENS, chunk_of
from tests.cachetier.nodes import BLOCK, Clock

TIMEOUT_S = 20.0


class Queue(WriteBehind):
    """Remembers what was written and what is done; `fails` says of which key the write raises."""

    def __init__(self, clock: Clock, num_blocks: int = 100) -> None:
        self.written: list[bytes] = []
        self.ended: list[bytes] = []
        self.fails: set[bytes] = set()
        self.is_loading = False
        self.is_writing: Callable[[], object] = lambda: None
        super().__init__(
            self.note,
            lambda pending: self.ended.append(pending.header.key),
            max_bytes=num_blocks * BLOCK,
            clock=clock,
            is_loading=lambda: self.is_loading,
            tail_delay_s=2.0,
        )

    def note(self, pending: Pending) -> None:
        self.is_writing()
        self.written.append(pending.header.key)
        if pending.header.key in self.fails:
            raise RuntimeError("of a test")

    def give(self, token_ids: list[int], wait_s: float = 0.0) -> tuple[bytes, bool]:
        chunk = chunk_of(token_ids)
        return chunk.header.key, self.submit(chunk.header, chunk.layers, wait_s=wait_s)


def whole(number: int) -> list[int]:
    return [number, *range(CHUNK_TOKENS - 1)]


FOREVER_S = 1e6  # a wait that is not meant to be waited for


def test_a_burst_waits_for_the_disk_and_tails_for_nothing_while_somebody_waits() -> None:
    queue = Queue(Clock(), num_blocks=1)  # two chunks at least; by this clock no tail is ever due
    queue.start()
    given = [queue.give(ids, FOREVER_S) for ids in ([1], [2], [3], whole(4), [5], whole(6))]
    assert all(is_taken for _, is_taken in given)
    assert queue.flush(TIMEOUT_S)
    assert sorted(queue.written) == sorted(key for key, _ in given)
    assert queue.close(TIMEOUT_S)


def test_for_a_disk_that_writes_nothing_only_the_first_waits() -> None:
    queue, goes_on = Queue(Clock(), num_blocks=1), threading.Event()
    queue.is_writing = goes_on.wait
    queue.start()
    assert [queue.give(whole(number))[1] for number in range(2)] == [True, True]
    assert not queue.give(whole(2), 0.01)[1]
    assert not queue.give(whole(3), FOREVER_S)[1]
    queue.cancel([chunk_of(whole(1)).header.key])
    assert queue.give(whole(1))[1]
    assert not queue.give(whole(3), FOREVER_S)[1]  # what is cancelled is not written
    assert not queue.await_one(FOREVER_S)
    goes_on.set()
    assert queue.flush(TIMEOUT_S)
    assert queue.give(whole(4), FOREVER_S)[1]
    assert queue.close(TIMEOUT_S)


def test_whole_chunks_go_at_once_and_tails_in_their_turn() -> None:
    clock = Clock()
    queue = Queue(clock)
    tail, _ = queue.give([1])
    first, _ = queue.give(whole(1))
    assert (queue.step(), queue.step()) == (0.0, 2.0)
    assert queue.written == [first]
    clock.now_s += 2
    late, _ = queue.give(whole(2))
    assert (queue.step(), queue.step(), queue.step()) == (0.0, 0.0, None)
    assert queue.written == queue.ended
    assert {*queue.written[1:]} == {tail, late}
    assert queue.stats()["bytes"] == 0


def test_loads_go_before_saves_but_not_for_ever() -> None:
    queue = Queue(Clock())
    key, _ = queue.give(whole(1))
    queue.is_loading = True
    waits = [queue.step() for _ in range(60)]
    assert queue.written == [key]
    assert 0 < waits.index(0.0) <= 50
    assert all(wait is None or 0 <= wait < 0.1 for wait in waits)


def test_a_full_queue_takes_no_more_and_no_key_stands_in_it_twice() -> None:
    queue = Queue(Clock(), num_blocks=2)
    assert [queue.give(whole(number))[1] for number in (1, 1, 2, 3)] == [True, False, True, False]
    assert queue.stats()["dropped"] == 1
    assert queue.cancel([chunk_of(whole(1)).header.key, bytes(16)]) == 1
    assert queue.give(whole(3))[1]
    assert queue.stats()["bytes"] == 2 * BLOCK


def test_a_queue_that_is_closed_ends_what_waits() -> None:
    queue = Queue(Clock())
    keys = {queue.give(ids)[0] for ids in (whole(1), whole(2), [3])}
    queue.close(TIMEOUT_S)
    assert ({*queue.ended}, queue.written, queue.stats()["bytes"]) == (keys, [], 0)
    assert not queue.give(whole(3))[1]  # nor is what that makes room for
    assert queue.stats()["bytes"] == 0


def test_a_thread_survives_its_errors_and_hears_when_it_is_woken() -> None:
    steps, errors = threading.Semaphore(0), []

    def step() -> float | None:
        steps.release()
        if not errors:
            raise RuntimeError("of a test")
        return None

    thread = Worker("test", step, lambda: errors.append(1))
    thread.start()
    assert steps.acquire(timeout=TIMEOUT_S)
    thread.wake()
    assert steps.acquire(timeout=TIMEOUT_S)
    thread.wake()
    assert steps.acquire(timeout=TIMEOUT_S)
    assert errors == [1]
    assert thread.close(TIMEOUT_S)
    assert Worker("never started", step, lambda: None).close(0.0)
