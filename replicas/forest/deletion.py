"""What is taken out of the prefix forest for good: of a session, of a prefix, of a tenant.

What sequences or pins hold stays until they let it go. Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from mneme.replicas.forest.kept import kept_roots
from mneme.replicas.forest.nodes import Node, Root, common_prefix
from mneme.replicas.forest.pages import TieredPages


def drop_below(pages: TieredPages, node: Node) -> None:
    """Everything under a node, leaves first."""
    for below in reversed(list(node.below_it())):
        pages.drop_everywhere(below)


def abandon(pages: TieredPages, root: Root, heir: Root | None) -> None:
    """See `PrefixForest.abandon`."""
    spared = set() if heir is None else kept_roots(heir)
    if root not in spared:
        drop_below(pages, root)
    for earlier in kept_roots(root) - spared:
        abandon(pages, earlier, heir)


def drop_kept(pages: TieredPages, root: Root) -> None:
    """See `PrefixForest.drop_kept`."""
    roots, nodes = [root], []
    for each in roots:  # grows
        nodes += [kept.node for kept in each.kept]
        roots += kept_roots(each)
    abandon(pages, root, None)
    for node in reversed(nodes):
        pages.drop_up(node)


def drop_prefix(pages: TieredPages, root: Root, ids: Sequence[int]) -> None:
    """What begins with `ids`, and of `ids` themselves, from their end up, what nothing else is on."""
    node, position = _follow(root, ids)
    if position < len(ids):  # nothing begins with them: the end may be another's, who goes on differently
        _drop_up(pages, node, position)
        return
    for child in list(node.children.values()):
        if child.start >= len(ids):
            drop_below(pages, child)
            pages.drop_everywhere(child)
    parent = node.parent
    if parent is not None and not node.children:
        pages.drop_everywhere(node)
        _drop_up(pages, parent, node.start)


def _drop_up(pages: TieredPages, node: Node, end: int) -> None:
    """From a node up, what nothing else is on; tokens behind `end`, where the prefix left it, are another's."""
    while node.parent is not None and node.end <= end:
        if node.refs or node.children or node.claim is not None:
            return
        parent, end = node.parent, node.start
        pages.drop_everywhere(node)
        node = parent


def _follow(root: Root, ids: Sequence[int]) -> tuple[Node, int]:
    """The last node that has some of `ids`, and how many of them there are up to there."""
    node: Node = root
    position = root.start
    while True:
        position += common_prefix(node.tokens, position - node.start, ids, position, len(ids))
        child = node.children.get((position, ids[position])) if position < len(ids) else None
        if child is None:
            return node, position
        node = child
