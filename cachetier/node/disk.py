"""Chunks on a node's disk, under a bound of bytes and one of files.

Every fault of the disk is a miss or a write that is skipped, and a counter: nothing here raises for one, except that a
folder which cannot be used at all is refused at the start. A disk that fails again and again is left alone for a while.
Calls may come from several threads; the index's lock is never held during a call to the file system.

Bytes are counted in whole blocks, before a file is written and until it is gone: what could not be removed counts on,
and its removal is tried again. So the bound holds at any time, in whatever order calls fail. Temporary files of a crash
are removed, and what is too much is evicted, when the tier starts.
"""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum

from mneme.cachetier.chunk.file import ChunkReader, file_bytes, open_chunk, write_chunk
from mneme.cachetier.chunk.header import Chunk, ChunkHeader, U8Array, is_beginning
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.names import Miss
from mneme.cachetier.node.folder import ChunkName, DiskFolder, make_root, name_of, parse_name
from mneme.cachetier.node.index import BLOCK_BYTES, ChunkTier, Entry, NodeIndex, blocks_of, entry_of
from mneme.cachetier.policy.eviction import EvictionPolicy, make_policy
from mneme.primitives import Bounded

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

MAX_FILES = 1_000_000  # a chunk is one: at 34 MB each, of an 8B model, 34 TB
_HARMLESS = (Miss.BUSY, Miss.OTHER_TOKENS)  # say nothing against the file
_TOUCH_AGAIN_S = 60.0  # the time of a file is set no more often; it orders chunks after a restart
_MAX_HEADERS = 4096  # that are kept in memory, some 3 KB each: a chain that is asked for again is found without files
_MAX_STUCK = 8  # files that could not be removed, until nothing is evicted for others: the folder may be read-only
_MAX_FAILURES = 3  # of writes in a row, until writes pause
_PAUSE_S = 10.0
_MAX_SIBLINGS = 8  # whose headers are read to see whether they are superseded


class Put(Enum):
    """Says what became of a chunk that was to be kept; the values are the names of counters."""

    WRITTEN = "written"
    KEPT = "kept"  # it was there, or is being written
    NO_ROOM = "no_room"
    BLOCKED = "write_blocked"  # by files that are still to be removed
    FAILED = "write_failed"
    PAUSED = "write_paused"  # after failures


class DiskRead:
    """An open chunk; a layer that cannot be read is a miss, which the tier is told."""

    def __init__(self, reader: ChunkReader, on_miss: Callable[[Miss], None]) -> None:
        self.header = reader.header
        self._reader, self._on_miss = reader, on_miss

    def __enter__(self) -> DiskRead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, first_layer: int, layers: Sequence[U8Array]) -> Miss | None:
        """See `ChunkReader.read`."""
        miss = self._reader.read(first_layer, layers)
        if miss is not None:
            self._on_miss(miss)
        return miss

    def close(self) -> None:
        self._reader.close()


class StaleFiles:
    """Files that may be there and must not stay. They count until they are gone, and nothing is written in their place.

    No files and no locks: the tier calls it under its own.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, int] = {}  # by path
        self._claimed: set[str] = set()  # one thread is removing them: another might remove what came after
        self._stuck: dict[str, None] = {}  # could not be removed, what was tried last at the end

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, path: str) -> bool:
        return path in self._blocks

    @property
    def num_blocks(self) -> int:
        return sum(self._blocks.values())

    @property
    def is_stuck(self) -> bool:
        """Return whether so many files could not be removed that the folder may be read-only."""
        return len(self._stuck) >= _MAX_STUCK

    def add(self, path: str, num_blocks: int) -> None:
        self._blocks[path] = num_blocks

    def leave(self, path: str) -> None:
        """Leave a file that is not ours."""
        del self._blocks[path]

    def claim(self) -> list[str]:
        """Paths to remove, each for one caller, who calls `swept`; some of those that could not be removed before."""
        fresh = [path for path in self._blocks if path not in self._claimed and path not in self._stuck]
        stuck = [path for path in self._stuck if path not in self._claimed][:_MAX_STUCK]
        self._claimed.update(fresh, stuck)
        return fresh + stuck

    def swept(self, path: str, *, is_gone: bool) -> None:
        self._claimed.discard(path)
        self._stuck.pop(path, None)
        if is_gone:
            del self._blocks[path]
        else:
            self._stuck[path] = None

    def num_stuck(self, tenant: bytes) -> int:
        """Chunks' files of a tenant that could not be removed."""
        names = (parse_name(os.path.basename(path)) for path in self._stuck)
        return sum(name is not None and name.tenant == tenant for name in names)


class DiskTier(ChunkTier):
    """Raises `ConfigError` if the folder cannot be used, or if another tier uses it.

    What it does not have from `ChunkTier` takes the lock by itself, but for `stats`.
    """

    name = "disk"

    def __init__(
        self,
        config: DiskTierConfig,
        policy: EvictionPolicy,
        *,
        files: FileOperations | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        ttl_s: float | None = None,
        tenant_bytes: int | None = None,
        max_files: int = MAX_FILES,
    ) -> None:
        """`policy` ranks blocks of 4 KB; `clock` must not jump, `wall_clock` may; `tenant_bytes` is each tenant's."""
        super().__init__(
            NodeIndex(clock),
            policy,
            config.capacity_bytes,
            max_chunks=max_files,
            tenant_bytes=tenant_bytes,
        )
        self._ttl_s, self._max_files = ttl_s, max_files
        self._files = files or FileOperations()
        self._folder = DiskFolder(config.folder, self._files)
        self._stale = StaleFiles()
        self._headers = Bounded[bytes, ChunkHeader](_MAX_HEADERS)  # last read or written, oldest use first
        self._to_touch: dict[bytes, Entry] = {}  # were used: their files' times are to be set
        self._num_failures, self._paused_until_s = 0, -math.inf  # of writes in a row
        with _no_collections():
            self._rebuild(wall_clock())
        self.sweep()

    @property
    def used_blocks(self) -> int:
        """Blocks of all files, including those being written or still to be removed."""
        return self.taken_blocks + self._stale.num_blocks

    def num_bytes(self, entry: Entry) -> int:
        return entry.file_bytes

    def moved_last(self, entry: Entry, before_s: float) -> None:
        super().moved_last(entry, before_s)
        if entry.last_used_s // _TOUCH_AGAIN_S != before_s // _TOUCH_AGAIN_S:
            self._to_touch[entry.key] = entry

    def put(self, chunk: Chunk, lineage: Lineage | None = None) -> Put:
        """Write a chunk unless it is there; shorter ones that it begins with, and that nothing descends from, go.

        Of many siblings these are found by the chunk's lineage.
        """
        outcome = self._put(chunk)
        if outcome is Put.WRITTEN:
            self._supersede(chunk.header, lineage)
            self._remove_litter()
        with self.index.lock:
            self.counters[outcome.value] += 1
        return outcome

    def open(self, key: bytes) -> DiskRead | Miss:
        """A reader of the chunk's layers, to be closed; it stays readable whatever becomes of the chunk."""
        with self.index.lock:
            entry = self.get(key)
            if entry is None:
                self.counters[f"miss_{Miss.ABSENT.value}"] += 1
                return Miss.ABSENT
            self.index.use(entry)
        reader = self._opened(entry)
        if isinstance(reader, Miss):
            return reader
        with self.index.lock:
            self.counters["hit"] += 1
        return DiskRead(reader, lambda miss: self.missed(key, miss))

    def header(self, key: bytes) -> ChunkHeader | Miss:
        """The chunk's header, from its file if it was not read lately; this does not count as a use."""
        with self.index.lock:
            entry = self.get(key)
            if entry is None:
                return Miss.ABSENT
            if entry.header is not None:
                return entry.header
            if key in self._headers:
                self._headers.move_to_end(key)
                return self._headers[key]
        reader = self._opened(entry)
        if isinstance(reader, Miss):
            return reader
        reader.close()
        with self.index.lock:
            self._keep_header(reader.header)
        return reader.header

    def knows_header(self, key: bytes) -> bool:
        """Return whether `header` reads no file."""
        return key in self._headers

    def path(self, entry: Entry) -> str:
        """The file's path; whoever finds a fault there calls `missed`."""
        return self._folder.path(_name(entry))

    def missed(self, key: bytes, miss: Miss) -> None:
        """Forget a chunk that a reader found missing or damaged, and remove its file if it is ours."""
        with self.index.lock:
            self.counters[f"miss_{miss.value}"] += 1
            entry = self.get(key)
            if entry is not None and miss not in _HARMLESS:
                self.remove(entry)
                if miss is Miss.NOT_OURS:
                    self._stale.leave(self.path(entry))
        self._remove_litter()

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete chunks; returns how many were there. Readers of one read on."""
        with self.index.lock:
            entries = [entry for key in keys if (entry := self.get(key)) is not None]
            for entry in entries:
                self.remove(entry)
        self._remove_litter()
        return len(entries)

    def sweep(self) -> None:
        """Remove files that could not be, and touch those that were used; to be called now and then.

        Nothing else touches files: the disk may hang, and who uses what memory has must not wait for it.
        """
        self._remove_litter()
        with self.index.lock:
            paths = [self.path(entry) for key, entry in self._to_touch.items() if key in self]
            self._to_touch.clear()
        for path in paths:
            with suppress(OSError):
                self._files.touch(path)

    def num_left(self, tenant: bytes) -> int:
        """Files of a tenant that are to be gone and could not be removed: another start would find them."""
        with self.index.lock:
            return self._stale.num_stuck(tenant)

    def expire(self, ttl_s: float | None = None) -> int:
        """Remove what was not used for the tier's own `ttl_s`."""
        with self.index.lock:
            num_expired = super().expire(self._ttl_s)
        self._remove_litter()
        return num_expired

    def close(self) -> None:
        """Release the folder; nothing may be called any more."""
        self.sweep()
        self._folder.close()

    def _removed(self, entry: Entry) -> None:
        self._headers.pop(entry.key, None)
        self._stale.add(self.path(entry), blocks_of(entry.file_bytes))

    def _opened(self, entry: Entry) -> ChunkReader | Miss:
        """Open a chunk for reading, to be closed; a fault is noted."""
        reader = open_chunk(self._files, self.path(entry))
        if isinstance(reader, ChunkReader) and name_of(reader.header, entry.file_bytes) != _name(entry):
            reader.close()
            reader = Miss.OTHER_KEY
        if isinstance(reader, Miss):
            self.missed(entry.key, reader)
        return reader

    def _keep_header(self, header: ChunkHeader) -> None:
        """Under the lock."""
        if header.key in self:
            self._headers[header.key] = header

    def _put(self, chunk: Chunk) -> Put:
        name = name_of(chunk.header, file_bytes(chunk.header))
        with self.index.lock:
            if self.index.clock() < self._paused_until_s:
                return Put.PAUSED
            if self.holds(name.key):
                if (entry := self.get(name.key)) is not None:
                    self.index.use(entry)
                return Put.KEPT
            if self._folder.path(name) in self._stale or self._stale.is_stuck:
                return Put.BLOCKED
            self.index.hold(name.parent)  # without it nobody finds the chunk: it must not go for it
            is_reserved = self.reserve(name.key, name.tenant, blocks_of(name.num_bytes))
        try:
            return self._write(chunk, name) if is_reserved else Put.NO_ROOM
        finally:
            with self.index.lock:
                self.index.release(name.parent)
                if is_reserved:
                    self.cancel(name.key)

    def _write(self, chunk: Chunk, name: ChunkName) -> Put:
        self._remove_litter()
        with self.index.lock:
            num_files = len(self) + len(self._coming) + len(self._stale)
            if self.used_blocks > self.max_blocks or num_files > self._max_files:
                return Put.BLOCKED  # something is not removed yet
            temporary = self._folder.temporary_path(name.key)
        path = self._folder.path(name)
        try:
            write_chunk(self._files, temporary, path, chunk)
        except OSError as error:
            self._failed(error, (temporary, path), blocks_of(name.num_bytes))
            return Put.FAILED
        with self.index.lock:
            self._num_failures = 0
            self.counters["written_bytes"] += name.num_bytes
            entry = self.index.get(name.key) or entry_of(chunk.header, self.index.clock())
            entry.file_bytes = name.num_bytes
            self.add(entry)
            self._keep_header(chunk.header)
        return Put.WRITTEN

    def _supersede(self, header: ChunkHeader, lineage: Lineage | None) -> None:
        """Remove what a tail was before it has grown; what is not found is evicted in time."""
        with self.index.lock:
            shorter = self.beginnings(header, lineage)
        for entry in shorter[:_MAX_SIBLINGS]:
            other = self.header(entry.key)
            if isinstance(other, Miss) or not is_beginning(other, header):
                continue
            with self.index.lock:
                if entry.key in self and not self.has_children(entry.key):
                    self.remove(entry)
                    self.counters["superseded"] += 1
                    self.counters["superseded_bytes"] += entry.file_bytes

    def _failed(self, error: OSError, paths: tuple[str, str], num_blocks: int) -> None:
        """Clean up after a failed write, and make room if the disk was full."""
        logger.warning("disk tier: a chunk could not be written: %s", error)
        with self.index.lock:
            for path in paths:
                self._stale.add(path, num_blocks)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                target = self.num_blocks - num_blocks
                while self.num_blocks > target and self._evict(self._victim()):
                    pass
                self.counters["disk_full"] += 1
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                self._paused_until_s = self.index.clock() + _PAUSE_S
        self._remove_litter()

    def _remove_litter(self) -> None:
        """Remove files that must not stay; those that cannot be removed are tried again later."""
        with self.index.lock:
            paths = self._stale.claim()
        for path in paths:
            is_gone = True
            try:
                self._files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:
                is_gone = False
            with self.index.lock:
                self._stale.swept(path, is_gone=is_gone)
                self.counters["unlink_failed"] += not is_gone

    def _rebuild(self, wall_s: float) -> None:
        """Build the index from file names. Ages count from the newest file: a clock that jumped ages nothing."""
        found: dict[bytes, Entry] = {}
        for time_s, name in self._folder.scan(self.counters):
            if name.key in found:  # under two names, which a tier of ours does not make
                self._stale.add(self._folder.path(name), blocks_of(name.num_bytes))
                continue
            parent = known.key if (known := found.get(name.parent)) is not None else name.parent  # one object for both
            entry = Entry(name.key, parent, name.tenant, name.model, name.kind, name.num_tokens, time_s)
            entry.file_bytes = name.num_bytes
            found[name.key] = entry
        entries = sorted(found.values(), key=lambda entry: (entry.last_used_s, entry.key))
        newest_s = min(wall_s, entries[-1].last_used_s) if entries else wall_s
        now_s = self.index.clock()
        for entry in entries:
            entry.last_used_s = now_s - max(0.0, newest_s - entry.last_used_s)
        self.fill(entries)
        for tenant in [*self.blocks_by_tenant]:
            self.evict_of(tenant, 0)  # a quota may be smaller than it was when the folder was written
        self.evict_to(self.max_blocks, self._max_files)


def _name(entry: Entry) -> ChunkName:
    """The name of the chunk's file."""
    return ChunkName(entry.key, entry.parent, entry.tenant, entry.model, entry.kind, entry.num_tokens, entry.file_bytes)


def make_disk_tier(
    config: CacheConfig,
    *,
    files: FileOperations | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> DiskTier | None:
    """A node's disk tier, if there is to be one; its folder is made. Raises `ConfigError` if that cannot be used."""
    if config.disk is None:
        return None
    make_root(config.disk.folder)
    policy = make_policy(config.eviction, clock, config.disk.capacity_bytes // BLOCK_BYTES)
    return DiskTier(config.disk, policy, files=files, clock=clock, ttl_s=config.ttl_s, tenant_bytes=config.tenant_bytes)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pause garbage collection, which would scan a million objects that stay again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
