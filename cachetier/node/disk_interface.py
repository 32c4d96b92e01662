"""What a disk tier answers and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from mneme.cachetier.chunk.file import ChunkReader
from mneme.cachetier.chunk.header import U8Array
from mneme.cachetier.chunk.misses import Miss


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
    """Of a moment; counters since the start."""

    num_chunks: int
    used_bytes: int  # files, those that are being written or could not be removed too
    capacity_bytes: int
    counters: dict[str, int]  # "hit", "miss_<Miss>", <Put>, "evicted", "superseded", "expired", "*_bytes", "scan_*"


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
