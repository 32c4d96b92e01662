"""Faults of the cache tier's nodes under engines with a real model: answers are those of an engine without a tier.

In each: the answer comes in bounded time, what went wrong is counted, and nothing stays under way.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from mneme.cachetier.chunk.keys import prefix_lineage
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.distributed.lifecycle import node_actor, own_identity
from mneme.cachetier.names import HostPut
from mneme.cachetier.node.index import BLOCK_BYTES
from mneme.replicas.model.decoder import Decoder
from tests.e2e.nodes.cache_cluster import (
    CALL_LIMIT_S,
    MARKS,
    SMALL,
    START_LIMIT_S,
    CacheCluster,
    call,
    chain,
    eventually,
    kill,
)
from tests.e2e.nodes.engine_process import Kill, ModelProcess, Told
from tests.replicas.chunk_stores import CHUNK_TOKENS
from tests.replicas.faulty_tier import NUM_NEW
from tests.replicas.tiered_engine import draw, full_prefill, load_decoder

pytestmark = MARKS

APPLICATION = "engines"
NODES = {"a": "full", "b": "b"}
# A store that is full refuses, as on a machine whose disk is full too: it writes nothing to files instead.
FULL_REFUSES = {
    "local_fs_capacity_threshold": "0.000001",
    "automatic_object_spilling_enabled": "false",
    "oom_grace_period_s": "0",
}
PROMPT_TOKENS = 3 * CHUNK_TOKENS + 20
CHUNK_BYTES = 2 * 3 * 2 * 16 * 4 * CHUNK_TOKENS  # K and V of 3 layers, 2 heads, 16 dimensions, float32
NUM_SAVED = PROMPT_TOKENS + NUM_NEW - 1  # the last token that is sampled is not computed
PEER_LOST = ("peer_host_miss", "peer_disk_miss", "peer_locate_", "actors_lost")  # counters of a node that goes


class Nodes:
    """Engines "a" and "b" on a node each; that of "a" goes in the last test."""

    def __init__(self, cluster: CacheCluster, folder: Path) -> None:
        self.cluster, self._model = cluster, folder
        self.decoder: Decoder = load_decoder("llama-3", folder)
        disk = DiskTierConfig(folder=str(cluster.folder / "engines-%n"), capacity_bytes=8 << 20)
        self.config = CacheConfig(chunk_tokens=CHUNK_TOKENS, min_load_tokens=1, host_bytes=8 << 20, disk=disk)
        self.engines = {name: self.begin(name) for name in "ab"}
        ray.get([each.stats.remote() for each in self.engines.values()], timeout=START_LIMIT_S)
        self.victims = [self.begin("a") for _ in range(2)]  # they start beside the first tests

    def begin(self, name: str) -> Any:
        return self.cluster.begin(NODES[name], ModelProcess, str(self._model), self.config, APPLICATION)

    def actor(self, name: str) -> Any:
        return self.cluster.node_actor(NODES[name], APPLICATION)

    def pid(self, name: str) -> int:
        """Return the process id of a node's actor."""
        found: int = call(self.actor(name).stats)["pid"]
        return found

    def ask(self, name: str, ids: list[int], fault: Kill | None = None) -> Told:
        """Right, whatever happens; checked by the engine itself: pages, buffers and fetches are back."""
        told: Told = ray.get(self.engines[name].answer.remote(ids, fault), timeout=2 * CALL_LIMIT_S)
        assert told.tokens == full_prefill(self.decoder, ids, NUM_NEW)[0]
        assert told.seconds < CALL_LIMIT_S
        assert told.is_flushed
        return told

    def save(self, name: str, seed: int) -> list[int]:
        """A prompt and its answer that a node has on its disk too, with two tokens of a next turn behind it."""
        ids = draw(seed, PROMPT_TOKENS)
        turn = [*ids, *self.ask(name, ids).tokens, 9, 9]
        assert call(self.actor(name).flush, 10.0)
        self.await_located(name, turn)
        return turn

    def await_located(self, name: str, turn: list[int]) -> None:
        try:
            eventually(lambda: call(self.engines[name].located, turn) >= NUM_SAVED)
        except AssertionError as error:
            error.add_note(str({node: call(self.actor(node).stats) for node in self.engines}))
            raise

    def counters(self, name: str) -> Counter[str]:
        return Counter(call(self.engines[name].stats))

    def check_rest(self, names: str = "ab") -> None:
        """Nothing is on its way, and each node has the bytes of its chunks and no more."""
        for name in names:
            eventually(lambda name=name: self.counters(name)["put_bytes_under_way"] == 0)
            assert call(self.actor(name).flush, 10.0)
            eventually(lambda name=name: is_consistent(call(self.actor(name).stats)))


def is_consistent(stats: dict[str, Any]) -> bool:
    """A chunk takes whole blocks of the host tier's budget, and its bytes of the object store."""
    host, objects = stats["host"], stats["objects"]
    assert host["bytes"] <= host["capacity_bytes"]
    assert stats["disk"]["bytes"] <= stats["disk"]["capacity_bytes"]
    if stats["writer"]["bytes"]:
        return False
    least = host["bytes"] - host["chunks"] * 2 * BLOCK_BYTES  # its header counts, too
    return bool(least <= objects["used_bytes"] <= host["bytes"])


def rise(before: Counter[str], after: Counter[str], names: Collection[str]) -> int:
    """Say how far the counters rose that begin with one of these."""
    return sum(count - before[name] for name, count in after.items() if name.startswith(tuple(names)))


@pytest.fixture(scope="module")
def nodes(cluster: CacheCluster, tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    cluster.add_node("full", **FULL_REFUSES)
    return Nodes(cluster, tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def at_rest(nodes: Nodes) -> Iterator[None]:
    yield
    nodes.check_rest("".join(nodes.engines))


def test_without_a_fault_all_is_loaded_on_either_node(nodes: Nodes) -> None:
    before = nodes.counters("b")
    turn = nodes.save("a", 1)
    nodes.await_located("b", turn)
    assert all(nodes.ask(name, turn).num_cached >= NUM_SAVED for name in "ab")
    assert rise(before, nodes.counters("b"), [*PEER_LOST, "node_restarted", "put_lost"]) == 0


def test_a_node_cache_is_killed_while_it_is_idle(nodes: Nodes) -> None:
    turn, before = nodes.save("a", 2), nodes.counters("a")
    kill(nodes.actor("a"))
    nodes.ask("a", turn)
    nodes.await_located("a", turn)  # its files are there
    assert nodes.ask("a", turn).num_cached >= NUM_SAVED
    assert nodes.counters("a")["node_restarted"] - before["node_restarted"] == 1


def test_a_node_cache_is_killed_while_an_engine_saves(nodes: Nodes) -> None:
    ids, before = draw(3, PROMPT_TOKENS), nodes.counters("a")
    nodes.ask("a", ids, Kill("was_put", 2, nodes.pid("a")))
    call(nodes.actor("a").ready)

    def is_saved_again() -> bool:
        nodes.ask("a", ids)
        return bool(call(nodes.engines["a"].located, ids) == PROMPT_TOKENS)

    eventually(is_saved_again)
    after = nodes.counters("a")
    assert rise(before, after, ["put_lost", "put_failed"]) > 0
    assert after["node_restarted"] - before["node_restarted"] == 1


@pytest.mark.parametrize("reader", ["a", "b"])
def test_a_node_cache_is_killed_while_an_engine_loads(nodes: Nodes, reader: str) -> None:
    """From the memory of its own node, then of another."""
    turn = nodes.save("a", 4 if reader == "a" else 5)
    nodes.await_located(reader, turn)
    before = nodes.counters(reader)
    told = nodes.ask(reader, turn, Kill("read", 1, nodes.pid("a")))
    assert told.num_cached <= NUM_SAVED
    nodes.await_located(reader, turn)
    assert nodes.ask(reader, turn).num_cached >= NUM_SAVED
    lost = ["node_restarted"] if reader == "a" else PEER_LOST
    assert rise(before, nodes.counters(reader), lost) > 0


def test_the_directory_is_killed(nodes: Nodes) -> None:
    turn = nodes.save("a", 6)
    nodes.await_located("b", turn)
    told_all = {name: call(nodes.actor(name).stats)["directory"]["told_all"] for name in "ab"}
    for number in range(nodes.config.directory_shards):
        ray.kill(ray.get_actor(f"directory-{number}", f"mneme-cache-{APPLICATION}"), no_restart=False)
    nodes.ask("b", turn)
    other = nodes.save("a", 7)
    for each in (turn, other):
        nodes.await_located("b", each)
        assert nodes.ask("b", each).num_cached >= NUM_SAVED
    for name, before in told_all.items():
        eventually(lambda name=name, before=before: call(nodes.actor(name).stats)["directory"]["told_all"] > before)


def test_an_engine_is_killed_after_its_first_put(nodes: Nodes) -> None:
    """It does not wait for what comes of it."""
    ids, actor, victim = draw(8, PROMPT_TOKENS), nodes.actor("a"), nodes.victims.pop()
    before = call(actor.stats)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.answer.remote(ids, Kill("was_put", 1, call(victim.stats)["pid"])), timeout=CALL_LIMIT_S)
    nodes.check_rest()
    after = call(actor.stats)
    num_taken = after["host"]["chunks"] - before["host"]["chunks"]
    assert (after["pid"], num_taken in (0, 1)) == (before["pid"], True)
    assert after["objects"]["used_bytes"] - before["objects"]["used_bytes"] == num_taken * CHUNK_BYTES
    assert nodes.ask("b", ids).num_cached <= num_taken * CHUNK_TOKENS


def test_an_engine_is_killed_before_its_chunk_is_taken(nodes: Nodes) -> None:
    """Its objects died with it; as long as their bytes are still on the node, they are taken as they were."""
    actor, victim, (chunk,) = nodes.actor("a"), nodes.victims.pop(), chain(list(range(CHUNK_TOKENS)))
    refs, before = call(victim.put_objects, chunk), call(actor.stats)
    os.kill(call(victim.stats)["pid"], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.stats.remote(), timeout=CALL_LIMIT_S)
    answer = call(actor.put, chunk.header, refs, prefix_lineage(SMALL, "tenant"))
    after = call(actor.stats)
    assert after["pid"] == before["pid"]
    num_refused = after["host"].get("memory_refused", 0) - before["host"].get("memory_refused", 0)
    if answer.outcome is HostPut.TAKEN:
        (refs,) = call(actor.read, [chunk.header.key])
        assert num_refused == 0
        assert b"".join(run.tobytes() for runs in ray.get(list(refs)) for run in runs) == b"".join(
            layer.tobytes() for layer in chunk.layers
        )
    else:
        assert (answer.outcome, num_refused) == (HostPut.REFUSED, 1)
        assert after["objects"]["used_bytes"] == before["objects"]["used_bytes"]


def test_an_object_store_that_is_full_refuses_chunks(nodes: Nodes) -> None:
    engine, before = nodes.engines["a"], nodes.counters("a")
    on_disk = nodes.save("a", 10)
    kill(nodes.actor("a"))  # then it is in files alone
    nodes.await_located("b", on_disk)
    assert call(engine.fill_store) > 0
    memory_refused = call(nodes.actor("a").stats)["host"].get("memory_refused", 0)
    ids = draw(11, PROMPT_TOKENS)
    try:
        nodes.ask("a", ids)
        nodes.ask("b", on_disk)
    finally:
        call(engine.free_store)
    assert nodes.counters("a")["put_failed"] - before["put_failed"] >= 3
    assert call(nodes.actor("a").stats)["host"]["memory_refused"] > memory_refused  # files for "b" go through memory
    assert nodes.save("a", 11)[: len(ids)] == ids


def test_a_node_without_the_data_goes(nodes: Nodes) -> None:
    turn, cluster = nodes.save("a", 12), nodes.cluster
    cluster.add_node("c")
    identity = replace(own_identity(nodes.config, APPLICATION, 3600.0), node_id=cluster.node_id("c"), name="c")
    call(node_actor(nodes.config, identity).ready)
    nodes.await_located("b", turn)
    cluster.remove_node("c")
    assert nodes.ask("b", turn).num_cached >= NUM_SAVED


def test_a_node_with_the_data_goes(nodes: Nodes) -> None:
    """The last test: "a" does not come back."""
    turn, before = nodes.save("a", 13), nodes.counters("b")
    nodes.await_located("b", turn)
    del nodes.engines["a"]
    nodes.cluster.remove_node(NODES["a"])
    nodes.ask("b", turn)
    assert rise(before, nodes.counters("b"), PEER_LOST) > 0
    eventually(lambda: nodes.ask("b", turn).num_cached >= NUM_SAVED)  # it has computed and saved them
