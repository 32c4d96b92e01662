"""The cache tier of a cluster of two nodes on this machine, as engines use it (`start_cache_tier`).

Another process, of this node or of the other, puts chunks into its node's store; this one locates and reads them. Every
round's chunks were put afresh, so that no object was fetched or looked at before.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import ray
from harness import median_ratio
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tier_io.chunks import Arm, Chain, ChainReads, Samples, Shape

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.distributed.lifecycle import shutdown_cache_tier, start_cache_tier
from mneme.cachetier.distributed.ray_store import RayChunkStore
from mneme.cachetier.store import Edge
from mneme.cluster.serve.ray_private import single_node
from mneme.errors import MnemeError

APPLICATION = "bench-tier-io"
EDGES: dict[str, Edge] = {"host": "host", "peer": "peer_host"}  # by the node whose process put the chunks
_TIMEOUT_S = 120.0
_CLOSE_S = 20.0
_SETTLE_S = 20.0  # of one chunk


class Author:
    """An engine's process that computed the chain and puts it into its node's store."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._chain, self._store = Chain(shape, seed), start_cache_tier(CacheConfig(), APPLICATION)

    def put(self) -> None:
        for index in range(len(self._chain.chunks)):
            put_settled(self._store, self._chain, index)


class TwoNodes:
    """A cluster of two nodes on this machine, which ends with `close`."""

    def __init__(self, store_bytes: int) -> None:
        node = {"object_store_memory": store_bytes, "num_cpus": 1, "node_ip_address": "127.0.0.1"}
        with single_node():  # on the loopback address; nothing beyond this machine joins
            self._cluster = Cluster(
                initialize_head=True, head_node_args=node | {"include_dashboard": False}, shutdown_at_exit=False
            )
            other = self._cluster.add_node(**node)
            ray.init(self._cluster.address, logging_level="error", log_to_driver=False, _node_ip_address="127.0.0.1")
        self.nodes = {"host": self._cluster.head_node.node_id, "peer": other.node_id}
        assert ray.get_runtime_context().get_node_id() == self.nodes["host"]

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


class ClusterTier:
    """This process as an engine that reads what another of its node, or of the other node, has put."""

    def __init__(self, cluster: TwoNodes, chain: Chain, seed: int) -> None:
        self._chain, self._ends = chain, ExitStack()
        self._ends.callback(shutdown_cache_tier, APPLICATION, timeout_s=_CLOSE_S)
        self.store = start_cache_tier(CacheConfig(), APPLICATION)
        self._ends.callback(self.store.close)
        self.reads = ChainReads(self.store, chain)
        self._located_s: dict[str, list[float]] = {}  # by arm, round by round
        self._authors: dict[str, Any] = {}
        for name in EDGES:
            on_node = NodeAffinitySchedulingStrategy(cluster.nodes[name], soft=False)
            author = ray.remote(num_cpus=0)(Author).options(scheduling_strategy=on_node)
            self._authors[name] = author.remote(chain.shape, seed)
            self._ends.callback(ray.kill, self._authors[name])

    def close(self) -> None:
        self.reads.close()
        self._ends.close()

    def locate_fresh(self, node: str, arm: str) -> None:
        """Chunks that a node's author puts now; the seconds that locating them takes are kept, for the arm."""
        self.clear()
        ray.get(self._authors[node].put.remote(), timeout=_TIMEOUT_S)
        self.reads.wait()
        self._located_s.setdefault(arm, []).append(self.reads.locate(EDGES[node]))

    def clear(self) -> None:
        """No node has any of the chunks."""
        self.reads.close()
        self.store.admin.delete(self.reads.query, spares_longer=False)

    def put(self, index: int) -> None:
        """As an engine saves: what is under way is waited for where that is too much, and after the last."""
        _put(self.store, self._chain, index)
        if index == len(self._chain.chunks) - 1:
            _settle(self.store)

    def put_settled(self, index: int) -> None:
        put_settled(self.store, self._chain, index)

    def with_locating(self, rows: list[dict[str, Any]], found: dict[str, Samples]) -> list[dict[str, Any]]:
        """Rows of arms that read, with what locating all of the chain took, and the share that counts it."""
        for row in rows:
            samples, located_s = found[row["arm"]], self._located_s.get(row["arm"])
            if located_s is not None and samples.arm.base is not None:
                located_s = located_s[-len(samples.rounds) :]  # a first round warmed up
                whole_s = [read + locate for read, locate in zip(samples.total_s(), located_s, strict=True)]
                row["locate ms"] = statistics.median(located_s) * 1e3
                row["share with locate"] = median_ratio(found[samples.arm.base].total_s(), whole_s)
        return rows


def read_arms(tier: ClusterTier, base: list[Arm]) -> list[Arm]:
    def arm(node: str, name: str, call: Any) -> Arm:
        return Arm(f"{node} get", name, call, "copy+checksum", lambda: tier.locate_fresh(node, name), tier.clear)

    return [
        *base,
        arm("host", "read", tier.reads.read),
        arm("host", "read+copy", tier.reads.copy),
        arm("peer", "read, other node", tier.reads.read),
    ]


def put_arms(tier: ClusterTier, base: list[Arm]) -> list[Arm]:
    return [
        *base,
        Arm("host put", "store", tier.put, "copy", tier.clear, tier.clear),
        Arm("host put", "store, each waited for", tier.put_settled, "copy", tier.clear, tier.clear),
    ]


def put_settled(store: RayChunkStore, chain: Chain, index: int) -> None:
    """Put a chunk, and wait until it can be found."""
    _put(store, chain, index)
    _settle(store)


def _put(store: RayChunkStore, chain: Chain, index: int) -> None:
    if not store.put(chain.chunks[index], chain.lineage):
        raise MnemeError(f"chunk {index} was not put")


def _settle(store: RayChunkStore) -> None:
    if not store.settle(_SETTLE_S):
        raise MnemeError(f"chunks were not kept within {_SETTLE_S:g} s")
