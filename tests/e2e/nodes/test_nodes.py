"""The cache tier on three nodes: found from anywhere, whoever dies, and never a wrong byte or a wait without end."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any, NamedTuple

import pytest
import ray

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.distributed.lifecycle import shutdown_cache_tier
from tests.budget import examples
from tests.e2e.nodes.cache_cluster import (
    CALL_LIMIT_S,
    CHUNK_TOKENS,
    LARGE,
    LARGE_BYTES,
    MARKS,
    SMALL,
    CacheCluster,
    EngineProcess,
    ReadChunk,
    call,
    chain,
    eventually,
    kill,
    mapped_files_bytes,
)

pytestmark = MARKS

TAIL = 10


class TwoEngines(NamedTuple):
    """Two nodes with an engine each."""

    cluster: CacheCluster
    a: Any
    b: Any

    def actor(self, name: str) -> Any:
        return self.cluster.node_actor(name, "shared")


def config_of(cluster: CacheCluster) -> CacheConfig:
    disk = DiskTierConfig(folder=str(cluster.folder / "kv-%n"), capacity_bytes=200 << 20)
    return CacheConfig(disk=disk, chunk_tokens=CHUNK_TOKENS)


@pytest.fixture(scope="module")
def tier(cluster: CacheCluster) -> TwoEngines:
    return TwoEngines(cluster, *(cluster.engine(name, config_of(cluster), "shared") for name in "ab"))


def tokens(first: int, num_chunks: int = 3, tail: int = TAIL) -> list[int]:
    """Make a sequence that no other test has."""
    return list(range(first * 10_000, first * 10_000 + num_chunks * CHUNK_TOKENS + tail))


def await_located(engine: Any, token_ids: list[int], *edges: str, fingerprint: ModelFingerprint = SMALL) -> None:
    """Until an engine sees all of a sequence, each chunk by one of these edges."""

    found: list[tuple[str, int]] = []

    def look() -> bool:
        found[:] = call(engine.locate, token_ids, fingerprint)
        return sum(n for _, n in found) == len(token_ids) and {e for e, _ in found} <= {*edges}

    try:
        eventually(look)
    except AssertionError:
        raise AssertionError(f"located {found}, not all by {edges}") from None


def assert_all_read(read: list[ReadChunk], token_ids: list[int]) -> None:
    assert [each.miss for each in read] == [None] * len(read)
    assert all(each.is_exact for each in read)
    assert sum(each.num_usable for each in read) == len(token_ids)


def test_chunks_in_a_nodes_memory_are_read_from_this_node_and_another(tier: TwoEngines) -> None:
    ids = tokens(1, num_chunks=2)
    assert all(call(tier.a.put, ids, LARGE))
    for engine, edge in ((tier.a, "host"), (tier.b, "peer_host")):
        await_located(engine, ids, edge, fingerprint=LARGE)
        assert_all_read(call(engine.read), ids)
    assert call(tier.b.locate, [*ids[:-3], 7, 7, 7], LARGE)[-1] == ("peer_host", TAIL - 3)


def test_what_is_shorter_than_a_chunk_is_read_from_another_node_whole(tier: TwoEngines) -> None:
    ids = tokens(31, num_chunks=0)
    assert all(call(tier.a.put, ids, LARGE))
    await_located(tier.b, ids, "peer_host", fingerprint=LARGE)
    assert_all_read(call(tier.b.read), ids)
    assert call(tier.b.locate, ids[:-3], LARGE) == []


def test_an_engine_that_dies_behind_its_put_leaves_its_chunks_or_none_of_their_bytes(tier: TwoEngines) -> None:
    """It owned the objects: as long as their bytes are still on the node, they are taken as they were."""
    ids = tokens(2, num_chunks=1, tail=0)
    other, actor = tier.cluster.engine("a", config_of(tier.cluster), "shared"), tier.actor("a")
    before = call(actor.stats)["objects"]["used_bytes"]
    call(other.put, ids)
    ray.kill(other)
    call(tier.a.put, ids)  # one copy, whoever puts it
    await_located(tier.b, ids, "peer_host")
    assert_all_read(call(tier.b.read), ids)
    assert call(actor.stats)["objects"]["used_bytes"] - before == LARGE_BYTES // 16


@pytest.mark.parametrize("reader", ["a", "b"])
def test_an_actor_that_is_killed_while_engines_load_costs_misses_at_most(tier: TwoEngines, reader: str) -> None:
    ids = tokens(5 if reader == "a" else 6)
    call(tier.a.put, ids)
    engine = tier.a if reader == "a" else tier.b
    await_located(engine, ids, "host" if reader == "a" else "peer_host")
    assert call(tier.actor("a").flush, 10.0)
    assert_all_read(call(engine.read, 1, close=False), ids)
    kill(tier.actor("a"))
    assert all(each.is_exact for each in call(engine.read))
    await_located(tier.a, ids, "disk", "host")  # host: what the other node asked the new actor for
    assert_all_read(call(tier.a.read), ids)


def test_an_actor_that_was_killed_finds_its_files_again(tier: TwoEngines) -> None:
    ids = tokens(3)
    call(tier.a.put, ids)
    await_located(tier.b, ids, "peer_host")
    assert call(tier.actor("a").flush, 10.0)
    kill(tier.actor("a"))
    await_located(tier.b, ids, "peer_disk")
    assert_all_read(call(tier.b.read), ids)
    await_located(tier.b, ids, "peer_host")  # it was brought up for the other node
    await_located(tier.a, ids, "host")


def test_an_actor_that_is_killed_while_engines_save_loses_what_it_had_not_written_and_no_more(tier: TwoEngines) -> None:
    ids = tokens(4, num_chunks=4, tail=0)
    actor = tier.actor("a")
    pid, taken = call(actor.stats)["pid"], call(actor.stats)["host"].get("taken", 0)
    saving = tier.a.put.remote(ids)
    eventually(lambda: call(actor.stats)["host"].get("taken", 0) > taken)
    os.kill(pid, signal.SIGKILL)
    ray.get(saving, timeout=CALL_LIMIT_S)  # it has not hung
    eventually(lambda: call(tier.a.stats)["put_bytes_under_way"] == 0)
    call(actor.ready)

    def is_saved_again() -> bool:
        call(tier.a.put, ids)
        return sum(n for _, n in call(tier.a.locate, ids)) == len(ids)

    eventually(is_saved_again)
    assert_all_read(call(tier.a.read), ids)


def test_a_directory_that_was_killed_is_told_all_anew_and_nothing_that_is_gone(tier: TwoEngines) -> None:
    kept, lost = tokens(7), tokens(8, num_chunks=1, tail=0)
    call(tier.a.put, kept)
    call(tier.b.put, lost)
    await_located(tier.b, kept, "peer_host")
    await_located(tier.a, lost, "peer_host")
    directory = ray.get_actor("directory", "mneme-cache-shared")
    for path in (tier.cluster.folder / "kv-b").rglob("*.kv"):
        path.unlink()
    os.kill(call(tier.actor("b").stats)["pid"], signal.SIGKILL)
    ray.kill(directory, no_restart=False)
    await_located(tier.b, kept, "peer_host")
    eventually(lambda: len(call(directory.stats)["live_nodes"]) == 2)
    assert call(directory.lookup, [chain(lost)[0].header.key]) == [()]
    assert call(tier.a.locate, lost) == []


def test_a_host_tier_that_is_full_makes_room_or_refuses_within_its_budget(cluster: CacheCluster) -> None:
    before = mapped_files_bytes(cluster.folder)
    engine = EngineProcess(CacheConfig(host_bytes=3 * LARGE_BYTES, chunk_tokens=CHUNK_TOKENS), "full")
    started_s = time.monotonic()
    for number in range(20, 26):
        engine.put(tokens(number, num_chunks=4, tail=0), LARGE)  # 20 MB each
    engine.close()
    assert time.monotonic() - started_s < CALL_LIMIT_S
    stats = call(cluster.node_actor("head", "full").stats)
    assert engine.stats()["put_bytes_under_way"] == 0
    assert 0 < stats["host"]["bytes"] <= stats["host"]["capacity_bytes"]
    assert stats["objects"]["used_bytes"] <= stats["host"]["capacity_bytes"]
    assert mapped_files_bytes(cluster.folder) == before
    shutdown_cache_tier("full")


def test_an_engine_without_its_actor_answers_at_once_and_has_another_made(cluster: CacheCluster) -> None:
    """Somebody ended it for good."""
    engine = EngineProcess(CacheConfig(chunk_tokens=CHUNK_TOKENS), "ended")
    ids = tokens(31, num_chunks=1)
    actor = cluster.node_actor("head", "ended")
    ray.kill(actor, no_restart=True)
    started_s = time.monotonic()
    assert engine.locate(ids, timeout_s=0.05) == []
    assert time.monotonic() - started_s < CALL_LIMIT_S

    def is_back() -> bool:
        engine.put(ids)
        return sum(n for _, n in engine.locate(ids)) == len(ids)

    eventually(is_back)
    engine.close()
    shutdown_cache_tier("ended")


def test_an_actor_that_hangs_is_left_alone_until_it_answers(cluster: CacheCluster) -> None:
    engine = EngineProcess(CacheConfig(chunk_tokens=CHUNK_TOKENS), "hanging")
    ids = tokens(32, num_chunks=1)
    engine.put(ids)
    eventually(lambda: sum(n for _, n in engine.locate(ids)) == len(ids))
    pid = call(cluster.node_actor("head", "hanging").stats)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        assert engine.locate(ids, timeout_s=0.05) == []
        assert time.monotonic() - started_s < CALL_LIMIT_S
        eventually(lambda: not engine.locate(ids, timeout_s=0.05) and engine.stats().get("not_asked", 0) > 0)
        assert not any(engine.put(ids))
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: sum(n for _, n in engine.locate(ids)) == len(ids))
    engine.close()
    shutdown_cache_tier("hanging")


@pytest.mark.slow
def test_kills_without_end_never_give_a_wrong_byte(tier: TwoEngines) -> None:
    """Either node's actor is killed, and the directory, at any moment of saving and loading."""
    generator = random.Random(0)
    for number in range(100, 100 + examples(5, at_length=5)):
        ids = tokens(number)
        saving = tier.a.put.remote(ids)
        victim = generator.choice(("a", "b", "directory"))
        actor = ray.get_actor(victim, "mneme-cache-shared") if victim == "directory" else tier.actor(victim)
        reading = tier.b.locate.remote(tokens(generator.randrange(100, number + 1)))
        ray.kill(actor, no_restart=False)
        ray.get([saving, reading], timeout=CALL_LIMIT_S)
        for engine in (tier.b, tier.a):
            assert all(each.is_exact for each in call(engine.read))
            call(engine.locate, ids)

    def is_whole() -> bool:
        call(tier.a.put, ids)
        return sum(n for _, n in call(tier.b.locate, ids)) == len(ids)

    eventually(is_whole)
    assert_all_read(call(tier.b.read), ids)


def test_a_node_that_goes_takes_its_chunks_and_nothing_else(tier: TwoEngines) -> None:
    cluster = tier.cluster
    cluster.add_node("c")
    engine = cluster.engine("c", config_of(cluster), "shared")
    stays, goes = tokens(40), tokens(41)
    call(tier.a.put, stays)
    call(engine.put, goes)
    await_located(tier.b, stays, "peer_host")
    await_located(tier.b, goes, "peer_host")
    assert_all_read(call(tier.b.read, 1, close=False), goes)
    cluster.remove_node("c")
    started_s = time.monotonic()
    read = call(tier.b.read)
    assert time.monotonic() - started_s < CALL_LIMIT_S
    assert all(each.is_exact for each in read)
    eventually(lambda: call(tier.b.locate, goes) == [])
    counters = call(tier.b.stats)
    assert any(name.startswith("peer_host_miss") or name.startswith("peer_locate_") for name in counters)
    eventually(lambda: sum(n for _, n in call(tier.b.locate, stays)) == len(stays))
    assert_all_read(call(tier.b.read), stays)
