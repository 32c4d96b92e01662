"""Answers `CacheAdmin` for one node, over its cache: lookups, pins by name, deletion."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mneme.cachetier.admin import MAX_PINS, Amount, FoundChunk, PinName, PinnedPrefix
from mneme.cachetier.chunk.keys import U32Array
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.search import Located
from mneme.cachetier.store import ChainQuery
from mneme.errors import CachePinRefused, ReplicaUnavailable

_SEARCH_S = 5.0  # for one sequence
_SCAN_S = 3.0  # of a deletion, for headers of what begins alike: some 50 us each from a disk
_MAX_ALL_PINS = 4096  # of all tenants


class NodeAdmin:
    """Thread-safe; may or may not see what happens to the cache meanwhile."""

    def __init__(self, node: NodeCache, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name` is the node's; `clock` is the cache's."""
        self._node, self._name, self._clock = node, name, clock
        self._pins = NamedPins(node, clock)

    def lookup(self, query: ChainQuery) -> list[FoundChunk]:
        """See `CacheAdmin.lookup`."""
        return [
            FoundChunk(place, each.header.key, each.num_usable, num_bytes, tier, self._name)
            for place, each in self._found(query)
            for tier, num_bytes in self._node.places(each.header.key).items()
        ]

    def pin(self, name: PinName, query: ChainQuery, ttl_s: float | None) -> PinnedPrefix | None:
        """See `CacheAdmin.pin`; the chunk that the sequence ends in is pinned as a whole."""
        found = [each for _, each in self._found(query)]
        if not found:
            return None
        pin = NamedPin(
            query=query,
            keys=frozenset(each.header.key for each in found),
            num_tokens=sum(each.num_usable for each in found),
            expires_at_s=math.inf if ttl_s is None else self._clock() + ttl_s,
        )
        self._pins.set(name, pin)
        return self._described(name, pin)

    def take_back_pin(self, name: PinName) -> bool:
        """Undo the last `pin` of that name: the pin that it replaced is back. False if there is none."""
        return self._pins.take_back(name)

    def unpin(self, name: PinName) -> bool:
        """See `CacheAdmin.unpin`."""
        return self._pins.drop(name, self._keys_of)

    def pins(self, tenant: bytes) -> list[PinnedPrefix]:
        """See `CacheAdmin.pins`."""
        return [self._described(name, pin) for name, pin in self._pins.of_tenant(tenant)]

    def delete(self, query: ChainQuery, *, spares_longer: bool) -> Amount:
        """See `CacheAdmin.delete`."""
        removed = Amount() if spares_longer else self._remove(self._begin_with(query))
        for place in reversed(range(len(query.keys) + 1)):
            parts = self._parts(query, place)
            removed = removed.plus(self._remove({key for key in parts if not self._node.children(key)}))
            if self._node.children(query.parent(place)):
                break  # others go on from here
        return self._sure(removed, query.tenant)

    def delete_tenant(self, tenant: bytes) -> Amount:
        """See `CacheAdmin.delete_tenant`; the tenant's pins go too."""
        self._pins.drop_tenant(tenant)
        return self._sure(self._remove(set(self._node.keys_of(tenant))), tenant)

    def stats(self) -> list[dict[str, Any]]:
        """See `CacheAdmin.stats`."""
        return [{"node": self._name, **self._node.stats()}]

    def _found(self, query: ChainQuery) -> Iterator[tuple[int, Located]]:
        """All chunks of the sequence that are here, whatever is missing between, with their places in it."""
        place, deadline_s = 0, self._clock() + _SEARCH_S
        while place <= len(query.keys) and self._clock() < deadline_s:
            found = self._node.search(replace(query, first=place), deadline_s)
            yield from enumerate(found, place)
            place += max(1, len(found))
            while place < len(query.keys) and not self._node.places(query.keys[place]):
                place += 1

    def _keys_of(self, query: ChainQuery) -> set[bytes]:
        return {each.header.key for _, each in self._found(query)}

    def _parts(self, query: ChainQuery, place: int) -> frozenset[bytes]:
        """Chunks at a place that hold the sequence's tokens and no others: by key, however many begin there."""
        parent = query.parent(place)
        children = self._node.children(parent)
        if children <= {*query.keys[place : place + 1]}:
            return children
        return children & {*query.lineage.beginnings(parent, query.tokens_of(place))}

    def _begin_with(self, query: ChainQuery) -> set[bytes]:
        """Chunks behind the last full one that begin with the rest of the sequence, and all their descendants."""
        rest, last = query.tokens_of(len(query.keys)), query.parent(len(query.keys))
        first = self._starting_with(rest, last) if len(rest) else {last}
        return first | self._behind(first)

    def _starting_with(self, ids: U32Array, parent: bytes) -> set[bytes]:
        """Children of a chunk whose tokens begin so; raises `ReplicaUnavailable` if looking takes too long."""
        until_s, found = self._clock() + _SCAN_S, set()
        for key in self._node.children(parent):
            header = self._node.header(key)
            if header is not None and _starts(header.token_ids, ids):
                found.add(key)
            if self._clock() > until_s:
                raise ReplicaUnavailable("too much in the cache tier begins alike to look at all of it")
        return found

    def _behind(self, keys: Collection[bytes]) -> set[bytes]:
        found: set[bytes] = set()
        unseen = list(keys)
        while unseen:
            children = set(self._node.children(unseen.pop())) - found
            found |= children
            unseen += children
        return found

    def _remove(self, keys: set[bytes]) -> Amount:
        """Delete these from every tier."""
        sizes = self._sizes(keys)
        self._node.delete(keys)
        return Amount(len(sizes), sum(sizes))

    def _sure(self, removed: Amount, tenant: bytes) -> Amount:
        """Raises `ReplicaUnavailable` while deleted files of the tenant are still there: a start would find them."""
        if num_left := self._node.num_left(tenant):
            raise ReplicaUnavailable(f"{num_left} files of the cache tier could not be removed yet")
        return removed

    def _sizes(self, keys: Collection[bytes]) -> list[int]:
        return [size for key in keys for size in self._node.places(key).values()]

    def _described(self, name: PinName, pin: NamedPin) -> PinnedPrefix:
        sizes = self._sizes(pin.keys)
        return PinnedPrefix(name.pin_id, pin.num_tokens, Amount(len(sizes), sum(sizes)), self._pins.left_s(pin))


def _starts(ids: U32Array, beginning: U32Array) -> bool:
    return len(beginning) <= len(ids) and bool(np.array_equal(ids[: len(beginning)], beginning))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedPin:
    """What one name keeps; `expires_at_s` is on the cache's clock."""

    query: ChainQuery
    keys: frozenset[bytes]  # a tail that has grown since has another
    num_tokens: int
    expires_at_s: float  # infinite: never
    replaced: NamedPin | None = None  # what had its name before


class NamedPins:
    """Keeps pins of sequences by name, over a cache that pins chunks by key: two pins may share chunks. Thread-safe.

    They are kept in memory: a node's pins are gone with its cache.
    """

    def __init__(self, cache: NodeCache, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock
        self._lock = threading.Lock()
        self._pins: dict[PinName, NamedPin] = {}

    def set(self, name: PinName, pin: NamedPin) -> None:
        """Pin under this name, replacing its pin; raises `CachePinRefused`, and then the old one stays."""
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
        """Put back the pin that the last one of that name replaced; False if there is no pin."""
        with self._lock:
            pin = self._pins.pop(name, None)
            if pin is None:
                return False
            if pin.replaced is not None:
                self._pins[name] = pin.replaced
            self._renew(pin.keys | _keys(pin.replaced))
            return True

    def drop(self, name: PinName, more_keys: Callable[[ChainQuery], Collection[bytes]]) -> bool:
        """Release a pin; False if there is none. `more_keys` finds what the cache has of its sequence by now."""
        with self._lock:
            self._forget_expired()
            pin = self._pins.pop(name, None)
        if pin is None:
            return False
        keys = pin.keys | set(more_keys(pin.query))
        with self._lock:
            self._renew(keys)
        return True

    def drop_tenant(self, tenant: bytes) -> None:
        with self._lock:
            names = [name for name in self._pins if name.tenant == tenant]
            self._renew(frozenset(key for name in names for key in self._pins.pop(name).keys))

    def of_tenant(self, tenant: bytes) -> list[tuple[PinName, NamedPin]]:
        with self._lock:
            self._forget_expired()
            return [(name, pin) for name, pin in self._pins.items() if name.tenant == tenant]

    def left_s(self, pin: NamedPin) -> float | None:
        """Seconds until it ends; None for a pin without an end."""
        return None if math.isinf(pin.expires_at_s) else max(0.0, pin.expires_at_s - self._clock())

    def _check_room(self, name: PinName) -> None:
        """Raises `CachePinRefused`; one that replaces another needs none. Under the lock."""
        if name in self._pins:
            return
        num_own = sum(other.tenant == name.tenant for other in self._pins)
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
        """Drop pins whose time is over; the cache has released their chunks by itself."""
        now_s = self._clock()
        for name in [name for name, pin in self._pins.items() if pin.expires_at_s <= now_s]:
            del self._pins[name]


def _in_place_of(before: NamedPin | None, pin: NamedPin) -> NamedPin:
    return pin if before is None else replace(pin, replaced=replace(before, replaced=None))


def _keys(pin: NamedPin | None) -> frozenset[bytes]:
    return frozenset() if pin is None else pin.keys
