"""The cache tier of two nodes, managed from a third: what is found, pinned and deleted is that of all nodes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from mneme.cachetier.admin import leading, num_leading_tokens
from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.chunk.keys import prefix_lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.distributed.nodes import Nodes
from mneme.cachetier.distributed.ray_admin import RayCacheAdmin
from mneme.cachetier.names import tenant_id
from mneme.cachetier.pin_book import PinName
from mneme.cachetier.store import ChainQuery
from mneme.errors import CachePinRefused, ReplicaUnavailable
from tests.e2e.nodes.cache_cluster import CHUNK_TOKENS, LARGE, MARKS, SMALL, CacheCluster, call, eventually, kill

pytestmark = MARKS

OWNER = tenant_id("tenant")
PIN = PinName(OWNER, "p")


@pytest.fixture(scope="module")
def engines(cluster: CacheCluster) -> dict[str, Any]:
    config = CacheConfig(chunk_tokens=CHUNK_TOKENS)
    return {name: cluster.engine(name, config, "managed") for name in "ab"}


@pytest.fixture
def admin(cluster: CacheCluster, engines: dict[str, Any]) -> RayCacheAdmin:
    """As a replica on node a would have it."""
    for engine in engines.values():
        call(engine.stats)  # it is up, and so is its node's actor
    own = cluster.node_id("a")
    return RayCacheAdmin(Nodes(own, "mneme-cache-managed", lambda: cluster.node_actor("a", "managed")))


def tokens(first: int, num_chunks: int) -> list[int]:
    return list(range(first * 10_000, first * 10_000 + num_chunks * CHUNK_TOKENS))


def query(ids: list[int], model: ModelFingerprint = SMALL) -> ChainQuery:
    return ChainQuery.of(prefix_lineage(model, "tenant"), model.digest, ids, CHUNK_TOKENS)


def await_put(engine: Any, admin: RayCacheAdmin, node: str, ids: list[int], model: ModelFingerprint = SMALL) -> None:
    assert all(call(engine.put, ids, model))
    num_chunks = len(ids) // CHUNK_TOKENS
    eventually(lambda: sum(found.node == node for found in admin.lookup(query(ids, model))) == num_chunks)


def num_found(admin: RayCacheAdmin, ids: list[int]) -> int:
    return num_leading_tokens(leading(admin.lookup(query(ids)), CHUNK_TOKENS))


def test_chunks_of_two_nodes_are_found_pinned_and_deleted_together(
    engines: dict[str, Any], admin: RayCacheAdmin
) -> None:
    ids = tokens(1, 2)
    await_put(engines["a"], admin, "a", ids[:CHUNK_TOKENS])
    await_put(engines["b"], admin, "b", ids)
    found = admin.lookup(query(ids))
    assert sorted((each.place, each.node, each.is_near) for each in found) == [
        (0, "a", True),
        (0, "b", False),
        (1, "b", False),
    ]
    assert num_found(admin, ids) == len(ids)
    pinned = admin.pin(PIN, query(ids), 60)
    assert pinned is not None
    assert (pinned.num_tokens, pinned.amount.num_chunks) == (len(ids), 3)
    assert [pin.pin_id for pin in admin.pins(OWNER)] == ["p"]
    assert [figures["pins"]["keys"] for figures in admin.stats()] in ([1, 2], [2, 1])
    assert {figures["node"] for figures in admin.stats()} == {"a", "b"}
    assert admin.unpin(PIN)
    assert not admin.unpin(PIN)
    assert admin.delete(query(ids), spares_longer=False).num_chunks == 3
    assert num_found(admin, ids) == 0
    assert admin.pin(PIN, query(ids), 60) is None


def test_what_one_node_refuses_is_pinned_on_none(engines: dict[str, Any], admin: RayCacheAdmin) -> None:
    ids = tokens(2, 4)  # 20 MB: over half of a node's 32
    await_put(engines["a"], admin, "a", ids[:CHUNK_TOKENS], LARGE)
    await_put(engines["b"], admin, "b", ids, LARGE)
    with pytest.raises(CachePinRefused):
        admin.pin(PIN, query(ids, LARGE), 60)
    assert admin.pins(OWNER) == []
    assert [figures["pins"]["keys"] for figures in admin.stats()] == [0, 0]
    pinned = admin.pin(PIN, query(ids[:CHUNK_TOKENS], LARGE), 60)
    with pytest.raises(CachePinRefused):  # another of that name, and the one before stays
        admin.pin(PIN, query(ids, LARGE), 600)
    (kept,) = admin.pins(OWNER)
    assert pinned is not None
    assert kept._replace(expires_in_s=60) == pinned._replace(expires_in_s=60)
    assert kept.expires_in_s is not None
    assert kept.expires_in_s < 60
    assert admin.delete_tenant(OWNER).num_chunks == 5


def test_a_node_that_hangs_is_left_out_of_the_figures(cluster: CacheCluster, admin: RayCacheAdmin) -> None:
    hung = call(cluster.node_actor("a", "managed").stats)["pid"]
    os.kill(hung, signal.SIGSTOP)
    try:
        assert [figures["node"] for figures in admin.stats()] == ["b"]
    finally:
        os.kill(hung, signal.SIGCONT)
    eventually(lambda: len(admin.stats()) == 2)


def test_a_node_that_does_not_answer_is_left_out_but_never_of_a_deletion(
    cluster: CacheCluster, engines: dict[str, Any], admin: RayCacheAdmin
) -> None:
    ids = tokens(3, 1)
    await_put(engines["a"], admin, "a", ids)
    kill(cluster.node_actor("b", "managed"))
    assert num_found(admin, ids) == CHUNK_TOKENS

    def delete() -> bool:
        try:
            admin.delete(query(ids), spares_longer=False)
        except ReplicaUnavailable:
            return False
        return True

    eventually(delete)  # once the node's actor is there again
    assert num_found(admin, ids) == 0
