"""The prefix forest and the page pool under it (ChunkAttention 3.1): who holds which page, found at run time.

A node is one page instance: the tokens at positions [start, end) of one lineage, all inside one block of
`page_size` positions; token t sits at offset t mod page_size. A child continues at `child.start`, which may lie
inside its parent's block: then both have a page for that block and the sequence masks the parent's higher slots.

    root --- [0..32) --- [32..45) ...              prompt A
                    `--- [32..64) --- ...          (a sibling that differs at token 32)
                    [32..45) forked at 40 --- [40..64)

Every token that a running sequence has computed, or computes in the step being scheduled, is in the forest, so
sequences of one step already share. A sequence whose next token is here follows this page instead of writing its
own; slots above its position are hidden from it by causality, so its mask stays whole until it leaves the page.

States of a page: free (on the free list), in use (held by a sequence or a pin), cached (held by nobody, still
matching; `forest_cached.py` says whose it is and when it goes). `free + cached + in_use == num_pages` is checked by
`check()`. The pool never grows or gives memory back.

Policy only: no tensors.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from mneme.errors import PinRefused
from mneme.replicas.eviction import EvictionPolicy
from mneme.replicas.eviction_lru import LruPolicy
from mneme.replicas.forest_cached import CachedPages
from mneme.replicas.forest_nodes import ALL_SLOTS, Node, Owner, Path, Pin, Root, common_prefix

_RESERVED_SHARE = 10  # one page in so many is kept for running requests (Pensieve 4.3)


class OutOfPages(Exception):
    """No page is free and none is cached; the scheduler answers by suspending a sequence."""


class PrefixForest:
    """Pages, their owners, and token-exact matching over everything that is resident."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        sharing: bool = True,
        first_page: int = 0,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`policy` is LRU unless given."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_reserved = max(1, num_pages // _RESERVED_SHARE)
        self._sharing = sharing
        self._free = list(range(first_page + num_pages - 1, first_page - 1, -1))  # pops the lowest first
        self._fresh: list[int] = []
        self._roots: dict[str, Root] = {}  # by tenant salt; one engine has one model
        self._num_in_use = 0
        self._num_pinned = 0
        self._pins: set[Pin] = set()
        self._clock = clock
        self._releases = itertools.count(1)
        self._cached = CachedPages(policy or LruPolicy())

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self._num_in_use

    @property
    def num_cached(self) -> int:
        return self.num_pages - len(self._free) - self._num_in_use

    @property
    def num_available(self) -> int:
        """Pages that `write` can still take: free ones, then cached ones."""
        return self.num_pages - self._num_in_use

    @property
    def num_unpinned(self) -> int:
        """Pages that one sequence could have if it were alone, beside the pinned ones that it shares."""
        return self.num_pages - self._num_pinned

    def look_ahead(self, queue: Callable[[], Iterable[Owner | None]]) -> None:
        """Where eviction reads which sessions wait, in order; None for a request without a session."""
        self._cached.look_ahead(queue)

    def open_path(self, salt: str) -> Path:
        """An empty path under the tenant's root; paths under different salts never meet."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Root(salt)
        root.refs += 1
        return Path(root)

    def extend(self, path: Path, ids: Sequence[int], limit: int) -> int:
        """Follow resident tokens equal to `ids[path.num_tokens:limit]`; returns how many were found."""
        if not self._sharing:
            return 0
        before = position = path.num_tokens
        while position < limit:
            node = path.tail
            position += common_prefix(node.tokens, position - node.start, ids, position, limit)
            if position == limit:
                break
            child = node.children.get((position, ids[position]))
            if child is None:
                break
            self._leave(path, position)
            self._hold(path, child)
        path.num_tokens = position
        return position - before

    def write(self, path: Path, ids: Sequence[int], end: int) -> list[tuple[int, int, int]]:
        """Take slots for `ids[path.num_tokens:end]`, which `extend` did not find.

        Returns runs (page id, first offset, number of tokens), in order. Raises `OutOfPages`, having taken nothing.
        """
        runs = []
        needed = self.num_new_pages(path, ids, end)
        if needed > self.num_available:
            raise OutOfPages
        while path.num_tokens < end:
            position = path.num_tokens
            node = self._writable_tail(path, ids)
            count = min(end, (position // self.page_size + 1) * self.page_size) - position
            node.tokens.extend(ids[position : position + count])
            path.num_tokens += count
            runs.append((node.page_id, position % self.page_size, count))
        return runs

    def num_new_pages(self, path: Path, ids: Sequence[int], end: int) -> int:
        """How many pages `write` would take."""
        position = path.num_tokens
        if self._can_append(path, ids):
            position = (position // self.page_size + 1) * self.page_size
        return max(0, -(-end // self.page_size) - position // self.page_size)

    def release(self, path: Path, owner: Owner | None = None) -> None:
        """The sequence is gone: its pages stay cached. They are the owner's, if it is given, and no others any more."""
        number, now_s, tail = next(self._releases), self._clock(), path.tail
        for node in reversed(path.nodes):
            node.refs -= 1
            node.released, node.last_used_s = number, now_s
            if node.writer is path:
                node.writer = None
            if node.refs == 0:
                self._num_in_use -= 1
                if not self._sharing:
                    self._free.append(node.page_id)
        if path.nodes and self._sharing:
            self._cached.released(tail, owner)
        path.root.refs -= 1
        self._drop_empty_root(path.root)
        path.nodes, path.page_ids, path.masks, path.num_tokens = [], [], [], 0

    def disown(self, owner: Owner) -> None:
        """The session is gone: what only it owned is nobody's and stays cached until room is needed."""
        self._cached.disown(owner)

    def pin(self, path: Path, *, num_kept: int = 0) -> Pin:
        """Keep the path's pages until `unpin`, whatever becomes of the path.

        Raises `PinRefused` if fewer than the reserve, or than `num_kept`, would then be left unpinned.
        """
        num_new = sum(not node.pins for node in path.nodes)
        left, needed = self.num_unpinned - num_new, max(self.num_reserved, num_kept)
        if left < needed or not path.nodes or not self._sharing:
            raise PinRefused(num_new, max(left, 0), needed)
        pin = Pin(path.copy())
        for node in path.nodes:
            node.refs += 1
            node.pins += 1
        path.root.refs += 1
        self._num_pinned += num_new
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """The pages are as any others again; a pin that is gone already is ignored."""
        if pin not in self._pins:
            return
        self._pins.remove(pin)
        for node in pin.path.nodes:
            node.pins -= 1
            self._num_pinned -= not node.pins
        self.release(pin.path)

    def clear(self) -> None:
        """Forget every cached page; pages in use or pinned stay."""
        while self._num_in_use + len(self._free) < self.num_pages:
            self._evict_one()

    def forget_all(self) -> None:
        """After a failed step no page can be trusted: pins go too. Pages that sequences hold stay theirs."""
        for pin in list(self._pins):
            self.unpin(pin)
        self.clear()

    def drain_fresh(self) -> list[int]:
        """Page ids taken since the last call: the runner makes their old slots invisible before it writes."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def check(self) -> None:
        """Assert every invariant; walks the whole forest."""
        nodes = list(self._walk())
        pages = [node.page_id for node in nodes]
        if self._sharing:
            assert sorted(pages + self._free) == sorted(set(pages) | set(self._free)), "a page has two owners"
            assert len(pages) + len(self._free) == self.num_pages, "a page is lost"
            assert self._num_in_use == sum(node.refs > 0 for node in nodes)
            self._cached.check(nodes)
        assert self._num_pinned == sum(node.pins > 0 for node in nodes)
        for node in nodes:
            assert node.refs >= 0
            assert 0 < len(node.tokens) <= self.page_size - node.start % self.page_size
            assert node.parent is not None
            assert node.start <= node.parent.end
            assert node.pins <= node.refs <= node.parent.refs
            assert node.parent.children[(node.start, node.tokens[0])] is node
        assert self.num_free + self.num_cached + self.num_in_use == self.num_pages

    def _walk(self) -> Iterator[Node]:
        stack: list[Node] = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def _hold(self, path: Path, node: Node) -> None:
        if node.refs == 0:
            self._num_in_use += 1
            self._cached.held(node)
        node.refs += 1
        node.num_uses += 1
        path.nodes.append(node)
        path.page_ids.append(node.page_id)
        path.masks.append(ALL_SLOTS)

    def _leave(self, path: Path, position: int) -> None:
        """From `position` on the path uses other pages: in the block it leaves, higher slots are not its own."""
        offset = position % self.page_size
        if path.nodes and offset and path.masks[-1] == ALL_SLOTS:
            path.masks[-1] = (1 << offset) - 1
            path.num_cuts += 1

    def _can_append(self, path: Path, ids: Sequence[int]) -> bool:
        node, position = path.tail, path.num_tokens
        if node is path.root or node.end != position or position % self.page_size == 0:
            return False
        if node.writer is None and position < len(ids):
            return (position, ids[position]) not in node.children
        return node.writer is path

    def _writable_tail(self, path: Path, ids: Sequence[int]) -> Node:
        if self._can_append(path, ids):
            path.tail.writer = path
            return path.tail
        position, parent = path.num_tokens, path.tail
        self._leave(path, position)
        node = Node(self._take_page(), parent, position, [])
        node.writer = path
        if self._sharing:
            parent.children[(position, ids[position])] = node
        self._hold(path, node)
        return node

    def _take_page(self) -> int:
        if not self._free:
            self._evict_one()
        page_id = self._free.pop()
        self._fresh.append(page_id)
        return page_id

    def _evict_one(self) -> None:
        evicted = self._cached.evict()
        if evicted is None:
            raise OutOfPages
        leaf, parent = evicted
        self._free.append(leaf.page_id)
        self._drop_empty_root(parent)

    def _drop_empty_root(self, node: Node) -> None:
        if isinstance(node, Root) and node.refs == 0 and not node.children:
            self._roots.pop(node.salt, None)
