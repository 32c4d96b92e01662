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

States of a page: free (on the free list), in use (held by a sequence), cached (held by nobody, still matching).
`free + cached + in_use == num_pages` is checked by `check()`. The pool never grows or gives memory back.

Policy only: no tensors.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from mneme.replicas.forest_nodes import ALL_SLOTS, Node, Path, Root

_HEAP_SLACK = 64  # entries that may be stale before they are swept


class OutOfPages(Exception):
    """No page is free and none is cached; the scheduler answers by suspending a sequence."""


class PrefixForest:
    """Pages, their owners, and token-exact matching over everything that is resident."""

    def __init__(self, num_pages: int, page_size: int, *, sharing: bool = True, first_page: int = 0) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._sharing = sharing
        self._free = list(range(first_page + num_pages - 1, first_page - 1, -1))  # pops the lowest first
        self._fresh: list[int] = []
        self._roots: dict[str, Root] = {}  # by tenant salt; one engine has one model
        self._num_in_use = 0
        self._clock = itertools.count(1)
        self._evictable: list[tuple[int, int, int, Node]] = []  # heap of (last_used, -start, serial, leaf)
        self._serial = itertools.count()

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
            position += _common_prefix(node.tokens, position - node.start, ids, position, limit)
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

    def release(self, path: Path) -> None:
        """The sequence is gone: its pages stay cached, youngest use last, tails before heads."""
        now = next(self._clock)
        for node in reversed(path.nodes):
            node.refs -= 1
            node.last_used = now
            if node.writer is path:
                node.writer = None
            if node.refs == 0:
                self._num_in_use -= 1
                self._became_idle(node)
        path.root.refs -= 1
        self._drop_empty_root(path.root)
        path.nodes, path.page_ids, path.masks, path.num_tokens = [], [], [], 0

    def clear(self) -> None:
        """Forget every cached page (after a failed step, say); pages in use stay."""
        while self._num_in_use + len(self._free) < self.num_pages:
            self._evict_one()

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
        for node in nodes:
            assert node.refs >= 0
            assert 0 < len(node.tokens) <= self.page_size - node.start % self.page_size
            assert node.parent is not None
            assert node.start <= node.parent.end
            assert node.refs <= node.parent.refs
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
        node.refs += 1
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

    def _became_idle(self, node: Node) -> None:
        if not self._sharing:
            self._free.append(node.page_id)
        elif not node.children:
            heapq.heappush(self._evictable, (node.last_used, -node.start, next(self._serial), node))
            if len(self._evictable) > 2 * self.num_pages + _HEAP_SLACK:
                self._evictable = [entry for entry in self._evictable if _is_true(entry)]
                heapq.heapify(self._evictable)

    def _evict_one(self) -> None:
        """Free the least recently used leaf that nobody holds; entries that are no longer true are skipped."""
        while self._evictable:
            entry = heapq.heappop(self._evictable)
            node, parent = entry[-1], entry[-1].parent
            if not _is_true(entry) or parent is None:
                continue
            node.parent = None
            del parent.children[(node.start, node.tokens[0])]
            self._free.append(node.page_id)
            if parent.refs == 0 and not parent.children and parent.parent is not None:
                self._became_idle(parent)
            self._drop_empty_root(parent)
            return
        raise OutOfPages

    def _drop_empty_root(self, node: Node) -> None:
        if isinstance(node, Root) and node.refs == 0 and not node.children:
            self._roots.pop(node.salt, None)


def _is_true(entry: tuple[int, int, int, Node]) -> bool:
    """Whether an entry of the heap still describes a leaf that nobody holds."""
    last_used, _, _, node = entry
    return not node.refs and not node.children and node.last_used == last_used and node.parent is not None


def _common_prefix(tokens: list[int], offset: int, ids: Sequence[int], position: int, limit: int) -> int:
    """Length of the common prefix of `tokens[offset:]` and `ids[position:limit]`."""
    ours = tokens[offset:]
    theirs = list(ids[position : min(limit, position + len(ours))])
    if ours == theirs:
        return len(ours)
    for count, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return count
    return min(len(ours), len(theirs))
