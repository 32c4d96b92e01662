"""What the prefix forest is made of: pages with their tokens, roots, paths of sequences, claims of sessions, pins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALL_SLOTS = -1  # a mask with every bit set


class Node:
    """One page instance in the forest."""

    __slots__ = (
        "children",
        "claim",
        "last_used_s",
        "num_uses",
        "page_id",
        "parent",
        "pins",
        "refs",
        "released",
        "start",
        "tokens",
        "writer",
    )

    def __init__(self, page_id: int, parent: Node | None, start: int, tokens: list[int]) -> None:
        self.page_id = page_id
        self.parent = parent
        self.start = start  # position of tokens[0]
        self.tokens = tokens
        self.children: dict[tuple[int, int], Node] = {}  # (position, token id) -> the child that begins with it
        self.refs = 0  # paths that hold this page; a pin is one
        self.pins = 0
        self.writer: Path | None = None  # the one path that may append
        self.claim: Claim | None = None  # of the sessions whose last path ends here
        self.released = 0  # number of the last release, which gave it back together with others
        self.last_used_s = 0.0  # when that was
        self.num_uses = 0  # paths that have held it

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Root(Node):
    """Where a tenant's lineages begin; holds no page and no tokens."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(0, None, 0, [])
        self.salt = salt


class Claim:
    """That the last paths of some owners end at `node`; see `forest_owners.py`."""

    __slots__ = ("into", "node", "num_owners")

    def __init__(self, node: Node) -> None:
        self.node: Node | None = node  # None: nothing is left of the paths
        self.num_owners = 0
        self.into: Claim | None = None  # the claim that this one became part of


@dataclass(slots=True, eq=False)
class Owner:
    """Who a path can belong to after its sequence is gone: a session."""

    claim: Claim | None = field(default=None, init=False, repr=False)  # where its last path ended


class Path:
    """The pages one sequence sees, root first: its page table.

    `page_ids[i]` with `masks[i]` are the references. Between cuts of a mask they are only appended to.
    """

    __slots__ = ("masks", "nodes", "num_cuts", "num_tokens", "page_ids", "root")

    def __init__(self, root: Root) -> None:
        self.root = root
        self.nodes: list[Node] = []
        self.page_ids: list[int] = []
        self.masks: list[int] = []
        self.num_tokens = 0  # tokens with KV on this path
        self.num_cuts = 0

    @property
    def tail(self) -> Node:
        return self.nodes[-1] if self.nodes else self.root

    def copy(self) -> Path:
        """Another path over the same pages; whoever makes it counts the references."""
        other = Path(self.root)
        other.nodes, other.page_ids, other.masks = list(self.nodes), list(self.page_ids), list(self.masks)
        other.num_tokens, other.num_cuts = self.num_tokens, self.num_cuts
        return other


class Pin:
    """Pages that stay until `PrefixForest.unpin`; holds them as a path does."""

    __slots__ = ("num_tokens", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_tokens = path.num_tokens


def common_prefix(tokens: list[int], offset: int, ids: Sequence[int], position: int, limit: int) -> int:
    """Length of the common prefix of `tokens[offset:]` and `ids[position:limit]`."""
    ours = tokens[offset:]
    theirs = list(ids[position : min(limit, position + len(ours))])
    if ours == theirs:
        return len(ours)
    for count, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return count
    return min(len(ours), len(theirs))
