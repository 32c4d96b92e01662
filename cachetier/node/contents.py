"""What a node's tiers hold, for whoever manages them: looking is no use, and nobody is noted as waiting."""

from __future__ import annotations

from dataclasses import replace

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.misses import Miss
from mneme.cachetier.node.search import ChainSearch, Located
from mneme.cachetier.node.tiers import NodeTiers
from mneme.cachetier.store import ChainQuery, TierName


class NodeContents:
    """Thread-safe; a call may wait for a header of a file."""

    def __init__(self, tiers: NodeTiers, search: ChainSearch) -> None:
        self._tiers, self._search = tiers, search

    def search(self, query: ChainQuery, deadline_s: float) -> list[Located]:
        """As `NodeCache.locate` finds it; `deadline_s` is of the node's clock."""
        return self._search.locate(replace(query, request_id=""), deadline_s)

    def places(self, key: bytes) -> dict[TierName, int]:
        """Bytes by the tier that has the chunk."""
        found: dict[TierName, int] = {}
        with self._tiers.lock:
            entry = self._tiers.host.index.get(key)
            if entry is not None:
                found["host"] = entry.num_bytes
        on_disk = None if self._tiers.disk is None else self._tiers.disk.num_bytes(key)
        return found if on_disk is None else found | {"disk": on_disk}

    def children(self, parent: bytes) -> frozenset[bytes]:
        """Of a chunk or of a lineage's root, in all tiers."""
        with self._tiers.lock:
            found = self._tiers.host.index.children(parent)
        return found if self._tiers.disk is None else found | self._tiers.disk.children(parent)

    def header(self, key: bytes) -> ChunkHeader | None:
        """Of a chunk, from its file if it must be."""
        with self._tiers.lock:
            entry = self._tiers.host.index.get(key)
        if entry is not None:
            return entry.header
        header = Miss.ABSENT if self._tiers.disk is None else self._tiers.disk.header(key)
        return None if isinstance(header, Miss) else header

    def num_left(self, owner: bytes) -> int:
        """Of a tenant's chunks that were deleted: files that could not be removed yet."""
        return 0 if self._tiers.disk is None else self._tiers.disk.num_left(owner)

    def owned(self, owner: bytes) -> list[bytes]:
        """Keys of all chunks of a tenant, each once; looks at every chunk."""
        with self._tiers.lock:
            keys = self._tiers.host.keys_of(owner)
        if self._tiers.disk is not None:
            keys += self._tiers.disk.keys_of(owner)
        return list(dict.fromkeys(keys))
