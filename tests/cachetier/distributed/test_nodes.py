"""Asking other nodes: breakers, late answers, and looking actors up in bounded time; without Ray."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from mneme.cachetier.distributed import nodes as ray_nodes
from mneme.cachetier.distributed.nodes import Breaker, Nodes, node_actor_name
from tests.cachetier.nodes import Clock


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


WAIT_S = 30.0


class LateAnswers:
    """Answers in the place of Ray: none is there by its deadline."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.futures: list[Future[object]] = []
        monkeypatch.setattr(ray_nodes, "ray", SimpleNamespace(get=self.get))

    def get(self, answer: object, timeout: float) -> object:
        raise GetTimeoutError

    def remote(self) -> Any:
        self.futures.append(Future())
        return SimpleNamespace(future=lambda future=self.futures[-1]: future)


def three_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> tuple[Nodes, LateAnswers]:
    late, nodes = LateAnswers(monkeypatch), Nodes("n", "test")
    calls = [nodes.call("n", "locate", late) for _ in range(3)]
    assert nodes.answers(calls, 0.0) == [None] * 3
    assert nodes.counters["locate_timeout"] == 3
    return nodes, late


def test_a_node_that_does_not_answer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, late = three_without_an_answer(monkeypatch)
    assert not nodes.is_up()
    assert nodes.call("n", "locate", late) is None
    assert nodes.call("another", "locate", late) is not None
    late.futures[0].set_exception(ActorUnavailableError("", None))
    assert not nodes.is_up()


def test_an_answer_soon_after_its_deadline_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, late = three_without_an_answer(monkeypatch)
    late.futures[0].set_result("soon")
    assert nodes.is_up()


def test_an_answer_that_takes_too_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "_LATE_S", 0.0)
    nodes, late = three_without_an_answer(monkeypatch)
    late.futures[0].set_result("late")
    assert not nodes.is_up()


class Names:
    """Answers in the place of Ray, once `is_open`: these nodes live, and "nobody" has no actor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
        self.is_open = threading.Event()
        self.asked: list[str] = []
        self.nodes = nodes
        named = [{"name": node_actor_name(node), "namespace": "test"} for node in nodes]
        fake = SimpleNamespace(nodes=self.alive, get_actor=self.find)
        monkeypatch.setattr(ray_nodes, "ray", fake)
        monkeypatch.setattr(ray_nodes, "list_named_actors", lambda **_: named)

    def alive(self) -> list[dict[str, object]]:
        assert self.is_open.wait(WAIT_S)
        return [{"NodeID": node, "Alive": True} for node in self.nodes]

    def find(self, name: str, namespace: str) -> str:
        node = name.removeprefix(node_actor_name(""))
        self.asked.append(node)
        if node == "nobody":
            raise ValueError(node)
        return f"{node}{len(self.asked)}"


def test_actors_are_looked_up_once_and_again_where_one_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "a", "b", "nobody")
    peers = Nodes("own", "test")

    async def run() -> None:
        names.is_open.set()
        assert await peers.find(("a", "b", "nobody"), WAIT_S) == {"a": "a1", "b": "b2", "nobody": None}
        assert await peers.find(("b", "a"), WAIT_S) == {"a": "a1", "b": "b2"}
        assert names.asked == ["a", "b", "nobody"]
        peers.drop("a")
        assert await peers.find(("a",), WAIT_S) == {"a": "a4"}

    asyncio.run(run())


def test_what_comes_too_late_is_there_for_the_next_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "a")
    peers = Nodes("own", "test")

    async def run() -> None:
        for _ in range(3):
            assert await peers.find(("a",), 0.0) == {"a": None}
        names.is_open.set()
        assert await peers.find(("a",), WAIT_S) == {"a": "a1"}
        assert names.asked == ["a"]

    asyncio.run(run())


def test_what_is_asked_of_all_is_asked_of_those_too_that_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names, late = Names(monkeypatch, "a", "b"), LateAnswers(monkeypatch)
    names.is_open.set()
    actor = SimpleNamespace(unpin=late)
    fake = SimpleNamespace(nodes=names.alive, get_actor=lambda *_: actor, get=late.get)
    monkeypatch.setattr(ray_nodes, "ray", fake)
    nodes = Nodes("a", "test", lambda: actor)
    for num_asked in (2, 4, 6, 8):
        assert nodes.ask_all("unpin", timeout_s=WAIT_S) == {"a": None, "b": None}
        assert len(late.futures) == num_asked
    assert nodes.ask_all("unpin", timeout_s=WAIT_S, among=["b"]) == {"b": None}
    assert nodes.call("b", "locate", late) is None
