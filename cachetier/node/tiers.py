"""What the parts of a node's cache share: its tiers under one lock, pins, the requests that wait, and
what came and went for a directory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.node.disk import DiskEntry, DiskTier
from mneme.cachetier.node.index import BLOCK_BYTES
from mneme.cachetier.node.memory import ChunkMemory, Held, HostEntry, HostTier, chunk_bytes
from mneme.cachetier.node.search import Located
from mneme.cachetier.policy.eviction import make_policy
from mneme.cachetier.store import TierName
from mneme.primitives import Bounded


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


_MAX_REQUESTS = 1024
_MAX_AGE_S = 600.0
_LATE_S = 30.0  # by which a request may come after it was forgotten


class _Request:
    """`*_leaves`: the chunks at which a tier's part of the chain ends; eviction begins there."""

    __slots__ = ("brought", "disk_leaves", "host_leaves", "num_bytes", "since_s", "wanted")

    def __init__(self, chain: Sequence[Located], since_s: float) -> None:
        self.since_s = since_s
        self.num_bytes = sum(chunk_bytes(each.header) for each in chain)
        pairs = zip(chain, [*chain[1:], None], strict=True)
        ends = [each for each, following in pairs if following is None or following.tier != each.tier]
        self.host_leaves = tuple(each.header.key for each in ends if each.tier == "host")
        self.disk_leaves = tuple(each.header.key for each in ends if each.tier == "disk" or each is chain[-1])
        self.wanted = deque(each.header.key for each in chain if each.tier == "disk")
        self.brought: bytes | None = None  # the last that came up from the disk


class WaitingRequests:
    """Has a lock of its own, under which nothing else is called: policies ask from under those of the tiers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}  # in the order of arrival
        self._forgotten = Bounded[str, float](_MAX_REQUESTS)  # since when: those that did not wait, or not yet
        self._host_queue: tuple[bytes, ...] = ()
        self._disk_queue: tuple[bytes, ...] = ()
        self._exempt: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        return len(self._requests)

    def host_queue(self) -> tuple[bytes, ...]:
        """Where the host's parts of the chains end, first come, first served; for a policy."""
        return self._host_queue

    def disk_queue(self) -> tuple[bytes, ...]:
        return self._disk_queue

    def exempt(self) -> frozenset[bytes]:
        """All of `host_queue`."""
        return self._exempt

    def put(self, request_id: str, chain: Sequence[Located]) -> None:
        """A request waits for these, unless it was forgotten meanwhile; if it did before, it keeps its place."""
        now_s = self._clock()
        with self._lock:
            if now_s - self._forgotten.pop(request_id, float("-inf")) <= _LATE_S:
                return
            earlier = self._requests.get(request_id)
            self._requests[request_id] = _Request(chain, now_s if earlier is None else earlier.since_s)
            self._drop_old(now_s)
            self._renew()

    def forget(self, request_ids: Collection[str]) -> None:
        now_s = self._clock()
        with self._lock:
            found = [each for each in request_ids if self._requests.pop(each, None) is not None]
            self._forgotten.update(dict.fromkeys(set(request_ids).difference(found), now_s))
            if found:
                self._renew()

    def next_wanted(self, capacity_bytes: int) -> tuple[str, bytes] | None:
        """The next chunk to bring up, and who wants it: `brought` or `give_up` follows, or it is the next again.

        Of the requests within the window: as many as fit the host tier, L_pw = C_mem / S_kv (AttentionStore 3.3.1).
        """
        with self._lock:
            if self._drop_old(self._clock()):
                self._renew()
            num_bytes = sum(request.num_bytes for request in self._requests.values())
            window = capacity_bytes * len(self._requests) // max(1, num_bytes)
            for request_id, request in islice(self._requests.items(), window):
                if request.wanted:
                    return request_id, request.wanted[0]
        return None

    def brought(self, request_id: str, key: bytes) -> None:
        """It is in the host tier now."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                request.brought = key
                if request.wanted and request.wanted[0] == key:
                    request.wanted.popleft()
                self._renew()

    def give_up(self, request_id: str) -> None:
        """The chunk cannot be had, so what is behind it is of no use."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                request.wanted.clear()

    def _drop_old(self, now_s: float) -> bool:
        num_before = len(self._requests)
        while self._requests:
            request_id, first = next(iter(self._requests.items()))
            if len(self._requests) <= _MAX_REQUESTS and now_s - first.since_s <= _MAX_AGE_S:
                break
            del self._requests[request_id]
        return len(self._requests) < num_before

    def _renew(self) -> None:
        host: dict[bytes, None] = {}
        disk: dict[bytes, None] = {}
        for request in self._requests.values():
            host.update(dict.fromkeys(request.host_leaves))
            if request.brought is not None:
                host[request.brought] = None
            disk.update(dict.fromkeys(request.disk_leaves))
        self._host_queue, self._disk_queue, self._exempt = tuple(host), tuple(disk), frozenset(host)
