"""In which order pages are copied, and what is told to whom; copies are played and let go one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mneme.cachetier.host_pages.transfers import QueuedLoad, Transfers
from mneme.errors import TransferFailed

TIMEOUT_S = 30.0  # of a test that fails; nothing waits for it otherwise


class PlayedCopies:
    """Copies that end when they are let go, and are noted as they begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self._condition = threading.Condition()
        self._let_go = 0

    def copy(self, name: str, error: Exception | None = None) -> Callable[[int], None]:
        def run(layer: int) -> None:
            with self._condition:
                self.begun.append(f"{name}{layer}")
                number = len(self.begun)
                self._condition.notify_all()
                assert self._condition.wait_for(lambda: self._let_go >= number, TIMEOUT_S)
                self.ended.append(f"{name}{layer}")
            if error is not None:
                raise error

        return run

    def wait_begun(self, count: int) -> list[str]:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self.begun) >= count, TIMEOUT_S), self.begun
            return list(self.begun)

    def let_go(self, count: int = 10**6) -> None:
        with self._condition:
            self._let_go += count
            self._condition.notify_all()


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


@contextmanager
def running(action: Callable[[], None]) -> Iterator[threading.Event]:
    """`action` in another thread; the event says that it has returned, and what it raised is raised at the end."""
    done, raised = threading.Event(), []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    yield done
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


@pytest.fixture
def played() -> PlayedCopies:
    return PlayedCopies()


@pytest.fixture
def transfers(played: PlayedCopies) -> Iterator[Transfers]:
    """Transfer two layers, eight pages each side."""
    made = Transfers(2, 8, 8)
    yield made
    played.let_go()
    made.close()


def finish(load: QueuedLoad, num_layers: int = 2) -> None:
    for layer in range(num_layers):
        load.wait_layer(layer)


def test_a_load_overtakes_all_but_the_layer_under_way(transfers: Transfers, played: PlayedCopies) -> None:
    for index, name in enumerate("abc"):
        transfers.save(pages(index), pages(index), played.copy(name))
    played.wait_begun(1)
    load = transfers.load(pages(5), pages(5), played.copy("L"))
    played.let_go()
    finish(load)
    transfers.before_reuse(pages(2))
    assert played.begun == ["a0", "L0", "L1", "a1", "b0", "b1", "c0", "c1"]


@pytest.mark.parametrize(
    ("host", "device"), [(1, 5), (5, 1)], ids=["reads what a save writes", "writes what a save reads"]
)
def test_a_load_waits_for_saves_of_its_pages(
    transfers: Transfers, played: PlayedCopies, host: int, device: int
) -> None:
    for index, name in enumerate("abc"):
        transfers.save(pages(index), pages(index), played.copy(name))
    played.wait_begun(1)
    load = transfers.load(pages(host), pages(device), played.copy("L"))
    played.let_go()
    finish(load)
    transfers.before_reuse(pages(2))
    assert played.begun == ["a0", "a1", "b0", "b1", "L0", "L1", "c0", "c1"]


def test_a_save_that_is_waited_for_overtakes_earlier_work_only_of_loads_behind_it(
    transfers: Transfers, played: PlayedCopies
) -> None:
    transfers.save(pages(0), pages(0), played.copy("a"))
    load = transfers.load(pages(5), pages(5), played.copy("L"))
    transfers.save(pages(5), pages(6), played.copy("b"))  # reads what the load writes
    played.wait_begun(1)
    with running(lambda: transfers.before_reuse(pages(0))) as done:
        played.let_go(4)
        assert done.wait(TIMEOUT_S)
        assert played.wait_begun(5)[-1] == "b0"  # the load went first
        played.let_go()
    finish(load)
    assert {name[0] for name in played.begun[:4]} == {"a", "L"}


@pytest.mark.parametrize(("page", "name"), [(1, "a"), (5, "L")])
def test_reuse_waits_for_readers_and_writers_and_for_nobody_else(
    transfers: Transfers, played: PlayedCopies, page: int, name: str
) -> None:
    transfers.save(pages(0, 1), pages(0, 1), played.copy("a"))
    transfers.load(pages(5), pages(5), played.copy("L"))
    played.wait_begun(1)
    transfers.before_reuse(pages(2, 3))
    assert not played.ended
    ended: list[str] = []

    def reuse() -> None:
        transfers.before_reuse(pages(page))
        ended.extend(played.ended)

    with running(reuse) as done:
        played.let_go(1)
        played.wait_begun(2)
        assert not done.is_set()
        played.let_go()
    assert {f"{name}0", f"{name}1"} <= set(ended)


def test_a_layer_is_there_before_the_next_one_is(transfers: Transfers, played: PlayedCopies) -> None:
    load = transfers.load(pages(1), pages(2), played.copy("L"))
    played.let_go(1)
    load.wait_layer(0)
    with running(lambda: load.wait_layer(1)) as done:
        assert played.wait_begun(2) == ["L0", "L1"]
        assert not done.is_set()
        played.let_go(1)
    load.wait_layer(1)


def test_who_waits_for_a_layer_hears_of_a_failed_copy(transfers: Transfers, played: PlayedCopies) -> None:
    load = transfers.load(pages(1), pages(2), played.copy("L", OSError("no such page")))
    lost = transfers.load(pages(3), pages(3), played.copy("M"))
    transfers.save(pages(4), pages(4), played.copy("a"))
    with pytest.raises(TransferFailed, match="no such page"), running(lambda: load.wait_layer(0)):
        played.let_go()
    with pytest.raises(TransferFailed, match="no such page"):
        lost.wait_layer(0)
    assert not transfers.has_saves
    transfers.before_reuse(pages(2, 4))  # it has been said
    finish(transfers.load(pages(1), pages(2), played.copy("N")))
    assert played.begun == ["L0", "N0", "N1"]


@pytest.mark.parametrize("ask", ["save", "load", "before_reuse"])
def test_a_failed_save_is_told_once(transfers: Transfers, played: PlayedCopies, ask: str) -> None:
    transfers.save(pages(0), pages(0), played.copy("a", MemoryError("too little")))
    played.let_go()
    call = {
        "save": lambda: transfers.save(pages(1), pages(1), played.copy("b")),
        "load": lambda: transfers.load(pages(1), pages(1), played.copy("b")),
        "before_reuse": lambda: transfers.before_reuse(pages(1)),
    }[ask]
    deadline_s = time.monotonic() + TIMEOUT_S
    while transfers.has_saves:
        assert time.monotonic() < deadline_s
    with pytest.raises(TransferFailed, match="MemoryError: too little"):
        call()
    call()


def test_a_copy_that_fails_wakes_who_wants_to_reuse_its_pages(transfers: Transfers, played: PlayedCopies) -> None:
    transfers.save(pages(0), pages(0), played.copy("a", OSError("gone")))
    with pytest.raises(TransferFailed, match="gone"), running(lambda: transfers.before_reuse(pages(0))):
        played.let_go()


def test_close_joins_the_thread_and_drops_what_waits(played: PlayedCopies) -> None:
    before = set(threading.enumerate())
    transfers = Transfers(2, 8, 8)
    (thread,) = set(threading.enumerate()) - before
    transfers.save(pages(0), pages(0), played.copy("a"))
    played.wait_begun(1)
    load = transfers.load(pages(1), pages(1), played.copy("L"))
    with running(transfers.close) as done:
        with pytest.raises(TransferFailed, match="closed"):
            load.wait_layer(0)
        assert not done.is_set()  # a0 is under way
        played.let_go()
    assert not thread.is_alive()
    assert played.begun == ["a0"]
    transfers.close()
    for call in (transfers.save, transfers.load):
        with pytest.raises(TransferFailed, match="closed"):
            call(pages(0), pages(0), played.copy("b"))
    transfers.before_reuse(pages(0, 1))
