"""The Ray Serve adapter keeps the framework's rules: called by keyword, never empty, never raising."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mneme.router import replica_set
from mneme.router.serve_router import MnemeRequestRouter

pytestmark = pytest.mark.engine


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), max_ongoing_requests=100)


def call(number: int = 0, *, session_id: str = "", **kwargs: Any) -> Any:
    metadata = SimpleNamespace(
        internal_request_id=f"call-{number}", request_id="r", session_id=session_id, multiplexed_model_id=""
    )
    return SimpleNamespace(kwargs=kwargs, metadata=metadata, routing_context=SimpleNamespace(should_backoff=False))


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An adapter without the framework's base state: three replicas, power of two that names the last."""
    made = MnemeRequestRouter.__new__(MnemeRequestRouter)
    made._deployment_id = SimpleNamespace(name="test-deployment")
    replicas = [replica(name) for name in "abc"]
    made.replicas = replicas

    async def power_of_two(candidates: list[Any], pending: Any) -> list[list[Any]]:
        return [[candidates[-1]]] if candidates else []

    monkeypatch.setattr(made, "_power_of_two", power_of_two)
    return made


def ranks(router: Any, pending: Any, names: str = "abc") -> list[list[str]]:
    candidates = [r for r in router.replicas if r.replica_id.unique_id in names]
    chosen = asyncio.run(router.choose_replicas(candidate_replicas=candidates, pending_request=pending))
    return [[r.replica_id.unique_id for r in rank] for rank in chosen]


def test_a_pinned_call_goes_to_its_replica(router: Any) -> None:
    pending = call(replica_id="b")
    assert ranks(router, pending)[0] == ["b"]
    assert pending.routing_context.should_backoff  # or the retry loop of the framework spins


def test_a_call_pinned_to_a_replica_that_is_gone_goes_to_any(router: Any) -> None:
    assert ranks(router, call(replica_id="dead")) == [["c"], ["a", "b", "c"]]


def test_a_call_that_names_nothing_is_left_to_power_of_two(router: Any) -> None:
    assert ranks(router, call()) == [["c"], ["a", "b", "c"]]


def test_a_failure_falls_back_to_every_replica(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(candidates: list[Any], pending: Any) -> list[list[Any]]:
        raise RuntimeError

    monkeypatch.setattr(router, "_power_of_two", fails)
    assert ranks(router, call(replica_id="b")) == [["a", "b", "c"]]


def test_the_replica_set_reaches_listeners_once_per_change() -> None:
    heard: list[frozenset[str]] = []
    replica_set.publish("d1", frozenset("a"))
    replica_set.listen("d1", heard.append)
    replica_set.publish("d1", frozenset("a"))
    replica_set.publish("d1", frozenset("ab"))
    replica_set.publish("d2", frozenset("x"))
    assert heard == [frozenset("a"), frozenset("ab")]
