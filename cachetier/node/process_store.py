"""The cache tier inside one process: what `mneme.LLM` uses, without a cluster."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mneme.cachetier.chunk.header import Chunk, U8Array
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.admin import NodeAdmin
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.disk import DiskTier
from mneme.cachetier.node.folder import make_root
from mneme.cachetier.node.index import BLOCK_BYTES
from mneme.cachetier.node.memory import ProcessMemory
from mneme.cachetier.node.saving import HostPut
from mneme.cachetier.node.search import Located
from mneme.cachetier.node.sources import DiskSource, HostSource
from mneme.cachetier.policy.eviction import make_policy
from mneme.cachetier.store import ChainQuery, ChunkSource

DEFAULT_HOST_BYTES = 1 << 30  # where `cache.host_bytes` is not given


def make_disk_tier(
    config: CacheConfig,
    *,
    files: FileOperations | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> DiskTier | None:
    """A node's disk tier, if there is to be one; its folder is made. Raises `ConfigError` if that cannot be used."""
    if config.disk is None:
        return None
    make_root(config.disk.folder)
    disk = config.disk if config.disk.ttl_s is not None else replace(config.disk, ttl_s=config.ttl_s)
    policy = make_policy(config.eviction, clock, disk.capacity_bytes // BLOCK_BYTES)
    return DiskTier(disk, policy, files=files, clock=clock, tenant_bytes=config.tenant_bytes)


class ProcessChunkStore:
    """A `ChunkStore` over a node cache of its own. Raises `ConfigError` if the disk's folder cannot be used."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        memory: ProcessMemory | None = None,
        files: FileOperations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory or ProcessMemory()
        self._files = files or FileOperations()
        host_bytes = DEFAULT_HOST_BYTES if config.host_bytes is None else config.host_bytes
        disk = make_disk_tier(config, files=self._files, clock=clock)
        self.node = NodeCache(config, self._memory, host_bytes, disk, clock=clock)
        self.admin = NodeAdmin(self.node, "local", clock)
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()

    def locate(self, query: ChainQuery, timeout_s: float) -> list[ChunkSource]:
        """See `ChunkStore.locate`."""
        sources = [self._source(each) for each in self.node.locate(query, timeout_s)]
        self._count("located", len(sources))
        return sources

    def forget(self, request_ids: Collection[str]) -> None:
        self.node.forget(request_ids)

    def known(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """No guess here: the node is in this process."""
        return frozenset(key for key in keys if key in self.node)

    def put(self, chunk: Chunk, lineage: Lineage) -> bool:
        """See `ChunkStore.put`; never waits for the disk."""
        outcome = self.node.put(chunk.header, chunk.layers, lineage)
        self._count(f"put_{outcome.value}")
        return outcome is not HostPut.REFUSED

    def stats(self) -> dict[str, int]:
        """See `ChunkStore.stats`; what the node counts is in `node.stats()`."""
        with self._lock:
            return dict(self._counters)

    def settle(self, timeout_s: float) -> bool:
        """See `ChunkStore.settle`."""
        return True

    def close(self) -> None:
        self.node.close()

    def _source(self, located: Located) -> ChunkSource:
        header, tier = located.header, located.tier

        def on_miss(miss: Miss) -> None:
            self._count(f"{tier}_miss_{miss.value}")
            self.node.missed(header.key, tier, miss)

        if located.path is not None:
            return DiskSource(
                header, located.num_usable, located.path, on_miss, files=self._files, loading=self.node.loading
            )

        def layer(number: int) -> U8Array | Miss:
            layers = self._memory.layers(located.held)
            return layers if isinstance(layers, Miss) else layers[number]

        return HostSource(header, located.num_usable, layer, on_miss)

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counters[name] += count
