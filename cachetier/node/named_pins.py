"""Pins of sequences by name, over a cache that pins chunks by key: two pins may share chunks.

They are kept in memory: a node's pins are gone with its cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from mneme.cachetier.admin import MAX_PINS, PinName
from mneme.cachetier.store import ChainQuery
from mneme.errors import CachePinRefused

_MAX_ALL_PINS = 4096  # of all owners


class PinnedKeys(Protocol):
    """The cache's part."""

    def pin(self, keys: Collection[bytes], ttl_s: float) -> int:
        """For so long at least; how many are pinned, as no more than a share of a tier can be."""

    def unpin(self, keys: Collection[bytes]) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedPin:
    query: ChainQuery
    keys: frozenset[bytes]  # a tail that has grown since has another
    num_tokens: int
    expires_at_s: float  # infinite: never
    replaced: NamedPin | None = None  # what had its name before


class NamedPins:
    """Thread-safe."""

    def __init__(self, cache: PinnedKeys, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock
        self._lock = threading.Lock()
        self._pins: dict[PinName, NamedPin] = {}

    def set(self, name: PinName, pin: NamedPin) -> None:
        """In the place of one of that name; raises `CachePinRefused`, and then that one stays."""
        with self._lock:
            self._forget_expired()
            self._check_room(name)
            before = self._pins.pop(name, None)
            num_pinned = self._cache.pin(pin.keys, pin.expires_at_s - self._clock())
            is_whole = num_pinned == len(pin.keys)
            kept = _in_place_of(before, pin) if is_whole else before
            if kept is not None:
                self._pins[name] = kept
            self._renew(pin.keys | _keys(before))
            if not is_whole:
                raise CachePinRefused("pin", len(pin.keys), "so many chunks cannot be pinned in the cache tier")

    def take_back(self, name: PinName) -> bool:
        """The last pin of that name, for the one that it replaced; whether there was one."""
        with self._lock:
            pin = self._pins.pop(name, None)
            if pin is None:
                return False
            if pin.replaced is not None:
                self._pins[name] = pin.replaced
            self._renew(pin.keys | _keys(pin.replaced))
            return True

    def drop(self, name: PinName, more_keys: Callable[[ChainQuery], Collection[bytes]]) -> bool:
        """Whether there was one. `more_keys`: what the cache has of its sequence by now."""
        with self._lock:
            self._forget_expired()
            pin = self._pins.pop(name, None)
        if pin is None:
            return False
        keys = pin.keys | set(more_keys(pin.query))
        with self._lock:
            self._renew(keys)
        return True

    def drop_owned(self, owner: bytes) -> None:
        with self._lock:
            names = [name for name in self._pins if name.owner == owner]
            self._renew(frozenset(key for name in names for key in self._pins.pop(name).keys))

    def owned(self, owner: bytes) -> list[tuple[PinName, NamedPin]]:
        with self._lock:
            self._forget_expired()
            return [(name, pin) for name, pin in self._pins.items() if name.owner == owner]

    def left_s(self, pin: NamedPin) -> float | None:
        """None: for ever."""
        return None if math.isinf(pin.expires_at_s) else max(0.0, pin.expires_at_s - self._clock())

    def _check_room(self, name: PinName) -> None:
        """Raises `CachePinRefused`; one that replaces another needs none. Under the lock."""
        if name in self._pins:
            return
        num_own = sum(other.owner == name.owner for other in self._pins)
        if num_own >= MAX_PINS:
            raise CachePinRefused("pin", num_own, f"an API key may have {MAX_PINS} pins at once in the cache tier")
        if len(self._pins) >= _MAX_ALL_PINS:
            rule = f"the cache tier has {_MAX_ALL_PINS} pins of all API keys, and takes no more"
            raise CachePinRefused("pin", len(self._pins), rule)

    def _renew(self, keys: frozenset[bytes]) -> None:
        """Each is pinned as long as the last of the pins that have it, or not at all; under the lock."""
        until_s: dict[bytes, float] = {}
        for pin in self._pins.values():
            for key in pin.keys & keys:
                until_s[key] = max(pin.expires_at_s, until_s.get(key, 0.0))
        self._cache.unpin(keys)  # a pin of keys never becomes shorter
        groups: dict[float, list[bytes]] = {}
        for key, expires_at_s in until_s.items():
            groups.setdefault(expires_at_s, []).append(key)
        for expires_at_s, group in groups.items():
            self._cache.pin(group, expires_at_s - self._clock())

    def _forget_expired(self) -> None:
        """The cache has let go of their chunks by itself."""
        now_s = self._clock()
        for name in [name for name, pin in self._pins.items() if pin.expires_at_s <= now_s]:
            del self._pins[name]


def _in_place_of(before: NamedPin | None, pin: NamedPin) -> NamedPin:
    return pin if before is None else replace(pin, replaced=replace(before, replaced=None))


def _keys(pin: NamedPin | None) -> frozenset[bytes]:
    return frozenset() if pin is None else pin.keys
