"""A disk tier's folder, what is known of it, and the lock over that: what its readers and its writer share.

The lock is never held during a call to the file system.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mneme.cachetier.chunk.file import ChunkReader, open_chunk
from mneme.cachetier.chunk.header import ChunkHeader, Wanted
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import DiskTierConfig
from mneme.cachetier.node.disk_folder import DiskFolder
from mneme.cachetier.node.disk_names import name_of
from mneme.cachetier.node.disk_room import DiskEntry, DiskRoom
from mneme.cachetier.node.header_cache import HeaderCache
from mneme.cachetier.node.index import blocks_of
from mneme.cachetier.policy.eviction import EvictionPolicy

Clock = Callable[[], float]
OnDiskChange = Callable[[DiskEntry, bool], None]  # a chunk that is there now (True) or not any more; under the lock

_HARMLESS = (Miss.BUSY, Miss.OTHER_TOKENS)  # say nothing against the file
_TOUCH_AGAIN_S = 60.0  # the time of a file is set no more often; it orders chunks after a restart


@contextmanager
def _no_collections() -> Iterator[None]:
    """A million objects that stay: looking at all of them again and again for garbage would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DiskContents:
    """Raises `ConfigError` if the folder cannot be used, or if another tier uses it."""

    def __init__(
        self,
        config: DiskTierConfig,
        policy: EvictionPolicy,
        files: FileOperations,
        clock: Clock = time.monotonic,
        tenant_bytes: int | None = None,
    ) -> None:
        self.clock = clock
        self.files = files
        self.lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        self.on_change: OnDiskChange | None = None
        self.folder = DiskFolder(config.folder, files)
        self.room = DiskRoom(
            policy,
            config.capacity_bytes,
            config.max_files,
            self.folder.path,
            tenant_bytes=tenant_bytes,
            on_change=self._changed,
        )
        self._headers = HeaderCache()

    def open(self, entry: DiskEntry, wanted: Wanted | None) -> ChunkReader | Miss:
        """A reader, to be closed; a fault is noted."""
        reader = open_chunk(self.files, self.folder.path(entry.name), wanted)
        if isinstance(reader, ChunkReader) and name_of(reader.header, entry.num_bytes) != entry.name:
            reader.close()
            reader = Miss.OTHER_KEY
        if isinstance(reader, Miss):
            self.missed(entry, reader)
        return reader

    def header(self, key: bytes) -> ChunkHeader | Miss:
        """What a chunk is, from its file if it was not read of late."""
        with self.lock:
            entry, header = self.room.index.get(key), self._headers.get(key)
        if entry is None or header is not None:
            return header or Miss.ABSENT
        reader = self.open(entry, None)
        if isinstance(reader, Miss):
            return reader
        reader.close()
        with self.lock:
            self.keep_header(reader.header)
        return reader.header

    def knows_header(self, key: bytes) -> bool:
        """Whether it was read of late."""
        with self.lock:
            return self._headers.get(key) is not None

    def keep_header(self, header: ChunkHeader) -> None:
        """Under the lock."""
        if header.key in self.room.index:
            self._headers.keep(header)

    def use(self, entry: DiskEntry) -> bool:
        """Under the lock: notes a use; whether the file is to be touched."""
        now_s = self.clock()
        self.room.index.use(entry, now_s)
        is_old = now_s - entry.touched_s > _TOUCH_AGAIN_S
        if is_old:
            entry.touched_s = now_s
        return is_old

    def touch(self, entry: DiskEntry) -> None:
        with suppress(OSError):
            self.files.touch(self.folder.path(entry.name))

    def missed(self, entry: DiskEntry, miss: Miss) -> None:
        """A chunk that is not there or not sound is forgotten, its file removed if it is ours."""
        with self.lock:
            self.counted(miss)
            is_known = self.room.index.get(entry.key) is entry
            if is_known and miss not in _HARMLESS:
                self.room.discard(entry, is_file_ours=miss is not Miss.NOT_OURS)
        self.sweep()

    def counted(self, miss: Miss) -> Miss:
        """Under the lock."""
        self.counters[f"miss_{miss.value}"] += 1
        return miss

    def sweep(self) -> None:
        """Remove litter; what cannot be removed stays litter."""
        with self.lock:
            paths = self.room.claim_litter()
        for path in paths:
            is_gone = True
            try:
                self.files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:
                is_gone = False
            with self.lock:
                self.room.swept(path, is_gone=is_gone)
                self.counters["unlink_failed"] += not is_gone

    def rebuild(self, wall_s: float) -> None:
        """The index from names. Ages count from the newest file: no halt and no jump of a clock makes all old."""
        with _no_collections():
            self._rebuild(wall_s)
        self.sweep()

    def _rebuild(self, wall_s: float) -> None:
        found = sorted(self.folder.scan(self.counters))
        newest_s = min(wall_s, found[-1][0]) if found else wall_s
        now_s = self.clock()
        entries: dict[bytes, DiskEntry] = {}
        for time_s, name in found:
            if name.key in entries:  # under two names, which a tier of ours does not make
                self.room.add_litter(self.folder.path(name), blocks_of(name.num_bytes))
            else:
                entries[name.key] = DiskEntry(name, now_s - max(0.0, newest_s - time_s))
        self.room.index.fill(entries.values())
        self.room.evict_over_quotas()
        self.room.evict()

    def _changed(self, entry: DiskEntry, is_added: bool) -> None:
        if not is_added:
            self._headers.drop(entry.key)
        if self.on_change is not None:
            self.on_change(entry, is_added)
