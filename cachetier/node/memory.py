"""What a node's host tier holds and may hold: an index of chunks under a budget, without their bytes.

No locks and no I/O: the node cache calls it under its own lock. Bytes are counted in blocks of 4 KB, from before a
chunk is taken. What goes is handed out by `claim_gone`, to be dropped outside of the lock.

A share of the budget is kept free (AttentionStore 3.3.1), so that a put finds room without a choice; what waiting
requests want never goes for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import numpy as np

from mneme.cachetier.chunk.header import ChunkHeader, U8Array, is_beginning
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.node.index import BLOCK_BYTES, ChunkIndex, Entry, blocks_of
from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy

_MAX_BEYOND = 2  # chunks on their way to the disk that the tier is too small for


class HostEntry(Entry):
    """A chunk in host memory."""

    __slots__ = ("header", "held")

    def __init__(self, header: ChunkHeader, held: Held, last_used_s: float) -> None:
        super().__init__(last_used_s)
        self.header, self.held = header, held

    @property
    def key(self) -> bytes:
        return self.header.key

    @property
    def parent(self) -> bytes:
        return self.header.parent

    @property
    def owner(self) -> bytes:
        return self.header.owner

    @property
    def num_bytes(self) -> int:
        return chunk_bytes(self.header)

    @property
    def num_tokens(self) -> int:
        return self.header.num_tokens


def chunk_bytes(header: ChunkHeader) -> int:
    """In memory: payload and header."""
    return header.payload_bytes + header.num_bytes


class HostTier:
    """Bounds in blocks; `tenant_bytes` of them for one owner."""

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity_bytes: int,
        *,
        free_share: float,
        tenant_bytes: int | None,
        on_change: Callable[[HostEntry, bool], None],
    ) -> None:
        self.index = ChunkIndex[HostEntry](policy, has_quotas=tenant_bytes is not None, on_change=on_change)
        self.counters: Counter[str] = Counter()
        self.max_blocks = capacity_bytes // BLOCK_BYTES
        self._policy = policy
        self._full_blocks = int(self.max_blocks * (1 - free_share))  # more than this is evicted ahead of need
        self._tenant_blocks = None if tenant_bytes is None else tenant_bytes // BLOCK_BYTES
        self._arriving: dict[bytes, tuple[bytes, int]] = {}  # owner and blocks by key
        self._passing: dict[bytes, tuple[bytes, int]] = {}  # likewise: on their way to the disk alone
        self._unwanted: set[bytes] = set()  # of those that arrive: deleted meanwhile
        self._gone: list[Held] = []

    @property
    def used_blocks(self) -> int:
        others = (*self._arriving.values(), *self._passing.values())
        return self.index.num_blocks + sum(num_blocks for _, num_blocks in others)

    def holds(self, key: bytes) -> bool:
        """It is there, or about to be."""
        return key in self.index or key in self._arriving or key in self._passing

    def admits(self, header: ChunkHeader, now_s: float) -> bool:
        """Whether it is worth what would go for it."""
        num_blocks = blocks_of(chunk_bytes(header))
        if self.used_blocks + num_blocks <= self._full_blocks:
            return True
        has_returned = self.index.was_here(header.key)
        return self._policy.admits(Candidate(header.key, num_blocks, now_s, has_returned))

    def reserve(self, header: ChunkHeader, spared: Container[bytes] | None = None) -> bool:
        """Room for a chunk that is to come: `arrive` or `cancel` follows.

        With `spared`, none of those goes for it, and the free share stays free.
        """
        num_blocks, owner = blocks_of(chunk_bytes(header)), header.owner
        bound = self.max_blocks if spared is None else self._full_blocks
        if self.holds(header.key) or num_blocks > bound or not self._evict_own(owner, num_blocks, spared or ()):
            return False
        if not self._evict_to(bound - num_blocks, spared or ()):
            return False
        self._arriving[header.key] = owner, num_blocks
        return True

    def reserve_passage(self, header: ChunkHeader) -> bool:
        """Room in the free share for a chunk that goes to the disk alone: `passed` follows.

        A chunk that is larger than the tier passes beyond it, two at a time: else the disk would never get any.
        """
        num_blocks = blocks_of(chunk_bytes(header))
        if num_blocks > self.max_blocks:
            if len(self._passing) >= _MAX_BEYOND:
                return False
        elif self.used_blocks + num_blocks > self.max_blocks:
            return False
        self._passing[header.key] = header.owner, num_blocks
        return True

    def arrive(
        self,
        header: ChunkHeader,
        held: Held,
        now_s: float,
        spared: Container[bytes],
        lineage: Lineage | None = None,
    ) -> list[bytes]:
        """A chunk is there, unless it was deleted meanwhile; the keys of those that it supersedes, which are gone."""
        del self._arriving[header.key]
        if header.key in self._unwanted:
            self._unwanted.remove(header.key)
            self._gone.append(held)
            return []
        self.index.add(HostEntry(header, held, now_s))
        superseded = self._supersede(header, lineage)
        self._evict_to(self._full_blocks, spared)
        return superseded

    def cancel(self, key: bytes) -> None:
        """It does not come."""
        self._arriving.pop(key, None)
        self._unwanted.discard(key)

    def passed(self, key: bytes) -> bool:
        """Whether it was on its way."""
        return self._passing.pop(key, None) is not None

    def keys_of(self, owner: bytes) -> list[bytes]:
        """All chunks of a tenant, those on their way too; looks at every chunk."""
        here = [entry.key for entry in self.index if entry.owner == owner]
        coming = (*self._arriving.items(), *self._passing.items())
        return here + [key for key, (other, _) in coming if other == owner]

    def delete(self, key: bytes) -> bool:
        """Whether it was there or on its way; then it does not come."""
        entry, is_coming = self.index.get(key), key in self._arriving
        if is_coming:
            self._unwanted.add(key)
        if entry is not None:
            self.discard(entry)
        return self.passed(key) or is_coming or entry is not None

    def discard(self, entry: HostEntry) -> None:
        self.index.remove(entry)
        self._gone.append(entry.held)

    def missed(self, key: bytes, miss: Miss) -> None:
        """A chunk whose bytes could not be had, or are not sound, goes."""
        self.counters[f"miss_{miss.value}"] += 1
        entry = self.index.get(key)
        if entry is not None and miss is not Miss.BUSY:
            self.discard(entry)

    def claim_gone(self) -> list[Held]:
        gone, self._gone = self._gone, []
        return gone

    def _supersede(self, header: ChunkHeader, lineage: Lineage | None) -> list[bytes]:
        """A tail that has grown replaces what it was."""
        found = []
        for entry in self.index.beginnings(header, lineage):
            if is_beginning(entry.header, header) and not self.index.has_children(entry.key):
                self.discard(entry)
                self.counters["superseded"] += 1
                found.append(entry.key)
        return found

    def _evict_to(self, num_blocks: int, spared: Container[bytes]) -> bool:
        """Whether so many are used at most, after evictions."""
        while self.used_blocks > num_blocks:
            if not self._is_evicted(self.index.pop_victim(spared)):
                return False
        return True

    def _evict_own(self, owner: bytes, num_blocks: int, spared: Container[bytes]) -> bool:
        """Room within an owner's quota, made of what is its own."""
        if self._tenant_blocks is None:
            return True
        arriving = sum(blocks for other, blocks in self._arriving.values() if other == owner)
        while self.index.blocks_by_owner[owner] + arriving + num_blocks > self._tenant_blocks:
            if not self._is_evicted(self.index.pop_oldest_of(owner, spared)):
                return False
        return True

    def _is_evicted(self, victim: HostEntry | None) -> bool:
        if victim is None:
            return False
        self.counters["evicted"] += 1
        self._gone.append(victim.held)
        return True


# What a memory made of a chunk's bytes: it alone knows what it is.
Held = object


class ChunkMemory(Protocol):
    """Calls may come from several threads, and take a bounded time."""

    def take(self, payload: object) -> Held:
        """What an engine gave is ours from now on. Raises MemoryError if it cannot be had or there is no room."""

    def keep(self, layers: Sequence[U8Array]) -> Held:
        """Bytes that were read from a disk, one array for each layer; they change no more. Raises MemoryError."""

    def layers(self, held: Held) -> tuple[U8Array, ...] | Miss:
        """All layers, read-only; the memory stays as long as they are referred to."""

    def drop(self, held: Held) -> None:
        """The tier gave it up; who was given it before may still read it."""


class ProcessMemory:
    """Arrays of this process, as they are."""

    def take(self, payload: object) -> Held:
        if not isinstance(payload, tuple) or not all(isinstance(layer, np.ndarray) for layer in payload):
            raise TypeError(f"payload: must be a tuple of arrays (got {type(payload).__name__})")
        return payload

    def keep(self, layers: Sequence[U8Array]) -> Held:
        return tuple(layers)

    def layers(self, held: Held) -> tuple[U8Array, ...] | Miss:
        assert isinstance(held, tuple)
        return held

    def drop(self, held: Held) -> None:
        """Nothing: the last reference frees it."""
