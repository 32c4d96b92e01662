"""The cache tier of a cluster of two nodes on this machine, as engines use it (`start_cache_tier`).

Another process, of this node or of others, puts chunks into its node's store; this one locates and reads them. Every
round's chunks were put afresh, so that no object was fetched or looked at before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import ray
from bench_tier_io import Arm, Chain, Shape
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mneme.cachetier.config import CacheConfig
from mneme.cachetier.distributed.lifecycle import shutdown_cache_tier, start_cache_tier
from mneme.cachetier.distributed.objects import layers_per_object
from mneme.cachetier.distributed.ray_store import RayChunkStore
from mneme.cachetier.names import Miss
from mneme.cachetier.policy.cost_model import Calibration, CostModel
from mneme.cachetier.policy.load_controller import LoadController
from mneme.cachetier.store import ChainQuery
from mneme.cluster.serve.ray_private import single_node
from mneme.errors import MnemeError
from mneme.replicas.connector.loads import Loads
from mneme.replicas.load import Load

APPLICATION = "bench-tier-io"
NODES = ("host", "peer", "peer 2")
_TIMEOUT_S = 120.0
_CLOSE_S = 20.0
_FLUSH_S = 20.0  # of one chunk
_FOUND_S = 20.0  # until chunks that were put can be found, those of another node too
_LOOK_S = 1.0
_POLL_S = 0.02


class Author:
    """An engine's process that computed the chain and puts it into its node's store."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._chain, self._store = Chain(shape, seed), start_cache_tier(CacheConfig(), APPLICATION)

    def put(self, chunks: range) -> None:
        for index in chunks:
            put_settled(self._store, self._chain, index)

    def put_raw(self, num_layers: int) -> list[list[Any]]:
        """The same bytes as objects of so many layers each; references to those of each chunk."""
        starts = range(0, self._chain.shape.num_layers, num_layers)
        return [[ray.put(layers[start : start + num_layers]) for start in starts] for layers in self._chain.payload]


class TwoNodes:
    """A cluster of two nodes on this machine, and of more that are added; it ends with `close`."""

    def __init__(self, store_bytes: int) -> None:
        self._node = {"object_store_memory": store_bytes, "num_cpus": 1, "node_ip_address": "127.0.0.1"}
        with single_node():  # on the loopback address; nothing beyond this machine joins
            self._cluster = Cluster(
                initialize_head=True, head_node_args=self._node | {"include_dashboard": False}, shutdown_at_exit=False
            )
            self.nodes = {"host": self._cluster.head_node.node_id}
            self.add("peer")
            ray.init(self._cluster.address, logging_level="error", log_to_driver=False, _node_ip_address="127.0.0.1")
        assert ray.get_runtime_context().get_node_id() == self.nodes["host"]

    def add(self, name: str) -> None:
        if name not in self.nodes:
            with single_node():
                self.nodes[name] = self._cluster.add_node(**self._node).node_id

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
        ids = chain.token_ids.reshape(-1).tolist()
        self._query = ChainQuery.of(chain.lineage, chain.fingerprint.digest, ids, chain.shape.num_tokens)
        self.engine = EngineReads(self.store, chain, self._query)
        self._ends.callback(self.engine.close)
        self._raw: list[list[Any]] = []  # references to what `put_raw` put
        cluster.add("peer 2")
        self._authors: dict[str, Any] = {}
        for name in NODES:
            on_node = NodeAffinitySchedulingStrategy(cluster.nodes[name], soft=False)
            author = ray.remote(num_cpus=0)(Author).options(scheduling_strategy=on_node)
            self._authors[name] = author.remote(chain.shape, seed)
            self._ends.callback(ray.kill, self._authors[name])

    def close(self) -> None:
        self._ends.close()

    def engine_arm(self, edge: str, name: str, base: str, nodes: Sequence[str]) -> Arm:
        """What an engine reads of chunks that these nodes' authors have put now."""
        return Arm(edge, name, self.engine.read, base, lambda: self.put_fresh(nodes), self.clear)

    def put_fresh(self, nodes: Sequence[str]) -> None:
        """Have these nodes' authors put a part of the chain each, one behind the other."""
        self.clear()
        num_each = self._chain.shape.num_chunks // len(nodes)
        for number, node in enumerate(nodes):
            chunks = range(number * num_each, (number + 1) * num_each)
            ray.get(self._authors[node].put.remote(chunks), timeout=_TIMEOUT_S)
        until_s = time.monotonic() + _FOUND_S
        while len(self.store.locate(self._query, _LOOK_S)) < len(self._query.keys):
            if time.monotonic() > until_s:
                raise MnemeError(f"chunks were not found within {_FOUND_S:g} s")
            time.sleep(_POLL_S)

    def put_raw(self, num_layers: int) -> None:
        """Have the other node's author put plain objects of so many layers."""
        self.clear()
        self._raw = ray.get(self._authors["peer"].put_raw.remote(num_layers), timeout=_TIMEOUT_S)

    def get_raw(self, index: int) -> None:
        """A chunk's plain objects; all of the chain's are on their way."""
        if index == 0:
            ray.wait([ref for refs in self._raw for ref in refs], timeout=0, fetch_local=True)
        ray.get(self._raw[index], timeout=_TIMEOUT_S)

    def clear(self) -> None:
        """No node has any of the chunks."""
        self.engine.end()
        self._raw = []
        self.store.admin.delete(self._query, spares_longer=False)

    def put(self, index: int) -> None:
        """As an engine saves: what is under way is waited for where that is too much, and after the last."""
        _put(self.store, self._chain, index)
        if index == len(self._chain.chunks) - 1:
            _flush(self.store)


class EngineReads:
    """Reads a chain as an engine does that computes nothing beside: located, brought, and taken layer by layer."""

    def __init__(self, store: RayChunkStore, chain: Chain, query: ChainQuery) -> None:
        shape = chain.shape
        self._query, self._num_chunks, self._num_layers = query, shape.num_chunks, shape.num_layers
        terms = (0.0, 1.0, 0.0)  # of a row: a question may take its time
        costs = CostModel(Calibration(prefill=terms, decode=terms, step_rows=1, kv_bytes_per_token=1))
        controller = LoadController(costs, num_layers=shape.num_layers, loads_all=True)
        self._loads = Loads(store, controller, costs, clock=time.monotonic)
        self._is_found = threading.Event()
        self._loads.on_answer = self._is_found.set
        self._load: Load | None = None

    def read(self, index: int) -> None:
        """As many bytes as a chunk has, in the order of an engine; the first time the chain is located."""
        if index == 0:
            self._is_found.clear()
            self._load = self._loads.begin(self._query, 0)
            self._is_found.wait(_TIMEOUT_S)
            if len(self._load.spans) < self._num_chunks:
                raise MnemeError(f"of {self._num_chunks} chunks {len(self._load.spans)} were found")
            self._load.begin(self._num_chunks)
        assert self._load is not None
        for place in range(index * self._num_layers, (index + 1) * self._num_layers):
            layer, chunk = divmod(place, self._num_chunks)
            found = self._load.read(chunk, layer)
            if isinstance(found, Miss):
                raise MnemeError(f"chunk {chunk}, layer {layer}: {found.value}")

    def end(self) -> None:
        if self._load is not None:
            self._load.close()
            self._load = None

    def close(self) -> None:
        self.end()
        self._loads.close()


def read_arms(tier: ClusterTier, base: Arm) -> list[Arm]:
    """What an engine reads of its node, beside a copy with checksums of the same bytes."""
    return [base, tier.engine_arm("host get", "engine", base.name, ["host"])]


def peer_arms(tier: ClusterTier, shape: Shape) -> list[Arm]:
    """What an engine reads from one peer, or two, beside what Ray transfers of the same bytes between two nodes."""
    num_layers = layers_per_object(shape.layer_bytes)
    return [
        Arm("peer get", "raw Ray", tier.get_raw, None, lambda: tier.put_raw(num_layers), tier.clear),
        tier.engine_arm("peer get", "engine", "raw Ray", ["peer"]),
        tier.engine_arm("peer get", "engine, two peers", "raw Ray", ["peer", "peer 2"]),
    ]


def put_arms(tier: ClusterTier, base: Arm) -> list[Arm]:
    return [base, Arm("host put", "store", tier.put, base.name, tier.clear, tier.clear)]


def put_settled(store: RayChunkStore, chain: Chain, index: int) -> None:
    """Put a chunk, and wait until it can be found."""
    _put(store, chain, index)
    _flush(store)


def _put(store: RayChunkStore, chain: Chain, index: int) -> None:
    if not store.put(chain.chunks[index], chain.lineage):
        raise MnemeError(f"chunk {index} was not put")


def _flush(store: RayChunkStore) -> None:
    if not store.flush(_FLUSH_S):
        raise MnemeError(f"chunks were not kept within {_FLUSH_S:g} s")
