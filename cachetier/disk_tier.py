"""Chunks on a node's disk, under a bound of bytes and one of files.

Every fault of the disk is a miss or a write that is skipped, and a counter: nothing here raises for one, except that a
folder which cannot be used at all is refused at the start. Calls may come from several threads; the lock is never held
during a call to the file system.

Bytes are counted in whole blocks, before a file is written and until it is gone: what could not be removed counts on,
and its removal is tried again. So the bound holds at any time, in whatever order calls fail. Temporary files of a crash
are removed, and what is too much is evicted, when the tier starts.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from mneme.cachetier.chunk import Chunk, ChunkHeader, Wanted
from mneme.cachetier.chunk_file import file_bytes, open_chunk, write_chunk
from mneme.cachetier.disk_folder import DiskFolder
from mneme.cachetier.disk_index import BLOCK_BYTES, Entry, blocks_of
from mneme.cachetier.disk_interface import DiskRead, DiskStats, DiskTierConfig, Put
from mneme.cachetier.disk_names import ChunkName, name_of
from mneme.cachetier.disk_room import DiskRoom
from mneme.cachetier.eviction import EvictionPolicy
from mneme.cachetier.file_operations import FileOperations
from mneme.cachetier.keys import Lineage, TokenIds
from mneme.cachetier.misses import Miss

Clock = Callable[[], float]

_logger = logging.getLogger(__name__)

_HARMLESS = (Miss.BUSY, Miss.OTHER_TOKENS)  # say nothing against the file
_TOUCH_AGAIN_S = 60.0  # the time of a file is set no more often; it orders chunks after a restart
_MAX_FAILURES = 3  # of writes in a row, until writes pause
_PAUSE_S = 10.0


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
    ) -> None:
        """`policy` ranks blocks of 4 KB; `clock` must not jump, `wall_clock` may."""
        self._config, self._clock = config, clock
        self._files = files or FileOperations()
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._num_failures, self._paused_until_s = 0, -math.inf  # of writes in a row
        self._folder = DiskFolder(config.folder, self._files)
        self._room = DiskRoom(policy, config.capacity_bytes, config.max_files, self._folder.path)
        self._rebuild(wall_clock())

    def __contains__(self, key: bytes) -> bool:
        return key in self._room.index

    def put(self, chunk: Chunk, lineage: Lineage) -> Put:
        """Write a chunk unless it is there; shorter ones that it begins with, and that nothing descends from, go."""
        outcome = self._put(chunk, lineage)
        with self._lock:
            self._counters[outcome.value] += 1
        return outcome

    def open(self, wanted: Wanted) -> DiskRead | Miss:
        """A reader of the chunk's layers, to be closed; it stays readable whatever becomes of the chunk."""
        with self._lock:
            entry = self._room.index.get(wanted.key)
            if entry is None:
                return self._counted(Miss.ABSENT)
            now_s = self._clock()
            self._room.index.use(entry, now_s)
            is_old = now_s - entry.touched_s > _TOUCH_AGAIN_S
            if is_old:
                entry.touched_s = now_s
        path = self._folder.path(entry.name)
        reader = open_chunk(self._files, path, wanted)
        if isinstance(reader, Miss):
            self._missed(entry, reader)
            return reader
        if is_old:
            self._touch(path)
        with self._lock:
            self._counters["hit"] += 1
        return DiskRead(reader, lambda miss: self._missed(entry, miss))

    def longest(self, lineage: Lineage, parent: bytes, token_ids: TokenIds) -> tuple[bytes, int] | None:
        """The longest chunk behind `parent` that holds a beginning of these tokens: its key, and how many it holds."""
        keys = lineage.keys_of_prefixes(parent, token_ids)
        with self._lock:
            return next(((keys[i], i + 1) for i in reversed(range(len(keys))) if keys[i] in self._room.index), None)

    def children(self, parent: bytes) -> frozenset[bytes]:
        """Keys of the chunks behind a key or a root; their headers say which tokens they hold."""
        with self._lock:
            return self._room.index.children(parent)

    def delete(self, keys: Iterable[bytes]) -> int:
        """How many of these were there. Who reads one reads on."""
        with self._lock:
            entries = [entry for key in keys if (entry := self._room.index.get(key)) is not None]
            for entry in entries:
                self._room.discard(entry)
        self._sweep()
        return len(entries)

    def delete_descendants(self, key: bytes) -> int:
        """Of a chunk or of a lineage's root."""
        with self._lock:
            keys = self._room.index.descendants(key)
        return self.delete(keys)

    def delete_owned(self, owner: bytes) -> int:
        """All chunks of a tenant; looks at every chunk."""
        with self._lock:
            keys = [entry.name.key for entry in self._room.index if entry.name.owner == owner]
        return self.delete(keys)

    def expire(self) -> int:
        """Remove what was not used for `ttl_s`; costs nothing but for what goes."""
        if self._config.ttl_s is None:
            return 0
        oldest_s, expired = self._clock() - self._config.ttl_s, []
        with self._lock:
            for entry in self._room.index:
                if entry.last_used_s >= oldest_s:
                    break
                expired.append(entry)
            for entry in expired:
                self._room.discard(entry)
            self._counters["expired"] += len(expired)
        self._sweep()
        return len(expired)

    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(
                num_chunks=len(self._room.index),
                used_bytes=self._room.used_blocks * BLOCK_BYTES,
                capacity_bytes=self._config.capacity_bytes,
                counters=dict(self._counters) | {"evicted": self._room.num_evicted},
            )

    def close(self) -> None:
        """Let the folder go; nothing may be called any more."""
        self._folder.close()

    def _put(self, chunk: Chunk, lineage: Lineage) -> Put:
        header = chunk.header
        name = name_of(header, file_bytes(header))
        with self._lock:
            if self._clock() < self._paused_until_s:
                return Put.PAUSED
            if self._room.holds(name.key):
                if (entry := self._room.index.get(name.key)) is not None:
                    self._room.index.use(entry, self._clock())
                return Put.KEPT
            if not self._room.reserve(name, blocks_of(name.num_bytes)):
                return Put.NO_ROOM
        try:
            return self._write(chunk, name, lineage)
        finally:
            with self._lock:
                self._room.release(name.key)

    def _write(self, chunk: Chunk, name: ChunkName, lineage: Lineage) -> Put:
        self._sweep()
        with self._lock:
            if not self._room.is_within:  # something could not be removed
                return Put.NO_ROOM
            temporary = self._folder.temporary_path(name.key)
        path = self._folder.path(name)
        try:
            write_chunk(self._files, temporary, path, chunk)
        except OSError as error:
            self._failed(error, (temporary, path), blocks_of(name.num_bytes))
            return Put.FAILED
        with self._lock:
            self._num_failures = 0
            self._counters["written_bytes"] += name.num_bytes
            self._room.release(name.key)
            self._room.index.add(Entry(name, self._clock()))
            self._supersede(lineage, chunk.header)
        self._sweep()
        return Put.WRITTEN

    def _supersede(self, lineage: Lineage, header: ChunkHeader) -> None:
        """A tail that has grown replaces what it was."""
        index, siblings = self._room.index, self._room.index.children(header.parent)
        if len(siblings) < 2:
            return
        for key in lineage.keys_of_prefixes(header.parent, header.token_ids[:-1]):
            if key in siblings and not index.children(key) and (entry := index.get(key)) is not None:
                self._room.discard(entry)
                self._counters["superseded"] += 1
                self._counters["superseded_bytes"] += entry.name.num_bytes

    def _failed(self, error: OSError, paths: tuple[str, str], num_blocks: int) -> None:
        """A write: nothing of it may stay, and a disk that is full has less room than was thought."""
        _logger.warning("disk tier: a chunk could not be written: %s", error)
        with self._lock:
            for path in paths:
                self._room.add_litter(path, num_blocks)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._room.free_up(num_blocks)
                self._counters["disk_full"] += 1
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                self._paused_until_s = self._clock() + _PAUSE_S
        self._sweep()

    def _missed(self, entry: Entry, miss: Miss) -> None:
        """A chunk that is not there or not sound is forgotten, its file removed if it is ours."""
        with self._lock:
            self._counted(miss)
            is_known = self._room.index.get(entry.name.key) is entry
            if is_known and miss not in _HARMLESS:
                self._room.discard(entry, is_file_ours=miss is not Miss.NOT_OURS)
        self._sweep()

    def _counted(self, miss: Miss) -> Miss:
        self._counters[f"miss_{miss.value}"] += 1
        return miss

    def _sweep(self) -> None:
        """Remove litter; what cannot be removed stays litter."""
        with self._lock:
            paths = self._room.claim_litter()
        for path in paths:
            is_gone = True
            try:
                self._files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError:
                is_gone = False
            with self._lock:
                self._room.swept(path, is_gone=is_gone)
                self._counters["unlink_failed"] += not is_gone

    def _touch(self, path: str) -> None:
        with suppress(OSError):
            self._files.touch(path)

    def _rebuild(self, wall_s: float) -> None:
        """The index from names. Ages count from the newest file: no halt and no jump of a clock makes all old."""
        found = sorted(self._folder.scan(self._counters))
        newest_s = min(wall_s, found[-1][0]) if found else wall_s
        now_s = self._clock()
        for time_s, name in found:
            if name.key in self._room.index:  # under two names, which a tier of ours does not make
                self._room.add_litter(self._folder.path(name), blocks_of(name.num_bytes))
            else:
                self._room.index.add(Entry(name, now_s - max(0.0, newest_s - time_s)))
        self._room.evict()
        self._sweep()
