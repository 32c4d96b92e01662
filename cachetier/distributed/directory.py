"""One shard of the directory: which nodes hold which chunks, as far as they have said.

Soft state: every entry is some node's word, kept no longer than that node speaks. A node numbers what it announces
within an *epoch*, which ends with its process or earlier. A higher epoch voids all that was said in lower ones; a gap
in the numbers makes the shard ask for everything anew, and what the node said before is void once the last part of that
has come. A node that is silent is not offered, later forgotten. So no entry outlives its node; and a node that is asked
in vain announces that what it was asked for is gone.

Calls come from one thread, and each takes milliseconds at most: what a lost node had is removed a part at a time, while
others announce.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mneme.cachetier.node.index import Change
from mneme.cachetier.store import ChainQuery, TierName

Clock = Callable[[], float]

SILENT_S = 4.0  # a node not heard of for so long is not offered; it speaks once a second
FORGOTTEN_S = 60.0  # and after so long all it said is removed
_EPOCH_KEPT_S = 600.0  # and after so long its epoch: nothing that it said before is still on its way
_SWEPT_BUCKETS = 4  # with each announcement
_MAX_SPANS = 8  # of a chain: each is a call to a node

NUM_BUCKETS = 256  # by the key's last byte

_SIZE_BITS, _TIER_BITS, _HOLDER_BITS = 38, 2, 20  # 60 in all: two digits of a Python integer
_HOLDER_SHIFT = _SIZE_BITS + _TIER_BITS
_MAX_SIZE = (1 << _SIZE_BITS) - 1
_TIER_MASK = {"host": 1 << _SIZE_BITS, "disk": 2 << _SIZE_BITS}
_ANY_TIER = _TIER_MASK["host"] | _TIER_MASK["disk"]
_MAX_SHARED = 1 << 16

MAX_HOLDERS = 1 << _HOLDER_BITS

Words = int | tuple[int, ...]


class Reply(NamedTuple):
    """To an announcement."""

    wants_all: bool  # everything is to be announced anew
    epoch: int  # the node's highest known: a node that has a lower one, and lives, takes a higher


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a node says to one shard; without changes it says that the node lives."""

    node: str
    epoch: int
    seq: int  # of the epoch and shard: 0, 1, 2...
    changes: Sequence[Change] = ()
    is_first: bool = False  # of all that the node holds
    is_last: bool = False


class Place(NamedTuple):
    """Where a chunk is said to be."""

    node: str
    tier: TierName  # the faster one
    num_bytes: int


class PlaceTable:
    """Keeps the places of each key, in about 150 bytes a key. No lock: the directory's.

    A place is one integer: [holder, tiers, bytes]. A key that is at one place carries that integer alone, and equal
    integers are one object: full chunks of one holder are alike. Keys are spread over many small tables, so that none
    takes long to grow or to go through.
    """

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


class _Node:
    """What is known of a node in its present epoch. A *holder* is a number: one complete account of what it holds."""

    __slots__ = ("epoch", "heard_s", "holder", "next_holder", "next_seq", "wants_all")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.heard_s = 0.0
        self.next_seq = 0
        self.wants_all = True
        self.holder: int | None = None
        self.next_holder: int | None = None  # of the account that is coming in

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(holder for holder in (self.holder, self.next_holder) if holder is not None)


class Directory:
    """See the module."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._table = PlaceTable()
        self._nodes: dict[str, _Node] = {}  # those forgotten too: their epochs stay for a while
        self._num_holders = 0
        self._free: list[int] = []  # holders that no entry names
        self._swept: set[int] = set()  # holders whose entries this pass over the table removes
        self._unswept: set[int] = set()  # that the next pass will
        self._next_bucket = 0
        self._counters: Counter[str] = Counter()

    def announce(self, said: Announcement) -> Reply:
        self._counters["announcements"] += 1
        known = self._nodes.get(said.node)
        if known is not None and said.epoch < known.epoch:
            self._counters["old_epochs"] += 1
            return Reply(False, known.epoch)
        if known is None or said.epoch > known.epoch:
            known = self._begin(said.node, said.epoch)
        known.heard_s = self._clock()
        if said.seq >= known.next_seq:  # or it was delayed, or came twice
            self._take(known, said)
        self._forget_silent()
        self._sweep()
        return Reply(known.wants_all, known.epoch)

    def lookup(self, keys: Sequence[bytes], exclude_node: str = "") -> list[tuple[Place, ...]]:
        """Places of each key at nodes that live, but for one node."""
        node_by_holder, table = self._offered(exclude_node), self._table
        found = []
        for key in keys:
            words = table.get(key)
            found.append(tuple([place_at(n, w) for w in words if (n := node_by_holder.get(holder_of(w))) is not None]))
        self._counters["lookups"] += 1
        self._counters["keys_asked"] += len(keys)
        self._counters["keys_found"] += sum(map(bool, found))
        return found

    def not_reached(self, node: str) -> None:
        """A node's process was found dead: it is not offered until it speaks again."""
        if node in self._nodes:
            self._nodes[node].heard_s = min(self._nodes[node].heard_s, self._clock() - SILENT_S - 1)
            self._counters["reported_dead"] += 1

    def stats(self) -> dict[str, Any]:
        """Of a moment; counters since the start."""
        live = sorted(set(self._offered("").values()))
        return {"num_keys": len(self._table), "live_nodes": live, "counters": dict(self._counters)}

    def _begin(self, name: str, epoch: int) -> _Node:
        if name in self._nodes:
            self._retire(self._nodes[name].holders)
        node = self._nodes[name] = _Node(epoch)
        return node

    def _take(self, node: _Node, said: Announcement) -> None:
        """An announcement that is new: the next in order, or one that begins an account."""
        is_gap = said.seq != node.next_seq
        node.next_seq = said.seq + 1
        if said.is_first:
            if node.next_holder is not None:
                self._retire((node.next_holder,))
            node.next_holder, node.wants_all = self._new_holder(), False
        elif is_gap or node.wants_all:
            self._counters["gaps"] += not node.wants_all
            node.wants_all = True
            return
        self._apply(node, said.changes)
        if said.is_last and node.next_holder is not None:
            if node.holder is not None:
                self._retire((node.holder,))
            node.holder, node.next_holder = node.next_holder, None

    def _apply(self, node: _Node, changes: Iterable[Change]) -> None:
        holder = node.holder if node.next_holder is None else node.next_holder
        assert holder is not None
        for key, tier, num_bytes, is_added in changes:
            words = self._table.get(key)
            own = next((word for word in words if holder_of(word) in node.holders), None) if words else None
            others = self._others(key, node) if words else ()
            if is_added:
                is_same_account = own is not None and holder_of(own) == holder
                word = with_tier(own if is_same_account else None, holder, tier, num_bytes)
                self._table.put(key, (*others, word))
            elif own is not None:
                left = without_tier(own, tier)
                self._table.put(key, others if left is None else (*others, left))

    def _others(self, key: bytes, node: _Node) -> tuple[int, ...]:
        """A key's places, but for those of a node and of holders that are gone."""
        gone = self._swept.union(self._unswept, node.holders)
        return tuple(word for word in self._table.get(key) if holder_of(word) not in gone)

    def _offered(self, exclude_node: str) -> dict[int, str]:
        """Nodes that live, by holder."""
        oldest_s = self._clock() - SILENT_S
        return {
            holder: name
            for name, node in self._nodes.items()
            if name != exclude_node and node.heard_s >= oldest_s
            for holder in node.holders
        }

    def _forget_silent(self) -> None:
        now_s = self._clock()
        for name, node in list(self._nodes.items()):
            if node.heard_s < now_s - _EPOCH_KEPT_S and not node.holders:
                del self._nodes[name]
            elif node.heard_s < now_s - FORGOTTEN_S and node.holders:
                self._retire(node.holders)
                node.holder, node.next_holder, node.wants_all = None, None, True
                self._counters["nodes_forgotten"] += 1

    def _new_holder(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_holders += 1
        assert self._num_holders < MAX_HOLDERS
        return self._num_holders

    def _retire(self, holders: Iterable[int]) -> None:
        """Entries that name these are void from now on, and removed by and by."""
        self._unswept.update(holders)

    def _sweep(self) -> None:
        """A part of a pass over the table; a holder is free again when a whole pass has removed it."""
        if not self._swept:
            self._swept, self._unswept, self._next_bucket = self._unswept, set(), 0
        if not self._swept:
            return
        for index in range(self._next_bucket, min(self._next_bucket + _SWEPT_BUCKETS, NUM_BUCKETS)):
            self._table.remove_holders(index, self._swept)
        self._next_bucket += _SWEPT_BUCKETS
        if self._next_bucket >= NUM_BUCKETS:
            self._free += self._swept
            self._swept = set()


def shard_of(key: bytes, num_shards: int) -> int:
    return key[0] % num_shards


class Span(NamedTuple):
    """The chunks [first, first + num_chunks) of a chain, at one node."""

    node: str
    first: int
    num_chunks: int

    @property
    def end(self) -> int:
        return self.first + self.num_chunks


def spans_of(places: Sequence[tuple[Place, ...]], first: int, own_node: str) -> tuple[Span, ...]:
    """Spans without a gap from `first` on; `places[i]` are those of chunk first + i.

    A node that has a chunk is asked for the next too if it has that. Otherwise the own node is preferred to others,
    host memory to disk, then the node that has more of the chain.
    """
    spans: list[Span] = []
    for offset, choices in enumerate(places):
        nodes = {place.node for place in choices}
        if spans and spans[-1].node in nodes:
            spans[-1] = spans[-1]._replace(num_chunks=spans[-1].num_chunks + 1)
            continue
        if not choices or len(spans) == _MAX_SPANS:
            break
        best = max(choices, key=lambda place: _preference(place, places, offset, own_node))
        spans.append(Span(best.node, first + offset, 1))
    return tuple(spans)


def query_of(query: ChainQuery, span: Span, *, is_last: bool) -> ChainQuery:
    """What to ask the node of a span; behind the last one it may find a chunk that is usable in part."""
    if is_last:
        return replace(query, first=span.first)
    end = span.end
    return replace(
        query, first=span.first, keys=query.keys[:end], token_ids=query.token_ids[: end * query.chunk_tokens]
    )


def _preference(
    place: Place, places: Sequence[tuple[Place, ...]], offset: int, own_node: str
) -> tuple[bool, bool, int, str]:
    length = 0
    for choices in places[offset:]:
        if place.node not in {choice.node for choice in choices}:
            break
        length += 1
    return place.node == own_node, place.tier == "host", length, place.node
