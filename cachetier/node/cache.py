"""The chunks of one node: host memory over disk, for all engines of the node and for other nodes.

Thread-safe; calls are short, but that `read`, `delete` and a `locate` of chunks on the disk wait for files. The lock is
never held while bytes are read, written or taken. A chunk is visible once it is in the host tier; it is written to the
disk behind that, and stays in memory until it is there. Nothing here raises for a fault of a tier: it is a miss, a
refusal, a counter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.names import HostPut, Miss, TierName
from mneme.cachetier.node.disk import DiskTier
from mneme.cachetier.node.index import BLOCK_BYTES, Change
from mneme.cachetier.node.memory import FREE_SHARE, ChunkMemory
from mneme.cachetier.node.node_tiers import NodeTiers
from mneme.cachetier.node.prefetch import Promoter
from mneme.cachetier.node.search import ChainSearch, Located
from mneme.cachetier.node.writer import ROOM_WAIT_S, TAIL_DELAY_S, ChunkWriter
from mneme.cachetier.store import ChainQuery
from mneme.primitives import Worker

_EXPIRE_EVERY_S = 1.0
# A request that begins at once reads what it needs by itself: to bring that up too would take half of the disk from it.
_PREFETCH_AFTER_S = 0.05
_YIELD_S = 0.005
_MAX_YIELDS = 20  # before a chunk: a tenth of a second, or a node that always reads would bring nothing up
_CLOSE_TIMEOUT_S = 10.0


class NodeCache:
    """`host_bytes` is the budget of the host tier; the disk tier is the cache's, `close` closes it."""

    def __init__(
        self,
        config: CacheConfig,
        memory: ChunkMemory,
        host_bytes: int,
        disk: DiskTier | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[Change], None] | None = None,
        tail_delay_s: float = TAIL_DELAY_S,
        has_threads: bool = True,
        free_share: float = FREE_SHARE,
    ) -> None:
        """`clock` must not jump. Without threads `step` and `writer.step` are the caller's to call.

        `on_change` hears of each change in order, under the lock: it takes no time, calls nothing here, raises nothing.
        """
        self._config, self._clock = config, clock
        self._tiers = tiers = NodeTiers(config, memory, host_bytes, disk, clock, on_change, free_share)
        self._host, self._disk, self._lock = tiers.host, disk, tiers.lock
        self._search = ChainSearch(tiers.host, disk)
        self._promoter = Promoter(tiers)
        self._expired_s, self._num_yields = clock(), 0
        self._thread = Worker(
            "mneme-node-cache", self.step, lambda: self._count("thread_error"), wake_delay_s=_PREFETCH_AFTER_S
        )
        self._writer = ChunkWriter(
            tiers,
            host_bytes,
            lambda: self._promoter.is_loading,
            tail_delay_s,
            room_wait_s=ROOM_WAIT_S if has_threads else 0.0,
        )
        self.writer = self._writer.queue
        if has_threads:
            self._thread.start()
            if self.writer is not None:
                self.writer.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._tiers.index

    def locate(self, query: ChainQuery, timeout_s: float = math.inf) -> list[Located]:
        """Find the longest run of chunks from `query.first` on; the last may be short or usable in part.

        What cannot be looked at in time counts as missing: headers of files that were not read lately are read. A
        request that waits is remembered until `forget`: what it will use is prefetched and kept.
        """
        chain = self._used(self._search.locate(query, self._clock() + timeout_s))
        if query.request_id and chain:
            self._tiers.waiting.put(query.request_id, chain)
            self._thread.wake()
        self._tiers.drop_gone()
        return chain

    def forget(self, request_ids: Collection[str]) -> None:
        """These requests wait no longer, which may make room for what others want."""
        self._tiers.waiting.forget(request_ids)
        self._thread.wake()

    def read(self, keys: Sequence[bytes]) -> list[Located | None]:
        """Read chunks for another node: their bytes are in memory, loaded from the disk where needed."""
        with self._tiers.index.holding(*keys):  # none of them goes for another
            return [self._promoter.fetch(key) for key in keys]

    def loading(self) -> AbstractContextManager[None]:
        """While this lasts somebody reads, and saving waits."""
        return self._promoter.loading()

    def others_load(self) -> None:
        """Another process reads files of this node: saving waits for a moment."""
        self._promoter.others_load()

    def missed(self, key: bytes, tier: TierName, miss: Miss) -> None:
        """Take note of a fault that a reader of a located chunk found."""
        if tier == "disk" and self._disk is not None:
            self._disk.missed(key, miss)
        elif tier == "host":
            with self._lock:
                self._host.missed(key, miss)
        self._tiers.drop_gone()

    def put(self, header: ChunkHeader, payload: object, lineage: Lineage | None = None) -> HostPut:
        """Keep a chunk, whose bytes the memory takes. It can be located when this returns `TAKEN`.

        By its lineage those are found that it supersedes, also among many that begin behind the same parent.
        """
        return self._writer.put(header, payload, lineage)

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete chunks; returns how many were there. Readers of one read on."""
        unique = dict.fromkeys(keys)
        found = self._delete_in_host(unique)  # first, or the writer would take what it is at for wanted
        self._writer.cancel(unique)
        if self._disk is not None:
            found.update(key for key in unique if key in self._disk)
            self._disk.delete(unique)
            self._delete_in_host(unique)  # what was brought up meanwhile
        self._tiers.drop_gone()
        return len(found)

    def pin(self, keys: Iterable[bytes], ttl_s: float) -> int:
        """Pin chunks for a time in each tier that has them, at most half of it; returns how many are pinned.

        What they descend from stays as well, pinned or not.
        """
        with self._lock:
            return sum([self._tiers.index.pin(key, ttl_s) for key in keys])

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Returns how many were pinned."""
        with self._lock:
            return self._tiers.index.unpin(keys)

    def expire(self) -> int:
        """End pins whose time is over and remove what was not used for `ttl_s`; returns how many chunks went."""
        with self._lock:
            self._tiers.index.expire_pins()
            num_expired = self._host.expire(self._config.ttl_s)
        num_expired += 0 if self._disk is None else self._disk.expire()
        self._tiers.drop_gone()
        return num_expired

    def snapshot(self) -> list[Change]:
        """List all chunks of all tiers for a directory that lost its memory; may contain changes announced later."""
        with self._lock:
            return [
                Change(entry.key, tier.name, tier.num_bytes(entry), True)
                for tier in self._tiers.index.tiers
                for entry in tier
            ]

    def search(self, query: ChainQuery, deadline_s: float) -> list[Located]:
        """Find what `locate` does, without noting a use or a request that waits.

        `deadline_s` is of the node's clock.
        """
        return self._search.locate(query, deadline_s)

    def places(self, key: bytes) -> dict[TierName, int]:
        """Bytes by the tier that has the chunk."""
        with self._lock:
            tiers = self._tiers.index.tiers
            return {tier.name: tier.num_bytes(entry) for tier in tiers if (entry := tier.get(key)) is not None}

    def children(self, parent: bytes) -> frozenset[bytes]:
        """Keys of the chunks behind a chunk or a lineage's root, in all tiers."""
        with self._lock:
            return self._tiers.index.children(parent)

    def header(self, key: bytes) -> ChunkHeader | None:
        """A chunk's header, read from its file if need be."""
        with self._lock:
            entry = self._tiers.index.get(key)
            if entry is None or entry.header is not None or self._disk is None:
                return None if entry is None else entry.header
        header = self._disk.header(key)
        return None if isinstance(header, Miss) else header

    def num_left(self, tenant: bytes) -> int:
        """Files of a tenant's chunks that were deleted and could not be removed yet."""
        return 0 if self._disk is None else self._disk.num_left(tenant)

    def keys_of(self, tenant: bytes) -> list[bytes]:
        """Keys of all chunks of a tenant, each once; looks at every chunk."""
        with self._lock:
            keys = self._host.keys_of(tenant)
            if self._disk is not None:
                keys += [entry.key for entry in self._disk if entry.tenant == tenant]
        return list(dict.fromkeys(keys))

    def stats(self) -> dict[str, Any]:
        """Sizes of this moment, and counters since the start.

        `host` and `disk` (None without one): chunks, bytes, capacity_bytes and counters; `writer`: the queue of writes;
        `owners`: bytes of each tenant by its id in hex; `waiting`: requests; `pins`: keys, bytes. Write amplification
        is disk.written_bytes / disk.(written_bytes - superseded_bytes); of the bytes given to `put`, host.put_bytes,
        those of tails that were replaced in time are writer.cancelled_bytes.
        """
        index, tenants = self._tiers.index, dict[bytes, dict[str, int]]()
        with self._lock:
            tiers = {tier.name: tier.stats() for tier in index.tiers}
            pins = {"keys": len(index.pinned_until_s)}
            for tier in index.tiers:
                pins[f"{tier.name}_bytes"] = tier.pinned_blocks * BLOCK_BYTES
                for tenant, num_blocks in tier.blocks_by_tenant.items():
                    tenants.setdefault(tenant, {"host": 0, "disk": 0})[tier.name] = num_blocks * BLOCK_BYTES
        return {
            "host": tiers["host"],
            "disk": tiers.get("disk"),
            "writer": None if self.writer is None else self.writer.stats(),
            "owners": {tenant.hex(): sizes for tenant, sizes in tenants.items()},
            "waiting": len(self._tiers.waiting),
            "pins": pins,
        }

    def flush(self, timeout_s: float) -> bool:
        """Write all that waits to be; False if that took too long."""
        return self.writer is None or self.writer.flush(timeout_s)

    def close(self, *, flush: bool = True, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Write what waits, if wanted, and release the folder, within this time; call nothing afterwards."""
        self._thread.close(timeout_s / 4)
        if self.writer is not None:
            if flush:
                self.writer.flush(timeout_s / 2)
            self.writer.close(timeout_s / 4)
        if self._disk is not None:
            self._disk.close()
        self._tiers.drop_gone()

    def step(self) -> float | None:
        """Do one thing on the cache's thread: prefetch a chunk, but behind who reads; each second what is due."""
        if self._clock() - self._expired_s >= _EXPIRE_EVERY_S:
            self._expired_s = self._clock()
            self.expire()
            if self._disk is not None:
                self._disk.sweep()
            self._writer.write_again()
        is_yielding = self._promoter.is_loading and self._num_yields < _MAX_YIELDS
        self._num_yields = self._num_yields + 1 if is_yielding else 0
        if is_yielding:
            return _YIELD_S
        return 0.0 if self._promoter.prefetch_next() else _EXPIRE_EVERY_S

    def _used(self, found: Sequence[Located]) -> list[Located]:
        """Note a use of these, up to the first that went meanwhile, and add the paths of files."""
        chain: list[Located] = []
        with self._lock:
            for each in found:
                entry = (self._host if each.tier == "host" else self._tiers.index).get(each.header.key)
                if each.tier == "disk":
                    assert self._disk is not None
                    if entry is None or entry.key not in self._disk:
                        break
                    each = each._replace(path=self._disk.path(entry))
                if entry is not None:
                    self._tiers.index.use(entry)
                chain.append(each)
            num_in_host = sum(each.tier == "host" for each in chain)
            self._host.counters["hit"] += num_in_host
            self._host.counters["located_on_disk"] += len(chain) - num_in_host
        return chain

    def _delete_in_host(self, keys: Collection[bytes]) -> set[bytes]:
        """Delete chunks in memory or on their way there; returns which."""
        with self._lock:
            self._tiers.index.unpin(keys)
            return {key for key in keys if self._host.delete(key)}

    def _count(self, name: str) -> None:
        with self._lock:
            self._host.counters[name] += 1
