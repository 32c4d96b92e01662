"""Chunks from a node's disk up into its memory: when another node asks, and ahead of requests that wait for them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import numpy as np

from mneme.cachetier.chain_search import Located
from mneme.cachetier.chunk import ChunkHeader, U8Array
from mneme.cachetier.chunk_index import BLOCK_BYTES
from mneme.cachetier.chunk_memory import Held
from mneme.cachetier.disk_interface import DiskRead
from mneme.cachetier.misses import Miss
from mneme.cachetier.node_tiers import NodeTiers


class Promoter:
    """Reads outside of the node's lock."""

    def __init__(self, tiers: NodeTiers) -> None:
        self._tiers = tiers
        self._num_loading = 0

    @property
    def is_loading(self) -> bool:
        return self._num_loading > 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Saving waits while this lasts."""
        with self._tiers.lock:
            self._num_loading += 1
        try:
            yield
        finally:
            with self._tiers.lock:
                self._num_loading -= 1

    def fetch(self, key: bytes) -> Located | None:
        """A chunk with its bytes in memory; it is kept there if there is room. None: it cannot be had."""
        found = self._in_host(key)
        if found is not None or self._tiers.disk is None:
            return found
        with self.loading():
            reader = self._tiers.disk.open_key(key)
            if isinstance(reader, Miss):
                return None
            with reader:
                found = self._load(reader, is_reserved=self._reserve(reader.header, None))
        self._tiers.settle()
        return found

    def prefetch_next(self) -> bool:
        """Bring up the next chunk that a waiting request wants; False if there is none (AttentionStore 3.3.1)."""
        tiers = self._tiers
        wanted = tiers.waiting.next_wanted(tiers.host.max_blocks * BLOCK_BYTES)
        if wanted is None or tiers.disk is None:
            return False
        request_id, key = wanted
        if key in tiers.host.index or self._prefetch(key, tiers.waiting.exempt()):
            tiers.waiting.brought(request_id, key)
        else:
            tiers.waiting.give_up(request_id)
        return True

    def _prefetch(self, key: bytes, exempt: Container[bytes]) -> bool:
        assert self._tiers.disk is not None
        with self.loading():
            reader = self._tiers.disk.open_key(key)
            if isinstance(reader, Miss):
                return False
            with reader:
                if not self._reserve(reader.header, exempt):
                    self._count("prefetch_no_room")
                    return False
                is_loaded = self._load(reader, is_reserved=True) is not None
        self._tiers.settle()
        self._count("prefetched" if is_loaded else "prefetch_failed")
        return is_loaded

    def _in_host(self, key: bytes) -> Located | None:
        with self._tiers.lock:
            entry = self._tiers.host.index.get(key)
            if entry is None:
                return None
            self._tiers.host.index.use(entry, self._tiers.clock())
            return Located(entry.header, entry.num_tokens, "host", entry.held, None)

    def _reserve(self, header: ChunkHeader, spared: Container[bytes] | None) -> bool:
        with self._tiers.lock:
            return self._tiers.host.reserve(header, spared)

    def _load(self, reader: DiskRead, *, is_reserved: bool) -> Located | None:
        header, held = reader.header, None
        try:
            held = self._held(reader)
        finally:
            with self._tiers.lock:
                if is_reserved and held is None:
                    self._tiers.host.cancel(header.key)
                elif is_reserved:
                    self._tiers.arrive(header, held, self._tiers.waiting.exempt())
        if held is None:
            self._count("promote_failed")
            return None
        self._count("promoted" if is_reserved else "promote_no_room")
        return Located(header, header.num_tokens, "host", held, None)

    def _held(self, reader: DiskRead) -> Held | None:
        header = reader.header
        layers: list[U8Array] = [np.empty(header.layer_bytes, np.uint8) for _ in range(header.layout.num_layers)]
        if reader.read(0, layers) is not None:
            return None
        try:
            return self._tiers.memory.keep(layers)
        except MemoryError:
            self._count("memory_refused")
            return None

    def _count(self, name: str) -> None:
        with self._tiers.lock:
            self._tiers.host.counters[name] += 1
