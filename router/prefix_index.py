"""Remembers which replica holds, or was sent, which prefix: a bounded map from block hash to replicas.

It is a hint, never a promise: a replica may have evicted what the index remembers, and then computes it
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence


class PrefixIndex:
    """Block hash -> replicas, least recently used blocks forgotten first."""

    def __init__(self, max_blocks: int = 200_000) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[int, frozenset[str]] = OrderedDict()
        self._sets: dict[frozenset[str], frozenset[str]] = {}  # one object for blocks held alike: half of the memory

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, hashes: Sequence[int], replica: str) -> None:
        """`replica` now computes this chain of blocks."""
        for block_hash in reversed(hashes):  # the root is the most recent, so a chain loses its tail first
            holders = self._holders.get(block_hash, frozenset())
            if replica not in holders:
                self._set(block_hash, holders | {replica})
            self._holders.move_to_end(block_hash)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def matched_blocks(self, hashes: Sequence[int]) -> dict[str, int]:
        """The number of leading blocks each replica holds; replicas that hold none are absent."""
        matched: dict[str, int] = {}
        for depth, block_hash in enumerate(hashes):
            # A holder counts only while its chain is unbroken; index entries may be gone in the middle.
            holders = [r for r in self._holders.get(block_hash, ()) if matched.get(r, 0) == depth]
            if not holders:
                break
            for replica in holders:
                matched[replica] = depth + 1
        return matched

    def forget(self, replica: str) -> None:
        """Drop every trace of a replica that died or restarted."""
        for block_hash, holders in list(self._holders.items()):
            if replica in holders:
                self._set(block_hash, holders - {replica})

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        alive = frozenset(replicas)
        self._sets.clear()
        for block_hash, holders in list(self._holders.items()):
            if not holders <= alive:
                self._set(block_hash, holders & alive)

    def _set(self, block_hash: int, holders: frozenset[str]) -> None:
        if holders:
            self._holders[block_hash] = self._sets.setdefault(holders, holders)
        else:
            del self._holders[block_hash]
