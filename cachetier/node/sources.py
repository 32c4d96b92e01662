"""Sources of chunks, from a node's memory and its disk, and the store that gives them within one process.

The checksum is computed of the bytes that `read` gives, each time. A fault is told to whoever keeps the chunk.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from mneme.cachetier.chunk.file import ChunkReader, open_chunk
from mneme.cachetier.chunk.header import Chunk, ChunkHeader, U8Array, checksum, differs
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.names import Edge, HostPut, Miss
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.disk import make_disk_tier
from mneme.cachetier.node.memory import ProcessMemory
from mneme.cachetier.node.node_admin import NodeAdmin
from mneme.cachetier.node.search import Located
from mneme.cachetier.store import ChainQuery, ChunkSource

OnMiss = Callable[[Miss], None]


class HostSource:
    """`layer` gives the bytes of one layer in a bounded time; they are let go at `close`."""

    def __init__(
        self,
        header: ChunkHeader,
        num_usable: int,
        layer: Callable[[int], U8Array | Miss],
        on_miss: OnMiss,
        edge: Edge = "host",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.header, self.num_usable, self.edge = header, num_usable, edge
        self._layer: Callable[[int], U8Array | Miss] | None = layer
        self._on_miss, self._on_close = on_miss, on_close

    def read(self, layer: int) -> U8Array | Miss:
        """See `ChunkSource.read`."""
        give = self._layer
        found = Miss.ABSENT if give is None else give(layer)
        if not isinstance(found, Miss):
            found = _sound(found, self.header, layer)
        if isinstance(found, Miss) and give is not None:
            self._on_miss(found)
        return found

    def close(self) -> None:
        self._layer = None
        self._on_close()


class DiskSource:
    """Opens the file at the first `read`; it must still be the chunk that was located.

    `loading` lasts while it reads.
    """

    def __init__(
        self,
        header: ChunkHeader,
        num_usable: int,
        path: str,
        on_miss: OnMiss,
        *,
        files: FileOperations | None = None,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
        edge: Edge = "disk",
    ) -> None:
        self.header, self.num_usable, self.edge = header, num_usable, edge
        self._path, self._on_miss, self._loading = path, on_miss, loading
        self._files = files or FileOperations()
        self._reader: ChunkReader | Miss | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def read(self, layer: int) -> U8Array | Miss:
        """See `ChunkSource.read`; after a miss all are that miss."""
        with self._lock, self._loading():
            if self._closed.is_set():
                return Miss.ABSENT
            is_known = isinstance(self._reader, Miss)
            found = self._read(layer)
            if isinstance(found, Miss):
                self._close_file()
                self._reader = found
        if self._closed.is_set():
            self.close()
        if isinstance(found, Miss) and not is_known:
            self._on_miss(found)
        return found

    def close(self) -> None:
        """Never waits for a read: that one then closes the file, as its descriptor might be another's meanwhile."""
        self._closed.set()
        if self._lock.acquire(blocking=False):
            try:
                self._close_file()
            finally:
                self._lock.release()

    def _read(self, layer: int) -> U8Array | Miss:
        if self._reader is None:
            self._reader = self._open()
        if isinstance(self._reader, Miss):
            return self._reader
        try:
            buffer = np.empty(self.header.layer_bytes, np.uint8)
            miss = self._reader.read(layer, [buffer])
        except MemoryError:
            return Miss.BUSY
        if miss is not None:
            return miss
        buffer.flags.writeable = False
        return buffer

    def _open(self) -> ChunkReader | Miss:
        reader = open_chunk(self._files, self._path)
        if isinstance(reader, ChunkReader):
            miss = differs(reader.header, self.header)
            if miss is not None:
                reader.close()
                return miss
        return reader

    def _close_file(self) -> None:
        if isinstance(self._reader, ChunkReader):
            self._reader.close()


def _sound(layer: U8Array, header: ChunkHeader, number: int) -> U8Array | Miss:
    """The bytes, read-only, if they are what the header says."""
    if layer.dtype != np.uint8 or layer.shape != (header.layer_bytes,):
        return Miss.SHORT
    view = layer.view()
    view.flags.writeable = False
    return view if checksum(view.data) == header.checksums[number] else Miss.BAD_CHECKSUM


DEFAULT_HOST_BYTES = 1 << 30  # where `cache.host_bytes` is not given, at least


class ProcessChunkStore:
    """A `ChunkStore` over a node cache of its own. Raises `ConfigError` if the disk's folder cannot be used."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        memory: ProcessMemory | None = None,
        files: FileOperations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory or ProcessMemory()
        self._files = files or FileOperations()
        host_bytes = DEFAULT_HOST_BYTES if config.host_bytes is None else config.host_bytes
        disk = make_disk_tier(config, files=self._files, clock=clock)
        self.node = NodeCache(config, self._memory, host_bytes, disk, clock=clock)
        self.admin = NodeAdmin(self.node, "local", clock)
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()

    def locate(self, query: ChainQuery, timeout_s: float) -> list[ChunkSource]:
        """See `ChunkStore.locate`."""
        sources = [self._source(each) for each in self.node.locate(query, timeout_s)]
        self._count("located", len(sources))
        return sources

    def forget(self, request_ids: Collection[str]) -> None:
        self.node.forget(request_ids)

    def known(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """No guess here: the node is in this process."""
        return frozenset(key for key in keys if key in self.node)

    def put(self, chunk: Chunk, lineage: Lineage) -> bool:
        """See `ChunkStore.put`; waits up to `ROOM_WAIT_S` for a disk that is behind."""
        outcome = self.node.put(chunk.header, chunk.layers, lineage)
        self._count(f"put_{outcome.value}")
        return outcome is not HostPut.REFUSED

    def stats(self) -> dict[str, int]:
        """See `ChunkStore.stats`; what the node counts is in `node.stats()`."""
        with self._lock:
            return dict(self._counters)

    def flush(self, timeout_s: float) -> bool:
        """See `ChunkStore.flush`."""
        return True

    def close(self) -> None:
        self.node.close()

    def _source(self, located: Located) -> ChunkSource:
        header, tier = located.header, located.tier

        def on_miss(miss: Miss) -> None:
            self._count(f"{tier}_miss_{miss.value}")
            self.node.missed(header.key, tier, miss)

        if located.path is not None:
            return DiskSource(
                header, located.num_usable, located.path, on_miss, files=self._files, loading=self.node.loading
            )

        def layer(number: int) -> U8Array | Miss:
            layers = self._memory.layers(located.held)
            return layers if isinstance(layers, Miss) else layers[number]

        return HostSource(header, located.num_usable, layer, on_miss)

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counters[name] += count
