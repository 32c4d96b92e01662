"""What a disk tier is configured by, answers and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from mneme.cachetier.chunk import U8Array
from mneme.cachetier.chunk_file import ChunkReader
from mneme.cachetier.misses import Miss
from mneme.config import check_range
from mneme.errors import ConfigError


class Put(Enum):
    """What became of a chunk that was to be kept; the values are the names of counters."""

    WRITTEN = "written"
    KEPT = "kept"  # it was there, or is being written
    NO_ROOM = "no_room"
    BLOCKED = "write_blocked"  # by files that are still to be removed
    FAILED = "write_failed"
    PAUSED = "write_paused"  # after failures


def check_ttl(name: str, ttl_s: float) -> None:
    """Raises `ConfigError`. 0 is refused: chunks would be served until the first look at their age."""
    check_range(name, ttl_s, 0, 1e9)
    if not ttl_s:
        raise ConfigError(f"{name}: must be over 0 (got {ttl_s})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig:
    """Key `cache.disk`."""

    # Of each node of a cluster. `%n` becomes the node's name: that of `ray start --node-name`, by default its address,
    # which a pod that comes back does not keep.
    folder: str
    capacity_bytes: int
    max_files: int = 1_000_000
    ttl_s: float | None = None  # since the last use; None: until room is needed

    def __post_init__(self) -> None:
        if not self.folder.strip():
            raise ConfigError("cache.disk.folder: must not be empty")
        check_range("capacity_bytes", self.capacity_bytes, 0, 2**60)
        check_range("max_files", self.max_files, 0, 2**32)
        if self.ttl_s is not None:
            check_ttl("cache.disk.ttl_s", self.ttl_s)


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
