"""Answers `CacheAdmin` for one node, over its cache: lookups, pins by name, deletion."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mneme.cachetier.admin import MAX_PINS, Amount, FoundChunk, PinnedPrefix
from mneme.cachetier.chunk.keys import U32Array
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.index import descendants
from mneme.cachetier.node.search import Located
from mneme.cachetier.pin_book import PinBook, PinName
from mneme.cachetier.store import ChainQuery
from mneme.errors import CachePinRefused, ReplicaUnavailable

_SEARCH_S = 5.0  # for one sequence
_SCAN_S = 3.0  # of a deletion, for headers of what begins alike: some 50 us each from a disk
_MAX_ALL_PINS = 4096  # of all tenants


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pin:
    query: ChainQuery
    keys: frozenset[bytes]  # a tail that has grown since has another
    num_tokens: int
    expires_at_s: float
    replaced: _Pin | None  # what had its name before


class NodeAdmin:
    """Thread-safe; may or may not see what happens to the cache meanwhile.

    Two pins may share chunks, which the cache pins by key. Pins are kept in memory: they are gone with the cache.
    """

    def __init__(self, node: NodeCache, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name` is the node's; `clock` is the cache's."""
        self._node, self._name, self._clock = node, name, clock
        self._lock = threading.Lock()  # of the pins
        self._pins = PinBook[_Pin](clock)

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
        keys, num_tokens = frozenset(each.header.key for each in found), sum(each.num_usable for each in found)
        with self._lock:
            self._forget_expired()
            self._check_room(name)
            before, end_s = self._pins.get(name), self._pins.end_s(ttl_s)
            is_whole = self._node.pin(keys, end_s - self._clock()) == len(keys)
            if is_whole:
                replaced = before and replace(before, replaced=None)
                self._pins[name] = _Pin(
                    query=query, keys=keys, num_tokens=num_tokens, expires_at_s=end_s, replaced=replaced
                )
            self._renew(keys | _keys(before))
            if not is_whole:
                raise CachePinRefused("pin", len(keys), "so many chunks cannot be pinned in the cache tier")
            return self._described(name, self._pins[name])

    def revert_pin(self, name: PinName) -> bool:
        """Undo the last `pin` of that name: the pin that it replaced is back. False if there is none."""
        with self._lock:
            pin = self._pins.pop(name, None)
            if pin is not None and pin.replaced is not None:
                self._pins[name] = pin.replaced
            self._renew(_keys(pin))
            return pin is not None

    def unpin(self, name: PinName) -> bool:
        """See `CacheAdmin.unpin`."""
        with self._lock:
            self._forget_expired()
            pin = self._pins.pop(name, None)
        if pin is None:
            return False
        grown = {each.header.key for _, each in self._found(pin.query)}
        with self._lock:
            self._renew(pin.keys | grown)
        return True

    def pins(self, tenant: bytes) -> list[PinnedPrefix]:
        """See `CacheAdmin.pins`."""
        with self._lock:
            self._forget_expired()
            return [self._described(*named) for named in self._pins.of_tenant(tenant).items()]

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
        with self._lock:
            self._renew(frozenset[bytes]().union(*(self._pins.pop(each).keys for each in self._pins.of_tenant(tenant))))
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
        return first.union(*(descendants(key, self._node.children) for key in first))

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

    def _described(self, name: PinName, pin: _Pin) -> PinnedPrefix:
        sizes = self._sizes(pin.keys)
        return PinnedPrefix(name.pin_id, pin.num_tokens, Amount(len(sizes), sum(sizes)), self._pins.left_s(pin))

    def _check_room(self, name: PinName) -> None:
        """Raises `CachePinRefused`; one that replaces another needs none."""
        if name in self._pins:
            return
        num_own = len(self._pins.of_tenant(name.tenant))
        if num_own >= MAX_PINS:
            raise CachePinRefused("pin", num_own, f"an API key may have {MAX_PINS} pins at once in the cache tier")
        if len(self._pins) >= _MAX_ALL_PINS:
            rule = f"the cache tier has {_MAX_ALL_PINS} pins of all API keys, and takes no more"
            raise CachePinRefused("pin", len(self._pins), rule)

    def _renew(self, keys: frozenset[bytes]) -> None:
        """Each is pinned as long as the last of the pins that have it, or not at all."""
        now_s = self._clock()
        self._node.unpin(keys)  # a pin of keys never becomes shorter
        for pin in self._pins.values():
            if shared := pin.keys & keys:
                self._node.pin(shared, pin.expires_at_s - now_s)

    def _forget_expired(self) -> None:
        """The cache has released their chunks by itself."""
        for name in self._pins.over():
            del self._pins[name]


def _starts(ids: U32Array, beginning: U32Array) -> bool:
    return len(beginning) <= len(ids) and bool(np.array_equal(ids[: len(beginning)], beginning))


def _keys(pin: _Pin | None) -> frozenset[bytes]:
    """List the keys of a pin, and of what it replaced."""
    return frozenset() if pin is None else pin.keys | _keys(pin.replaced)
