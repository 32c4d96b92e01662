"""The page ids of one tier: each is free, cached (of a node that nobody holds) or in use; and which cached ones go.

Pages go leaves first: a leaf is a node with a page here that nobody holds and no such node below it. A *run* is what
the eviction of one leaf's session would free: the leaf and the pages above it that were given back together with it and
carry nothing else: no other idle page below, no path that holds them, no end of another session's path. A shared page
is thus part of no run until one session is left on it, and unowned leaves are runs like any other.

A run that shrinks (a path holds its upper part) is measured again when the policy chooses it; one that grows (a sibling
went, or the path that ended on it is another now) is offered again at once. So each choice is the policy's for the
runs as they are, and no change costs more than the length of a path.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.replicas.forest.nodes import Node, Owner
from mneme.replicas.forest.owners import Owners

_MAX_CLIMB = 4096  # nodes that one look at the queue climbs from where sessions end to what this tier has of them


class Tier:
    """Offers runs of cached pages to a policy and names its victims, page by page.

    `index` is DEVICE or HOST; page ids are [first_page, first_page + num_pages).
    """

    def __init__(
        self, index: int, num_pages: int, policy: EvictionPolicy, owners: Owners, *, first_page: int = 0
    ) -> None:
        self.index = index
        self.num_pages = num_pages
        self.free = list(range(first_page + num_pages - 1, first_page - 1, -1))  # pops the lowest first
        self.num_in_use = 0
        self.policy = policy
        self._owners = owners
        self._victim: Node | None = None  # the leaf that goes next, no candidate any more
        self._num_victims = 0  # pages that are to go with it, itself too

    @property
    def num_cached(self) -> int:
        return self.num_pages - len(self.free) - self.num_in_use

    def look_ahead(self, queue: Callable[[], Iterable[Owner | None]]) -> None:
        """Tell the policy what waits: the sessions of waiting requests, in order; None for one without."""

        def keys() -> Iterable[Hashable | None]:
            steps = _MAX_CLIMB
            for owner in queue():
                node = None if owner is None else self._owners.tail_of(owner)
                while node is not None and node.pages[self.index] is None and steps:
                    node, steps = node.parent, steps - 1
                yield node

        self.policy.set_queue(keys)

    def has(self, node: Node) -> bool:
        return node.pages[self.index] is not None

    def place(self, node: Node, page_id: int) -> None:
        """The node has this page from now on, still without KV."""
        node.pages[self.index], node.filled[self.index] = page_id, 0
        if node.refs:
            self.num_in_use += 1
        else:
            self._add_below(node)
            self.offer_through(node)

    def remove(self, node: Node) -> None:
        """The node's page is free again."""
        page_id = node.pages[self.index]
        assert page_id is not None
        self.free.append(page_id)
        node.pages[self.index], node.filled[self.index] = None, 0
        if node.refs:
            self.num_in_use -= 1
        else:
            self._remove_cached(node, _parent(node))

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
        if node is self._victim:
            self._victim = None
        self.policy.withdraw(node)
        parent = _parent(node)
        parent.below[self.index] -= 1
        if not parent.refs:  # a truncated session does not hold what it dropped
            self.offer_through(parent)

    def release(self, node: Node) -> None:
        """The last path gave the node back; it is offered once the whole path is."""
        if self.has(node):
            self.num_in_use -= 1
            self._add_below(node)

    def offer_if_leaf(self, node: Node) -> None:
        if self._is_leaf(node) and node is not self._victim:
            self._offer(node, self._run_length(node))

    def offer_through(self, node: Node) -> None:
        """Offer the run that this node is or may be part of, if it is one."""
        while node.below[self.index] == 1:
            node = next(child for child in node.children.values() if self._is_idle(child))
        self.offer_if_leaf(node)

    def choose(self) -> Node | None:
        """The leaf to go next; None if no page is cached. `remove` is to follow."""
        if self._victim is not None:
            return self._victim
        while (victim := self.policy.choose()) is not None:
            leaf = victim.candidate.key
            assert isinstance(leaf, Node)
            length = self._run_length(leaf)
            if length == victim.candidate.num_pages:
                self._victim, self._num_victims = leaf, victim.num_pages
                return leaf
            self._offer(leaf, length)
        return None

    def check(self, nodes: list[Node]) -> None:
        """Assert every invariant; `nodes` is the whole forest."""
        pages = [page for node in nodes if (page := node.pages[self.index]) is not None]
        assert sorted(pages + self.free) == sorted(set(pages) | set(self.free)), "a page has two owners"
        assert len(pages) + len(self.free) == self.num_pages, "a page is lost"
        assert self.num_in_use == sum(self.has(node) and node.refs > 0 for node in nodes)
        for node in nodes:
            assert 0 <= node.filled[self.index] <= (len(node.tokens) if self.has(node) else 0)
        leaves = {node for node in nodes if self._is_leaf(node)}
        offered = self.policy.candidates
        assert leaves - {self._victim} == set(offered)
        assert self._victim is None or (self._victim in leaves and self._num_victims > 0)
        for key, candidate in offered.items():
            assert isinstance(key, Node)
            assert candidate.num_pages >= self._run_length(key)
            assert candidate.last_used_s == key.last_used_s
        for node in nodes:
            assert node.below[self.index] == sum(self._is_idle(child) for child in node.children.values())

    def _withdraw(self, node: Node) -> None:
        """The node is no leaf here, or not idle, any more."""
        if node is self._victim:
            self._victim = None
        self.policy.withdraw(node)

    def _remove_cached(self, node: Node, parent: Node) -> None:
        """An idle node's page is gone: its parent goes next, or is offered, or the run of a sibling has grown."""
        parent.below[self.index] -= 1
        was_victim = node is self._victim
        self._num_victims -= was_victim
        self._withdraw(node)
        if not self._is_idle(parent):
            return
        if parent.below[self.index]:
            self.offer_through(parent)
        elif was_victim and self._num_victims and parent.released == node.released:
            self._victim = parent
        else:
            self.offer_if_leaf(parent)

    def _add_below(self, node: Node) -> None:
        parent = _parent(node)
        parent.below[self.index] += 1
        self._withdraw(parent)

    def _is_idle(self, node: Node) -> bool:
        return not node.refs and node.pages[self.index] is not None

    def _is_leaf(self, node: Node) -> bool:
        return self._is_idle(node) and not node.below[self.index]

    def _run_length(self, leaf: Node) -> int:
        """Pages of the run that ends at an idle leaf."""
        length, node, parent = 1, leaf, leaf.parent
        while parent is not None and self._continues(node, parent):
            length, node, parent = length + 1, parent, parent.parent
        return length

    def _continues(self, node: Node, parent: Node) -> bool:
        """Whether the run that `node` is part of goes on in its parent."""
        is_of_release = parent.released == node.released and parent.claim is None
        return is_of_release and self._is_idle(parent) and parent.below[self.index] == 1

    def _offer(self, leaf: Node, num_pages: int) -> None:
        node = leaf
        for _ in range(num_pages // 3):
            assert node.parent is not None  # the run is longer
            node = node.parent
        self.policy.offer(Candidate(leaf, num_pages, leaf.last_used_s, node.num_uses > 1))


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
