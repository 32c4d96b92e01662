"""Which chunks a tier holds, by key and by parent, in the order of their last use, and which of them goes next.

Only a chunk that no other chunk descends from is a candidate: what is left of a chain can be used from its root on.
What is held, for a pin or because it is being copied, is no candidate either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice, takewhile
from typing import Generic, TypeVar

from mneme.cachetier.chunk.header import ChunkHeader
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.primitives import Bounded

BLOCK_BYTES = 4096  # a file takes whole blocks of the file system
_MAX_PAST_KEYS = 1 << 17  # some 20 MB
_FEW_SIBLINGS = 16  # that are compared one by one


class Entry(ABC):
    """A chunk in a tier."""

    __slots__ = ("has_returned", "last_used_s")

    def __init__(self, last_used_s: float) -> None:
        self.last_used_s = last_used_s
        self.has_returned = False

    @property
    @abstractmethod
    def key(self) -> bytes: ...

    @property
    @abstractmethod
    def parent(self) -> bytes: ...

    @property
    @abstractmethod
    def owner(self) -> bytes: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @property
    @abstractmethod
    def num_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        return blocks_of(self.num_bytes)


def blocks_of(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def descendants(key: bytes, children: Callable[[bytes], Iterable[bytes]]) -> list[bytes]:
    """All chunks that descend from a key or root, each behind those that descend from it."""
    found: dict[bytes, None] = {}
    unseen = [*children(key)]
    while unseen:
        child = unseen.pop()
        if child not in found:
            found[child] = None
            unseen += children(child)
    return [*found][::-1]


E = TypeVar("E", bound=Entry)


class ChunkIndex(Generic[E]):
    """No locks and no I/O: the tier's. `on_change` hears of every entry that comes (True) or goes."""

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        has_quotas: bool = False,
        on_change: Callable[[E, bool], None] = lambda _entry, _is_added: None,
    ) -> None:
        """`has_quotas`: `oldest_of` is asked."""
        self.num_blocks = 0
        self.blocks_by_owner: Counter[bytes] = Counter()
        self._policy, self._on_change = policy, on_change
        self._past = Bounded[bytes, bool](_MAX_PAST_KEYS)
        self._entries: dict[bytes, E] = {}  # oldest use first
        self._keys_by_owner: dict[bytes, dict[bytes, None]] | None = {} if has_quotas else None  # likewise
        self._children: dict[bytes, bytes | set[bytes]] = {}  # most have one: a set for each would cost 200 bytes
        self._holds: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[E]:
        """Oldest use first."""
        return iter(self._entries.values())

    def get(self, key: bytes) -> E | None:
        return self._entries.get(key)

    def children(self, parent: bytes) -> frozenset[bytes]:
        found = self._children.get(parent)
        return frozenset() if found is None else frozenset((found,) if isinstance(found, bytes) else found)

    def some_children(self, parent: bytes, most: int) -> list[bytes]:
        """At most so many, whichever; costs no more than that."""
        found = self._children.get(parent, ())
        return [found] if isinstance(found, bytes) else list(islice(found, most))

    def child_lengths(self, parent: bytes) -> set[int] | None:
        """How many tokens chunks behind a key hold; None: there are too many to look at."""
        keys = self.some_children(parent, _FEW_SIBLINGS + 1)
        return None if len(keys) > _FEW_SIBLINGS else {self._entries[key].num_tokens for key in keys}

    def beginnings(self, header: ChunkHeader, lineage: Lineage | None) -> list[E]:
        """Entries that may hold a beginning of a chunk: behind the same parent, and shorter.

        Of many siblings those that the lineage says; without it, a few of them.
        """
        keys = self.some_children(header.parent, _FEW_SIBLINGS + 1)
        if len(keys) > _FEW_SIBLINGS and lineage is not None:
            keys = lineage.beginnings(header.parent, header.token_ids)
        entries = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        return [entry for entry in entries if entry.num_tokens < header.num_tokens]

    def has_children(self, key: bytes) -> bool:
        return key in self._children

    def was_here(self, key: bytes) -> bool:
        """Whether a chunk of this key went, or was refused, not long ago."""
        return key in self._past

    def note_refused(self, key: bytes) -> None:
        """A chunk that did not come: if it comes again it is a return."""
        self._past[key] = True

    def add(self, entry: E) -> None:
        """A chunk whose key is not there, used last of all."""
        self._insert(entry)
        entry.has_returned = self._past.pop(entry.key, False)
        self._policy.withdraw(entry.parent)
        self._offer(entry)
        self._on_change(entry, True)

    def fill(self, entries: Iterable[E]) -> None:
        """Many at once, oldest use first, of keys that are not there: what has descendants is never ranked."""
        for entry in entries:
            self._insert(entry)
        for key, entry in self._entries.items():
            if key not in self._children:
                self._offer(entry)

    def use(self, entry: E, now_s: float) -> None:
        entry.last_used_s = now_s
        entry.has_returned = True
        key = entry.key
        self._entries[key] = self._entries.pop(key)
        if self._keys_by_owner is not None:
            keys = self._keys_by_owner[entry.owner]
            keys[key] = keys.pop(key)
        self._offer(entry)

    def remove(self, entry: E) -> None:
        key, parent_key, owner = entry.key, entry.parent, entry.owner
        del self._entries[key]
        self._past[key] = True
        self.num_blocks -= entry.num_blocks
        self.blocks_by_owner[owner] -= entry.num_blocks
        if not self.blocks_by_owner[owner]:
            del self.blocks_by_owner[owner]
        if self._keys_by_owner is not None:
            del self._keys_by_owner[owner][key]
            if not self._keys_by_owner[owner]:
                del self._keys_by_owner[owner]
        self._policy.withdraw(key)
        self._disown(parent_key, key)
        parent = self._entries.get(parent_key)
        if parent is not None:
            self._offer(parent)
        self._on_change(entry, False)

    def hold(self, key: bytes) -> None:
        """Not to go until `let_go` was called as often; the key need not be there yet."""
        self._holds[key] += 1
        self._policy.withdraw(key)

    def let_go(self, key: bytes) -> None:
        self._holds[key] -= 1
        if self._holds[key] <= 0:
            del self._holds[key]
        entry = self._entries.get(key)
        if entry is not None:
            self._offer(entry)

    def pop_victim(self, spared: Container[bytes] = ()) -> E | None:
        """The next to go, out of the index; None if nothing may go, or if it would be one that is spared."""
        victim = self._policy.choose()
        if victim is None:
            entry = self._in_a_circle()
        else:
            assert isinstance(victim.candidate.key, bytes)
            entry = self._entries[victim.candidate.key]
            if entry.key in spared:
                self._offer(entry)
                return None
        if entry is not None:
            self.remove(entry)
        return entry

    def pop_oldest_of(self, owner: bytes, spared: Container[bytes] = ()) -> E | None:
        """What the owner used longest ago, of what may go; None if there is nothing. `has_quotas` only."""
        assert self._keys_by_owner is not None
        for key in self._keys_by_owner.get(owner, ()):
            if key not in self._children and key not in self._holds and key not in spared:
                entry = self._entries[key]
                self.remove(entry)
                return entry
        return None

    def unused_since(self, time_s: float) -> list[E]:
        """What was not used from then on and is not held, nor is anything behind it; the ends of chains first.

        A chunk that others descend from is in use as they are: who has its KV on a device asks for what follows only.
        """
        old = {entry.key: entry for entry in takewhile(lambda entry: entry.last_used_s < time_s, self)}
        found: dict[bytes, E] = {}
        num_found_behind: Counter[bytes] = Counter()  # of the children, by parent
        for entry in old.values():
            each: E | None = entry
            while each is not None and each.key not in found and each.key not in self._holds:
                if num_found_behind[each.key] < self._num_children(each.key):
                    break
                found[each.key] = each
                num_found_behind[each.parent] += 1
                each = old.get(each.parent)
        return [*found.values()]

    def candidate(self, entry: E) -> Candidate:
        return Candidate(entry.key, entry.num_blocks, entry.last_used_s, entry.has_returned)

    def _insert(self, entry: E) -> None:
        key, owner, num_blocks = entry.key, entry.owner, entry.num_blocks
        assert key not in self._entries
        self._entries[key] = entry
        self.num_blocks += num_blocks
        self.blocks_by_owner[owner] += num_blocks
        if self._keys_by_owner is not None:
            self._keys_by_owner.setdefault(owner, {})[key] = None
        self._adopt(entry.parent, key)

    def _in_a_circle(self) -> E | None:
        """Names of a hostile folder may say that chunks descend from each other: then there is no last one."""
        is_held = any(key in self._entries for key in self._holds)
        return None if is_held else next(iter(self), None)

    def _offer(self, entry: E) -> None:
        key = entry.key
        if key not in self._children and key not in self._holds:
            self._policy.offer(self.candidate(entry))

    def _num_children(self, parent: bytes) -> int:
        found = self._children.get(parent, ())
        return 1 if isinstance(found, bytes) else len(found)

    def _adopt(self, parent: bytes, key: bytes) -> None:
        found = self._children.get(parent)
        if found is None:
            self._children[parent] = key
        elif isinstance(found, bytes):
            self._children[parent] = {found, key}
        else:
            found.add(key)

    def _disown(self, parent: bytes, key: bytes) -> None:
        found = self._children[parent]
        if isinstance(found, bytes):
            del self._children[parent]
        else:
            found.discard(key)
            if len(found) == 1:
                self._children[parent] = found.pop()
