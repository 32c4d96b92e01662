"""Knows where each page's KV is, and how it comes and goes between the device, the host and nothing.

Device pages that nobody holds go when others need them. What the host does not have by then is saved to it, in the
place of what the host's own policy gives up; where the host has no room, it is dropped. Ahead of time, once few pages
are free or reclaimable, what was given back longest ago is copied (Pensieve 4.3): a copied page stays usable, and is
reclaimed without work as long as the host has all that is on it.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from mneme.replicas.forest.moves import LoadedPage, Moves, PendingMoves
from mneme.replicas.forest.owners import Owners
from mneme.replicas.forest.page_pool import PagePool
from mneme.replicas.forest.pages import DEVICE, HOST, Page, Root

_COPIES_PER_STEP = 64  # pages copied ahead of time, so that a step is not held up by choosing them


class OutOfPages(Exception):
    """No page is free and none is cached; the scheduler answers by suspending a sequence."""


class TieredPages:
    """Holds both tiers of one forest."""

    def __init__(
        self,
        device: PagePool,
        host: PagePool,
        owners: Owners,
        on_empty_root: Callable[[Root], None],
        *,
        copy_out_below: float,
    ) -> None:
        """`copy_out_below`: the share of device pages, free or reclaimable, under which copies are made."""
        self.device, self.host = device, host
        self._tiers = (device, host)
        self._owners = owners
        self._on_empty_root = on_empty_root
        self.moves = PendingMoves()
        self._copy_target = int(copy_out_below * device.num_pages)
        self._uncopied: dict[Page, None] = {}  # where given-back paths end, oldest first
        self._copying: Page | None = None  # how far up its path the present one is
        self.num_reclaimable = 0
        self.num_moved = {"saved": 0, "loaded": 0, "dropped": 0}  # pages

    @property
    def wants_copies(self) -> bool:
        """Return whether copies should be made ahead of time, and there is something to copy."""
        is_short = len(self.device.free) + self.num_reclaimable < self._copy_target
        return is_short and self.host.num_pages > 0 and (bool(self._uncopied) or self._copying is not None)

    def hold(self, page: Page) -> None:
        page.refs += 1
        page.num_uses += 1
        if page.refs == 1:
            for tier in self._tiers:
                tier.hold(page)
            self._note(page)

    def release(self, pages: list[Page]) -> None:
        """Release a path's pages, root first; what of them has no KV is gone."""
        for page in reversed(pages):
            page.refs -= 1
            if page.refs == 0:
                for tier in self._tiers:
                    tier.release(page)
                self._note(page)
        for page in reversed(pages):
            if not page.filled[DEVICE] and self.device.has(page) and not page.refs:
                self.device.remove(page)
                self._note(page)
            self.settle(page)
        for page in pages:
            for tier in self._tiers:
                tier.offer_if_leaf(page)
        if self.host.num_pages:
            self._note_uncopied(pages)

    def free(self, pages: list[Page]) -> None:
        """Free pages that no forest has, because nothing is shared: nothing stays."""
        for page in pages:
            page.refs = 0
            self.device.discard(page)

    def drop_new(self, page: Page) -> None:
        """Free a page that was begun in vain, and that its one path does not hold any more."""
        page.refs = 0
        self.device.discard(page)
        page.ids[DEVICE], page.filled[DEVICE], page.writer = None, 0, None
        if self.device.changed is not None:
            self.device.changed.add(page)

    def add(self, page: Page) -> None:
        """Give a page that is held an id on the device; raises `OutOfPages`."""
        if not self.device.free:
            self.evict_one()
        page_id = self.device.free.pop()
        self.device.place(page, page_id)
        self.moves.take(page_id)
        host_page = page.ids[HOST]
        if host_page is not None:
            page.filled[DEVICE] = page.filled[HOST]
            self.moves.load(LoadedPage(host_page, page_id, page.start, page.filled[HOST]))

    def evict_one(self) -> None:
        leaf = self.device.choose()
        if leaf is None:
            raise OutOfPages
        self._save(leaf)
        self.drop(leaf, DEVICE)

    def drop(self, page: Page, index: int) -> None:
        """Forget what a tier has of a page that nobody holds."""
        cancelled = self.moves.cancel_load(page.ids[DEVICE])
        if index == DEVICE or cancelled:  # the load's target, or its source
            self.device.remove(page)
        host_page = page.ids[HOST]
        if index == HOST and host_page is not None:
            self.moves.forget_save(host_page)
            self.host.remove(page)
        if not any(page.filled):
            self.num_moved["dropped"] += 1
            for root in list(page.keepers or ()):
                root.lose()
        self._note(page)
        self.settle(page)

    def drop_everywhere(self, page: Page) -> None:
        """Forget what every tier has of a page, if nobody holds it."""
        for tier in self._tiers:
            if tier.has(page) and not page.refs:
                self.drop(page, tier.index)

    def retract(self, pages: Iterable[Page]) -> None:
        """Drop pages whose KV did not come, and what was computed behind them; nobody holds any."""
        for page in pages:
            self.drop_below(page)
            self.drop_everywhere(page)

    def drop_below(self, page: Page) -> None:
        """Drop everything under a page, leaves first."""
        for below in reversed(list(page.below_it())):
            self.drop_everywhere(below)

    def drop_up(self, page: Page, end: int | None = None) -> None:
        """Drop what nothing else is on, from this page up; with `end`, where a prefix left it, tokens behind it are
        another's and stay."""
        while page.parent is not None and not (page.refs or page.children or page.keepers or page.claim is not None):
            if end is not None and page.end > end:
                return
            parent, end = page.parent, None if end is None else page.start
            self.drop_everywhere(page)
            page = parent

    def settle(self, page: Page) -> None:
        """Take what has neither KV nor anything behind it out of the forest, from this page up."""
        while page.parent is not None and not page.refs and not page.children:
            num_tokens = max(page.filled)
            if num_tokens:
                if num_tokens < len(page.tokens):
                    del page.tokens[num_tokens:]
                    page.block = None
                return
            page = self._detach(page, page.parent)
        if isinstance(page, Root):
            self._on_empty_root(page)

    def clear(self, index: int) -> None:
        """Drop every page of a tier that nobody holds."""
        while (leaf := self._tiers[index].choose()) is not None:
            self.drop(leaf, index)

    def drain(self, *, can_copy: bool) -> Moves:
        """Return the moves of the step that was scheduled; loads go before copies that can wait (Pensieve 5.1)."""
        if can_copy and not self.moves.has_loads:
            self._copy_ahead()
        moves = self.moves.drain()
        self.num_moved["saved"] += len(moves.saves)
        self.num_moved["loaded"] += len(moves.loads)
        return moves

    def check(self, pages: list[Page]) -> None:
        """Assert every invariant; `pages` is the whole forest."""
        for tier in self._tiers:
            tier.check(pages)
        assert self.num_reclaimable == sum(page.is_reclaimable for page in pages)
        for page in pages:
            assert page.is_reclaimable == self._is_reclaimable(page)
            if not page.refs:
                assert page.children or max(page.filled) == len(page.tokens), "tokens that lead nowhere"
                assert page.filled[DEVICE] or not self.device.has(page)
        assert all(page.parent is not None for page in self._uncopied)

    def _note_uncopied(self, pages: list[Page]) -> None:
        """Remember the ends of a path: its last page and, of a truncated one, the last of each kept run."""
        ends = [page for page, after in pairwise(pages) if after.parent is not page] + pages[-1:]
        for page in ends:
            self._uncopied.pop(page, None)
            if page.parent is not None:
                self._uncopied[page] = None

    def _copy_ahead(self) -> None:
        for _ in range(_COPIES_PER_STEP):
            page = self._next_to_copy()
            if page is None:
                return
            if not self._save(page):  # the host is full of what is in use
                self._uncopied.clear()
                self._copying = None
                return
            assert page.parent is not None
            self._copying = page.parent

    def _next_to_copy(self) -> Page | None:
        while self.wants_copies:
            page = self._copying
            if page is None:
                page = next(iter(self._uncopied))
                del self._uncopied[page]
            if page.parent is not None and not page.refs and self.device.has(page) and not page.is_reclaimable:
                return page
            self._copying = None  # above a copied one all were, and what is held is given back again
        return None

    def _save(self, page: Page) -> bool:
        """Let the host have all that the device has of an idle page; False if it has no room.

        A blend's private page stays on the device: without it the prompt is computed anew.
        """
        if page.positions is not None:
            return True
        device_page = page.ids[DEVICE]
        assert device_page is not None
        if page.filled[HOST] == page.filled[DEVICE]:
            return True
        if not self.host.has(page):
            host_page = self._host_page()
            if host_page is None:
                return False
            self.host.place(page, host_page)
        host_page = page.ids[HOST]
        assert host_page is not None
        page.filled[HOST] = page.filled[DEVICE]
        self.moves.save(device_page, host_page)
        self._note(page)
        return True

    def _host_page(self) -> int | None:
        if not self.host.free:
            leaf = self.host.choose()
            if leaf is None:
                return None
            self.drop(leaf, HOST)
        return self.host.free.pop()

    def _detach(self, page: Page, parent: Page) -> Page:
        """Take a page without KV out of the forest; returns its former parent."""
        for tier in self._tiers:
            if tier.has(page):
                tier.remove(page)
        del parent.children[parent.key_of(page, page.tokens[0])]
        self._owners.move_up(page, parent)
        self._uncopied.pop(page, None)
        page.parent = None
        return parent

    def _note(self, page: Page) -> None:
        now = self._is_reclaimable(page)
        self.num_reclaimable += now - page.is_reclaimable
        page.is_reclaimable = now

    def _is_reclaimable(self, page: Page) -> bool:
        return not page.refs and self.device.has(page) and page.filled[HOST] >= page.filled[DEVICE]
