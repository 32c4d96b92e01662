"""The prefix forest and the page pool under it (ChunkAttention 3.1): who holds which page, found at run time.

A page is the tokens at positions [start, end) of one lineage, all inside one block of
`page_size` positions; token t sits at offset t mod page_size. A child continues at `child.start`, which may lie
inside its parent's block: then both have a page for that block and the sequence masks the parent's higher slots.

    root --- [0..32) --- [32..45) ...              prompt A
                    `--- [32..64) --- ...          (a sibling that differs at token 32)
                    [32..45) forked at 40 --- [40..64)

Every token that a running sequence has computed, or computes in the step being scheduled, is in the forest, so
sequences of one step already share. A sequence whose next token is here follows this page instead of writing its
own; slots above its position are hidden from it by causality, so its mask stays whole until it leaves the page.

A page's KV may be on the device, on the host, on both, or on neither: a hole (`page_store.py`, `paths.py`).
States of a device page: free (on the free list), in use (of a page that a sequence or a pin holds), cached (of a page
that nobody holds, still matching; `page_store.py` says which goes when). `free + cached + in_use == num_pages` is
checked by `check()`. The pool never grows or gives memory back.

Tenants have roots of their own. What an admin has had computed as public has one too (`PUBLIC_SALT`), and a tenant's
path may begin there: its own pages then hang below public ones, under keys that name the tenant.

Policy only: no tensors.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from mneme.cachetier.names import PUBLIC_SALT
from mneme.cachetier.policy.eviction import EvictionPolicy, LruPolicy
from mneme.errors import PinRefused
from mneme.replicas.forest.moves import Chunks, Graft, GraftPiece
from mneme.replicas.forest.owners import Owners
from mneme.replicas.forest.page_store import PageStore, PageTier
from mneme.replicas.forest.paths import (
    DocumentUse,
    Path,
    Spans,
    is_lost,
    kept_by,
    moved_pages,
    private_pages,
    references_of,
    update_gaps,
    use_of,
    visible_gaps,
)
from mneme.replicas.forest.tree import DEVICE, HOST, Owner, Page, Resident, Root, common_prefix, resident

_LEAST_PUBLIC = 8  # tokens: what is shorter, all chats of a model may begin with
COPY_OUT_BELOW = 0.5  # share of pages, free or with a copy, under which idle ones are copied to the host (Pensieve 4.3)
_RESERVED_SHARE = 10  # one page in so many is kept for running requests (Pensieve 4.3)


class PrefixForest:
    """Pages, their owners, and token-exact matching over everything that is resident."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        sharing: bool = True,
        first_page: int = 0,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_host_pages: int = 0,
        host_policy: EvictionPolicy | None = None,
        copy_out_below: float = COPY_OUT_BELOW,
        window: int | None = None,
    ) -> None:
        """Make an empty forest; policies are LRU unless given.

        `window`: tokens that a row sees on every layer; None if a layer sees all.
        """
        self.num_reserved = max(1, num_pages // _RESERVED_SHARE)
        self.roots: dict[str, Root] = {}  # by tenant salt; one engine has one model
        self.kept_roots: set[Root] = set()  # of truncated sessions
        self._last_truncated: tuple[Owner | None, Root] = (None, Root(""))
        self._num_pinned = 0
        self._pinned: set[Path] = set()
        self._clock = clock
        self._releases = itertools.count(1)
        self.owners = Owners()
        self.device = PageTier(DEVICE, num_pages, policy or LruPolicy(), first_page=first_page)
        self.host = PageTier(HOST, num_host_pages if sharing else 0, host_policy or LruPolicy())
        self.page_size, self.window = page_size, window
        self.store = PageStore(
            self.device,
            self.host,
            self.owners,
            self._drop_root,
            page_size=page_size,
            sharing=sharing,
            window=window,
            copy_out_below=copy_out_below,
        )

    @property
    def capacity(self) -> int:
        """Tokens that one sequence could have if it were alone, beside the pinned pages that it shares."""
        return (self.device.num_pages - self._num_pinned) * self.page_size

    def has_room(self, num_pages: int, num_running: int = 0) -> bool:
        """Return whether so many free or cached pages are left beside the reserve: at least one for each that runs."""
        reserve = max(self.num_reserved, num_running) if num_running else 0
        return num_pages + reserve <= self.device.num_available

    def stats(self) -> dict[str, dict[str, int]]:
        """Count the pages of both tiers by state, and those saved to the host, loaded from it and dropped everywhere.

        Pinned ones are in use too, reclaimable ones are cached, with a copy on the host. Those in use on the host have
        a copy on the device that sequences hold.
        """
        more = {"pinned": self._num_pinned, "reclaimable": self.store.num_reclaimable}
        return {
            "pages": {**self.device.by_state(), **more},
            "host_pages": self.host.by_state(),
            "moved_pages": dict(self.store.num_moved),
        }

    def resident(self, salt: str, ids: Sequence[int], root: Root | None = None) -> Resident:
        """Count what the tiers have of a sequence; leaves their order of eviction as it is.

        `root`: a truncated session's own; `ids` begin with what it kept.
        """
        if root is not None:
            counts = [resident(root, ids), *(each.resident for each in root.kept)]
            return Resident(sum(each.device for each in counts), sum(each.host for each in counts))
        root = self._root_of(salt, ids)
        return Resident(0, 0) if root is None else resident(root, ids, salt)

    def look_ahead(self, queue: Callable[[], Iterable[Owner | None]]) -> None:
        """Tell eviction where to read which sessions wait, in order; None: without a session."""
        self.device.look_ahead(queue, self.owners)
        self.host.look_ahead(queue, self.owners)

    def open_path(self, salt: str, ids: Sequence[int] = (), kept_root: Root | None = None) -> Path:
        """Open an empty path for a tenant, to be extended by `ids`.

        Paths under different salts never meet, but for public pages: several tenants' prompts may begin with them.

        kept_root  of a session's own: the path sees what that kept, with which `ids` begin, unless some of that is gone
                   from every tier
        """
        if kept_root is not None and not kept_root.is_lost and kept_root.begins(ids):
            path = self._open_whole(kept_root)
            if path is not None:
                return path
        root = self._root_of(salt, ids)
        if root is None:
            root = self.roots[salt] = Root(salt)
        root.refs += 1
        return Path(self.store, root, salt)

    def _root_of(self, salt: str, ids: Sequence[int]) -> Root | None:
        """Return the root under which most of a prompt is known: the tenant's own, or the public one."""
        own, public = self.roots.get(salt), self.roots.get(PUBLIC_SALT)
        if public is None or public is own:
            return own
        num_public = sum(resident(public, ids, salt))
        if num_public < min(self.page_size, _LEAST_PUBLIC) or (
            own is not None and sum(resident(own, ids)) > num_public
        ):
            return own
        return public

    def _open_whole(self, root: Root) -> Path | None:
        """Open a path that sees what a root kept; None if some of that is gone from every tier."""
        path = self._open(root)
        if not is_lost(path):
            return path
        self.release(path)
        return None

    def blend(
        self,
        path: Path,
        uses: Sequence[DocumentUse],
        private: Sequence[int],
        ids: Sequence[int],
        end: int,
        *,
        keeps_hidden: bool = False,
    ) -> Path | None:
        """Open a path of its own that sees what `path` has and, behind that up to `end`, documents computed apart.

        private  positions, in order, whose KV is to be computed in slots of its own: whatever no use has, and tokens of
                 uses that are not to be seen as they were computed apart
        keeps_hidden  whether pages of which all tokens are private are kept: their KV is to be compared, or copied

        None, and nothing has happened, where what is to be reused has holes. The paths that it is made of stay open.
        """
        chosen = frozenset(private)
        kept = references_of(path) + [
            each for use in uses for each in use_of(use, chosen, self.page_size, keeps_hidden=keeps_hidden)
        ]
        if any(each.page.start + max(each.page.filled) < each.end for each in kept):
            return None
        root = Root(path.salt, tuple(kept), blend_end=end)
        root.kept += tuple(private_pages(root, uses, private, ids, self.page_size))
        return self._open(root)

    def _open(self, root: Root) -> Path:
        root.refs += 1
        self.kept_roots.add(root)
        root.watch()
        path = Path(self.store, root)
        for kept in root.kept:
            self.store.hold(kept.page)
            path.append(kept.page, kept.mask(self.page_size))
        update_gaps(path, 0)
        return path

    def truncate(self, path: Path, ranges: Spans, owner: Owner | None = None) -> Path | None:
        """Make a path of its own that sees only `ranges` of a path's positions, moved together; the other is released.

        No KV moves or changes: keys that were rotated at p serve p + delta (AttentionStore 3.4). None, and nothing has
        happened, where some of it has no KV, or nothing is shared. Paths of one owner keeping the same go on together.
        """
        if path.root.is_blend:  # what stays is computed exactly
            return None
        kept = kept_by(path, ranges)
        known, known_root = self._last_truncated
        is_known = owner is not None and known is owner and known_root.kept == kept
        root = known_root if is_known else Root(path.salt, kept)
        truncated = self._open_whole(root) if self.store.sharing and not root.is_lost else None
        if truncated is not None:
            self._last_truncated = owner, root
            self.release(path)
        return truncated

    def restore(
        self, path: Path, ids: Sequence[int], chunks: Chunks, event: bytes, limit: int | None = None
    ) -> tuple[Path, Graft] | None:
        """Open a path of its own with what chunks have of a truncated session, behind what `path` has of them already.

        Keys stay where they were rotated; their KV comes with the step. The other path is released, if there is one to
        return: else nothing has happened. At most `limit` chunks.
        """
        num_tokens = path.num_tokens if path.root.is_own else 0
        kept = references_of(path) if path.root.is_own else []
        num_pages = len(kept)
        spans: list[tuple[int, int, int]] = []  # of each chunk: its index, and which of `kept` are its pages
        for index, (start, end) in enumerate(chunks.spans):
            if start == num_tokens and len(spans) != limit:
                first, num_tokens = len(kept), end
                kept += moved_pages(path.salt, ids, start, chunks.rotated(index)[: end - start], self.page_size)
                spans.append((index, first, len(kept)))
        if not spans or not self.store.sharing or not self.has_room(len(kept) - num_pages):
            return None
        self.kept_roots.update(each.root for each in kept[num_pages:])
        restored = self._open(Root(path.salt, tuple(kept), event=event))
        self.release(path)
        pieces = [self._graft_moved(restored, *span) for span in spans]
        restored.gaps = visible_gaps(restored, 0, None)
        graft = Graft(chunks, pieces, is_last=num_tokens == chunks.spans[-1][1])
        self.store.grafts.append(graft)
        return restored, graft

    def _graft_moved(self, path: Path, chunk: int, first: int, last: int) -> GraftPiece:
        """Take pages for the references [first, last) of a path: what a chunk has."""
        runs = []
        for index, (page, start, end, *_) in enumerate(path.root.kept[first:last], first):
            self.store.add(page)
            page.filled[DEVICE] = end - start
            page_id = page.ids[DEVICE]
            assert page_id is not None
            path.page_ids[index] = page_id
            runs.append((page_id, start % self.page_size, end - start))
        ends = [(kept.start + kept.delta, kept.end + kept.delta) for kept in path.root.kept[first:last]]
        return GraftPiece(chunk, ends[0][0], ends[-1][1], runs, tuple(path.pages[first:last]))

    def release(self, path: Path, owner: Owner | None = None) -> None:
        """Give a path back: its pages stay cached. They are the owner's, if it is given, and no others any more.

        Of a pin: its pages are as any others again.
        """
        if path in self._pinned:
            self._pinned.remove(path)
            for page in path.pages:
                page.pins -= 1
                self._num_pinned -= not page.pins
        number, now_s, pages, root = next(self._releases), self._clock(), path.pages, path.root
        for page in pages:
            page.released, page.last_used_s = number, now_s
            if page.writer is path:
                page.writer = None
        root.refs -= 1
        if self.store.sharing:
            self.store.release(pages)
            tail = next((page for page in reversed(pages) if page.parent is not None), None)
            if owner is not None and tail is not None:
                self._mark_grown(self.owners.claim(owner, tail))
        else:
            for page in pages:
                self.store.discard(page)
        self._drop_root(root)
        path.pages, path.page_ids, path.masks = [], array("i"), {}
        path.gaps, path.num_tokens, path._own = [], root.start, None

    def claim(self, owner: Owner, path: Path | None, other: Owner | None) -> None:
        """Let an owner have what a path is on too, or else, where none is open, what is left of another owner's."""
        tail = path.tail if path is not None and path.pages else None
        if tail is None and other is not None:
            tail = self.owners.tail_of(other)
        if self.store.sharing and tail is not None and tail.parent is not None:
            self._mark_grown(self.owners.claim(owner, tail))

    def abandon(self, root: Root | None, heir: Root | None = None, *, owner: Owner | None = None) -> None:
        """Drop what hangs on a root from which its session does not go on: nobody else can find it.

        What the `heir` kept of it stays, and so do the roots from which the heir kept something. What only `owner`
        owned, which is gone, is nobody's and stays cached until room is needed.
        """
        if owner is not None:
            self._mark_grown(self.owners.drop(owner))
        spared = set() if heir is None else heir.kept_roots
        roots = [] if root is None else [root]
        for each in roots:  # grows
            if each not in spared:
                self.store.drop_below(each)
            roots += each.kept_roots - spared

    def delete(self, owner: Owner, root: Root | None, salt: str = "", ids: Sequence[int] = ()) -> None:
        """Delete a session's pages from every tier: from the end of its last path up, what nothing else is on.

        With a root of its own also what it computed since, what it kept of its history, and what led there. Documents
        that a blend moved to their places stay cached: they are whoever's names them, as is what others keep. What is
        exact of its `ids` goes too: another request may have asked for that again.
        """
        tail = self.owners.tail_of(owner)
        self._mark_grown(self.owners.drop(owner))
        if tail is not None:
            self.store.drop_up(tail)
        roots, pages = [] if root is None else [root], []
        for each in roots:  # grows
            pages += [kept.page for kept in each.kept if kept.root.is_own or not (each.is_blend and kept.delta)]
            roots += each.kept_roots
        self.abandon(root)
        for page in reversed(pages):
            self.store.drop_up(page)
        if ids and (exact := self.roots.get(salt)) is not None:
            page, position = follow(exact, exact.start, ids, salt)
            self._drop_up(page, salt, position)

    def drop_prefix(self, salt: str, ids: Sequence[int]) -> None:
        """Delete a prompt: what begins with it, and of itself what nothing else is on."""
        for root in [each for each in (self.roots.get(salt), self.roots.get(PUBLIC_SALT)) if each is not None]:
            page, position = follow(root, root.start, ids, salt)
            if position < len(ids):  # nothing begins with them: the end may be another's, who goes on differently
                self._drop_up(page, salt, position)
                continue
            for child in list(page.children.values()):
                if child.start >= len(ids) and child.salt == salt:
                    self.store.drop_from(child)
            parent = page.parent
            if parent is not None and not page.children and page.salt == salt:
                self.store.drop_everywhere(page)
                self._drop_up(parent, salt, page.start)

    def _drop_up(self, page: Page, salt: str, end: int) -> None:
        if page.salt == salt:  # else nobody's alone
            self.store.drop_up(page, end)

    def drop_salts(self, is_chosen: Callable[[str], bool], *, is_counted: bool = True) -> None:
        """Drop all that is cached under the chosen salts, of truncated sessions too.

        `is_counted`: in `num_moved`.
        """
        num_moved = dict(self.store.num_moved)
        for root in [each for each in (*self.roots.values(), *self.kept_roots) if is_chosen(each.salt)]:
            self.store.drop_below(root)
        for page in [each for each in self._behind_public() if is_chosen(each.salt)]:
            self.store.drop_from(page)
        if not is_counted:
            self.store.num_moved = num_moved

    def _behind_public(self) -> Iterator[Page]:
        """Find where tenants go on behind public pages."""
        stack: list[Page] = [root for root in (self.roots.get(PUBLIC_SALT),) if root is not None]
        while stack:
            for child in stack.pop().children.values():
                if child.salt == PUBLIC_SALT:
                    stack.append(child)
                else:
                    yield child

    def check_pin(self, salt: str, ids: Sequence[int], *, num_kept_tokens: int) -> None:
        """Raise `PinRefused` before a prompt is computed whose pin would be refused; what is pinned costs nothing."""
        path = self._follow(salt, ids)
        num_new = max(-(-len(ids) // self.page_size) - sum(page.pins > 0 for page in path.pages), 0)
        self.release(path)
        left, needed = self._num_left(num_new, num_kept_tokens)
        if left < needed:
            raise PinRefused(num_new, max(left, 0), needed)

    def pin(self, salt: str, ids: Sequence[int], *, num_kept_tokens: int = 0) -> Path:
        """Keep what is resident of a prompt until `release` of what this returns.

        Raises `PinRefused` if fewer pages than the reserve, or than `num_kept_tokens` need, would then be left
        unpinned, or if the device lacks what a row behind them sees.
        """
        path = self._follow(salt, ids)
        lacks = visible_gaps(path, path.num_tokens + 1, self.window) if path.gaps else []
        num_new = sum(not page.pins for page in path.pages)
        left, needed = self._num_left(num_new, num_kept_tokens)
        if left < needed or not path.pages or lacks:
            self.release(path)
            raise PinRefused(num_new, max(left, 0), needed)
        for page in path.pages:
            page.pins += 1
        self._num_pinned += num_new
        self._pinned.add(path)
        return path

    def _follow(self, salt: str, ids: Sequence[int]) -> Path:
        path = self.open_path(salt, ids)
        path.extend(ids, len(ids))
        return path

    def _num_left(self, num_new: int, num_kept_tokens: int) -> tuple[int, int]:
        """Return how many pages so many more pins leave unpinned, and how many are needed."""
        left = self.device.num_pages - self._num_pinned - num_new
        return left, max(self.num_reserved, -(-num_kept_tokens // self.page_size))

    def clear(self, *, is_trusted: bool = True) -> None:
        """Forget every cached page of both tiers; pages in use or pinned stay.

        `is_trusted`: False after a failed step: pins go too. Pages that sequences hold stay theirs.
        """
        for pinned in () if is_trusted else list(self._pinned):
            self.release(pinned)
        self.store.clear()
        if not is_trusted:
            self.store.forget_moves()

    def report_changes(self) -> set[Page]:
        """Return a set to which pages are added that come to a tier, are filled or go, for who takes them out.

        All that are there already are in it.
        """
        changed: set[Page] = set()
        if self.store.sharing:
            changed.update(page for root in self.roots.values() for page in root.below_it())
            self.device.changed = self.host.changed = changed
        return changed

    def check(self) -> None:
        """Assert every invariant; walks the whole forest."""
        pages = [page for root in (*self.roots.values(), *self.kept_roots) for page in root.below_it()]
        if self.store.sharing:
            self.store.check(pages)
            self.owners.check(pages)
        assert self._num_pinned == sum(page.pins > 0 for page in pages)
        for page in pages:
            assert page.refs >= page.pins >= 0
            assert 0 < len(page.tokens) <= self.page_size - page.start % self.page_size
            assert page.parent is not None
            assert page.start <= page.parent.end
            assert page.parent.children[page.parent.key_of(page, page.tokens[0])] is page
            assert page.salt == page.parent.salt or page.parent.salt == PUBLIC_SALT
            assert self.kept_roots.issuperset(page.keepers or ())

    def _mark_grown(self, pages: list[Page]) -> None:
        """Let runs be measured anew that no session's path ends in any more."""
        for page in pages:
            for tier in self.store.tiers:
                tier.unranked[page] = None

    def _drop_root(self, root: Root) -> None:
        """Forget a root that nothing hangs on."""
        if root.refs or root.children:
            return
        if root.is_own:
            self.kept_roots.discard(root)
            root.unwatch()
        else:
            self.roots.pop(root.salt, None)


def follow(page: Page, position: int, ids: Sequence[int], salt: str) -> tuple[Page, int]:
    """Find the last page that has some of `ids`, from `position` in `page` on, and how many there are up to there.

    `salt`: for whose path.
    """
    while True:
        position += common_prefix(page.tokens, position - page.start, ids, position, len(ids))
        child = page.child(position, ids[position], salt) if position < len(ids) else None
        if child is None:
            return page, position
        page = child
