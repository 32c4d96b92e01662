"""A node's host tier: which chunks are in memory and may be, and where their bytes lie.

No locks and no I/O: the node cache calls the tier under the index's lock. What goes is handed out by `claim_gone`, to
be dropped outside of the lock.

A share of the budget is kept free (AttentionStore 3.3.1), so that a put finds room without a choice; what waiting
requests want never goes for that.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

import numpy as np

from mneme.cachetier.chunk.header import ChunkHeader, U8Array, is_beginning
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.names import Miss
from mneme.cachetier.node.index import ChunkTier, Entry, NodeIndex, blocks_of, entry_of
from mneme.cachetier.policy.eviction import EvictionPolicy

# What a memory made of a chunk's bytes: it alone knows what it is.
Held = object

FREE_SHARE = 0.05  # of the tier, kept free for what comes in (AttentionStore 3.3.1)
_MAX_BEYOND = 2  # chunks on their way to the disk that the tier is too small for


class ChunkMemory(Protocol):
    """Keeps the bytes of a host tier. Calls may come from several threads, and take a bounded time."""

    def accept(self, payload: object) -> Held:
        """Take over what an engine gave. Raises MemoryError if it cannot be read or there is no room."""

    def keep(self, layers: Sequence[U8Array]) -> Held:
        """Take over bytes read from a disk, one array per layer, which change no more. Raises MemoryError."""

    def layers(self, held: Held) -> tuple[U8Array, ...] | Miss:
        """All layers, read-only; the memory stays as long as they are referred to."""

    def drop(self, held: Held) -> None:
        """Free what the tier gave up; whoever was given it before may still read it."""


class ProcessMemory:
    """Arrays of this process, as they are."""

    def accept(self, payload: object) -> Held:
        if not isinstance(payload, tuple) or not all(isinstance(layer, np.ndarray) for layer in payload):
            raise TypeError(f"payload: must be a tuple of arrays (got {type(payload).__name__})")
        return payload

    def keep(self, layers: Sequence[U8Array]) -> Held:
        return tuple(layers)

    def layers(self, held: Held) -> tuple[U8Array, ...] | Miss:
        assert isinstance(held, tuple)
        return held

    def drop(self, held: Held) -> None:
        """Does nothing: the last reference frees it."""


def chunk_bytes(header: ChunkHeader) -> int:
    """Count what a chunk takes in memory: payload and header."""
    return header.payload_bytes + header.num_bytes


class HostTier(ChunkTier):
    """The chunks in memory, those that come, and those that pass through memory to the disk."""

    name = "host"

    def __init__(
        self,
        index: NodeIndex,
        policy: EvictionPolicy,
        capacity_bytes: int,
        *,
        free_share: float,
        tenant_bytes: int | None,
    ) -> None:
        super().__init__(index, policy, capacity_bytes, tenant_bytes=tenant_bytes)
        self._full_blocks = int(self.max_blocks * (1 - free_share))  # more than this is evicted ahead of need
        self._passing: dict[bytes, tuple[bytes, int]] = {}  # tenant and blocks of what goes to the disk alone
        self._unwanted: set[bytes] = set()  # of those that come: deleted meanwhile
        self._gone: list[Held] = []

    @property
    def taken_blocks(self) -> int:
        return super().taken_blocks + sum(num_blocks for _, num_blocks in self._passing.values())

    def num_bytes(self, entry: Entry) -> int:
        return entry.memory_bytes

    def holds(self, key: bytes) -> bool:
        return super().holds(key) or key in self._passing

    def admits_chunk(self, header: ChunkHeader) -> bool:
        """See `ChunkTier.admits`; the free share stays free."""
        return self.admits(header.key, blocks_of(chunk_bytes(header)), self._full_blocks)

    def make_room(self, header: ChunkHeader, spared: Container[bytes] | None = None) -> bool:
        """Reserve room for a chunk that is not there: `arrive` or `cancel` follows.

        With `spared`, none of those goes for it, and the free share stays free.
        """
        most = self.max_blocks if spared is None else self._full_blocks
        num_blocks = blocks_of(chunk_bytes(header))
        return not self.holds(header.key) and self.reserve(
            header.key, header.tenant, num_blocks, most=most, spared=spared or ()
        )

    def reserve_passage(self, header: ChunkHeader) -> bool:
        """Room in the free share for a chunk that goes to the disk alone: `passed` follows.

        A chunk that is larger than the tier passes beyond it, two at a time: else the disk would never get any.
        """
        num_blocks = blocks_of(chunk_bytes(header))
        if num_blocks > self.max_blocks:
            if len(self._passing) >= _MAX_BEYOND:
                return False
        elif self.taken_blocks + num_blocks > self.max_blocks:
            return False
        self._passing[header.key] = header.tenant, num_blocks
        return True

    def arrive(self, header: ChunkHeader, held: Held) -> None:
        """A chunk for which there is room is there, unless it was deleted meanwhile."""
        is_wanted = header.key not in self._unwanted
        self.cancel(header.key)
        if not is_wanted:
            self._gone.append(held)
            return
        known = self.index.get(header.key)
        entry = entry_of(header, self.index.clock()) if known is None else known
        entry.header, entry.held, entry.memory_bytes = header, held, chunk_bytes(header)
        self.add(entry)
        if known is not None:
            self.index.use(entry)

    def keep_share_free(self, spared: Container[bytes]) -> None:
        """Evict ahead of need, but none of these."""
        self.evict_to(self._full_blocks, spared=spared)

    def supersede(self, header: ChunkHeader, lineage: Lineage | None) -> list[bytes]:
        """Remove what a tail was before it has grown; returns the keys."""
        found = []
        for entry in self.beginnings(header, lineage):
            assert entry.header is not None
            if is_beginning(entry.header, header) and not self.has_children(entry.key):
                self.remove(entry)
                self.counters["superseded"] += 1
                found.append(entry.key)
        return found

    def cancel(self, key: bytes) -> None:
        super().cancel(key)
        self._unwanted.discard(key)

    def passed(self, key: bytes) -> bool:
        """Return whether it was on its way to the disk alone; it no longer is."""
        return self._passing.pop(key, None) is not None

    def keys_of(self, tenant: bytes) -> list[bytes]:
        """All chunks of a tenant, those on their way too; looks at every chunk."""
        here = [entry.key for entry in self if entry.tenant == tenant]
        coming = (*self._coming.items(), *self._passing.items())
        return here + [key for key, (other, _) in coming if other == tenant]

    def delete(self, key: bytes) -> bool:
        """Return whether it was there or on its way; then it does not come."""
        entry, is_coming = self.get(key), key in self._coming
        if is_coming:
            self._unwanted.add(key)
        if entry is not None:
            self.remove(entry)
        return self.passed(key) or is_coming or entry is not None

    def missed(self, key: bytes, miss: Miss) -> None:
        """A chunk whose bytes could not be had, or are not sound, goes."""
        self.counters[f"miss_{miss.value}"] += 1
        entry = self.get(key)
        if entry is not None and miss is not Miss.BUSY:
            self.remove(entry)

    def claim_gone(self) -> list[Held]:
        gone, self._gone = self._gone, []
        return gone

    def _removed(self, entry: Entry) -> None:
        self._gone.append(entry.held)
        entry.header = entry.held = None
