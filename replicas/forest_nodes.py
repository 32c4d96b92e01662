"""What the prefix forest is made of: pages with their tokens, roots, and the paths of sequences."""

from __future__ import annotations

ALL_SLOTS = -1  # a mask with every bit set


class Node:
    """One page instance in the forest."""

    __slots__ = ("children", "last_used", "page_id", "parent", "refs", "start", "tokens", "writer")

    def __init__(self, page_id: int, parent: Node | None, start: int, tokens: list[int]) -> None:
        self.page_id = page_id
        self.parent = parent
        self.start = start  # position of tokens[0]
        self.tokens = tokens
        self.children: dict[tuple[int, int], Node] = {}  # (position, token id) -> the child that begins with it
        self.refs = 0  # paths that hold this page
        self.writer: Path | None = None  # the one path that may append
        self.last_used = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Root(Node):
    """Where a tenant's lineages begin; holds no page and no tokens."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(0, None, 0, [])
        self.salt = salt


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
