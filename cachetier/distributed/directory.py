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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mneme.cachetier.distributed.place_table import (
    MAX_HOLDERS,
    NUM_BUCKETS,
    Place,
    PlaceTable,
    holder_of,
    place_at,
    with_tier,
    without_tier,
)
from mneme.cachetier.node.tiers import Change

Clock = Callable[[], float]

SILENT_S = 4.0  # a node not heard of for so long is not offered; it speaks once a second
FORGOTTEN_S = 60.0  # and after so long all it said is removed
_EPOCH_KEPT_S = 600.0  # and after so long its epoch: nothing that it said before is still on its way
_SWEPT_BUCKETS = 4  # with each announcement


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
