"""Chunks on their way to a node's actor: what fails leaves nothing behind; without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.distributed import puts as ray_puts
from mneme.cachetier.distributed.puts import PutAnswer, PutsUnderWay
from mneme.cachetier.node.saving import HostPut
from tests.cachetier.chunks import LINEAGE, chunk_of

CHUNK = chunk_of(list(range(8)))
ANSWER = PutAnswer(HostPut.TAKEN, True, 1)
WAIT_S = 30.0


class FakeRay:
    """Answers are those that a node gave; `wait` says that all are ready."""

    def __init__(self) -> None:
        self.wait: Callable[..., Any] = lambda answers, timeout: (answers, [])

    def get(self, answer: object, timeout: float) -> PutAnswer:
        return ANSWER


class Node:
    """`error` is raised instead of a put."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.put = SimpleNamespace(remote=self._put)

    def _put(self, *args: object) -> object:
        if self.error is not None:
            raise self.error
        return object()


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_puts, "ray", fake)
    monkeypatch.setattr(ray_puts, "put_runs", lambda runs: ())
    return fake


@pytest.fixture
def heard() -> list[ChunkHeader]:
    return []


@pytest.fixture
def puts(fake_ray: FakeRay, heard: list[ChunkHeader]) -> Iterator[PutsUnderWay]:
    puts = PutsUnderWay(1, 0.0, lambda header, answer: heard.append(header))
    yield puts
    puts.close(WAIT_S)


def test_a_put_that_raises_is_not_under_way(puts: PutsUnderWay) -> None:
    node = Node()
    node.error = TypeError("a bug")
    with pytest.raises(TypeError):
        puts.put(node, CHUNK, LINEAGE)
    assert puts.stats() == {"put_bytes_under_way": 0, "put_failed": 1}
    node.error = None
    assert puts.put(node, CHUNK, LINEAGE)  # there is room
    assert puts.settle(WAIT_S)


def test_an_answer_that_cannot_be_taken_in_is_over(
    puts: PutsUnderWay, heard: list[ChunkHeader], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(header: ChunkHeader, answer: PutAnswer | None) -> None:
        heard.append(header)
        raise RuntimeError("a bug")

    monkeypatch.setattr(puts, "_done", fails)
    assert puts.put(Node(), CHUNK, LINEAGE)
    assert puts.settle(WAIT_S)
    assert puts.close(WAIT_S)
    assert (puts.stats()["put_bytes_under_way"], heard) == (0, [CHUNK.header])


def test_answers_that_cannot_be_waited_for_are_looked_at_now_and_then(
    fake_ray: FakeRay, puts: PutsUnderWay, heard: list[ChunkHeader], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sound, num_failures = fake_ray.wait, threading.Semaphore(3)

    def wait(answers: list[object], timeout: float) -> object:
        if num_failures.acquire(blocking=False):
            raise RuntimeError("Ray is gone")
        return sound(answers, timeout)

    fake_ray.wait = wait
    monkeypatch.setattr(ray_puts, "_POLL_S", 0.001)
    waits = puts._changed.wait_for

    def wait_for(predicate: Callable[[], object], timeout: float | None = None) -> object:
        if timeout == 0.001:
            pauses.append(timeout)
        return waits(predicate, timeout)

    monkeypatch.setattr(puts._changed, "wait_for", wait_for)
    assert puts.put(Node(), CHUNK, LINEAGE)
    assert puts.settle(WAIT_S)
    assert len(pauses) == 3
    assert heard == [CHUNK.header]
