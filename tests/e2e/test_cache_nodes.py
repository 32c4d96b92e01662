"""The cache tier on three nodes: found from anywhere, whoever dies, and never a wrong byte or a wait without end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray

from mneme.cachetier.cache_config import CacheConfig
from mneme.cachetier.disk_interface import DiskTierConfig
from tests.e2e.cache_cluster import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    CacheCluster,
    ReadChunk,
    cache_cluster,
    call,
    eventually,
    kill,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own sockets and files
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TAIL = 10
READ_LIMIT_S = 15.0


class Tier(NamedTuple):
    """Two nodes with an engine each."""

    cluster: CacheCluster
    a: Any
    b: Any

    def actor(self, name: str) -> Any:
        return self.cluster.node_actor(name, "shared")


@pytest.fixture(scope="module")
def cluster() -> Iterator[CacheCluster]:
    with cache_cluster() as started:
        started.add_node("a")
        started.add_node("b")
        yield started


def disk_config(folder: Path, **fields: Any) -> CacheConfig:
    return CacheConfig(disk=DiskTierConfig(folder=str(folder), capacity_bytes=200 << 20), **fields)


@pytest.fixture(scope="module")
def tier(cluster: CacheCluster) -> Tier:
    config = disk_config(cluster.folder / "kv-%n", chunk_tokens=CHUNK_TOKENS)
    return Tier(cluster, *(cluster.engine(name, config, "shared") for name in "ab"))


def tokens(first: int, num_chunks: int = 3, tail: int = TAIL) -> list[int]:
    """Of a sequence that no other test has."""
    return list(range(first * 10_000, first * 10_000 + num_chunks * CHUNK_TOKENS + tail))


def await_located(engine: Any, token_ids: list[int], edge: str) -> None:
    """Until an engine sees all of a sequence, each chunk by this edge."""

    def look() -> bool:
        found = call(engine.locate, token_ids)
        return sum(n for _, n in found) == len(token_ids) and {e for e, _ in found} == {edge}

    eventually(look)


def assert_all_read(read: list[ReadChunk], token_ids: list[int]) -> None:
    assert [each.miss for each in read] == [None] * len(read)
    assert all(each.is_exact for each in read)
    assert sum(each.num_usable for each in read) == len(token_ids)


def test_chunks_in_a_nodes_memory_are_read_from_this_node_and_another(tier: Tier) -> None:
    ids = tokens(1)
    assert all(call(tier.a.put, ids))
    for engine, edge in ((tier.a, "host"), (tier.b, "peer_host")):
        await_located(engine, ids, edge)
        assert_all_read(call(engine.read), ids)
    assert call(tier.b.locate, [*ids[:-3], 7, 7, 7])[-1] == ("peer_host", TAIL - 3)


def test_two_engines_that_put_the_same_chunks_keep_one_copy(tier: Tier, cluster: CacheCluster) -> None:
    ids = tokens(2, num_chunks=1, tail=0)
    config = disk_config(cluster.folder / "kv-%n", chunk_tokens=CHUNK_TOKENS)
    other = cluster.engine("a", config, "shared")
    before = call(tier.actor("a").stats)["objects"]["used_bytes"]
    for answer in [engine.put.remote(ids) for engine in (tier.a, other)]:
        assert all(ray.get(answer, timeout=READ_LIMIT_S))
    for engine in (tier.a, other):
        call(engine.close)
    await_located(tier.b, ids, "peer_host")
    assert call(tier.actor("a").stats)["objects"]["used_bytes"] - before == CHUNK_BYTES
    ray.kill(other)


def test_an_actor_that_was_killed_finds_its_files_again(tier: Tier) -> None:
    ids = tokens(3)
    call(tier.a.put, ids)
    await_located(tier.b, ids, "peer_host")
    assert call(tier.actor("a").flush, 10.0)
    kill(tier.actor("a"))
    await_located(tier.b, ids, "peer_disk")
    assert_all_read(call(tier.b.read), ids)
    await_located(tier.b, ids, "peer_host")  # it was brought up for the other node
