"""The directory: which nodes hold which chunks, as far as they have said; a Ray actor.

Soft state: every entry is some node's word, kept no longer than that node speaks. A node numbers what it announces
within an *epoch*, which ends with its process or earlier. A higher epoch voids all that was said in lower ones; a gap
in the numbers makes it ask for everything anew, and what the node said before is void once the last part of that has
come. A node that is silent is not offered, later forgotten. So no entry outlives its node; and a node that is asked
in vain announces that what it was asked for is gone.

It is a detached actor, restarted wherever there is room when it dies. It comes back empty, asks each node for
everything, and is whole again a moment later. Its calls come one after the other, and each takes
milliseconds at most: what a lost node had is removed a part at a time, while others announce.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError

from mneme.cachetier.distributed.nodes import Breaker
from mneme.cachetier.names import TierName
from mneme.cachetier.node.index import Change
from mneme.cachetier.store import ChainQuery

Clock = Callable[[], float]

SEND_TIMEOUT_S = 2.0  # of one announcement; with the second between signs of life less than `SILENT_S`
SILENT_S = 4.0  # a node not heard of for so long is not offered; it speaks once a second
FORGOTTEN_S = 60.0  # and after so long all it said is removed
_EPOCH_KEPT_S = 600.0  # and after so long its epoch: nothing that it said before is still on its way
_SWEPT_BUCKETS = 4  # with each announcement
_MAX_SPANS = 8  # of a chain: each is a call to a node

_NUM_BUCKETS = 256  # by the key's last byte: no table takes long to grow or to go through
_MAX_SHARED = 1 << 16


class Reply(NamedTuple):
    """Answers an announcement."""

    wants_all: bool  # everything is to be announced anew
    epoch: int  # the node's highest known: a node that has a lower one, and lives, takes a higher


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Says what a node says; without changes it says that the node lives."""

    node: str
    epoch: int
    seq: int  # of the epoch: 0, 1, 2...
    changes: Sequence[Change] = ()
    is_first: bool = False  # of all that the node holds
    is_last: bool = False


class Place(NamedTuple):
    """Says where a chunk is said to be."""

    node: str
    tier: TierName  # the faster one
    num_bytes: int


class _Held(NamedTuple):
    """A chunk in one tier of a holder: a number for one complete account of what a node holds."""

    holder: int
    tier: TierName
    num_bytes: int


class _Node:
    """Holds what is known of a node in its present epoch."""

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
    """Keeps what nodes have announced."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: list[dict[bytes, tuple[_Held, ...]]] = [{} for _ in range(_NUM_BUCKETS)]
        self._shared: dict[tuple[_Held, ...], tuple[_Held, ...]] = {}  # one object for chunks held alike
        self._nodes: dict[str, _Node] = {}  # those forgotten too: their epochs stay for a while
        self._holders = itertools.count()
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
            self._accept(known, said)
        self._forget_silent()
        self._sweep()
        return Reply(known.wants_all, known.epoch)

    def lookup(self, keys: Sequence[bytes]) -> list[tuple[Place, ...]]:
        """Places of each key at nodes that live."""
        node_by_holder = self._offered()
        places: dict[tuple[_Held, ...], tuple[Place, ...]] = {}  # neighbours in a chain are held alike
        found = []
        for key in keys:
            helds = self._buckets[key[-1]].get(key, ())
            if helds not in places:
                places[helds] = _places(helds, node_by_holder)
            found.append(places[helds])
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
        """Gauges of this moment, and counters since the start."""
        live = sorted(set(self._offered().values()))
        num_keys = sum(map(len, self._buckets))
        return {"num_keys": num_keys, "live_nodes": live, "counters": dict(self._counters)}

    def _begin(self, name: str, epoch: int) -> _Node:
        if name in self._nodes:
            self._retire(self._nodes[name].holders)
        node = self._nodes[name] = _Node(epoch)
        return node

    def _accept(self, node: _Node, said: Announcement) -> None:
        """An announcement that is new: the next in order, or one that begins an account."""
        is_gap = said.seq != node.next_seq
        node.next_seq = said.seq + 1
        if said.is_first:
            if node.next_holder is not None:
                self._retire((node.next_holder,))
            node.next_holder, node.wants_all = next(self._holders), False
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
        gone = self._swept | self._unswept
        for key, tier, num_bytes, is_added in changes:
            before = self._buckets[key[-1]].get(key, ())
            kept = [
                held
                for held in before
                if held.holder not in gone
                and (held.holder not in node.holders or (held.tier != tier and (held.holder == holder or not is_added)))
            ]
            self._set(key, (*kept, _Held(holder, tier, num_bytes)) if is_added else tuple(kept))

    def _set(self, key: bytes, helds: tuple[_Held, ...]) -> None:
        """A key that nobody holds is forgotten."""
        if not helds:
            self._buckets[key[-1]].pop(key, None)
            return
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()
        self._buckets[key[-1]][key] = self._shared.setdefault(helds, helds)

    def _offered(self) -> dict[int, str]:
        """List nodes that live, by holder."""
        oldest_s = self._clock() - SILENT_S
        return {
            holder: name for name, node in self._nodes.items() if node.heard_s >= oldest_s for holder in node.holders
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

    def _retire(self, holders: Iterable[int]) -> None:
        """Entries that name these are void from now on, and removed by and by."""
        self._unswept.update(holders)

    def _sweep(self) -> None:
        """A part of a pass over the table, which removes what was void when the pass began."""
        if not self._swept:
            self._swept, self._unswept, self._next_bucket = self._unswept, set(), 0
        if not self._swept:
            return
        for bucket in self._buckets[self._next_bucket : self._next_bucket + _SWEPT_BUCKETS]:
            for key, helds in list(bucket.items()):
                if any(held.holder in self._swept for held in helds):
                    self._set(key, tuple(held for held in helds if held.holder not in self._swept))
        self._next_bucket += _SWEPT_BUCKETS
        if self._next_bucket >= _NUM_BUCKETS:
            self._swept = set()
            self._shared.clear()  # some of them named holders that are gone


def _places(helds: Iterable[_Held], node_by_holder: dict[int, str]) -> tuple[Place, ...]:
    """One for each node that is offered, in its faster tier."""
    places: dict[str, Place] = {}
    for holder, tier, num_bytes in helds:
        node = node_by_holder.get(holder)
        if node is not None and (node not in places or tier == "host"):
            places[node] = Place(node, tier, num_bytes)
    return tuple(places.values())


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
    """Return what to ask the node of a span; behind the last one it may find a chunk that is usable in part."""
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


def directory_actor(namespace: str) -> Any:
    """The actor, made if there is none."""
    options = {"name": "directory", "namespace": namespace, "lifetime": "detached", "get_if_exists": True}
    return ray.remote(Directory).options(num_cpus=0, max_restarts=-1, **options).remote()


class DirectoryLink:
    """The directory, as one node sees it."""

    def __init__(self, namespace: str) -> None:
        """Blocks until Ray knows the actor, not until it is up."""
        self._namespace, self._actor = namespace, directory_actor(namespace)
        self._breaker = Breaker()
        self.counters: Counter[str] = Counter()

    def send(self, said: Announcement) -> Reply | None:
        """See `announcer.Send`; not from an event loop."""
        try:
            reply: Reply = ray.get(self._actor.announce.remote(said), timeout=SEND_TIMEOUT_S)
        except ActorDiedError:  # for good: somebody ended it
            self._actor = directory_actor(self._namespace)
            self.counters["shard_lost"] += 1
            return None
        except RayError:
            return None
        return reply

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> list[tuple[Place, ...]]:
        """Places of each key; nothing if the directory does not answer in time."""
        if not keys:
            return []
        if not self._breaker.allows():
            self.counters["lookup_not_asked"] += 1
            return [()] * len(keys)
        answer = asyncio.wrap_future(self._actor.lookup.remote(keys).future())
        try:
            places: list[tuple[Place, ...]] = await asyncio.wait_for(answer, timeout_s)
        except (TimeoutError, RayError):
            self.counters["lookup_unanswered"] += 1
            self._breaker.failed()
            return [()] * len(keys)
        self._breaker.succeeded()
        return places

    def not_reached(self, node: str) -> None:
        """Do nothing: nobody waits for it to arrive."""
        self._actor.not_reached.remote(node)
