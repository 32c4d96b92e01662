"""Grows paths in the prefix forest: they follow what is known, bring back what the device lacks, and write the rest.

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
from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from mneme.cachetier.chunk.header import I32Array
from mneme.kernels.page_table import IntArray
from mneme.kernels.segments import ranges
from mneme.replicas.forest.moves import Chunks, Graft, GraftPiece
from mneme.replicas.forest.pages import ALL_SLOTS, DEVICE, HOST, Kept, Page, Path, Root, common_prefix
from mneme.replicas.forest.store import OutOfPages, PageStore

Runs = list[tuple[int, int, int]]  # (page id, first offset, number of tokens)
Spans = list[tuple[int, int]]  # positions [start, end), in order


class Rows(NamedTuple):
    """Says what a path computes next."""

    spans: Spans  # positions of the rows, in order
    runs: Runs  # where their KV goes, in the same order
    num_refilled: int  # how many of them, at the front, fill holes
    loaded: Spans  # positions whose KV comes back from the host before
    shifts: list[int]  # of each span: how far behind the place at which its keys are rotated it stands


class DocumentUse(NamedTuple):
    """Puts what a path has of a document, computed apart, at the positions [start, end) of another sequence."""

    path: Path
    start: int
    end: int
    delta: int  # from where its keys are rotated


class Paths:
    """Walks and extends paths over the pages of one forest."""

    def __init__(self, store: PageStore, page_size: int, *, sharing: bool, window: int | None) -> None:
        self.page_size = page_size
        self.store = store
        self._device = store.device
        self._sharing = sharing
        self.window = window

    def is_settled(self, path: Path) -> bool:
        """Return whether all that the path sees lies on the device, but for tokens that this step adds to pages."""
        return not path.gaps and not any(page_id in self.store.fresh for page_id in path.page_ids)

    def extend(self, path: Path, ids: Sequence[int], limit: int) -> int:
        """Follow known tokens equal to `ids[path.num_tokens:limit]`; returns how many were found.

        The device may lack the KV of some: `take_rows` brings it back.
        """
        if not self._sharing:
            return 0
        before = position = path.num_tokens
        num_pages, page = len(path.pages), path.tail
        while position < limit:
            offset = position - page.start
            if offset < len(page.tokens):
                position += common_prefix(page.tokens, offset, ids, position, limit)
            child = page.child(position, ids[position], path.salt) if position < limit else None
            if child is None:
                break
            if position % self.page_size:
                self._leave(path, position)
            self.store.hold(child)
            path.append(child)
            page = child
        if position > before:
            path.num_tokens = position
            note_gaps(path, max(num_pages - 1, len(path.root.kept)))
        return position - before

    def write_next(self, path: Path, ids: Sequence[int]) -> tuple[int, int, int] | None:
        """Take the slot of the one token that follows, if it goes into the path's own last page, where no other path is
        found: what `extend` and `take_rows` do for a decode, but once in a page. Returns the run; None: ask those."""
        position = path.num_tokens
        offset = position % self.page_size
        if not offset or path.gaps or not path.pages or len(ids) != position + 1:
            return None
        page = path.pages[-1]
        if page.writer is not path or page.children or page.end != position:
            return None
        page_id = page.ids[DEVICE]
        assert page_id is not None
        page.tokens.append(ids[position])
        page.filled[DEVICE] += 1
        path.num_tokens = position + 1
        if offset + 1 == self.page_size and self._device.changed is not None:
            self._device.changed.add(page)
        return page_id, offset, 1

    def take_rows(self, path: Path, ids: Sequence[int], budget: int) -> Rows:
        """Take at most `budget` rows: holes first, then `ids[path.num_tokens:]`, which `extend` did not find.

        Where nothing of that is left, one row: the last, whose KV is there, for its logits. Takes the pages that they
        need, for what comes back from the host too. Raises `OutOfPages`, having taken nothing.
        """
        gaps = visible_gaps(path, len(ids), self.window) if path.gaps else []
        num_holes = sum(num_missing(path, index) for index in gaps) if gaps else 0
        start = path.num_tokens
        end = min(len(ids), start + max(budget - num_holes, 0))
        if (
            gaps and self.num_new_pages(path, ids, end) > self._device.num_available
        ):  # without gaps it is `write` that asks
            raise OutOfPages
        loaded = self._restore(path, gaps)
        spans, shifts, runs = fill(path, gaps, self.page_size, budget)
        if start < end:
            runs += self.write(path, ids, end)
            spans.append((start, end))
        elif num_holes < budget and start == len(ids) and (not spans or spans[-1][1] < start):
            spans.append((start - 1, start))
        shifts += [0] * (len(spans) - len(shifts))
        is_new = path.root.is_blend and path.num_tokens == path.root.start  # private tokens never had KV
        return Rows(spans, runs, 0 if is_new else min(num_holes, budget), loaded, shifts)

    def num_pending(self, path: Path, ids: Sequence[int]) -> int:
        """Count the rows before the path's next sampled token but for the last token's own."""
        num_new = len(ids) - path.num_tokens
        if not path.gaps:
            return num_new
        return num_new + sum(num_missing(path, i) for i in visible_gaps(path, len(ids), self.window))

    def graft(self, path: Path, ids: Sequence[int], chunks: Chunks, limit: int | None = None) -> Graft | None:
        """Take pages for what these chunks have behind the path's end; their KV comes with the step. None: none fit.

        They are nobody else's and begin with what comes, so that they can be taken back (`retract`). At most `limit`
        chunks: the rest is for later steps.
        """
        pieces: list[GraftPiece] = []
        is_last = True
        with contextlib.suppress(OutOfPages):
            for index, (start, end) in enumerate(chunks.spans):
                position = path.num_tokens
                if not start <= position < end:
                    continue
                if len(pieces) == limit:
                    is_last = False
                    break
                num_pages = len(path.pages)
                runs = self.write(path, ids, end, is_apart=True)
                pieces.append(GraftPiece(index, position, end, runs, tuple(path.pages[num_pages:])))
        if not pieces:
            return None
        graft = Graft(chunks, pieces, is_last)
        self.store.grafts.append(graft)
        return graft

    def retract(self, pages: Iterable[Page]) -> None:
        """Drop grafted pages whose KV did not come, with all that hangs on them; no path is on them any more."""
        if self._sharing:  # else nothing stays of a path that was given back
            for page in pages:
                self.store.drop_below(page)
                self.store.drop_everywhere(page)

    def write(self, path: Path, ids: Sequence[int], end: int, *, is_apart: bool = False) -> Runs:
        """Take slots for `ids[path.num_tokens:end]`, which `extend` did not find.

        Returns runs (page id, first offset, number of tokens), in order, of pages begun for them if they are to be
        apart. Raises `OutOfPages`, having taken nothing.
        """
        runs = []
        position, can_append = path.num_tokens, not is_apart and self._can_append(path, ids)
        if self._num_pages_to(end, position, can_append) > self._device.num_available:
            raise OutOfPages
        while position < end:
            page = path.tail if can_append else self._begin_page(path, ids)
            page.writer, can_append = path, False
            count = min(end, (position // self.page_size + 1) * self.page_size) - position
            page.tokens.extend(ids[position : position + count])
            page.filled[DEVICE] += count
            page_id = page.ids[DEVICE]
            assert page_id is not None
            runs.append((page_id, position % self.page_size, count))
            path.num_tokens = position = position + count
            if position % self.page_size == 0 and self._device.changed is not None:
                self._device.changed.add(page)
        return runs

    def learn(self, learned: Sequence[tuple[Path, int, int]]) -> None:
        """Put tokens in the places of placeholders, each the last of its path: (path, placeholder, token).

        Whoever began a page with a placeholder where another path has the same token goes on with that one's.
        """
        for path, placeholder, token_id in learned:  # all, before any page is compared with another
            page, index = path.tail, path.num_tokens - 1 - path.tail.start
            assert page.tokens[index] == placeholder, "the path's last token"
            page.tokens[index] = token_id
        for path, placeholder, _ in learned:
            if self._sharing and path.num_tokens == path.tail.start + 1:
                self._name(path, placeholder)

    def _name(self, path: Path, placeholder: int) -> None:
        """Let the path's last page, which began with a placeholder, be found by its token, or give it back."""
        page, parent = path.tail, path.tail.parent
        assert parent is not None
        token_id, at = page.tokens[0], page.start - parent.start
        del parent.children[parent.key_of(page, placeholder)]
        twin = parent.child(page.start, token_id, path.salt)
        goes_on = at < len(parent.tokens) and parent.tokens[at] == token_id
        if twin is None and not goes_on:
            parent.children[parent.key_of(page, token_id)] = page
            return
        for column in (path.pages, path.page_ids, path.masks):
            column.pop()
        path.num_changes += 1
        self.store.discard(page)
        if goes_on:
            path.masks[-1] = ALL_SLOTS
        else:
            assert twin is not None
            self.store.hold(twin)
            path.append(twin)
        note_gaps(path, max(len(path.pages) - 1, len(path.root.kept)))

    def num_new_pages(self, path: Path, ids: Sequence[int], end: int) -> int:
        """Count the pages that `take_rows` would take up to `end`, for what is to come back too."""
        num_pages = self._num_pages_to(end, path.num_tokens, self._can_append(path, ids))
        if path.gaps:
            gaps = visible_gaps(path, len(ids), self.window)
            num_pages += len({path.pages[index] for index in gaps if path.pages[index].ids[DEVICE] is None})
        return num_pages

    def _num_pages_to(self, end: int, position: int, can_append: bool) -> int:
        """Count pages to begin for [position, end); `can_append`: the first tokens go into the page that is there."""
        begun = position // self.page_size + can_append
        return max(0, -(-end // self.page_size) - begun)

    def _leave(self, path: Path, position: int) -> None:
        """Use other pages from `position` on: in the block that the path leaves, higher slots are not its own."""
        offset = position % self.page_size
        if path.tail is not path.root and offset and path.masks[-1] == ALL_SLOTS:
            path.masks[-1] = (1 << offset) - 1
            path.num_changes += 1

    def _restore(self, path: Path, gaps: list[int]) -> Spans:
        """Take pages on the device for what is behind these gaps; returns what comes back from the host."""
        loaded = []
        for index in gaps:
            page = path.pages[index]
            if page.ids[DEVICE] is None:
                self.store.add(page)
                loaded += [loaded_span(path, index)] if page.filled[DEVICE] else []
            page_id = page.ids[DEVICE]
            assert page_id is not None
            path.page_ids[index] = page_id
            path.num_changes += 1
        return loaded

    def _can_append(self, path: Path, ids: Sequence[int]) -> bool:
        """Return whether the path's next token may go into its last page."""
        page, position = path.tail, path.num_tokens
        if position % self.page_size == 0 or page is path.root or page.end != position or page.salt != path.salt:
            return False
        if page.writer is None and position < len(ids):
            return page.child(position, ids[position], path.salt) is None
        return page.writer is path

    def _begin_page(self, path: Path, ids: Sequence[int]) -> Page:
        position, parent = path.num_tokens, path.tail
        self._leave(path, position)
        page = Page(parent, position)
        page.salt = path.salt
        if self._sharing:
            parent.children[parent.key_of(page, ids[position])] = page
        page.refs = page.num_uses = 1
        self.store.add(page)
        path.append(page)
        return page


def note_gaps(path: Path, first: int) -> None:
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
