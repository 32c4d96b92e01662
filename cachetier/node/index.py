"""Which chunks a node has, in which of its tiers, in the order of their last use, and which of a tier goes next.

Only a chunk that no other chunk of its tier descends from is a candidate: what is left of a chain can be used from its
root on. What is pinned, or held because it is being copied, is no candidate either. There is no I/O in here, and one
lock over all of it, which callers take.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import NamedTuple

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage, LineageKind
from mneme.cachetier.names import TierName
from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.primitives import Bounded

BLOCK_BYTES = 4096  # a file takes whole blocks of the file system
MODEL_BYTES = 8  # of the fingerprint, in an entry and in a file's name
_MAX_PAST_KEYS = 1 << 17  # some 20 MB
_PAST_PER_CHUNK, _MIN_PAST_KEYS = 4, 1024  # whatever went longer ago is new when it comes again
_FEW_SIBLINGS = 16  # that are compared one by one


class Entry:
    """A chunk that a node has, in one tier or in both."""

    __slots__ = (
        "file_bytes",  # on disk
        "has_returned",  # it was used, or gone and here again, since it came
        "header",  # None: it is on the disk alone
        "held",  # what the memory made of its bytes; None: likewise
        "key",
        "kind",
        "last_used_s",
        "memory_bytes",  # in memory
        "model",  # the fingerprint's first bytes
        "num_tokens",
        "parent",
        "tenant",
    )

    def __init__(
        self, key: bytes, parent: bytes, tenant: bytes, model: bytes, kind: LineageKind, num_tokens: int, used_s: float
    ) -> None:
        self.key, self.parent, self.tenant, self.model, self.kind = key, parent, tenant, model, kind
        self.num_tokens, self.last_used_s, self.has_returned = num_tokens, used_s, False
        self.file_bytes = self.memory_bytes = 0
        self.header: ChunkHeader | None = None
        self.held: object = None


def entry_of(header: ChunkHeader, used_s: float) -> Entry:
    model = header.fingerprint[:MODEL_BYTES]
    return Entry(header.key, header.parent, header.tenant, model, header.kind, header.num_tokens, used_s)


class Change(NamedTuple):
    """A chunk that a tier has now, or has no more."""

    key: bytes
    tier: TierName
    num_bytes: int
    is_added: bool


def blocks_of(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def descendants(key: bytes, children: Callable[[bytes], Iterable[bytes]]) -> list[bytes]:
    """All chunks that descend from a key or root, each behind those that descend from it."""
    found: dict[bytes, None] = {}
    unseen = [*children(key)]
    while unseen:
        child = unseen.pop()
        if child not in found:
            found[child] = None
            unseen += children(child)
    return [*found][::-1]


class NodeIndex:
    """Holds what a node's tiers share: entries, holds, pins, and the keys of chunks that are gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` must not jump."""
        self.clock, self.lock = clock, threading.Lock()
        self.on_change: Callable[[Change], None] | None = None  # under the lock
        self.tiers: list[ChunkTier] = []  # from the top
        self.holds: Counter[bytes] = Counter()
        self.pinned_until_s: dict[bytes, float] = {}
        self._past = Bounded[bytes, bool](_MIN_PAST_KEYS)  # see `mark_gone`

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def get(self, key: bytes) -> Entry | None:
        for tier in self.tiers:
            if (entry := tier.get(key)) is not None:
                return entry
        return None

    def children(self, parent: bytes) -> frozenset[bytes]:
        """Keys of the chunks behind a chunk or a lineage's root, in all tiers."""
        return frozenset().union(*(tier.children(parent) for tier in self.tiers))

    def was_here(self, key: bytes) -> bool:
        """Return whether a chunk of this key went from all tiers, or was refused, not long ago."""
        return key in self._past

    def mark_gone(self, key: bytes) -> None:
        """A chunk is gone, or did not come: if it comes again it is a return."""
        most = max(_MIN_PAST_KEYS, _PAST_PER_CHUNK * max(map(len, self.tiers), default=0))
        self._past.max_items = min(most, _MAX_PAST_KEYS)
        self._past[key] = True

    def unmark_gone(self, key: bytes) -> bool:
        """Return whether a chunk that is here again was known as gone; it no longer is."""
        return self._past.pop(key, False)

    def use(self, entry: Entry) -> None:
        """Note a use of the chunk in every tier that has it."""
        before_s, entry.last_used_s, entry.has_returned = entry.last_used_s, self.clock(), True
        for tier in self.tiers:
            if entry.key in tier:
                tier.moved_last(entry, before_s)

    def hold(self, key: bytes) -> None:
        """Keep a chunk from eviction until `release` was called as often; the key need not be there yet."""
        self.holds[key] += 1
        for tier in self.tiers:
            tier.policy.withdraw(key)

    def release(self, key: bytes) -> None:
        self.holds[key] -= 1
        if self.holds[key] <= 0:
            del self.holds[key]
        for tier in self.tiers:
            tier.offer(key)

    @contextmanager
    def holding(self, *keys: bytes) -> Iterator[None]:
        """Takes the lock: these are not evicted while this lasts, whether they are there yet or not."""
        with self.lock:
            for key in keys:
                self.hold(key)
        try:
            yield
        finally:
            with self.lock:
                for key in keys:
                    self.release(key)

    def pin(self, key: bytes, ttl_s: float) -> bool:
        """Keep a chunk for a time in each tier that has it and has room for pins; False if none does.

        A later end replaces an earlier one.
        """
        is_pinned = [tier.pin(key) for tier in self.tiers]
        if any(is_pinned):
            self.pinned_until_s[key] = max(self.pinned_until_s.get(key, 0.0), self.clock() + ttl_s)
        return any(is_pinned)

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Returns how many were pinned."""
        found = [key for key in keys if self.pinned_until_s.pop(key, None) is not None]
        for key in found:
            for tier in self.tiers:
                tier.unpin(key)
        return len(found)

    def inherit_pin(self, keys: Iterable[bytes], heir: bytes) -> None:
        """A tail that was pinned has grown: what is pinned of these ends, and the heir's pin lasts as long."""
        until_s = [self.pinned_until_s[key] for key in keys if key in self.pinned_until_s]
        self.unpin(keys)
        if until_s:
            self.pinned_until_s[heir] = max(until_s)
            for tier in self.tiers:
                tier.pin(heir)

    def expire_pins(self) -> None:
        now_s = self.clock()
        self.unpin([key for key, until_s in self.pinned_until_s.items() if until_s < now_s])


class ChunkTier(ABC):
    """The chunks of one tier, under a bound of bytes, one of chunks, and one of bytes for each tenant.

    Bytes are counted in whole blocks, from before a chunk is taken. What it evicts goes to `_removed`.
    """

    name: TierName

    def __init__(
        self,
        index: NodeIndex,
        policy: EvictionPolicy,
        capacity_bytes: int,
        *,
        max_chunks: float = math.inf,
        tenant_bytes: int | None = None,
    ) -> None:
        self.index, self.policy = index, policy
        self.counters: Counter[str] = Counter(evicted=0)
        self.max_blocks, self._max_chunks = capacity_bytes // BLOCK_BYTES, max_chunks
        self.num_blocks = 0  # of its chunks, without what was reserved
        self.blocks_by_tenant: Counter[bytes] = Counter()
        self.pinned_blocks = 0  # half of the tier at most
        self._pinned: dict[bytes, int] = {}  # blocks
        self._tenant_blocks = None if tenant_bytes is None else tenant_bytes // BLOCK_BYTES
        self._coming: dict[bytes, tuple[bytes, int]] = {}  # tenant and blocks of what room was reserved for
        self._coming_blocks = 0  # all of these
        self._entries: dict[bytes, Entry] = {}  # oldest use first
        self._keys_by_tenant: dict[bytes, dict[bytes, None]] = {}  # likewise; only with a quota
        self._children: dict[bytes, bytes | set[bytes]] = {}  # most have one: a set for each would cost 200 bytes
        index.tiers.insert(0, self)  # a tier is made before the one above it

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        """Oldest use first."""
        return iter(self._entries.values())

    @abstractmethod
    def num_bytes(self, entry: Entry) -> int:
        """Return what the chunk takes in this tier."""

    @abstractmethod
    def _removed(self, entry: Entry) -> None:
        """Called when a chunk has left the tier; its bytes are to be dropped later, outside of the lock."""

    @property
    def taken_blocks(self) -> int:
        """Blocks of its chunks and of what room was reserved for: what the bounds are about."""
        return self.num_blocks + self._coming_blocks

    @property
    def used_blocks(self) -> int:
        return self.taken_blocks

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def holds(self, key: bytes) -> bool:
        """Return whether it is there, or about to be."""
        return key in self._entries or key in self._coming

    def children(self, parent: bytes) -> frozenset[bytes]:
        found = self._children.get(parent)
        return frozenset() if found is None else frozenset((found,) if isinstance(found, bytes) else found)

    def has_children(self, key: bytes) -> bool:
        return key in self._children

    def some_children(self, parent: bytes, most: int) -> list[bytes]:
        """Any children of a chunk, at most so many."""
        found = self._children.get(parent, ())
        return [found] if isinstance(found, bytes) else list(islice(found, most))

    def child_lengths(self, parent: bytes) -> set[int] | None:
        """Return how many tokens chunks behind a key hold; None: there are too many to look at."""
        keys = self.some_children(parent, _FEW_SIBLINGS + 1)
        return None if len(keys) > _FEW_SIBLINGS else {self._entries[key].num_tokens for key in keys}

    def beginnings(self, header: ChunkHeader, lineage: Lineage | None) -> list[Entry]:
        """Entries that may hold a beginning of a chunk: behind the same parent, and shorter.

        Of many siblings those that the lineage says; without it, a few of them.
        """
        keys = self.some_children(header.parent, _FEW_SIBLINGS + 1)
        if len(keys) > _FEW_SIBLINGS and lineage is not None:
            keys = lineage.beginnings(header.parent, header.token_ids)
        entries = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        return [entry for entry in entries if entry.num_tokens < header.num_tokens]

    def admits(self, key: bytes, num_blocks: int, most: int) -> bool:
        """Return whether a chunk to come is worth what would go for it, where `most` blocks are used at most."""
        if self.taken_blocks + num_blocks <= most:
            return True
        has_returned = key in self.index or self.index.was_here(key)
        return self.policy.admits(Candidate(key, num_blocks, self.index.clock(), has_returned))

    def reserve(
        self, key: bytes, tenant: bytes, num_blocks: int, *, most: int | None = None, spared: Container[bytes] = ()
    ) -> bool:
        """Make room for a chunk that is to come: `add` or `cancel` follows. False if there is none.

        None of the `spared` goes for it; `most` blocks are used then, if the tier has more.
        """
        most = self.max_blocks if most is None else most
        if num_blocks > most or self._max_chunks < 1 or not self.evict_of(tenant, num_blocks, spared):
            return False
        if not self.evict_to(most - num_blocks, self._max_chunks - 1, spared):
            return False
        self.cancel(key)
        self._coming[key] = tenant, num_blocks
        self._coming_blocks += num_blocks
        return True

    def cancel(self, key: bytes) -> None:
        """Free what was reserved for a chunk; called twice it does nothing."""
        if (coming := self._coming.pop(key, None)) is not None:
            self._coming_blocks -= coming[1]

    def add(self, entry: Entry) -> None:
        """A chunk whose key is not there, used last of all. A key that is pinned is pinned here too."""
        self.add_chain([entry])

    def add_chain(self, entries: Sequence[Entry]) -> None:
        """Add chunks of which each is the only one behind the one before: the last alone may be evicted."""
        for entry in entries:
            key = entry.key
            self.cancel(key)
            is_new = key not in self.index
            if self.index.unmark_gone(key) and is_new:
                entry.has_returned = True
            self._insert(entry)
            if key in self.index.pinned_until_s:
                self.pin(key)
        self.policy.withdraw(entries[0].parent)
        self.offer(entries[-1].key)
        for entry in entries:
            self._report_change(entry, is_added=True)

    def fill(self, entries: Iterable[Entry]) -> None:
        """Many at once, oldest use first, of keys that are not there: what has descendants is never ranked."""
        for entry in entries:
            self._insert(entry)
        for key in self._entries:
            self.offer(key)

    def remove(self, entry: Entry) -> None:
        key, tenant, num_blocks = entry.key, entry.tenant, blocks_of(self.num_bytes(entry))
        del self._entries[key]
        if key not in self.index:
            self.index.mark_gone(key)
        self.num_blocks -= num_blocks
        self.blocks_by_tenant[tenant] -= num_blocks
        if not self.blocks_by_tenant[tenant]:
            del self.blocks_by_tenant[tenant]
        if self._tenant_blocks is not None:
            del self._keys_by_tenant[tenant][key]
            if not self._keys_by_tenant[tenant]:
                del self._keys_by_tenant[tenant]
        self.pinned_blocks -= self._pinned.pop(key, 0)
        self.policy.withdraw(key)
        self._disown(entry.parent, key)
        self.offer(entry.parent)
        self._report_change(entry, is_added=False)
        self._removed(entry)

    def moved_last(self, entry: Entry, before_s: float) -> None:
        """See `NodeIndex.use`; `before_s`: of the use before."""
        key = entry.key
        self._entries[key] = self._entries.pop(key)
        if self._tenant_blocks is not None:
            keys = self._keys_by_tenant[entry.tenant]
            keys[key] = keys.pop(key)
        self.offer(key)

    def pin(self, key: bytes) -> bool:
        """Return whether the tier has it and it is pinned now."""
        entry = self._entries.get(key)
        if entry is not None and key not in self._pinned:
            num_blocks = blocks_of(self.num_bytes(entry))
            if self.pinned_blocks + num_blocks <= self.max_blocks // 2:
                self._pinned[key] = num_blocks
                self.pinned_blocks += num_blocks
                self.policy.withdraw(key)
        return key in self._pinned

    def unpin(self, key: bytes) -> None:
        self.pinned_blocks -= self._pinned.pop(key, 0)
        self.offer(key)

    def evict_to(self, num_blocks: float, num_chunks: float = math.inf, spared: Container[bytes] = ()) -> bool:
        """Evict until so much is used at most; False if that cannot be."""
        while self.taken_blocks > num_blocks or len(self._entries) + len(self._coming) > num_chunks:
            if not self._evict(self._victim(spared)):
                return False
        return True

    def evict_of(self, tenant: bytes, num_blocks: int, spared: Container[bytes] = ()) -> bool:
        """Make room within a tenant's quota, of what is its own."""
        if self._tenant_blocks is None:
            return True
        coming = sum(blocks for other, blocks in self._coming.values() if other == tenant)
        while self.blocks_by_tenant[tenant] + coming + num_blocks > self._tenant_blocks:
            if not self._evict(self._oldest_of(tenant, spared)):
                return False
        return True

    def expire(self, ttl_s: float | None) -> int:
        """Remove what was not used for so long, see `unused_since`; returns how many."""
        expired = [] if ttl_s is None else self.unused_since(self.index.clock() - ttl_s)
        for entry in expired:
            self.remove(entry)
        self.counters["expired"] += len(expired)
        return len(expired)

    def unused_since(self, time_s: float) -> list[Entry]:
        """Chunks that were not used since then and are not kept, nor anything behind them; ends of chains first.

        A chunk that others descend from is in use as they are: who has its KV on a device asks for what follows only.
        """
        old = {entry.key: entry for entry in takewhile(lambda entry: entry.last_used_s < time_s, self)}
        found: dict[bytes, Entry] = {}
        num_found_behind: Counter[bytes] = Counter()  # of the children, by parent
        for entry in old.values():
            each: Entry | None = entry
            while each is not None and each.key not in found and not self._is_kept(each.key):
                if num_found_behind[each.key] < self._num_children(each.key):
                    break
                found[each.key] = each
                num_found_behind[each.parent] += 1
                each = old.get(each.parent)
        return [*found.values()]

    def candidate(self, entry: Entry) -> Candidate:
        return Candidate(entry.key, blocks_of(self.num_bytes(entry)), entry.last_used_s, entry.has_returned)

    def offer(self, key: bytes) -> None:
        """Make a chunk a candidate for eviction, if it is there and nothing keeps it."""
        if key not in self._children and key in self._entries and not self._is_kept(key):
            self.policy.offer(self.candidate(self._entries[key]))

    def stats(self) -> dict[str, int]:
        """Sizes of this moment, and counters since the start."""
        sizes = {"chunks": len(self), "bytes": self.used_blocks * BLOCK_BYTES}
        return sizes | {"capacity_bytes": self.max_blocks * BLOCK_BYTES, **self.counters}

    def _is_kept(self, key: bytes) -> bool:
        return key in self.index.holds or key in self._pinned

    def _report_change(self, entry: Entry, *, is_added: bool) -> None:
        if self.index.on_change is not None:
            self.index.on_change(Change(entry.key, self.name, self.num_bytes(entry), is_added))

    def _insert(self, entry: Entry) -> None:
        key, tenant, num_blocks = entry.key, entry.tenant, blocks_of(self.num_bytes(entry))
        assert key not in self._entries
        self._entries[key] = entry
        self.num_blocks += num_blocks
        self.blocks_by_tenant[tenant] += num_blocks
        if self._tenant_blocks is not None:
            self._keys_by_tenant.setdefault(tenant, {})[key] = None
        self._adopt(entry.parent, key)

    def _evict(self, victim: Entry | None) -> bool:
        if victim is None:
            return False
        self.counters["evicted"] += 1
        self.remove(victim)
        return True

    def _victim(self, spared: Container[bytes] = ()) -> Entry | None:
        """The next to go; None if nothing may go, or if it would be one that is spared."""
        victim = self.policy.choose()
        if victim is None:
            return self._in_a_circle()
        key = victim.candidate.key
        assert isinstance(key, bytes)
        if key in spared:
            self.offer(key)
            return None
        return self._entries[key]

    def _oldest_of(self, tenant: bytes, spared: Container[bytes]) -> Entry | None:
        """Return what the tenant used longest ago, of what may go."""
        for key in self._keys_by_tenant.get(tenant, ()):
            if key not in self._children and not self._is_kept(key) and key not in spared:
                return self._entries[key]
        return None

    def _in_a_circle(self) -> Entry | None:
        """Names of a hostile folder may say that chunks descend from each other: then there is no last one."""
        is_kept = bool(self._pinned) or any(key in self._entries for key in self.index.holds)
        return None if is_kept else next(iter(self), None)

    def _num_children(self, parent: bytes) -> int:
        found = self._children.get(parent, ())
        return 1 if isinstance(found, bytes) else len(found)

    def _adopt(self, parent: bytes, key: bytes) -> None:
        found = self._children.get(parent)
        if found is None:
            self._children[parent] = key
        elif isinstance(found, bytes):
            self._children[parent] = {found, key}
        else:
            found.add(key)

    def _disown(self, parent: bytes, key: bytes) -> None:
        found = self._children[parent]
        if isinstance(found, bytes):
            del self._children[parent]
        else:
            found.discard(key)
            if len(found) == 1:
                self._children[parent] = found.pop()
