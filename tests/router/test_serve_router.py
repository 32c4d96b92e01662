"""The Ray Serve adapter keeps the framework's rules: called by keyword, never empty, never raising."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mneme.router import replica_set
from mneme.router.serve_router import MnemeRequestRouter

pytestmark = pytest.mark.engine


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), max_ongoing_requests=100)


def call(replica_id: str) -> Any:
    return SimpleNamespace(kwargs={"replica_id": replica_id}, routing_context=SimpleNamespace(should_backoff=False))


def ranks(pending: Any) -> list[list[str]]:
    router = MnemeRequestRouter.__new__(MnemeRequestRouter)  # without the framework's state
    candidates = [replica(name) for name in "abc"]
    chosen = asyncio.run(router.choose_replicas(candidate_replicas=candidates, pending_request=pending))
    return [[r.replica_id.unique_id for r in rank] for rank in chosen]


def test_a_call_goes_to_the_replica_that_it_names_and_to_any_where_that_is_gone() -> None:
    pending = call("b")
    assert ranks(pending) == [["b"], ["a", "b", "c"]]
    assert pending.routing_context.should_backoff  # or the retry loop of the framework spins
    assert ranks(call("dead")) == [["a", "b", "c"]]


def test_the_replica_set_reaches_listeners_once_per_change() -> None:
    heard: list[frozenset[str]] = []
    replica_set.publish("d1", frozenset("a"))
    replica_set.listen("d1", heard.append)
    replica_set.publish("d1", frozenset("a"))
    replica_set.publish("d1", frozenset("ab"))
    replica_set.publish("d2", frozenset("x"))
    assert heard == [frozenset("a"), frozenset("ab")]
