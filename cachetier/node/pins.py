"""Chunks that are kept for a while: by key, in each tier that has them, at most half of each tier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable


class TierPins:
    """What of one tier is pinned."""

    def __init__(self, max_bytes: int, hold: Callable[[bytes], None], let_go: Callable[[bytes], None]) -> None:
        self._max_bytes, self._hold, self._let_go = max_bytes, hold, let_go
        self._bytes_by_key: dict[bytes, int] = {}
        self.num_bytes = 0

    def pin(self, key: bytes, num_bytes: int) -> bool:
        """Whether it is pinned now."""
        if key in self._bytes_by_key:
            return True
        if self.num_bytes + num_bytes > self._max_bytes:
            return False
        self._bytes_by_key[key] = num_bytes
        self.num_bytes += num_bytes
        self._hold(key)
        return True

    def unpin(self, key: bytes) -> None:
        num_bytes = self._bytes_by_key.pop(key, None)
        if num_bytes is not None:
            self.num_bytes -= num_bytes
            self._let_go(key)


class NodePins:
    """Until when each key is pinned. No locks: the node cache's."""

    def __init__(self, tiers: Collection[TierPins], clock: Callable[[], float]) -> None:
        self._tiers, self._clock = tiers, clock
        self._until_s: dict[bytes, float] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._until_s

    def __len__(self) -> int:
        return len(self._until_s)

    def keep(self, key: bytes, ttl_s: float) -> None:
        """A key that a tier has pinned; a later end replaces an earlier one."""
        self._until_s[key] = max(self._until_s.get(key, 0.0), self._clock() + ttl_s)

    def unpin(self, keys: Iterable[bytes]) -> int:
        """How many were pinned."""
        found = [key for key in keys if self._until_s.pop(key, None) is not None]
        for key in found:
            for tier in self._tiers:
                tier.unpin(key)
        return len(found)

    def inherit(self, keys: Iterable[bytes], heir: bytes) -> None:
        """A tail that was pinned has grown."""
        until_s = [self._until_s[key] for key in keys if key in self._until_s]
        self.unpin(keys)
        if until_s:
            self._until_s[heir] = max(until_s)

    def expire(self) -> int:
        now_s = self._clock()
        return self.unpin([key for key, until_s in self._until_s.items() if until_s < now_s])
