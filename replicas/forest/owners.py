"""Which session owns which path: the path of its last turn, remembered by the page where it ends.

An owner holds its claim itself, so that owners cost nothing here and are as many as there are sessions.

Pages go from the tail, so what is left of a path is always a path, and its end moves up to the parent. Sessions whose
paths end at the same page share one claim; claims that meet are merged into the larger one, so that an eviction costs
the same however many sessions own the page.
"""

from __future__ import annotations

from mneme.replicas.forest.nodes import Claim, Node, Owner


class Owners:
    """Gives claims to owners and takes them back; whoever forgets an owner drops it here first."""

    def __init__(self) -> None:
        self._num_owners = 0

    def __len__(self) -> int:
        """Owners with a claim, also those of whose path nothing is left."""
        return self._num_owners

    def tail_of(self, owner: Owner) -> Node | None:
        """Where what is left of its path ends; None if nothing is."""
        return None if owner.claim is None else _merged(owner.claim).node

    def claim(self, owner: Owner, node: Node) -> list[Node]:
        """The owner's path ends at this page from now on. Returns the pages at which none ends any more."""
        left = self.drop(owner)
        if node.claim is None:
            node.claim = Claim(node)
        node.claim.num_owners += 1
        owner.claim = node.claim
        self._num_owners += 1
        return left

    def drop(self, owner: Owner) -> list[Node]:
        """The owner is gone. Returns the page at which no path ends any more, if there is one."""
        if owner.claim is None:
            return []
        claim, owner.claim = _merged(owner.claim), None
        self._num_owners -= 1
        claim.num_owners -= 1
        node = claim.node
        if claim.num_owners or node is None:
            return []
        node.claim = claim.node = None
        return [node]

    def move_up(self, node: Node, parent: Node) -> None:
        """The page goes: the paths that ended there end at its parent."""
        claim, node.claim = node.claim, None
        if claim is None:
            return
        if parent.parent is None:  # a root: nothing is left of them
            claim.node = None
            return
        if parent.claim is not None:
            small, claim = sorted((claim, parent.claim), key=lambda one: one.num_owners)
            small.into, small.node = claim, None
            claim.num_owners += small.num_owners
        parent.claim, claim.node = claim, parent

    def check(self, nodes: list[Node]) -> None:
        """Assert that claims and pages know each other; `nodes` are all pages."""
        claims = [node.claim for node in nodes if node.claim is not None]
        assert all(node.claim.node is node and node.claim.into is None for node in nodes if node.claim is not None)
        assert all(claim.num_owners > 0 for claim in claims)
        assert len(self) >= sum(claim.num_owners for claim in claims)


def _merged(claim: Claim) -> Claim:
    """The claim that this one became part of; halves the way for the next time."""
    while claim.into is not None:
        if claim.into.into is not None:
            claim.into = claim.into.into
        claim = claim.into
    return claim
