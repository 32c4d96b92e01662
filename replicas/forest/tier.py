"""The page ids of one tier: each is free, cached (with a node that nobody holds) or in use. Policy only: no tensors."""

from __future__ import annotations

from mneme.cachetier.policy.eviction import EvictionPolicy
from mneme.replicas.forest.cached import CachedPages
from mneme.replicas.forest.nodes import Node
from mneme.replicas.forest.owners import Owners


class Tier:
    """`index` is DEVICE or HOST; page ids are [first_page, first_page + num_pages)."""

    def __init__(
        self, index: int, num_pages: int, policy: EvictionPolicy, owners: Owners, *, first_page: int = 0
    ) -> None:
        self.num_pages = num_pages
        self.free = list(range(first_page + num_pages - 1, first_page - 1, -1))  # pops the lowest first
        self.num_in_use = 0
        self.cached = CachedPages(index, policy, owners)
        self.index = index

    @property
    def num_cached(self) -> int:
        return self.num_pages - len(self.free) - self.num_in_use

    def has(self, node: Node) -> bool:
        return node.pages[self.index] is not None

    def place(self, node: Node, page_id: int) -> None:
        """The node has this page from now on, still without KV."""
        node.pages[self.index], node.filled[self.index] = page_id, 0
        if node.refs:
            self.num_in_use += 1
        else:
            self._add_below(node)
            self.cached.offer_through(node)

    def remove(self, node: Node) -> None:
        """The node's page is free again."""
        page_id = node.pages[self.index]
        assert page_id is not None
        self.free.append(page_id)
        node.pages[self.index], node.filled[self.index] = None, 0
        if node.refs:
            self.num_in_use -= 1
        else:
            _parent(node).below[self.index] -= 1
            self.cached.removed(node)

    def discard(self, node: Node) -> None:
        """The page of a node that was in use, and in no forest, is free again."""
        page_id = node.pages[self.index]
        assert page_id is not None
        self.free.append(page_id)
        self.num_in_use -= 1

    def hold(self, node: Node) -> None:
        """The first path holds the node; its `refs` say so already."""
        if not self.has(node):
            return
        self.num_in_use += 1
        self.cached.withdraw(node)
        parent = _parent(node)
        parent.below[self.index] -= 1
        if not parent.refs:  # a truncated session does not hold what it dropped
            self.cached.offer_through(parent)

    def release(self, node: Node) -> None:
        """The last path gave the node back; it is offered once the whole path is."""
        if self.has(node):
            self.num_in_use -= 1
            self._add_below(node)

    def check(self, nodes: list[Node]) -> None:
        """Assert every invariant; `nodes` is the whole forest."""
        pages = [page for node in nodes if (page := node.pages[self.index]) is not None]
        assert sorted(pages + self.free) == sorted(set(pages) | set(self.free)), "a page has two owners"
        assert len(pages) + len(self.free) == self.num_pages, "a page is lost"
        assert self.num_in_use == sum(self.has(node) and node.refs > 0 for node in nodes)
        for node in nodes:
            assert 0 <= node.filled[self.index] <= (len(node.tokens) if self.has(node) else 0)
        self.cached.check(nodes)

    def _add_below(self, node: Node) -> None:
        parent = _parent(node)
        parent.below[self.index] += 1
        self.cached.withdraw(parent)


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
