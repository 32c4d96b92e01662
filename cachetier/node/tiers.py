"""A node's host tier, its bytes, its disk tier, and the lock over the first: what the parts of a node cache share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.change_log import Change, ChangeLog, OnChange
from mneme.cachetier.node.disk_room import DiskEntry
from mneme.cachetier.node.disk_tier import DiskTier
from mneme.cachetier.node.host_tier import HostEntry, HostTier
from mneme.cachetier.node.index import BLOCK_BYTES, blocks_of
from mneme.cachetier.node.memory import ChunkMemory, Held
from mneme.cachetier.node.pins import NodePins, TierPins
from mneme.cachetier.node.waiting_requests import WaitingRequests
from mneme.cachetier.policy.eviction import make_policy


class NodeTiers:
    """The lock is over the host tier and the pins; the disk tier's own may be taken under it, never the reverse."""

    def __init__(
        self,
        config: CacheConfig,
        memory: ChunkMemory,
        host_bytes: int,
        disk: DiskTier | None,
        clock: Callable[[], float],
        on_change: OnChange | None,
    ) -> None:
        self.clock, self.memory, self.disk = clock, memory, disk
        self.lock = threading.Lock()
        self.changes = ChangeLog(on_change)
        self.waiting = WaitingRequests(clock)
        policy = make_policy(config.eviction, clock, host_bytes // BLOCK_BYTES)
        policy.set_queue(self.waiting.host_queue)
        self.host = HostTier(
            policy,
            host_bytes,
            free_share=config.free_share,
            tenant_bytes=config.tenant_bytes,
            on_change=self._host_changed,
        )
        self.host_pins = TierPins(host_bytes // 2, self.host.index.hold, self.host.index.let_go)
        self.disk_pins: TierPins | None = None
        if disk is not None:
            self.disk_pins = TierPins(disk.stats().capacity_bytes // 2, disk.hold, disk.let_go)
            disk.follow(self._disk_changed)
            disk.set_queue(self.waiting.disk_queue)
        tiers = [tier for tier in (self.host_pins, self.disk_pins) if tier is not None]
        self.pins = NodePins(tiers, clock)

    def arrive(
        self, header: ChunkHeader, held: Held, spared: Container[bytes] = (), lineage: Lineage | None = None
    ) -> list[bytes]:
        """Under the lock: a chunk for which there is room is there; the keys of those that it supersedes."""
        superseded = self.host.arrive(header, held, self.clock(), spared, lineage)
        if self.pins:
            self.pins.inherit(superseded, header.key)
            self.pin_in_host(header.key)
        return superseded

    @contextmanager
    def holding(self, *keys: bytes) -> Iterator[None]:
        """Outside of the lock: they do not go from memory while this lasts, whether they are there yet or not."""
        with self.lock:
            for key in keys:
                self.host.index.hold(key)
        try:
            yield
        finally:
            with self.lock:
                for key in keys:
                    self.host.index.let_go(key)

    def pin_in_host(self, key: bytes) -> bool:
        """Under the lock: if it is to be pinned and is there."""
        entry = self.host.index.get(key)
        return entry is not None and key in self.pins and self.host_pins.pin(key, entry.num_blocks * BLOCK_BYTES)

    def pin_on_disk(self, key: bytes) -> bool:
        """Under the lock, likewise."""
        if self.disk is None or self.disk_pins is None or key not in self.pins:
            return False
        num_bytes = self.disk.num_bytes(key)
        return num_bytes is not None and self.disk_pins.pin(key, blocks_of(num_bytes) * BLOCK_BYTES)

    def settle(self) -> None:
        """Outside of the lock: let go of the bytes of what is gone, tell of what has changed."""
        with self.lock:
            gone = self.host.claim_gone()
        for held in gone:
            self.memory.drop(held)
        self.changes.announce()

    def _host_changed(self, entry: HostEntry, is_added: bool) -> None:
        self.changes.note(Change(entry.key, "host", entry.num_bytes, is_added))

    def _disk_changed(self, entry: DiskEntry, is_added: bool) -> None:
        self.changes.note(Change(entry.key, "disk", entry.num_bytes, is_added))
