"""Chunk keys and the places that they are at, in about 150 bytes a key.

A place is one integer: [holder, tiers, bytes]. A key that is at one place carries that integer alone, and equal
integers are one object: full chunks of one holder are alike. Keys are spread over many small tables, so that none takes
long to grow or to go through.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from mneme.cachetier.store import TierName

NUM_BUCKETS = 256  # by the key's last byte

_SIZE_BITS, _TIER_BITS, _HOLDER_BITS = 38, 2, 20  # 60 in all: two digits of a Python integer
_HOLDER_SHIFT = _SIZE_BITS + _TIER_BITS
_MAX_SIZE = (1 << _SIZE_BITS) - 1
_TIER_MASK = {"host": 1 << _SIZE_BITS, "disk": 2 << _SIZE_BITS}
_ANY_TIER = _TIER_MASK["host"] | _TIER_MASK["disk"]
_MAX_SHARED = 1 << 16

MAX_HOLDERS = 1 << _HOLDER_BITS

Words = int | tuple[int, ...]


class Place(NamedTuple):
    """Where a chunk is said to be."""

    node: str
    tier: TierName  # the faster one
    num_bytes: int


class PlaceTable:
    """No lock: the directory's."""

    def __init__(self) -> None:
        self._buckets: list[dict[bytes, Words]] = [{} for _ in range(NUM_BUCKETS)]
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def get(self, key: bytes) -> tuple[int, ...]:
        words = self._buckets[key[-1]].get(key, ())
        return (words,) if isinstance(words, int) else words

    def put(self, key: bytes, words: tuple[int, ...]) -> None:
        """A key without a place is forgotten."""
        bucket = self._buckets[key[-1]]
        if not words:
            bucket.pop(key, None)
            return
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()
        shared = [self._shared.setdefault(word, word) for word in words]
        bucket[key] = shared[0] if len(shared) == 1 else tuple(shared)

    def remove_holders(self, index: int, holders: Set[int]) -> None:
        """From one bucket."""
        bucket = self._buckets[index]
        for key, words in list(bucket.items()):
            each = (words,) if isinstance(words, int) else words
            if any(holder_of(word) in holders for word in each):
                self.put(key, tuple(word for word in each if holder_of(word) not in holders))


def with_tier(word: int | None, holder: int, tier: TierName, num_bytes: int) -> int:
    """A holder's place that has one more tier; None: it had none."""
    tiers = 0 if word is None else word & _ANY_TIER
    return holder << _HOLDER_SHIFT | tiers | _TIER_MASK[tier] | min(num_bytes, _MAX_SIZE)


def without_tier(word: int, tier: TierName) -> int | None:
    left = word & ~_TIER_MASK[tier]
    return left if left & _ANY_TIER else None


def holder_of(word: int) -> int:
    return word >> _HOLDER_SHIFT


def place_at(node: str, word: int) -> Place:
    return Place(node, "host" if word & _TIER_MASK["host"] else "disk", word & _MAX_SIZE)
