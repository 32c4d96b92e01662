"""Chunks from a node's disk up into its memory: when another node asks, and ahead of requests that wait for them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager

import numpy as np

from mneme.cachetier.chunk.header import ChunkHeader, U8Array
from mneme.cachetier.names import Miss
from mneme.cachetier.node.disk import DiskRead, DiskTier
from mneme.cachetier.node.index import BLOCK_BYTES
from mneme.cachetier.node.memory import Held
from mneme.cachetier.node.node_tiers import NodeTiers
from mneme.cachetier.node.search import Located

LOADS_AGAIN_S = 0.1  # by which another process has to say again that it reads


class Promoter:
    """Reads outside of the node's lock."""

    def __init__(self, tiers: NodeTiers) -> None:
        self._tiers = tiers
        self._num_loading = 0
        self._others_until_s = -math.inf

    @property
    def is_loading(self) -> bool:
        return self._num_loading > 0 or self._tiers.clock() < self._others_until_s

    def others_load(self) -> None:
        """Another process reads the node's files; it says so again while that lasts."""
        self._others_until_s = self._tiers.clock() + LOADS_AGAIN_S

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let saves wait while this lasts."""
        with self._tiers.lock:
            self._num_loading += 1
        try:
            yield
        finally:
            with self._tiers.lock:
                self._num_loading -= 1

    def fetch(self, key: bytes) -> Located | None:
        """A chunk with its bytes in memory, kept there if there is room. None: it cannot be had."""
        found, disk = self._in_host(key), self._tiers.disk
        if disk is None or found is not None:
            return found
        return self._load(disk, key, None)[1]

    def prefetch_next(self) -> bool:
        """Bring up the next chunk that a waiting request wants (AttentionStore 3.3.1).

        False if there is none, or no room beside what the requests before it want: it is tried again later.
        """
        tiers = self._tiers
        wanted = tiers.waiting.next_wanted(tiers.host.max_blocks * BLOCK_BYTES)
        if wanted is None or tiers.disk is None:
            return False
        request_id, key = wanted
        has_room, is_here = True, False
        try:
            is_here = key in tiers.host
            if not is_here:
                has_room, found = self._load(tiers.disk, key, tiers.waiting.exempt())
                is_here = found is not None
                self._count("prefetched" if is_here else "prefetch_failed" if has_room else "prefetch_no_room")
        finally:  # what raises must not be the next again: others wait behind it
            if is_here:
                tiers.waiting.brought(request_id, key)
            elif has_room:
                tiers.waiting.give_up(request_id)
        return has_room

    def _load(self, disk: DiskTier, key: bytes, spared: Container[bytes] | None) -> tuple[bool, Located | None]:
        """Return whether there was room in memory, and the chunk.

        With `spared`, none of those goes for it, and nothing is read without room; else it is read in any case.
        """
        with self.loading():
            reader = disk.open(key)
            if isinstance(reader, Miss):
                return True, None
            with reader, self._tiers.index.holding(reader.header.parent):
                has_room = self._reserve(disk, reader.header, spared)
                found = self._read(reader, is_reserved=has_room) if has_room or spared is None else None
        self._tiers.drop_gone()
        return has_room, found

    def _in_host(self, key: bytes) -> Located | None:
        with self._tiers.lock:
            entry = self._tiers.host.get(key)
            if entry is None or entry.header is None:
                return None
            self._tiers.index.use(entry)
            return Located(entry.header, entry.num_tokens, "host", entry.held, None)

    def _reserve(self, disk: DiskTier, header: ChunkHeader, spared: Container[bytes] | None) -> bool:
        """Reserve room in memory, but not for what was deleted since it was opened."""
        with self._tiers.lock:
            is_reserved = header.key in disk and self._tiers.host.make_room(header, spared)
        self._tiers.drop_gone()  # the bytes of what goes for it are free before its own come
        return is_reserved

    def _read(self, reader: DiskRead, *, is_reserved: bool) -> Located | None:
        header, held = reader.header, None
        try:
            held = self._held(reader)
        finally:
            with self._tiers.lock:
                if is_reserved and held is None:
                    self._tiers.host.cancel(header.key)
                elif is_reserved:
                    self._tiers.arrive(header, held)
        if held is None:
            self._count("promote_failed")
            return None
        self._count("promoted" if is_reserved else "promote_no_room")
        return Located(header, header.num_tokens, "host", held, None)

    def _held(self, reader: DiskRead) -> Held | None:
        header = reader.header
        try:
            layers: list[U8Array] = [np.empty(header.layer_bytes, np.uint8) for _ in range(header.layout.num_layers)]
            return None if reader.read(0, layers) is not None else self._tiers.memory.keep(layers)
        except MemoryError:
            self._count("memory_refused")
            return None

    def _count(self, name: str) -> None:
        with self._tiers.lock:
            self._tiers.host.counters[name] += 1
