"""Defines what the prefix forest is made of: pages with their tokens, roots, claims of sessions."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mneme.kernels.page_table import IntArray

ALL_SLOTS = -1  # a mask with every bit set
NOWHERE = -1  # stands for the page id of a page that the device has not
DEVICE, HOST = 0, 1  # tiers, as indices of what a page keeps for each
_WORD_BITS = 64  # of a mask
_EVENT_BYTES = 16


# Position and token id with which a child begins, and whose it is where that is not the parent's.
ChildKey = tuple[int, int] | tuple[int, int, str]


class Page:
    """Holds the tokens at [start, end) of one lineage, all in one block, and where their KV is.

    In each tier the first `filled` tokens have KV, at the page id in `ids`. What no tier has is a hole; a page is all
    hole only while something behind it has KV, or a sequence is about to compute it.
    """

    __slots__ = (
        "below",
        "block",
        "children",
        "claim",
        "filled",
        "ids",
        "is_reclaimable",
        "keepers",
        "last_used_s",
        "num_uses",
        "parent",
        "pins",
        "positions",
        "refs",
        "released",
        "salt",
        "start",
        "tokens",
        "writer",
    )

    def __init__(self, parent: Page | None, start: int) -> None:
        self.parent = parent
        self.salt: str = "" if parent is None else parent.salt  # whose tokens they are
        self.start = start  # position of tokens[0], at which its key is rotated
        self.tokens = array("i")
        # Where the keys of a blend's private tokens are rotated: any places. None: at `start` and behind it.
        self.positions: array[int] | None = None
        self.children: dict[ChildKey, Page] = {}
        self.block: bytes | None = None  # names the block of tokens that ends with it, once somebody has asked
        self.ids: list[int | None] = [None, None]  # by tier
        self.filled = [0, 0]  # by tier; 0 without a page id
        self.below = [0, 0]  # by tier: children with a page id there that nobody holds
        self.keepers: set[Root] | None = None  # roots that keep some of its tokens, and that paths or pages are on
        self.is_reclaimable = False  # nobody holds it, and the host has all that the device has
        self.refs = 0  # paths that hold it; a pin is one
        self.pins = 0
        self.writer: object | None = None  # the one `Path` that may append
        self.claim: Claim | None = None  # of the sessions whose last path ends here
        self.released = 0  # number of the last release, which gave it back together with others
        self.last_used_s = 0.0  # when that was
        self.num_uses = 0  # paths that have held it

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def child(self, position: int, token_id: int, salt: str) -> Page | None:
        """Find the child that begins with this token, for paths under this salt: their own, or else a public one."""
        common = self.children.get((position, token_id))
        return common if salt == self.salt else self.children.get((position, token_id, salt), common)

    def key_of(self, child: Page, token_id: int) -> ChildKey:
        """Name a child; below a public page those of each tenant are apart."""
        return (child.start, token_id) if child.salt == self.salt else (child.start, token_id, child.salt)

    def below_it(self) -> Iterator[Page]:
        """Walk all pages under this one, parents first."""
        stack: list[Page] = [self]
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)


class Kept(NamedTuple):
    """Names tokens of another lineage that a truncated session or a blend sees: those rotated at [start, end).

    Of a page of private tokens, which are rotated anywhere, these are places in its row of tokens.
    """

    page: Page
    start: int
    end: int
    delta: int  # from there to where the session has them
    root: Root  # under which the page hangs
    hidden: int = 0  # bits of slots that are not seen all the same: a blend computes these tokens anew

    @property
    def resident(self) -> Resident:
        """The tokens with KV."""
        device, host = (max(min(self.page.start + filled, self.end) - self.start, 0) for filled in self.page.filled)
        return Resident(max(device - self.hidden.bit_count(), 0), max(host - device, 0))

    def mask(self, page_size: int) -> int:
        """The slots of the page that are seen, and no others: somebody else may go on behind them."""
        mask = ((1 << (self.end - self.start)) - 1) << (self.start % page_size) & ~self.hidden
        return mask - (1 << _WORD_BITS) if mask >> (_WORD_BITS - 1) else mask


class Root(Page):
    """Begins lineages; has no page id and no tokens.

    A tenant has one, found by its salt. After a truncation a session has its own, and a blend has one: it begins behind
    the tokens that were kept, and nobody else finds it.
    """

    __slots__ = ("event", "is_blend", "is_lost", "is_own", "kept", "masks_from")

    def __init__(
        self, salt: str, kept: tuple[Kept, ...] = (), *, blend_end: int | None = None, event: bytes = b""
    ) -> None:
        """`blend_end`: where the part of a sequence that is a blend ends."""
        super().__init__(None, sum(each.end - each.start for each in kept) if blend_end is None else blend_end)
        self.is_blend = blend_end is not None
        self.salt = salt
        self.kept = kept
        # Of a blend, by first layer: the mask of each of `kept` from there on. Empty: the same in all layers.
        self.masks_from: tuple[tuple[int, IntArray], ...] = ()
        self.is_own = bool(kept) or self.is_blend  # one session's, or one sequence's
        # Names its KV in the cache tier, for its session alone; empty: that is exact.
        self.event = event or (os.urandom(_EVENT_BYTES) if self.is_own else b"")
        self.is_lost = False  # some of what it kept is gone: nobody can go on here

    @property
    def kept_roots(self) -> set[Root]:
        """The roots of earlier truncations and blends under which what this one keeps was computed."""
        return {kept.root for kept in self.kept if kept.root.is_own} - {self}

    def begins(self, ids: Sequence[int]) -> bool:
        """Return whether `ids` still begin with what it keeps: a page that lost its KV may have got other tokens."""
        for kept in self.kept:
            page, position = kept.page, kept.start + kept.delta
            if page.positions is not None:  # its tokens are one blend's: nobody else's come there
                continue
            expected = array("i", ids[position : position + kept.end - kept.start])
            if page.tokens[kept.start - page.start : kept.end - page.start] != expected:
                return False
        return True

    def watch(self) -> None:
        """Be told if some of what it keeps is lost."""
        for each in self.kept:
            if each.page.keepers is None:
                each.page.keepers = set()
            each.page.keepers.add(self)

    def unwatch(self) -> None:
        """Leave no trace on the pages that it keeps: a popular one would gather roots for ever."""
        for each in self.kept:
            if each.page.keepers is not None:
                each.page.keepers.discard(self)

    def lose(self) -> None:
        """Note that some of what it kept is gone from every tier."""
        self.unwatch()
        self.kept, self.is_lost = (), True


class Resident(NamedTuple):
    """Tokens of one sequence with KV."""

    device: int
    host: int  # and not on the device


class Claim:
    """Says that the last paths of some owners end at `page`; see `forest/owners.py`."""

    __slots__ = ("into", "num_owners", "page")

    def __init__(self, page: Page) -> None:
        self.page: Page | None = page  # None: nothing is left of the paths
        self.num_owners = 0
        self.into: Claim | None = None  # the claim that this one became part of


@dataclass(slots=True, eq=False)
class Owner:
    """Owns a path after its sequence is gone: a session."""

    claim: Claim | None = field(default=None, init=False, repr=False)  # where its last path ended


def resident(root: Root, ids: Sequence[int], salt: str | None = None) -> Resident:
    """Count what the tiers have of `ids` under a root, holes left out; changes nothing.

    `salt`: for whose path, where that is not the root's.
    """
    salt = root.salt if salt is None else salt
    num_device = num_host = 0
    page: Page = root
    position = root.start
    while True:
        end = position + common_prefix(page.tokens, position - page.start, ids, position, len(ids))
        device, host = (min(page.start + filled, end) for filled in page.filled)
        num_device += max(device - position, 0)
        num_host += max(host - max(device, position), 0)
        child = page.child(end, ids[end], salt) if end < len(ids) else None
        if child is None:
            return Resident(num_device, num_host)
        page, position = child, end


def common_prefix(tokens: array[int], offset: int, ids: Sequence[int], position: int, limit: int) -> int:
    """Length of the common prefix of `tokens[offset:]` and `ids[position:limit]`."""
    ours = (tokens[offset:] if offset else tokens).tolist()
    theirs: Sequence[int] = ids[position : min(limit, position + len(ours))]
    if isinstance(theirs, array):
        theirs = theirs.tolist()  # two lists are compared as a whole
    if ours == theirs:
        return len(ours)
    for count, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return count
    return min(len(ours), len(theirs))
