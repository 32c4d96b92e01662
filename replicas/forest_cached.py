"""The pages that nobody holds: whose they are, and which go when room is needed.

Pages go leaves first. A *run* is what the eviction of one leaf's session would free: the leaf and the pages above it
that were given back together with it and carry nothing else: no other child, no path that holds them, no end of another
session's path. A shared page is thus part of no run until one session is left on it, and unowned leaves are runs like
any other.

A run that shrinks (a path holds its upper part) is measured again when the policy chooses it; one that grows (a sibling
went, or the path that ended on it is another now) is offered again at once. So each choice is the policy's for the
runs as they are, and no change costs more than the length of a path.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from mneme.replicas.eviction import Candidate, EvictionPolicy
from mneme.replicas.forest_nodes import Node, Owner
from mneme.replicas.forest_owners import Owners


class CachedPages:
    """Offers runs to a policy and takes out its victims, page by page."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._owners = Owners()
        self._victim: Node | None = None  # the leaf that goes next, no candidate any more
        self._num_victims = 0  # pages that are to go with it, itself too

    @property
    def num_owners(self) -> int:
        return len(self._owners)

    def look_ahead(self, queue: Callable[[], Iterable[Owner | None]]) -> None:
        """Tell the policy what waits: the sessions of waiting requests, in order; None for one without."""

        def keys() -> Iterable[Hashable | None]:
            return (None if owner is None else self._owners.tail_of(owner) for owner in queue())

        self._policy.set_queue(keys)

    def held(self, node: Node) -> None:
        """A path holds this page, which nobody did."""
        if node is self._victim:
            self._victim = None
        self._policy.withdraw(node)

    def released(self, tail: Node, owner: Owner | None) -> None:
        """A path that ends here was given back."""
        if owner is not None:
            for node in self._owners.claim(owner, tail):
                self._offer_through(node)
        if _is_idle_leaf(tail):
            self._offer(tail, _run_length(tail))

    def disown(self, owner: Owner) -> None:
        """The session is gone: its pages are nobody's, or those of the other sessions that have them."""
        for node in self._owners.drop(owner):
            self._offer_through(node)

    def evict(self) -> tuple[Node, Node] | None:
        """Take one leaf out of the forest; returns it and its former parent, or None if no page is cached."""
        leaf = self._victim or self._choose()
        if leaf is None:
            return None
        parent = leaf.parent
        assert parent is not None
        del parent.children[(leaf.start, leaf.tokens[0])]
        self._owners.move_up(leaf, parent)
        leaf.parent = None
        self._after(leaf, parent)
        return leaf, parent

    def check(self, nodes: list[Node]) -> None:
        """Assert every invariant; `nodes` are all pages."""
        leaves = {node for node in nodes if _is_idle_leaf(node)}
        offered = self._policy.candidates
        assert leaves - {self._victim} == set(offered)
        assert self._victim is None or (self._victim in leaves and self._num_victims > 0)
        for key, candidate in offered.items():
            assert isinstance(key, Node)
            assert candidate.num_pages >= _run_length(key)
            assert (candidate.last_used_s, candidate.num_uses) == (key.last_used_s, key.num_uses)
        self._owners.check(nodes)

    def _choose(self) -> Node | None:
        while (victim := self._policy.choose()) is not None:
            leaf = victim.candidate.key
            assert isinstance(leaf, Node)
            length = _run_length(leaf)
            if length == victim.candidate.num_pages:
                self._num_victims = victim.num_pages
                return leaf
            self._offer(leaf, length)
        return None

    def _after(self, leaf: Node, parent: Node) -> None:
        """The victim has gone: its parent goes next, or is offered, or the run of a sibling has grown."""
        self._victim = None
        self._num_victims -= 1
        if parent.parent is None or parent.refs:
            return
        if parent.children:
            self._offer_through(parent)
        elif self._num_victims and parent.released == leaf.released:
            self._victim = parent
        else:
            self._offer(parent, _run_length(parent))

    def _offer_through(self, node: Node) -> None:
        """Offer the run that this page is or may be part of, if it is one."""
        while len(node.children) == 1:
            (node,) = node.children.values()
        if _is_idle_leaf(node) and node is not self._victim:
            self._offer(node, _run_length(node))

    def _offer(self, leaf: Node, num_pages: int) -> None:
        self._policy.offer(Candidate(leaf, num_pages, leaf.last_used_s, leaf.num_uses))


def _is_idle_leaf(node: Node) -> bool:
    return not node.refs and not node.children and node.parent is not None


def _run_length(leaf: Node) -> int:
    """Pages of the run that ends at an idle leaf."""
    length, node, parent = 1, leaf, leaf.parent
    while parent is not None and _continues(node, parent):
        length, node, parent = length + 1, parent, parent.parent
    return length


def _continues(node: Node, parent: Node) -> bool:
    """Whether the run that `node` is part of goes on in its parent."""
    return (
        parent.parent is not None  # not a root
        and not parent.refs
        and parent.released == node.released
        and parent.claim is None
        and len(parent.children) == 1
    )
