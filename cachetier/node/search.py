"""Finding a sequence in a node's tiers: whole chunks by their keys, then the chunk behind them that shares most.

Whatever is found is compared with what is wanted: fingerprint, tenant, layout, parent, token ids; what differs is a
miss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import LineageKind, U32Array
from mneme.cachetier.names import Miss, TierName
from mneme.cachetier.node.disk import DiskTier
from mneme.cachetier.node.memory import Held, HostTier
from mneme.cachetier.store import ChainQuery

_MAX_CHILDREN = 64  # in each tier, that are compared
_MAX_OPENED = 8  # files, of those whose headers are not known: some tenths of a millisecond each
_OPEN_SHARE = 0.1  # of a question's time may go into that: what they share with the sequence may be nothing


class Located(NamedTuple):
    """Locates a chunk that a node has."""

    header: ChunkHeader
    num_usable: int  # of its leading tokens
    tier: TierName
    held: Held | None  # in the host tier
    path: str | None  # on disk: to be opened with `open_chunk` and compared with the header, by any process of the node


class ChainSearch:
    """Takes the index's lock; never while a file is read."""

    def __init__(self, host: HostTier, disk: DiskTier | None) -> None:
        self._host, self._disk = host, disk
        self._lock, self._clock = host.index.lock, host.index.clock

    def locate(self, query: ChainQuery, deadline_s: float) -> list[Located]:
        """Find chunks from `query.first` on, without a gap; the last may be usable in part."""
        open_until_s = self._clock() + _OPEN_SHARE * (deadline_s - self._clock())
        found = self._whole_chunks(query, deadline_s)
        child = None
        if self._clock() < deadline_s:
            child = self._best_child(query, query.first + len(found), open_until_s)
        return found if child is None else [*found, child]

    def _whole_chunks(self, query: ChainQuery, deadline_s: float) -> list[Located]:
        with self._lock:
            here = {key: located for key in query.keys[query.first :] if (located := self._in_host(key)) is not None}
        found: list[Located] = []
        for place in range(query.first, len(query.keys)):
            key = query.keys[place]
            located = self._at(query, place, here.get(key) or self._on_disk(key))
            if located is None or self._clock() >= deadline_s:
                break
            found.append(located)
        return found

    def _at(self, query: ChainQuery, place: int, located: Located | None) -> Located | None:
        """The whole chunk at a place of the chain."""
        if located is None:
            return None
        key = query.keys[place]
        num_usable = usable(located.header, query, place)
        if located.header.key != key:
            num_usable = Miss.OTHER_KEY
        elif num_usable != query.chunk_tokens and not isinstance(num_usable, Miss):
            num_usable = Miss.OTHER_TOKENS
        return self._judged(located, num_usable)

    def _best_child(self, query: ChainQuery, place: int, open_until_s: float) -> Located | None:
        """Find the chunk behind the last whole one that has the longest common beginning.

        One that the sequence goes on from is found by its key, however many others begin there; of those that share
        less than they hold, some are compared.
        """
        if not len(query.tokens_of(place)):
            return None
        tail = self._tail(query, place)
        is_private = query.lineage.kind is LineageKind.SESSION  # under its root are chunks of other events, too
        found = [] if is_private else self._children(query.parent(place), open_until_s)
        found = [each for each in found if each.header.key not in query.keys[place:][:1]]
        judged = [self._judged(each, usable(each.header, query, place)) for each in (*found, *filter(None, [tail]))]
        return max((each for each in judged if each is not None), key=lambda each: each.num_usable, default=None)

    def _tail(self, query: ChainQuery, place: int) -> Located | None:
        """The longest chunk that holds the sequence's next tokens and no others."""
        parent, ids = query.parent(place), query.tokens_of(place)[: query.chunk_tokens - 1]
        with self._lock:
            lengths = self._host.child_lengths(parent)
            if self._disk is not None and lengths is not None:
                on_disk = self._disk.child_lengths(parent)
                lengths = None if on_disk is None else lengths | on_disk
        keys = query.lineage.beginnings(parent, ids, lengths)
        with self._lock:
            here = {key: located for key in keys if (located := self._in_host(key)) is not None}
        return next((located for key in keys if (located := here.get(key) or self._on_disk(key)) is not None), None)

    def _children(self, parent: bytes, open_until_s: float) -> list[Located]:
        """Some, those of the host first; on disk those whose headers are known, and others as far as there is time."""
        with self._lock:
            found = [*filter(None, map(self._in_host, self._host.some_children(parent, _MAX_CHILDREN)))]
            on_disk = [] if self._disk is None else self._disk.some_children(parent, _MAX_CHILDREN)
        if self._disk is None:
            return found
        others = [key for key in on_disk if key not in self._host]
        unknown = [key for key in others if not self._disk.knows_header(key)]
        found += [located for key in others if key not in unknown and (located := self._on_disk(key)) is not None]
        for key in unknown[:_MAX_OPENED]:
            if self._clock() >= open_until_s:
                break
            if (located := self._on_disk(key)) is not None:
                found.append(located)
        return found

    def _in_host(self, key: bytes) -> Located | None:
        """Under the lock."""
        entry = self._host.get(key)
        if entry is None or entry.header is None:
            return None
        return Located(entry.header, 0, "host", entry.held, None)

    def _on_disk(self, key: bytes) -> Located | None:
        if self._disk is None or key not in self._disk:
            return None
        header = self._disk.header(key)
        return None if isinstance(header, Miss) else Located(header, 0, "disk", None, None)

    def _judged(self, located: Located, num_usable: int | Miss) -> Located | None:
        """Return a chunk with what is usable of it; counts a miss."""
        if not isinstance(num_usable, Miss):
            return located._replace(num_usable=num_usable) if num_usable else None
        if located.tier == "host":
            with self._lock:
                self._host.counters[f"miss_{num_usable.value}"] += 1
        elif self._disk is not None:
            self._disk.missed(located.header.key, num_usable)
        return None


def usable(header: ChunkHeader, query: ChainQuery, place: int) -> int | Miss:
    """Return how many of a chunk's leading tokens are those at a place of the chain; perhaps none."""
    if header.fingerprint != query.fingerprint or header.layout.chunk_tokens != query.chunk_tokens:
        return Miss.OTHER_MODEL
    if query.layout not in (None, header.layout):
        return Miss.OTHER_MODEL
    if header.parent != query.parent(place) or header.tenant != query.tenant:
        return Miss.OTHER_KEY
    return num_common(header.token_ids, query.tokens_of(place))


def num_common(ids: U32Array, others: U32Array) -> int:
    """Leading tokens that are equal."""
    length = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:length] != others[:length])
    return int(differ[0]) if len(differ) else length
