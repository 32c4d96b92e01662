"""Chunks on a node's disk, under a bound of bytes and one of files.

Every fault of the disk is a miss or a write that is skipped, and a counter: nothing here raises for one, except that a
folder which cannot be used at all is refused at the start. A disk that fails again and again is left alone for a while.
Calls may come from several threads; the lock is never held during a call to the file system.

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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum

from mneme.cachetier.chunk.file import ChunkReader, file_bytes, open_chunk, write_chunk
from mneme.cachetier.chunk.header import Chunk, ChunkHeader, U8Array, Wanted, is_beginning
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.folder import ChunkName, DiskFolder, make_root, name_of, parse_name
from mneme.cachetier.node.index import BLOCK_BYTES, ChunkIndex, Entry, blocks_of
from mneme.cachetier.policy.eviction import EvictionPolicy, make_policy
from mneme.primitives import Bounded

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
OnDiskChange = Callable[["DiskEntry", bool], None]  # a chunk that is there now (True) or not any more; under the lock

_HARMLESS = (Miss.BUSY, Miss.OTHER_TOKENS)  # say nothing against the file
_TOUCH_AGAIN_S = 60.0  # the time of a file is set no more often; it orders chunks after a restart
_MAX_HEADERS = 4096  # that are kept in memory, some 3 KB each: a chain that is asked for again is found without files
_MAX_STUCK = 8  # files that could not be removed, until nothing is evicted for others: the folder may be read-only
_MAX_FAILURES = 3  # of writes in a row, until writes pause
_PAUSE_S = 10.0
_MAX_SIBLINGS = 8  # whose headers are read to see whether they are superseded


class Put(Enum):
    """What became of a chunk that was to be kept; the values are the names of counters."""

    WRITTEN = "written"
    KEPT = "kept"  # it was there, or is being written
    NO_ROOM = "no_room"
    BLOCKED = "write_blocked"  # by files that are still to be removed
    FAILED = "write_failed"
    PAUSED = "write_paused"  # after failures


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """Sizes are of this moment; counters since the start."""

    num_chunks: int
    used_bytes: int  # files, those that are being written or could not be removed too
    capacity_bytes: int
    counters: dict[str, int]  # "hit", "miss_<Miss>", <Put>, "evicted", "superseded", "expired", "*_bytes", "scan_*"

    def as_mapping(self) -> dict[str, int]:
        sizes = {"chunks": self.num_chunks, "bytes": self.used_bytes, "capacity_bytes": self.capacity_bytes}
        return sizes | self.counters


class DiskRead:
    """An open chunk; a layer that cannot be had is a miss, and the tier hears of it."""

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
    """Counts what the folder holds and may hold: the index, what is being written, what is still to be removed.

    Bounds are in bytes, counted in whole blocks, and in files; `tenant_bytes` of them for one owner. No files and no
    locks: the tier calls it under its own. What is taken out of the index is *litter* until its file is gone: it
    counts, and nothing is written under its path.
    """

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


class DiskTier:
    """Raises `ConfigError` if the folder cannot be used, or if another tier uses it.

    `lock` is over `index` and all that is counted; whoever holds it may read the index.
    """

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
        self.policy, self.lock = policy, threading.Lock()
        self.on_change: OnDiskChange | None = None  # hears of chunks that come and go; it must not call the tier
        self._config, self._clock = config, clock
        self._files = files or FileOperations()
        self._folder = DiskFolder(config.folder, self._files)
        self._room = DiskRoom(
            policy,
            config.capacity_bytes,
            config.max_files,
            self._folder.path,
            tenant_bytes=tenant_bytes,
            on_change=self._changed,
        )
        self.index = self._room.index
        self._counters: Counter[str] = Counter()
        self._headers = Bounded[bytes, ChunkHeader](_MAX_HEADERS)  # last read or written, oldest use first
        self._used: dict[bytes, DiskEntry] = {}  # in memory: their files are to be touched
        self._num_failures, self._paused_until_s = 0, -math.inf  # of writes in a row
        with _no_collections():
            self._rebuild(wall_clock())
        self.sweep()

    def __contains__(self, key: bytes) -> bool:
        return key in self.index

    def put(self, chunk: Chunk, lineage: Lineage | None = None) -> Put:
        """Write a chunk unless it is there; shorter ones that it begins with, and that nothing descends from, go.

        Of many siblings these are found by the chunk's lineage.
        """
        outcome = self._put(chunk)
        if outcome is Put.WRITTEN:
            self._supersede(chunk.header, lineage)
            self._remove_litter()
        with self.lock:
            self._counters[outcome.value] += 1
        return outcome

    def open(self, wanted: Wanted) -> DiskRead | Miss:
        """A reader of the chunk's layers, to be closed; it stays readable whatever becomes of the chunk."""
        return self._read(wanted.key, wanted)

    def open_key(self, key: bytes) -> DiskRead | Miss:
        """A reader of the chunk, whatever tokens it holds."""
        return self._read(key, None)

    def header(self, key: bytes) -> ChunkHeader | Miss:
        """What the chunk is, from its file if it was not read of late; this is no use of it."""
        with self.lock:
            entry, header = self.index.get(key), self._headers.get(key)
            if header is not None:
                self._headers.move_to_end(key)
        if entry is None or header is not None:
            return header or Miss.ABSENT
        reader = self._opened(entry, None)
        if isinstance(reader, Miss):
            return reader
        reader.close()
        with self.lock:
            self._keep_header(reader.header)
        return reader.header

    def knows_header(self, key: bytes) -> bool:
        """Whether `header` reads no file."""
        return key in self._headers

    def use(self, key: bytes) -> str | None:
        """The path of a chunk that somebody is about to read: who finds a fault says so to `missed`."""
        with self.lock:
            entry = self.index.get(key)
            is_old = entry is not None and self._use(entry)
        if entry is None:
            return None
        if is_old:
            self._touch(entry)
        return self._folder.path(entry.name)

    def used(self, keys: Iterable[bytes]) -> None:
        """These were used where memory has them: what memory gives up must not be old here.

        Calls nothing of the disk, which may hang: `sweep` touches their files.
        """
        with self.lock:
            entries = [entry for key in keys if (entry := self.index.get(key)) is not None]
            self._used.update((entry.key, entry) for entry in entries if self._use(entry))

    def missed(self, key: bytes, miss: Miss) -> None:
        """A reader of the path found this."""
        with self.lock:
            entry = self.index.get(key)
            if entry is None:
                self._counters[f"miss_{miss.value}"] += 1
        if entry is not None:
            self._missed(entry, miss)

    def delete(self, keys: Iterable[bytes]) -> int:
        """How many of these were there. Who reads one reads on."""
        with self.lock:
            entries = [entry for key in keys if (entry := self.index.get(key)) is not None]
            for entry in entries:
                self._room.discard(entry)
        self._remove_litter()
        return len(entries)

    def sweep(self) -> None:
        """Try again to remove files that could not be, and touch those of `used`; to be called now and then."""
        self._remove_litter()
        with self.lock:
            used, self._used = self._used, {}
        for entry in used.values():
            self._touch(entry)

    def num_left(self, owner: bytes) -> int:
        """Files of a tenant that are to be gone and could not be removed: another start would find them."""
        with self.lock:
            return self._room.num_stuck(owner)

    def expire(self) -> int:
        """Remove what was not used for `ttl_s`, see `ChunkIndex.unused_since`."""
        if self._config.ttl_s is None:
            return 0
        with self.lock:
            expired = self.index.unused_since(self._clock() - self._config.ttl_s)
            for entry in expired:
                self._room.discard(entry)
            self._counters["expired"] += len(expired)
        self._remove_litter()
        return len(expired)

    def stats(self) -> DiskStats:
        with self.lock:
            return DiskStats(
                num_chunks=len(self.index),
                used_bytes=self._room.used_blocks * BLOCK_BYTES,
                capacity_bytes=self._config.capacity_bytes,
                counters=dict(self._counters) | {"evicted": self._room.num_evicted},
            )

    def close(self) -> None:
        """Release the folder; nothing may be called any more."""
        self._folder.close()

    def _read(self, key: bytes, wanted: Wanted | None) -> DiskRead | Miss:
        with self.lock:
            entry = self.index.get(key)
            if entry is None:
                self._counters[f"miss_{Miss.ABSENT.value}"] += 1
                return Miss.ABSENT
            is_old = self._use(entry)
        reader = self._opened(entry, wanted)
        if isinstance(reader, Miss):
            return reader
        if is_old:
            self._touch(entry)
        with self.lock:
            self._counters["hit"] += 1
        return DiskRead(reader, lambda miss: self._missed(entry, miss))

    def _opened(self, entry: DiskEntry, wanted: Wanted | None) -> ChunkReader | Miss:
        """A reader, to be closed; a fault is noted."""
        reader = open_chunk(self._files, self._folder.path(entry.name), wanted)
        if isinstance(reader, ChunkReader) and name_of(reader.header, entry.num_bytes) != entry.name:
            reader.close()
            reader = Miss.OTHER_KEY
        if isinstance(reader, Miss):
            self._missed(entry, reader)
        return reader

    def _keep_header(self, header: ChunkHeader) -> None:
        """Under the lock."""
        if header.key in self.index:
            self._headers[header.key] = header

    def _use(self, entry: DiskEntry) -> bool:
        """Under the lock: notes a use; whether the file is to be touched."""
        now_s = self._clock()
        self.index.use(entry, now_s)
        is_old = now_s - entry.touched_s > _TOUCH_AGAIN_S
        if is_old:
            entry.touched_s = now_s
        return is_old

    def _touch(self, entry: DiskEntry) -> None:
        with suppress(OSError):
            self._files.touch(self._folder.path(entry.name))

    def _missed(self, entry: DiskEntry, miss: Miss) -> None:
        """A chunk that is not there or not sound is forgotten, its file removed if it is ours."""
        with self.lock:
            self._counters[f"miss_{miss.value}"] += 1
            is_known = self.index.get(entry.key) is entry
            if is_known and miss not in _HARMLESS:
                self._room.discard(entry, is_file_ours=miss is not Miss.NOT_OURS)
        self._remove_litter()

    def _put(self, chunk: Chunk) -> Put:
        name = name_of(chunk.header, file_bytes(chunk.header))
        with self.lock:
            if self._clock() < self._paused_until_s:
                return Put.PAUSED
            if self._room.holds(name.key):
                if (entry := self.index.get(name.key)) is not None:
                    self.index.use(entry, self._clock())
                return Put.KEPT
            self.index.hold(name.parent)  # without it nobody finds the chunk: it must not go for it
            refusal = self._room.reserve(name)
        try:
            return refusal or self._write(chunk, name)
        finally:
            with self.lock:
                self.index.let_go(name.parent)
                if refusal is None:
                    self._room.release(name.key)

    def _write(self, chunk: Chunk, name: ChunkName) -> Put:
        self._remove_litter()
        with self.lock:
            if not self._room.is_within:  # something is not removed yet
                return Put.BLOCKED
            temporary = self._folder.temporary_path(name.key)
        path = self._folder.path(name)
        try:
            write_chunk(self._files, temporary, path, chunk)
        except OSError as error:
            self._failed(error, (temporary, path), blocks_of(name.num_bytes))
            return Put.FAILED
        with self.lock:
            self._num_failures = 0
            self._counters["written_bytes"] += name.num_bytes
            self._room.release(name.key)
            self.index.add(DiskEntry(name, self._clock()))
            self._keep_header(chunk.header)
        return Put.WRITTEN

    def _supersede(self, header: ChunkHeader, lineage: Lineage | None) -> None:
        """A tail that has grown replaces what it was; what is not found ages."""
        with self.lock:
            shorter = self.index.beginnings(header, lineage)
        for entry in shorter[:_MAX_SIBLINGS]:
            other = self.header(entry.key)
            if isinstance(other, Miss) or not is_beginning(other, header):
                continue
            with self.lock:
                if self.index.get(entry.key) is entry and not self.index.has_children(entry.key):
                    self._room.discard(entry)
                    self._counters["superseded"] += 1
                    self._counters["superseded_bytes"] += entry.num_bytes

    def _failed(self, error: OSError, paths: tuple[str, str], num_blocks: int) -> None:
        """Nothing of it may stay, and a disk that is full has less room than was thought."""
        logger.warning("disk tier: a chunk could not be written: %s", error)
        with self.lock:
            for path in paths:
                self._room.add_litter(path, num_blocks)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._room.free_up(num_blocks)
                self._counters["disk_full"] += 1
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                self._paused_until_s = self._clock() + _PAUSE_S
        self._remove_litter()

    def _remove_litter(self) -> None:
        """What cannot be removed stays litter."""
        with self.lock:
            paths = self._room.claim_litter()
        for path in paths:
            is_gone = True
            try:
                self._files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:
                is_gone = False
            with self.lock:
                self._room.swept(path, is_gone=is_gone)
                self._counters["unlink_failed"] += not is_gone

    def _rebuild(self, wall_s: float) -> None:
        """The index from names. Ages count from the newest file: no halt and no jump of a clock makes all old."""
        found = sorted(self._folder.scan(self._counters))
        newest_s = min(wall_s, found[-1][0]) if found else wall_s
        now_s = self._clock()
        entries: dict[bytes, DiskEntry] = {}
        for time_s, name in found:
            if name.key in entries:  # under two names, which a tier of ours does not make
                self._room.add_litter(self._folder.path(name), blocks_of(name.num_bytes))
            else:
                entries[name.key] = DiskEntry(name, now_s - max(0.0, newest_s - time_s))
        self.index.fill(entries.values())
        self._room.evict_over_quotas()
        self._room.evict()

    def _changed(self, entry: DiskEntry, is_added: bool) -> None:
        if not is_added:
            self._headers.pop(entry.key, None)
        if self.on_change is not None:
            self.on_change(entry, is_added)


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
    disk = config.disk if config.disk.ttl_s is not None else replace(config.disk, ttl_s=config.ttl_s)
    policy = make_policy(config.eviction, clock, disk.capacity_bytes // BLOCK_BYTES)
    return DiskTier(disk, policy, files=files, clock=clock, tenant_bytes=config.tenant_bytes)


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
