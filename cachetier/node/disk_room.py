"""What a disk tier's folder holds and may hold: its index, what is being written, what is still to be removed.

No files and no locks; the tier calls it under its own lock. What is taken out of the index is *litter* until its file
is gone: it counts, and nothing is written under its path.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from mneme.cachetier.node.disk_interface import Put
from mneme.cachetier.node.disk_names import ChunkName, parse_name
from mneme.cachetier.node.index import BLOCK_BYTES, ChunkIndex, Entry, blocks_of
from mneme.cachetier.policy.eviction import EvictionPolicy

_MAX_STUCK = 8  # files that could not be removed, until nothing is evicted for others: the folder may be read-only


class DiskEntry(Entry):
    """A chunk in the folder."""

    __slots__ = ("name", "touched_s")

    def __init__(self, name: ChunkName, last_used_s: float) -> None:
        super().__init__(last_used_s)
        self.name = name
        self.touched_s = last_used_s  # when the file's time was last set

    @property
    def key(self) -> bytes:
        return self.name.key

    @property
    def parent(self) -> bytes:
        return self.name.parent

    @property
    def owner(self) -> bytes:
        return self.name.owner

    @property
    def num_bytes(self) -> int:
        return self.name.num_bytes

    @property
    def num_tokens(self) -> int:
        return self.name.num_tokens


class DiskRoom:
    """Bounds in bytes, counted in whole blocks, and in files; `tenant_bytes` of them for one owner."""

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity_bytes: int,
        max_files: int,
        path_of: Callable[[ChunkName], str],
        *,
        tenant_bytes: int | None = None,
        on_change: Callable[[DiskEntry, bool], None],
    ) -> None:
        self.index = ChunkIndex[DiskEntry](policy, has_quotas=tenant_bytes is not None, on_change=on_change)
        self.num_evicted = 0
        self._tenant_blocks = None if tenant_bytes is None else tenant_bytes // BLOCK_BYTES
        self._path_of = path_of
        self._max_blocks, self._max_files = capacity_bytes // BLOCK_BYTES, max_files
        self._writing: dict[bytes, int] = {}  # blocks by key
        self._litter: dict[str, int] = {}  # blocks by path
        self._claimed: set[str] = set()  # litter that one thread is removing: another might remove what came after it
        self._stuck: dict[str, None] = {}  # litter that could not be removed, what was tried last at the end

    @property
    def used_blocks(self) -> int:
        return self.index.num_blocks + sum(self._writing.values()) + sum(self._litter.values())

    @property
    def is_within(self) -> bool:
        num_files = len(self.index) + len(self._writing) + len(self._litter)
        return self.used_blocks <= self._max_blocks and num_files <= self._max_files

    def holds(self, key: bytes) -> bool:
        """It is there, or is being written."""
        return key in self.index or key in self._writing

    def reserve(self, name: ChunkName) -> Put | None:
        """Room for a file, once the litter is gone: None; else why there is none."""
        num_blocks = blocks_of(name.num_bytes)
        if num_blocks > self._max_blocks or not self._max_files:
            return Put.NO_ROOM
        if self._path_of(name) in self._litter or len(self._stuck) >= _MAX_STUCK:
            return Put.BLOCKED
        if not self._evict_own(name.owner, num_blocks):
            return Put.NO_ROOM
        self._writing[name.key] = num_blocks
        self.evict()
        if self._is_over():
            del self._writing[name.key]
            return Put.NO_ROOM
        return None

    def release(self, key: bytes) -> None:
        """It was written, or will not be. Called twice it does nothing."""
        self._writing.pop(key, None)

    def evict(self) -> None:
        """As many as must go."""
        while self._is_over() and self._evict_one():
            pass

    def evict_over_quotas(self) -> None:
        """Each owner's own: a quota may be smaller than it was when the folder was written."""
        for owner in [*self.index.blocks_by_owner]:
            self._evict_own(owner, 0)

    def free_up(self, num_blocks: int) -> None:
        """Evict so many blocks, if there are: the disk has less room than the bound."""
        target = self.index.num_blocks - num_blocks
        while self.index.num_blocks > target and self._evict_one():
            pass

    def discard(self, entry: DiskEntry, *, is_file_ours: bool = True) -> None:
        """Out of the index; its file goes too, if it is ours."""
        self.index.remove(entry)
        if is_file_ours:
            self.add_litter(self._path_of(entry.name), entry.num_blocks)

    def add_litter(self, path: str, num_blocks: int) -> None:
        """A file that may be there and must not stay."""
        self._litter[path] = num_blocks

    def claim_litter(self) -> list[str]:
        """Paths to remove, each for one caller, who calls `swept`; some of those that could not be removed before."""
        fresh = [path for path in self._litter if path not in self._claimed and path not in self._stuck]
        stuck = [path for path in self._stuck if path not in self._claimed][:_MAX_STUCK]
        self._claimed.update(fresh, stuck)
        return fresh + stuck

    def swept(self, path: str, *, is_gone: bool) -> None:
        self._claimed.discard(path)
        self._stuck.pop(path, None)
        if is_gone:
            del self._litter[path]
        else:
            self._stuck[path] = None

    def num_stuck(self, owner: bytes) -> int:
        """Chunks' files of an owner that could not be removed."""
        names = (parse_name(os.path.basename(path)) for path in self._stuck)
        return sum(name is not None and name.owner == owner for name in names)

    def _evict_one(self) -> bool:
        return self._is_evicted(self.index.pop_victim())

    def _evict_own(self, owner: bytes, num_blocks: int) -> bool:
        """Room within an owner's quota, made of what is its own; what is being written does not count yet."""
        if self._tenant_blocks is None:
            return True
        while self.index.blocks_by_owner[owner] + num_blocks > self._tenant_blocks:
            if not self._is_evicted(self.index.pop_oldest_of(owner)):
                return False
        return True

    def _is_evicted(self, victim: DiskEntry | None) -> bool:
        if victim is None:
            return False
        self.num_evicted += 1
        self.add_litter(self._path_of(victim.name), victim.num_blocks)
        return True

    def _is_over(self) -> bool:
        """Without the litter."""
        num_blocks = self.index.num_blocks + sum(self._writing.values())
        return num_blocks > self._max_blocks or len(self.index) + len(self._writing) > self._max_files
