"""Which chunks a folder holds, by key and by parent, in the order of their last use, and which of them goes next.

Only a chunk that no other chunk descends from is a candidate: what is left of a chain can be used from its root on.
"""

from __future__ import annotations

from collections.abc import Iterator

from mneme.cachetier.disk_names import ChunkName
from mneme.cachetier.eviction import Candidate, EvictionPolicy

BLOCK_BYTES = 4096  # a file takes whole blocks of the file system


class Entry:
    """A chunk in the folder."""

    __slots__ = ("last_used_s", "name", "num_uses", "touched_s")

    def __init__(self, name: ChunkName, last_used_s: float) -> None:
        self.name = name
        self.last_used_s = last_used_s
        self.touched_s = last_used_s  # when the file's time was last set
        self.num_uses = 1

    @property
    def num_blocks(self) -> int:
        return blocks_of(self.name.num_bytes)


def blocks_of(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


class DiskIndex:
    """No locks and no files: the tier's."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.num_blocks = 0
        self._policy = policy
        self._entries: dict[bytes, Entry] = {}  # oldest use first
        self._children: dict[bytes, bytes | set[bytes]] = {}  # most have one: a set for each would cost 200 bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        """Oldest use first."""
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def children(self, parent: bytes) -> frozenset[bytes]:
        found = self._children.get(parent)
        return frozenset() if found is None else frozenset((found,) if isinstance(found, bytes) else found)

    def add(self, entry: Entry) -> None:
        """A chunk whose key is not there, used last of all."""
        name = entry.name
        assert name.key not in self._entries
        self._entries[name.key] = entry
        self.num_blocks += entry.num_blocks
        self._adopt(name.parent, name.key)
        self._policy.withdraw(name.parent)
        self._offer(entry)

    def use(self, entry: Entry, now_s: float) -> None:
        entry.last_used_s = now_s
        entry.num_uses += 1
        self._entries[entry.name.key] = self._entries.pop(entry.name.key)
        self._offer(entry)

    def remove(self, entry: Entry) -> None:
        name = entry.name
        del self._entries[name.key]
        self.num_blocks -= entry.num_blocks
        self._policy.withdraw(name.key)
        self._disown(name.parent, name.key)
        parent = self._entries.get(name.parent)
        if parent is not None:
            self._offer(parent)

    def pop_victim(self) -> Entry | None:
        """The next to go, out of the index; None if it is empty."""
        victim = self._policy.choose()
        if victim is None:
            entry = next(iter(self), None)  # names of a hostile folder may say that chunks descend from each other
        else:
            assert isinstance(victim.candidate.key, bytes)
            entry = self._entries[victim.candidate.key]
        if entry is not None:
            self.remove(entry)
        return entry

    def descendants(self, key: bytes) -> list[bytes]:
        """All chunks that descend from a key or root, each behind those that descend from it."""
        found: dict[bytes, None] = {}
        unseen = [*self.children(key)]
        while unseen:
            child = unseen.pop()
            if child not in found:
                found[child] = None
                unseen += self.children(child)
        return [*found][::-1]

    def _offer(self, entry: Entry) -> None:
        key = entry.name.key
        if key not in self._children:
            self._policy.offer(Candidate(key, entry.num_blocks, entry.last_used_s, entry.num_uses))

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
