"""Ray's object store: an actor of this node and one of another own the chunks, this process reads them.

A chunk is one object of bytes. Whoever reads gets a view of the store's memory, read-only, and copies what it uses; the
checksum is of the copy. Every round reads objects that were put afresh, so that none was fetched or looked at before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tier_io.chunks import Chain, copy_checked
from tier_io.rounds import Arm

from mneme.cachetier.chunk import U8Array
from mneme.cluster.ray_private import single_node

_TIMEOUT_S = 60.0


@ray.remote(num_cpus=0)
class Owner:
    """Keeps references; an object lives as long as the process that put it."""

    def __init__(self, shape: tuple[int, int, int], seed: int) -> None:
        self._payload = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self._kept: list[ray.ObjectRef] = []

    def fresh(self) -> list[ray.ObjectRef]:
        """All chunks as new objects; the old ones go with their last reference."""
        self._kept = []
        self._kept = [ray.put(payload) for payload in self._payload]
        return self._kept

    def take_over(self, kept: list[ray.ObjectRef]) -> None:
        """A reader's object becomes ours: put again."""
        self._kept.append(ray.put(ray.get(kept[0], timeout=_TIMEOUT_S)))

    def drop(self) -> None:
        self._kept = []


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

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


class ObjectStore:
    """This process as an engine that reads from its node's owner and from another's, and puts for the former."""

    def __init__(self, cluster: TwoNodes, chain: Chain, seed: int) -> None:
        self._chain, self._buffer = chain, np.zeros_like(chain.payload[0])
        self._refs: list[ray.ObjectRef] = []
        self._owners: dict[str, Any] = {}
        for name, node_id in cluster.nodes.items():
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._owners[name] = Owner.options(scheduling_strategy=on_node).remote(chain.payload.shape, seed)

    def close(self) -> None:
        self._refs = []
        for owner in self._owners.values():
            ray.kill(owner)

    def fresh(self, name: str) -> None:
        """New objects of one owner; those of before are let go."""
        self.drop()
        self._refs = self._asked(name, "fresh")

    def drop(self) -> None:
        self._refs = []
        for name in self._owners:
            self._asked(name, "drop")

    def get(self, index: int) -> None:
        payload: U8Array = ray.get(self._refs[index], timeout=_TIMEOUT_S)
        copy_checked(payload, self._buffer, self._chain.chunks[index].header.checksums)

    def put(self, index: int) -> None:
        self._refs.append(ray.put(self._chain.payload[index]))

    def hand_over(self, index: int) -> None:
        """Put, and wait until the node's owner has put it again."""
        self._asked("host", "take_over", [ray.put(self._chain.payload[index])])

    def _asked(self, name: str, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._owners[name], method).remote(*args), timeout=_TIMEOUT_S)


def read_arms(store: ObjectStore, base: list[Arm]) -> list[Arm]:
    return [
        *base,
        Arm("host get", "object store", store.get, "copy+checksum", lambda: store.fresh("host"), store.drop),
        Arm("peer get", "other node", store.get, "copy+checksum", lambda: store.fresh("peer"), store.drop),
    ]


def put_arms(store: ObjectStore, base: list[Arm]) -> list[Arm]:
    return [
        *base,
        Arm("host put", "object store", store.put, "copy", store.drop, store.drop),
        Arm("host put", "object store, re-put", store.hand_over, "copy", store.drop, store.drop),
    ]
