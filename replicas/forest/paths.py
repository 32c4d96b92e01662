"""Grows paths in the prefix forest: they follow what is known, load what the device lacks, and write the rest.

What the device lacks of a path are its gaps: pages that the host has, and holes (Pensieve 4.3, Fig. 6).
A row needs the KV of every token that it can see. Holes are filled in order, as rows of the same batch, before any
later row of the path; what lies behind a hole stays as it is. Under a sliding window a row sees `window` tokens: what
no row from the first one to be computed on can see stays away, and a hole that is filled needs what its own first row
sees.

A hole counts as filled when its rows are scheduled, so paths that share one fill it once: the later one goes on where
the earlier one stopped, in the same step or the next.

Policy only: no tensors.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from mneme.cachetier.chunk.header import I32Array
from mneme.kernels.page_table import IntArray
from mneme.kernels.segments import ranges
from mneme.replicas.forest.moves import Chunks, Graft, GraftPiece
from mneme.replicas.forest.page_store import OutOfPages, PageStore
from mneme.replicas.forest.tree import ALL_SLOTS, DEVICE, HOST, NOWHERE, Kept, Page, Root, common_prefix

Runs = list[tuple[int, int, int]]  # (page id, first offset, number of tokens)
Spans = list[tuple[int, int]]  # positions [start, end), in order


class Rows(NamedTuple):
    """Says what a path computes next."""

    spans: Spans  # positions of the rows, in order
    runs: Runs  # where their KV goes, in the same order
    num_refilled: int  # how many of them, at the front, fill holes
    loaded: Spans  # positions whose KV comes back from the host before
    shifts: list[int]  # of each span: how far behind the place at which its keys are rotated it stands


class Path:
    """Lists what one sequence sees, in order: its page table. The root's kept tokens come first.

    `page_ids[i]` with `masks.get(i, ALL_SLOTS)` are the references; NOWHERE where the device has no page. Between
    changes that `num_changes` counts they are only appended to. A tenant's path may begin with public pages; what it
    adds is its own.
    """

    __slots__ = ("_own", "gaps", "masks", "num_changes", "num_tokens", "page_ids", "pages", "root", "salt", "store")

    def __init__(self, store: PageStore, root: Root, salt: str | None = None) -> None:
        """`salt`: whose it is, where that is not the root's."""
        self.store = store
        self.root = root
        self.salt = root.salt if salt is None else salt
        self.pages: list[Page] = []
        self.page_ids = array("i")
        self.masks: dict[int, int] = {}  # by index, ascending, of the few pages that are seen in part
        self.gaps: list[int] = []  # in order, the pages of which the device may lack something that the path has
        self.num_tokens = root.start  # tokens on this path
        self.num_changes = 0
        # Tokens and `filled` of the last page while its next token goes there without a look at anything else: a step
        # of many decodes takes as long as memory that is not in the processor's caches.
        self._own: tuple[array[int], list[int]] | None = None

    @property
    def tail(self) -> Page:
        return self.pages[-1] if len(self.pages) > len(self.root.kept) else self.root

    def append(self, page: Page, mask: int = ALL_SLOTS) -> None:
        """Go on to a page; whoever appends it counts the reference."""
        self._own = None
        self.pages.append(page)
        page_id = page.ids[DEVICE]
        self.page_ids.append(NOWHERE if page_id is None else page_id)
        if mask != ALL_SLOTS:
            self.masks[len(self.page_ids) - 1] = mask

    def all_masks(self) -> IntArray:
        """Return the mask of each page, int64 [pages]."""
        masks = np.full(len(self.page_ids), ALL_SLOTS)
        masks[[*self.masks]] = [*self.masks.values()]
        return masks

    def is_on_device(self) -> bool:
        """Return whether all that the path sees lies on the device, but for tokens that this step adds to pages."""
        return not self.gaps and not any(page_id in self.store.fresh for page_id in self.page_ids)

    def extend(self, ids: Sequence[int], limit: int) -> int:
        """Follow known tokens equal to `ids[self.num_tokens:limit]`; returns how many were found.

        The device may lack the KV of some: `take_rows` brings it back.
        """
        if not self.store.sharing:
            return 0
        before = self.num_tokens
        self._extend_whole(ids, limit)
        position, num_pages, page = self.num_tokens, len(self.pages), self.tail
        while position < limit:
            offset = position - page.start
            if offset < len(page.tokens):
                position += common_prefix(page.tokens, offset, ids, position, limit)
            child = page.child(position, ids[position], self.salt) if position < limit else None
            if child is None:
                break
            if position % self.store.page_size:
                self._leave(position)
            self.store.hold(child)
            self.append(child)
            page = child
        if position > before:
            self.num_tokens, self._own = position, None
            update_gaps(self, max(num_pages - 1, len(self.root.kept)))
        return position - before

    def _extend_whole(self, ids: Sequence[int], limit: int) -> None:
        """Follow pages that are full and wholly on the device, as `extend` does: a cached prefix is almost only that.

        They are found by their first tokens, then compared all at once.
        """
        page, size, first, salt = self.tail, self.store.page_size, self.num_tokens, self.salt
        if first != page.end:
            return
        position, found = first, list[Page]()
        while position + size <= limit:
            token_id = ids[position]
            child = (
                page.children.get((position, token_id)) if page.salt == salt else page.child(position, token_id, salt)
            )
            if child is None or child.filled[DEVICE] < size:
                break
            found.append(child)
            page, position = child, position + size
        try:  # several times as fast as an array of a list
            wanted = struct.pack(f"{position - first}i", *ids[first:position])
        except struct.error:  # that is no token
            return
        known = b"".join([page.tokens for page in found])
        if known != wanted:
            differ = np.frombuffer(known, np.int32) != np.frombuffer(wanted, np.int32)
            del found[int(differ.argmax()) // size :]
        for page in found:
            self.store.hold(page)
        self.pages += found
        self.page_ids.extend([page_id for page in found if (page_id := page.ids[DEVICE]) is not None])
        assert len(self.page_ids) == len(self.pages)
        self.num_tokens += len(found) * size

    def write_next(self, ids: Sequence[int]) -> bool:
        """Take the slot of the one token that follows, if it goes into the path's own last page, where no other path is
        found: what `extend` and `take_rows` do for a decode, but once in a page. Returns whether it was taken; else ask
        those."""
        position, page_size = self.num_tokens, self.store.page_size
        offset = position % page_size
        own = self._own or self._look_at_own()
        if not offset or own is None or len(ids) != position + 1:
            return False
        tokens, filled = own
        tokens.append(ids[position])
        filled[DEVICE] += 1
        self.num_tokens = position + 1
        if offset + 1 == page_size and self.store.device.changed is not None:
            self.store.device.changed.add(self.pages[-1])
        return True

    def begin_next(self, ids: Sequence[int]) -> bool:
        """Begin a page for the one token that follows, where the path's own last page is full, no other path is found
        behind it, and a page is free. Returns whether it was begun, as `write_next` does."""
        position = self.num_tokens
        if position % self.store.page_size or len(ids) != position + 1 or not self.store.device.free:
            return False
        if self._look_at_own() is None:
            return False
        page = self._begin_page(ids)
        page.writer = self
        page.tokens.append(ids[position])
        page.filled[DEVICE] += 1
        self.num_tokens = position + 1
        return True

    def _look_at_own(self) -> tuple[array[int], list[int]] | None:
        """Find whether the path's next token goes into its last page, for `write_next`."""
        page = self.pages[-1] if self.pages and not self.gaps else None
        if page is None or page.writer is not self or page.children or page.end != self.num_tokens:
            return None
        self._own = page.tokens, page.filled
        return self._own

    def take_rows(self, ids: Sequence[int], budget: int) -> Rows:
        """Take at most `budget` rows: holes first, then `ids[self.num_tokens:]`, which `extend` did not find.

        Where nothing of that is left, one row: the last, whose KV is there, for its logits. Takes the pages that they
        need, for what comes back from the host too. Raises `OutOfPages`, having taken nothing.
        """
        gaps = visible_gaps(self, len(ids), self.store.window) if self.gaps else []
        num_holes = sum(num_missing(self, index) for index in gaps) if gaps else 0
        start = self.num_tokens
        end = min(len(ids), start + max(budget - num_holes, 0))
        # Without gaps it is `write` that asks.
        if gaps and self.num_new_pages(ids, end) > self.store.device.num_available:
            raise OutOfPages
        loaded = self._restore(gaps)
        spans, shifts, runs = fill(self, gaps, self.store.page_size, budget)
        if start < end:
            runs += self.write(ids, end)
            spans.append((start, end))
        elif num_holes < budget and start == len(ids) and (not spans or spans[-1][1] < start):
            spans.append((start - 1, start))
        shifts += [0] * (len(spans) - len(shifts))
        is_new = self.root.is_blend and self.num_tokens == self.root.start  # private tokens never had KV
        return Rows(spans, runs, 0 if is_new else min(num_holes, budget), loaded, shifts)

    def num_pending(self, ids: Sequence[int]) -> int:
        """Count the rows before the path's next sampled token but for the last token's own."""
        num_new = len(ids) - self.num_tokens
        if not self.gaps:
            return num_new
        return num_new + sum(num_missing(self, i) for i in visible_gaps(self, len(ids), self.store.window))

    def graft(self, ids: Sequence[int], chunks: Chunks, limit: int | None = None) -> Graft | None:
        """Take pages for what these chunks have behind the path's end; their KV comes with the step. None: none fit.

        They are nobody else's and begin with what comes, so that they can be taken back (`retract`). At most `limit`
        chunks: the rest is for later steps.
        """
        pieces: list[GraftPiece] = []
        is_last = True
        with contextlib.suppress(OutOfPages):
            for index, (start, end) in enumerate(chunks.spans):
                position = self.num_tokens
                if not start <= position < end:
                    continue
                if len(pieces) == limit:
                    is_last = False
                    break
                num_pages = len(self.pages)
                runs = self.write(ids, end, is_apart=True)
                pieces.append(GraftPiece(index, position, end, runs, tuple(self.pages[num_pages:])))
        if not pieces:
            return None
        graft = Graft(chunks, pieces, is_last)
        self.store.grafts.append(graft)
        return graft

    def write(self, ids: Sequence[int], end: int, *, is_apart: bool = False) -> Runs:
        """Take slots for `ids[self.num_tokens:end]`, which `extend` did not find.

        Returns runs (page id, first offset, number of tokens), in order, of pages begun for them if they are to be
        apart. Raises `OutOfPages`, having taken nothing.
        """
        runs = []
        position, can_append = self.num_tokens, not is_apart and self._can_append(ids)
        if self._num_pages_to(end, position, can_append) > self.store.device.num_available:
            raise OutOfPages
        while position < end:
            page = self.tail if can_append else self._begin_page(ids)
            page.writer, can_append = self, False
            count = min(end, (position // self.store.page_size + 1) * self.store.page_size) - position
            page.tokens.extend(ids[position : position + count])
            page.filled[DEVICE] += count
            page_id = page.ids[DEVICE]
            assert page_id is not None
            runs.append((page_id, position % self.store.page_size, count))
            self.num_tokens = position = position + count
            if position % self.store.page_size == 0 and self.store.device.changed is not None:
                self.store.device.changed.add(page)
        return runs

    def _name(self, placeholder: int) -> None:
        """Let the path's last page, which began with a placeholder, be found by its token, or give it back."""
        page, parent = self.tail, self.tail.parent
        assert parent is not None
        token_id, at = page.tokens[0], page.start - parent.start
        del parent.children[parent.key_of(page, placeholder)]
        twin = parent.child(page.start, token_id, self.salt)
        goes_on = at < len(parent.tokens) and parent.tokens[at] == token_id
        if twin is None and not goes_on:
            _add_child(parent, page, token_id)
            return
        self._own = None
        self.pages.pop()
        self.page_ids.pop()
        self.masks.pop(len(self.pages), None)
        self.num_changes += 1
        self.store.discard(page)
        if goes_on:
            self.masks.pop(len(self.pages) - 1, None)
        else:
            assert twin is not None
            self.store.hold(twin)
            self.append(twin)
        update_gaps(self, max(len(self.pages) - 1, len(self.root.kept)))

    def num_new_pages(self, ids: Sequence[int], end: int) -> int:
        """Count the pages that `take_rows` would take up to `end`, for what is to come back too."""
        num_pages = self._num_pages_to(end, self.num_tokens, self._can_append(ids))
        if self.gaps:
            gaps = visible_gaps(self, len(ids), self.store.window)
            num_pages += len({self.pages[index] for index in gaps if self.pages[index].ids[DEVICE] is None})
        return num_pages

    def _num_pages_to(self, end: int, position: int, can_append: bool) -> int:
        """Count pages to begin for [position, end); `can_append`: the first tokens go into the page that is there."""
        begun = position // self.store.page_size + can_append
        return max(0, -(-end // self.store.page_size) - begun)

    def _leave(self, position: int) -> None:
        """Use other pages from `position` on: in the block that the path leaves, higher slots are not its own."""
        offset = position % self.store.page_size
        last = len(self.pages) - 1
        if self.tail is not self.root and offset and last not in self.masks:
            self.masks[last] = (1 << offset) - 1
            self.num_changes += 1

    def _restore(self, gaps: list[int]) -> Spans:
        """Take pages on the device for what is behind these gaps; returns what comes back from the host."""
        loaded = []
        for index in gaps:
            page = self.pages[index]
            if page.ids[DEVICE] is None:
                self.store.add(page)
                loaded += [loaded_span(self, index)] if page.filled[DEVICE] else []
            page_id = page.ids[DEVICE]
            assert page_id is not None
            self.page_ids[index] = page_id
            self.num_changes += 1
        return loaded

    def _can_append(self, ids: Sequence[int]) -> bool:
        """Return whether the path's next token may go into its last page."""
        page, position = self.tail, self.num_tokens
        if position % self.store.page_size == 0 or page is self.root or page.end != position or page.salt != self.salt:
            return False
        if page.writer is None and position < len(ids):
            return page.child(position, ids[position], self.salt) is None
        return page.writer is self

    def _begin_page(self, ids: Sequence[int]) -> Page:
        position, parent = self.num_tokens, self.tail
        self._leave(position)
        page = Page(parent, position)
        page.salt = self.salt
        if self.store.sharing:
            _add_child(parent, page, ids[position])
        page.refs = page.num_uses = 1
        self.store.add(page)
        self.append(page)
        return page


def _add_child(parent: Page, page: Page, token_id: int) -> None:
    """Let paths find a page behind another, whose writer may be one of them."""
    parent.children[parent.key_of(page, token_id)] = page
    if isinstance(parent.writer, Path):
        parent.writer._own = None


class DocumentUse(NamedTuple):
    """Puts what a path has of a document, computed apart, at the positions [start, end) of another sequence."""

    path: Path
    start: int
    end: int
    delta: int  # from where its keys are rotated


def learn(learned: Sequence[tuple[Path, int, int]]) -> None:
    """Put tokens in the places of placeholders, each the last of its path: (path, placeholder, token).

    Whoever began a page with a placeholder where another path has the same token goes on with that one's.
    """
    for path, placeholder, token_id in learned:  # all, before any page is compared with another
        page, index = path.tail, path.num_tokens - 1 - path.tail.start
        assert page.tokens[index] == placeholder, "the path's last token"
        page.tokens[index] = token_id
    for path, placeholder, _ in learned:
        if path.store.sharing and path.num_tokens == path.tail.start + 1:
            path._name(placeholder)


def update_gaps(path: Path, first: int) -> None:
    """Look at the path's pages from index `first` on, to which tokens were added."""
    lacking = [  # most pages are whole, whatever of them the path needs
        index
        for index, page in enumerate(path.pages[first:], first)
        if page.filled[DEVICE] < len(page.tokens) or path.page_ids[index] != page.ids[DEVICE]
    ]
    if lacking:
        known = set(path.gaps)
        path.gaps += [index for index in lacking if index not in known and not _is_whole(path, index)]


def visible_gaps(path: Path, num_ids: int, window: int | None) -> list[int]:
    """Find the gaps that must be closed before the path's next rows, in order; forgets those that others closed."""
    path.gaps = [i for i in path.gaps if not _is_whole(path, i)]
    if window is None or path.root.kept:
        return path.gaps
    reach = min(path.num_tokens, num_ids - 1) - window + 1
    seen = []
    for index in reversed(path.gaps):
        page = path.pages[index]
        if page.start + needed_tokens(path, index) <= reach:
            continue
        seen.append(index)
        if num_missing(path, index):
            reach = min(reach, page.start + max(page.filled) - window + 1)
    return seen[::-1]


def needed_tokens(path: Path, index: int) -> int:
    """Count the tokens of a page, from its first on, that must have KV for the path."""
    page, kept = path.pages[index], path.root.kept
    if index < len(kept):
        return kept[index].end - page.start
    end = path.pages[index + 1].start if index + 1 < len(path.pages) else path.num_tokens
    return end - page.start


def num_missing(path: Path, index: int) -> int:
    """Count those of them that no tier has."""
    return max(needed_tokens(path, index) - max(path.pages[index].filled), 0)


def is_lost(path: Path) -> bool:
    """Return whether tokens that the root keeps have no KV any more; their own lineage is not the path's to compute."""
    return any(num_missing(path, index) for index in path.gaps if index < len(path.root.kept))


def references_of(path: Path) -> list[Kept]:
    """List what the path has of each of its pages, in order; its own tokens stand where they were rotated."""
    own = [
        Kept(page, page.start, page.start + needed_tokens(path, index), 0, path.root)
        for index, page in enumerate(path.pages)
        if index >= len(path.root.kept)
    ]
    return [*path.root.kept, *own]


def slots_of(path: Path, page_size: int, wanted: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Return the slot of each token of a path that is whole on the device, and its delta.

    wanted  positions of some of its tokens, in order; None: all of them
    """
    firsts, starts, counts, deltas = np.array(
        [
            (max(page_id, 0) * page_size + kept.start % page_size, kept.start, kept.end - kept.start, kept.delta)
            for page_id, kept in zip(path.page_ids, references_of(path), strict=True)
            if kept.page.positions is None  # private tokens are nobody's to look at
        ],
        np.int64,
    ).T
    slots, deltas = ranges(firsts, counts), np.repeat(deltas, counts)
    if wanted is None:
        return slots, deltas
    indices = np.searchsorted(ranges(starts, counts) + deltas, wanted)
    return slots[indices], deltas[indices]


def kept_by(path: Path, ranges: Spans) -> tuple[Kept, ...]:
    """Refer to what the path has at the positions of `ranges` (in order, apart), moved together from 0 on.

    Each range has one delta; it is lowered once more where what the path has was moved before.
    """
    kept: list[Kept] = []
    references = references_of(path)
    num_kept = 0
    for start, end in ranges:
        shift = num_kept - start
        for page, first, last, delta, top, _ in references:
            low, high = max(first + delta, start), min(last + delta, end)
            if low < high:
                kept.append(Kept(page, low - delta, high - delta, delta + shift, top))
        num_kept += end - start
    return tuple(kept)


def use_of(use: DocumentUse, private: Collection[int], page_size: int, *, keeps_hidden: bool) -> list[Kept]:
    """Refer to what a use sees of a document's pages: all but its `private` tokens."""
    kept: list[Kept] = []
    for page, first, last, _, top, _ in references_of(use.path):
        low, high = max(first, use.start - use.delta), min(last, use.end - use.delta)
        hidden = [position for position in range(low, high) if position + use.delta in private]
        if low < high and (keeps_hidden or len(hidden) < high - low):
            mask = sum(1 << position % page_size for position in hidden)
            kept.append(Kept(page, low, high, use.delta, top, mask))
    return kept


def private_pages(
    root: Root, uses: Sequence[DocumentUse], private: Sequence[int], ids: Sequence[int], page_size: int
) -> list[Kept]:
    """Hang pages for a blend's private tokens under its root; their KV is to be computed.

    Each key is rotated where its document's are, so that what is cached may take its place, bit by bit.
    """
    delta_by_position = {position: use.delta for use in uses for position in range(use.start, use.end)}
    kept: list[Kept] = []
    for first in range(0, len(private), page_size):
        positions = private[first : first + page_size]
        deltas = [delta_by_position.get(position, 0) for position in positions]
        page = Page(root, first)
        page.tokens = array("i", [ids[position] for position in positions])
        page.positions = array("i", [position - delta for position, delta in zip(positions, deltas, strict=True)])
        root.children[(first, page.tokens[0])] = page
        for delta, places in groupby(range(len(positions)), deltas.__getitem__):
            low, *_, high = [*places] * 2
            kept.append(Kept(page, first + low, first + high + 1, delta, root))
    return kept


def divide_layers(path: Path, positions: IntArray, left: IntArray) -> None:
    """Let a blend's path read shared pages wherever its private ones hold copies of them: each page once, for all.

    positions  int64 [n] of private tokens of documents, in order; in the first layer all are as they are cached
    left       int64 [n] the layer from which on a private slot holds what is cached, or the number of layers
    """
    root, page_size = path.root, path.store.page_size
    counts = np.array([kept.end - kept.start for kept in root.kept], np.int64)
    index = np.repeat(np.arange(len(counts)), counts)
    slots = ranges(np.array([kept.start for kept in root.kept], np.int64), counts)
    rotated = slots.copy()
    for begin, (page, start, end, *_) in zip((np.cumsum(counts) - counts).tolist(), root.kept, strict=True):
        if page.positions is not None:
            rotated[begin : begin + end - start] = page.positions[start - page.start : end - page.start]
    places = rotated + np.repeat([kept.delta for kept in root.kept], counts)
    rows = np.minimum(np.searchsorted(positions, places), len(positions) - 1)
    is_private = positions[rows] == places  # seen in its private slot, and hidden on the shared page
    masks = path.all_masks()[: len(counts)]
    bits = np.left_shift(np.int64(1), slots % page_size)
    shown = {0: is_private, 1: np.zeros_like(is_private)}
    shown |= {layer: is_private & (left[rows] <= layer) for layer in np.unique(left)[:-1].tolist()}
    views = []
    for layer, is_shown in shown.items():
        other = np.zeros_like(masks)
        np.bitwise_or.at(other, index[is_shown], bits[is_shown])
        views.append((layer, masks ^ other))
    root.masks_from = tuple(views)
    path.num_changes += 1


def moved_pages(salt: str, ids: Sequence[int], start: int, rotated: I32Array, page_size: int) -> list[Kept]:
    """Make pages, under roots of their own, for tokens from position `start` on whose keys are rotated elsewhere."""
    deltas = np.arange(start, start + len(rotated)) - rotated
    edges = [0, *(np.flatnonzero(np.diff(deltas)) + 1).tolist(), len(rotated)]
    kept: list[Kept] = []
    for low, high in pairwise(edges):
        delta, position, end = int(deltas[low]), int(rotated[low]), int(rotated[high - 1]) + 1
        root = Root(salt)
        root.is_own, root.start = True, position
        page: Page = root
        while position < end:
            last = min(end, (position // page_size + 1) * page_size)
            parent, page = page, Page(page, position)
            page.tokens = array("i", ids[position + delta : last + delta])
            parent.children[(position, page.tokens[0])] = page
            kept.append(Kept(page, position, last, delta, root))
            position = last
    return kept


def fill(path: Path, gaps: list[int], page_size: int, budget: int) -> tuple[Spans, list[int], Runs]:
    """Take rows for the holes of these gaps, whose pages are there, up to the budget; they count as computed.

    Returns their spans, the shift of each, and the runs.
    """
    spans: Spans = []
    shifts: list[int] = []
    runs: Runs = []
    for index in gaps:
        page = path.pages[index]
        start = page.start + page.filled[DEVICE]
        end = min(page.start + needed_tokens(path, index), start + budget)
        if start >= end:
            continue
        page_id = page.ids[DEVICE]
        assert page_id is not None
        page.filled[DEVICE] = end - page.start
        runs.append((page_id, start % page_size, end - start))
        pieces, shift = [(start, end)], 0
        if page.positions is not None:
            shift = path.root.kept[index].delta
            rotated = page.positions[start - page.start : end - page.start]
            pieces = [(position + shift, position + shift + 1) for position in rotated]
        for first, last in pieces:
            if spans and spans[-1][1] == first and shifts[-1] == shift:
                spans[-1] = (spans[-1][0], last)
            else:
                spans.append((first, last))
                shifts.append(shift)
        budget -= end - start
    return spans, shifts, runs


def loaded_span(path: Path, index: int) -> tuple[int, int]:
    """Say which of the path's positions a page that comes back from the host holds."""
    page, kept = path.pages[index], path.root.kept
    start, delta = (kept[index].start, kept[index].delta) if index < len(kept) else (page.start, 0)
    return start + delta, page.start + min(page.filled[HOST], needed_tokens(path, index)) + delta


def _is_whole(path: Path, index: int) -> bool:
    """Return whether the device has all the path needs of a page, where the path knows it."""
    page = path.pages[index]
    has_all = page.filled[DEVICE] >= needed_tokens(path, index)
    return has_all and path.page_ids[index] == page.ids[DEVICE]
