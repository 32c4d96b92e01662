"""Chunks on a node's disk, under a bound of bytes and one of files.

Every fault of the disk is a miss or a write that is skipped, and a counter: nothing here raises for one, except that a
folder which cannot be used at all is refused at the start. Calls may come from several threads; the lock is never held
during a call to the file system.

Bytes are counted in whole blocks, before a file is written and until it is gone: what could not be removed counts on,
and its removal is tried again. So the bound holds at any time, in whatever order calls fail. Temporary files of a crash
are removed, and what is too much is evicted, when the tier starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from mneme.cachetier.chunk.header import Chunk, ChunkHeader, Wanted
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.node.disk_contents import Clock, DiskContents, OnDiskChange
from mneme.cachetier.node.disk_interface import DiskRead, DiskStats, Put
from mneme.cachetier.node.disk_room import DiskEntry
from mneme.cachetier.node.disk_writer import DiskWriter
from mneme.cachetier.node.index import BLOCK_BYTES
from mneme.cachetier.policy.eviction import EvictionPolicy, Queue


class DiskTier:
    """Raises `ConfigError` if the folder cannot be used, or if another tier uses it."""

    def __init__(
        self,
        config: DiskTierConfig,
        policy: EvictionPolicy,
        *,
        files: FileOperations | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        tenant_bytes: int | None = None,
    ) -> None:
        """`policy` ranks blocks of 4 KB; `clock` must not jump, `wall_clock` may; `tenant_bytes` is each owner's."""
        self._config, self._clock, self._policy = config, clock, policy
        self._contents = DiskContents(config, policy, files or FileOperations(), clock, tenant_bytes)
        self._lock, self._room, self._index = self._contents.lock, self._contents.room, self._contents.room.index
        self._used: dict[bytes, DiskEntry] = {}  # in memory: their files are to be touched
        self._writer = DiskWriter(self._contents)
        self._contents.rebuild(wall_clock())

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def was_here(self, key: bytes) -> bool:
        """Whether a chunk of this key went, not long ago."""
        with self._lock:
            return self._index.was_here(key)

    def follow(self, on_change: OnDiskChange) -> None:
        """Whom to tell of chunks that come and go from now on; it must not call the tier."""
        self._contents.on_change = on_change

    def set_queue(self, queue: Queue) -> None:
        """Keys of chunks that will be used next; it must take no lock and call nothing."""
        self._policy.set_queue(queue)

    def put(self, chunk: Chunk, lineage: Lineage | None = None) -> Put:
        """Write a chunk unless it is there; shorter ones that it begins with, and that nothing descends from, go.

        Of many siblings these are found by the chunk's lineage.
        """
        return self._writer.put(chunk, lineage)

    def open(self, wanted: Wanted) -> DiskRead | Miss:
        """A reader of the chunk's layers, to be closed; it stays readable whatever becomes of the chunk."""
        return self._open(wanted.key, wanted)

    def open_key(self, key: bytes) -> DiskRead | Miss:
        """Likewise, whatever tokens it holds."""
        return self._open(key, None)

    def header(self, key: bytes) -> ChunkHeader | Miss:
        """What the chunk is, from its file if it was not read of late; this is no use of it."""
        return self._contents.header(key)

    def use(self, key: bytes) -> str | None:
        """The path of a chunk that somebody is about to read: who finds a fault says so to `missed`."""
        with self._lock:
            entry = self._index.get(key)
            is_old = entry is not None and self._contents.use(entry)
        if entry is None:
            return None
        if is_old:
            self._contents.touch(entry)
        return self._contents.folder.path(entry.name)

    def used(self, keys: Iterable[bytes]) -> None:
        """These were used where memory has them: what memory gives up must not be old here.

        Calls nothing of the disk, which may hang: `sweep` touches their files.
        """
        with self._lock:
            entries = [entry for key in keys if (entry := self._index.get(key)) is not None]
            self._used.update((entry.key, entry) for entry in entries if self._contents.use(entry))

    def missed(self, key: bytes, miss: Miss) -> None:
        """A reader of the path found this."""
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                self._contents.counted(miss)
        if entry is not None:
            self._contents.missed(entry, miss)

    def child_lengths(self, parent: bytes) -> set[int] | None:
        """See `ChunkIndex.child_lengths`."""
        with self._lock:
            return self._index.child_lengths(parent)

    def some_children(self, parent: bytes, most: int) -> list[bytes]:
        """See `ChunkIndex.some_children`."""
        with self._lock:
            return self._index.some_children(parent, most)

    def knows_header(self, key: bytes) -> bool:
        """Whether `header` reads no file."""
        return self._contents.knows_header(key)

    def children(self, parent: bytes) -> frozenset[bytes]:
        """Keys of the chunks behind a key or a root; their headers say which tokens they hold."""
        with self._lock:
            return self._index.children(parent)

    def num_bytes(self, key: bytes) -> int | None:
        """Of the chunk's file; None if it is not there."""
        with self._lock:
            entry = self._index.get(key)
            return None if entry is None else entry.num_bytes

    def sizes(self) -> list[tuple[bytes, int]]:
        """Keys and bytes of all chunks."""
        with self._lock:
            return [(entry.key, entry.num_bytes) for entry in self._index]

    def bytes_by_owner(self) -> dict[bytes, int]:
        with self._lock:
            return {owner: num * BLOCK_BYTES for owner, num in self._index.blocks_by_owner.items()}

    def hold(self, key: bytes) -> None:
        """Not to be evicted until `let_go`, whether it is there yet or not."""
        with self._lock:
            self._index.hold(key)

    def let_go(self, key: bytes) -> None:
        with self._lock:
            self._index.let_go(key)

    def delete(self, keys: Iterable[bytes]) -> int:
        """How many of these were there. Who reads one reads on."""
        with self._lock:
            entries = [entry for key in keys if (entry := self._index.get(key)) is not None]
            for entry in entries:
                self._room.discard(entry)
        self._contents.sweep()
        return len(entries)

    def keys_of(self, owner: bytes) -> list[bytes]:
        """All chunks of a tenant; looks at every chunk."""
        with self._lock:
            return [entry.key for entry in self._index if entry.owner == owner]

    def sweep(self) -> None:
        """Try again to remove files that could not be, and touch those of `used`; to be called now and then."""
        self._contents.sweep()
        with self._lock:
            used, self._used = self._used, {}
        for entry in used.values():
            self._contents.touch(entry)

    def num_left(self, owner: bytes) -> int:
        """Files of a tenant that are to be gone and could not be removed: another start would find them."""
        with self._lock:
            return self._room.num_stuck(owner)

    def expire(self) -> int:
        """Remove what was not used for `ttl_s`, see `ChunkIndex.unused_since`."""
        if self._config.ttl_s is None:
            return 0
        with self._lock:
            expired = self._index.unused_since(self._clock() - self._config.ttl_s)
            for entry in expired:
                self._room.discard(entry)
            self._contents.counters["expired"] += len(expired)
        self._contents.sweep()
        return len(expired)

    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(
                num_chunks=len(self._index),
                used_bytes=self._room.used_blocks * BLOCK_BYTES,
                capacity_bytes=self._config.capacity_bytes,
                counters=dict(self._contents.counters) | {"evicted": self._room.num_evicted},
            )

    def close(self) -> None:
        """Let the folder go; nothing may be called any more."""
        self._contents.folder.close()

    def _open(self, key: bytes, wanted: Wanted | None) -> DiskRead | Miss:
        contents = self._contents
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                return contents.counted(Miss.ABSENT)
            is_old = contents.use(entry)
        reader = contents.open(entry, wanted)
        if isinstance(reader, Miss):
            return reader
        if is_old:
            contents.touch(entry)
        with self._lock:
            contents.counters["hit"] += 1
        return DiskRead(reader, lambda miss: contents.missed(entry, miss))
