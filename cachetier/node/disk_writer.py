"""Chunks into a disk tier's folder, and what a write replaces. A disk that fails again and again is left alone."""

from __future__ import annotations

import errno
import logging
import math

from mneme.cachetier.chunk.file import file_bytes, write_chunk
from mneme.cachetier.chunk.header import Chunk, ChunkHeader, is_beginning
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.node.disk_contents import DiskContents
from mneme.cachetier.node.disk_interface import Put
from mneme.cachetier.node.disk_names import ChunkName, name_of
from mneme.cachetier.node.disk_room import DiskEntry
from mneme.cachetier.node.index import blocks_of

_logger = logging.getLogger(__name__)

_MAX_FAILURES = 3  # of writes in a row, until writes pause
_PAUSE_S = 10.0
_MAX_SIBLINGS = 8  # whose headers are read to see whether they are superseded


class DiskWriter:
    """Calls may come from several threads."""

    def __init__(self, contents: DiskContents) -> None:
        self._contents, self._room = contents, contents.room
        self._num_failures, self._paused_until_s = 0, -math.inf  # of writes in a row

    def put(self, chunk: Chunk, lineage: Lineage | None) -> Put:
        """See `DiskTier.put`."""
        outcome = self._put(chunk)
        if outcome is Put.WRITTEN:
            self._supersede(chunk.header, lineage)
            self._contents.sweep()
        with self._contents.lock:
            self._contents.counters[outcome.value] += 1
        return outcome

    def _put(self, chunk: Chunk) -> Put:
        contents, name = self._contents, name_of(chunk.header, file_bytes(chunk.header))
        with contents.lock:
            if contents.clock() < self._paused_until_s:
                return Put.PAUSED
            if self._room.holds(name.key):
                if (entry := self._room.index.get(name.key)) is not None:
                    self._room.index.use(entry, contents.clock())
                return Put.KEPT
            self._room.index.hold(name.parent)  # without it nobody finds the chunk: it must not go for it
            refusal = self._room.reserve(name)
        try:
            return refusal or self._write(chunk, name)
        finally:
            with contents.lock:
                self._room.index.let_go(name.parent)
                if refusal is None:
                    self._room.release(name.key)

    def _write(self, chunk: Chunk, name: ChunkName) -> Put:
        contents = self._contents
        contents.sweep()
        with contents.lock:
            if not self._room.is_within:  # something is not removed yet
                return Put.BLOCKED
            temporary = contents.folder.temporary_path(name.key)
        path = contents.folder.path(name)
        try:
            write_chunk(contents.files, temporary, path, chunk)
        except OSError as error:
            self._failed(error, (temporary, path), blocks_of(name.num_bytes))
            return Put.FAILED
        with contents.lock:
            self._num_failures = 0
            contents.counters["written_bytes"] += name.num_bytes
            self._room.release(name.key)
            self._room.index.add(DiskEntry(name, contents.clock()))
            contents.keep_header(chunk.header)
        return Put.WRITTEN

    def _supersede(self, header: ChunkHeader, lineage: Lineage | None) -> None:
        """A tail that has grown replaces what it was; what is not found ages."""
        contents, index = self._contents, self._room.index
        with contents.lock:
            shorter = index.beginnings(header, lineage)
        for entry in shorter[:_MAX_SIBLINGS]:
            other = contents.header(entry.key)
            if isinstance(other, Miss) or not is_beginning(other, header):
                continue
            with contents.lock:
                if index.get(entry.key) is entry and not index.has_children(entry.key):
                    self._room.discard(entry)
                    contents.counters["superseded"] += 1
                    contents.counters["superseded_bytes"] += entry.num_bytes

    def _failed(self, error: OSError, paths: tuple[str, str], num_blocks: int) -> None:
        """Nothing of it may stay, and a disk that is full has less room than was thought."""
        contents = self._contents
        _logger.warning("disk tier: a chunk could not be written: %s", error)
        with contents.lock:
            for path in paths:
                self._room.add_litter(path, num_blocks)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._room.free_up(num_blocks)
                contents.counters["disk_full"] += 1
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                self._paused_until_s = contents.clock() + _PAUSE_S
        contents.sweep()
