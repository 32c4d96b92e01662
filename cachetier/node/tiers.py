"""What the parts of a node's cache share: its tiers under one lock, pins, and what came and went for a directory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.disk import DiskEntry, DiskTier
from mneme.cachetier.node.host_tier import HostEntry, HostTier
from mneme.cachetier.node.index import BLOCK_BYTES
from mneme.cachetier.node.memory import ChunkMemory, Held
from mneme.cachetier.node.waiting_requests import WaitingRequests
from mneme.cachetier.policy.eviction import make_policy
from mneme.cachetier.store import TierName


class Change(NamedTuple):
    """A chunk that a tier has now, or has no more."""

    key: bytes
    tier: TierName
    num_bytes: int
    is_added: bool


OnChange = Callable[[list[Change]], None]


class ChangeLog:
    """Keeps changes in their order.

    `on_change` gets batches, one at a time, from whichever thread comes by; it must not raise.
    """

    def __init__(self, on_change: OnChange | None) -> None:
        self._on_change = on_change
        self._changes: deque[Change] = deque()
        self._announcing = threading.Lock()

    def note(self, change: Change) -> None:
        """Cheap; under the lock of the tier, so that changes of a key are in order."""
        if self._on_change is not None:
            self._changes.append(change)

    def announce(self) -> None:
        """Outside of all locks. Who comes while another thread is at it leaves its changes to that one."""
        while self._on_change is not None and self._changes and self._announcing.acquire(blocking=False):
            try:
                self._on_change([self._changes.popleft() for _ in range(len(self._changes))])
            finally:
                self._announcing.release()


class TierPins:
    """Counts what of one tier is pinned: at most `max_bytes` of it."""

    def __init__(self, max_bytes: int, hold: Callable[[bytes], None], let_go: Callable[[bytes], None]) -> None:
        self._max_bytes, self._hold, self._let_go = max_bytes, hold, let_go
        self._bytes_by_key: dict[bytes, int] = {}
        self.num_bytes = 0

    def pin(self, key: bytes, num_bytes: int) -> bool:
        """Whether it is pinned now."""
        if key in self._bytes_by_key:
            return True
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self._bytes_by_key[key] = num_bytes
        self.num_bytes += num_bytes
        self._hold(key)
        return True

    def unpin(self, key: bytes) -> None:
        num_bytes = self._bytes_by_key.pop(key, None)
        if num_bytes is not None:
            self.num_bytes -= num_bytes
            self._let_go(key)


class NodePins:
    """Keeps chunks for a while, by key, in each tier that has them. No locks: the node cache's."""

    def __init__(self, tiers: Collection[TierPins], clock: Callable[[], float]) -> None:
        self._tiers, self._clock = tiers, clock
        self._until_s: dict[bytes, float] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._until_s

    def __len__(self) -> int:
        return len(self._until_s)

    def keep(self, key: bytes, ttl_s: float) -> None:
        """A key that a tier has pinned; a later end replaces an earlier one."""
        self._until_s[key] = max(self._until_s.get(key, 0.0), self._clock() + ttl_s)

    def unpin(self, keys: Iterable[bytes]) -> int:
        """How many were pinned."""
        found = [key for key in keys if self._until_s.pop(key, None) is not None]
        for key in found:
            for tier in self._tiers:
                tier.unpin(key)
        return len(found)

    def inherit(self, keys: Iterable[bytes], heir: bytes) -> None:
        """A tail that was pinned has grown."""
        until_s = [self._until_s[key] for key in keys if key in self._until_s]
        self.unpin(keys)
        if until_s:
            self._until_s[heir] = max(until_s)

    def expire(self) -> int:
        now_s = self._clock()
        return self.unpin([key for key, until_s in self._until_s.items() if until_s < now_s])


class NodeTiers:
    """One lock is over all that is known of both tiers, and over the pins; it is never held during I/O."""

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
        self.lock = threading.Lock() if disk is None else disk.lock
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
            self.disk_pins = TierPins(disk.stats().capacity_bytes // 2, disk.index.hold, disk.index.let_go)
            disk.on_change = self._disk_changed
            disk.policy.set_queue(self.waiting.disk_queue)
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
        """Under the lock: if it is to be pinned and is there."""
        if self.disk is None or self.disk_pins is None or key not in self.pins:
            return False
        entry = self.disk.index.get(key)
        return entry is not None and self.disk_pins.pin(key, entry.num_blocks * BLOCK_BYTES)

    def settle(self) -> None:
        """Outside of the lock: drop the bytes of what is gone, tell of what has changed."""
        with self.lock:
            gone = self.host.claim_gone()
        for held in gone:
            self.memory.drop(held)
        self.changes.announce()

    def _host_changed(self, entry: HostEntry, is_added: bool) -> None:
        self.changes.note(Change(entry.key, "host", entry.num_bytes, is_added))

    def _disk_changed(self, entry: DiskEntry, is_added: bool) -> None:
        self.changes.note(Change(entry.key, "disk", entry.num_bytes, is_added))
