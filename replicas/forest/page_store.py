"""Stores the pages of a forest by tier: which ids are free, who holds a page, which idle ones go, and what moves.

A page id of a tier is free, in use (of a page that a path holds) or cached (of an idle page: nobody holds it). Device
pages that are idle go when others need them. What the host does not have by then is saved to it, in the place of what
the host's own policy gives up; if the host has no room, it is dropped. Ahead of time, once few pages are free or
reclaimable, what was released longest ago is copied (Pensieve 4.3): a copied page stays usable, and is reclaimed
without work as long as the host has all that is on it.

Pages go leaves first: a leaf is an idle page of a tier with no such page below it. A *run* is what the eviction of one
leaf's session would free: the leaf and the pages above it that were released together with it and carry nothing else:
no other idle page below, no path that holds them, no end of another session's path. A shared page is thus part of no
run until one session is left on it, and unowned leaves are runs like any other.

Holding and releasing a page changes counters and marks whose run is another now. The policy hears of that when a victim
is needed (`PageTier.rank`), and a run that shrank is measured again when it is chosen. So each choice is the policy's
for the runs as they are, and no change costs more than the length of a path. Each step ranks what is marked too: the
first victim after 2,000 paths of 49 pages were released would else cost its step 45 ms (2 cores of an AMD EPYC).

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.replicas.forest.moves import Graft, LoadedPage, Moves
from mneme.replicas.forest.owners import Owners
from mneme.replicas.forest.tree import DEVICE, HOST, Owner, Page, Root

_COPIES_PER_STEP = 64  # pages copied ahead of time, so that a step is not held up by choosing them
_MAX_CLIMB = 4096  # pages that one look at the queue climbs from where sessions end to what this tier has of them


class OutOfPages(Exception):
    """No page is free and none is cached; the scheduler answers by suspending a sequence."""


class PageTier:
    """Has the page ids of one tier, and names its victims, page by page.

    `index` is DEVICE or HOST; ids are [first_page, first_page + num_pages).
    """

    def __init__(self, index: int, num_pages: int, policy: EvictionPolicy, *, first_page: int = 0) -> None:
        self.index = index
        self.num_pages = num_pages
        self.free = list(range(first_page + num_pages - 1, first_page - 1, -1))  # pops the lowest first
        self.num_in_use = 0
        self.policy = policy
        self.unranked: dict[Page, None] = {}  # at or below which runs have changed since the policy was told
        self.victim: Page | None = None  # the leaf that goes next, no candidate any more
        self.num_victims = 0  # pages that are to go with it, itself too
        self.changed: set[Page] | None = None  # pages that came or went; None: nobody wants to know

    @property
    def num_cached(self) -> int:
        return self.num_pages - len(self.free) - self.num_in_use

    @property
    def num_available(self) -> int:
        """Free pages and cached ones."""
        return self.num_pages - self.num_in_use

    def by_state(self) -> dict[str, int]:
        return {
            "free": len(self.free),
            "cached": self.num_cached,
            "in_use": self.num_in_use,
            "total": self.num_pages,
        }

    def look_ahead(self, queue: Callable[[], Iterable[Owner | None]], owners: Owners) -> None:
        """Tell the policy what waits: the sessions of waiting requests, in order; None for one without."""

        def keys() -> Iterable[Hashable | None]:
            steps = _MAX_CLIMB
            for owner in queue():
                page = None if owner is None else owners.tail_of(owner)
                while page is not None and page.ids[self.index] is None and steps:
                    page, steps = page.parent, steps - 1
                yield page

        self.policy.set_queue(keys)

    def cover(self, parent: Page) -> None:
        """Note that an idle page came below this one, which is no leaf any more."""
        parent.below[self.index] += 1
        if self._is_idle(parent):
            self.unranked[parent] = None
            if parent is self.victim:
                self.victim = None

    def remove(self, page: Page) -> None:
        """Free the id of an idle page. Its parent goes next or is ranked, as is a sibling whose run has grown."""
        page_id, parent = page.ids[self.index], page.parent
        assert page_id is not None
        assert parent is not None
        self.free.append(page_id)
        page.ids[self.index], page.filled[self.index] = None, 0
        if self.changed is not None:
            self.changed.add(page)
        parent.below[self.index] -= 1
        self.policy.withdraw(page)
        self.unranked.pop(page, None)
        was_victim = page is self.victim
        if was_victim:
            self.victim, self.num_victims = None, self.num_victims - 1
        if was_victim and self.num_victims and parent.released == page.released and self._is_leaf(parent):
            self.victim = parent
        elif self._is_idle(parent):
            self.unranked[parent] = None

    def choose(self) -> Page | None:
        """Choose the leaf to go next; None if no page is cached. `remove` is to follow."""
        self.rank()
        while self.victim is None and (chosen := self.policy.choose()) is not None:
            leaf = chosen.candidate.key
            assert isinstance(leaf, Page)
            length = self._run_length(leaf)
            if length == chosen.candidate.num_pages:
                self.victim, self.num_victims = leaf, chosen.num_pages
            else:
                self._offer(leaf, length)
        return self.victim

    def rank(self) -> None:
        """Offer the policy the runs that have changed, as they are now; no page is passed twice."""
        leaves: dict[Page, None] = {}
        passed: dict[Page, Page] = {}
        for page in self.unranked:
            self.policy.withdraw(page)
            leaves[self._only_leaf(page, passed)] = None
        self.unranked.clear()
        for leaf in leaves:
            if self._is_leaf(leaf) and leaf is not self.victim:
                self._offer(leaf, self._run_length(leaf))

    def check(self, pages: list[Page]) -> None:
        """Assert every invariant; `pages` is the whole forest."""
        ids = [page_id for page in pages if (page_id := page.ids[self.index]) is not None]
        assert sorted(ids + self.free) == sorted(set(ids) | set(self.free)), "a page has two owners"
        assert len(ids) + len(self.free) == self.num_pages, "a page is lost"
        assert self.num_in_use == sum(page.ids[self.index] is not None and page.refs > 0 for page in pages)
        for page in pages:
            assert 0 <= page.filled[self.index] <= (0 if page.ids[self.index] is None else len(page.tokens))
            assert page.below[self.index] == sum(self._is_idle(child) for child in page.children.values())
        assert all(page.parent is not None for page in self.unranked)
        leaves = {page for page in pages if self._is_leaf(page)}
        marked = {self._only_leaf(page, {}) for page in self.unranked}
        assert self.victim is None or (self.victim in leaves and self.num_victims > 0)
        offered = self.policy.candidates
        assert self.victim not in offered
        assert leaves <= marked | {self.victim, *offered}
        for key, candidate in offered.items():
            assert isinstance(key, Page)
            assert key in leaves or key in self.unranked
            if key in leaves - marked:
                assert candidate.num_pages >= self._run_length(key)
                assert candidate.last_used_s == key.last_used_s

    def _only_leaf(self, page: Page, passed: dict[Page, Page]) -> Page:
        """Find the leaf of the run that this page is or may be part of; any other page if it is part of none.

        passed  pages above leaves that were found, which is extended
        """
        way = []
        while page not in passed and page.below[self.index] == 1:
            way.append(page)
            page = next(child for child in page.children.values() if self._is_idle(child))
        leaf = passed.get(page, page)
        passed.update(dict.fromkeys(way, leaf))
        return leaf

    def _is_idle(self, page: Page) -> bool:
        return not page.refs and page.ids[self.index] is not None

    def _is_leaf(self, page: Page) -> bool:
        return self._is_idle(page) and not page.below[self.index]

    def _run_length(self, leaf: Page) -> int:
        """Count the pages of the run that ends at an idle leaf."""
        length, page, parent = 1, leaf, leaf.parent
        while parent is not None and parent.released == page.released and parent.claim is None:
            if not self._is_idle(parent) or parent.below[self.index] != 1:
                break
            length, page, parent = length + 1, parent, parent.parent
        return length

    def _offer(self, leaf: Page, num_pages: int) -> None:
        page = leaf
        for _ in range(num_pages // 3):
            assert page.parent is not None  # the run is longer
            page = page.parent
        self.policy.offer(Candidate(leaf, num_pages, leaf.last_used_s, page.num_uses > 1))


class PageStore:
    """Holds both tiers of one forest, and gathers a step's moves while it is scheduled."""

    def __init__(
        self,
        device: PageTier,
        host: PageTier,
        owners: Owners,
        on_empty_root: Callable[[Root], None],
        *,
        page_size: int,
        sharing: bool,
        window: int | None,
        copy_out_below: float,
    ) -> None:
        """`copy_out_below`: the share of device pages, free or reclaimable, under which copies are made."""
        self.page_size, self.sharing, self.window = page_size, sharing, window
        self.device, self.host = device, host
        self.tiers = (device, host) if host.num_pages else (device,)
        self._owners = owners
        self._on_empty_root = on_empty_root
        self._copy_target = int(copy_out_below * device.num_pages)
        self._uncopied: dict[Page, None] = {}  # where released paths end, oldest first
        self._copying: Page | None = None  # how far up its path the present one is
        self.num_reclaimable = 0
        self.num_moved = {"saved": 0, "loaded": 0, "dropped": 0}  # pages
        self.grafts: list[Graft] = []  # of the step that is being scheduled, as are:
        self.fresh: dict[int, None] = {}  # device pages with a new owner, whose content comes with the step
        self._saved: dict[int, int] = {}  # device page by host page
        self._loaded: dict[int, LoadedPage] = {}  # by device page

    @property
    def wants_copies(self) -> bool:
        """Return whether copies should be made ahead of time, and there is something to copy."""
        is_short = len(self.device.free) + self.num_reclaimable < self._copy_target
        return is_short and self.host.num_pages > 0 and (bool(self._uncopied) or self._copying is not None)

    def hold(self, page: Page) -> None:
        page.refs += 1
        page.num_uses += 1
        if page.refs > 1:
            return
        parent = page.parent
        for tier in self.tiers:
            index = tier.index
            if page.ids[index] is None:
                continue
            assert parent is not None  # a root may keep a page that is gone, but that has no ids
            tier.num_in_use += 1
            parent.below[index] -= 1
            if page is tier.victim:
                tier.victim = None
            if not page.below[index]:
                tier.unranked[page] = None
            if not parent.refs and parent.ids[index] is not None:  # a truncated session does not hold what it dropped
                tier.unranked[parent] = None
        self.num_reclaimable -= page.is_reclaimable
        page.is_reclaimable = False

    def release(self, pages: list[Page]) -> None:
        """Release a path's pages, root first; what of them has no KV is gone."""
        idle: list[Page] = []
        for page in reversed(pages):
            page.refs -= 1
            if page.refs:
                continue
            idle.append(page)
            parent = page.parent
            for tier in self.tiers:
                if page.ids[tier.index] is not None:
                    assert parent is not None
                    tier.num_in_use -= 1
                    tier.cover(parent)
            self._count_reclaimable(page)
        for page in idle:
            if not page.filled[DEVICE] and page.ids[DEVICE] is not None:
                self.device.remove(page)
                self._count_reclaimable(page)
            if not page.children:
                self._prune(page)
        for page in reversed(idle):
            for tier in self.tiers:
                if page.ids[tier.index] is not None and not page.below[tier.index]:
                    tier.unranked[page] = None
        if self.host.num_pages:
            self._mark_uncopied(pages)

    def discard(self, page: Page) -> None:
        """Free a page that the forest does not have: nothing is shared, or it was begun in vain."""
        page_id = page.ids[DEVICE]
        assert page_id is not None
        self.device.free.append(page_id)
        self.device.num_in_use -= 1
        page.refs, page.writer, page.ids[DEVICE], page.filled[DEVICE] = 0, None, None, 0
        if self.device.changed is not None:
            self.device.changed.add(page)

    def add(self, page: Page) -> None:
        """Give a page that is held an id on the device; raises `OutOfPages`."""
        if not self.device.free:
            self.evict()
        page_id = self.device.free.pop()
        page.ids[DEVICE], page.filled[DEVICE] = page_id, 0
        self.device.num_in_use += 1
        if self.device.changed is not None:
            self.device.changed.add(page)
        self.fresh[page_id] = None
        host_page = page.ids[HOST]
        if host_page is not None:
            page.filled[DEVICE] = page.filled[HOST]
            self._loaded[page_id] = LoadedPage(host_page, page_id, page.start, page.filled[HOST])

    def evict(self) -> None:
        """Free a device page; raises `OutOfPages`."""
        leaf = self.device.choose()
        if leaf is None:
            raise OutOfPages
        self.save(leaf)
        self.drop(leaf, self.device)

    def drop(self, page: Page, tier: PageTier) -> None:
        """Forget what a tier has of an idle page."""
        device_page, host_page = page.ids
        was_loading = device_page is not None and self._loaded.pop(device_page, None) is not None
        if tier is self.device or was_loading:  # the load's target, or its source
            self.device.remove(page)
        if tier is self.host and host_page is not None:
            self._saved.pop(host_page, None)
            self.host.remove(page)
        if not any(page.filled):
            self.num_moved["dropped"] += 1
            for root in list(page.keepers or ()):
                root.lose()
        self._count_reclaimable(page)
        self._prune(page)

    def drop_everywhere(self, page: Page) -> None:
        """Forget what every tier has of a page, if nobody holds it."""
        for tier in self.tiers:
            if page.ids[tier.index] is not None and not page.refs:
                self.drop(page, tier)

    def drop_below(self, page: Page) -> None:
        """Drop everything under a page, leaves first."""
        for below in reversed(list(page.below_it())):
            self.drop_everywhere(below)

    def drop_from(self, page: Page) -> None:
        """Drop a page with all that hangs on it."""
        self.drop_below(page)
        self.drop_everywhere(page)

    def drop_up(self, page: Page, end: int | None = None) -> None:
        """Drop what nothing else is on, from this page up; with `end`, where a prefix left it, tokens behind it are
        another's and stay."""
        while page.parent is not None and not (page.refs or page.children or page.keepers or page.claim is not None):
            if end is not None and page.end > end:
                return
            parent, end = page.parent, None if end is None else page.start
            self.drop_everywhere(page)
            page = parent

    def clear(self) -> None:
        """Drop every idle page of both tiers."""
        for tier in self.tiers:
            while (leaf := tier.choose()) is not None:
                self.drop(leaf, tier)

    def save(self, page: Page) -> bool:
        """Let the host have all that the device has of an idle page; False if it has no room.

        A blend's private page stays on the device: without it the prompt is computed anew.
        """
        if page.positions is not None or page.filled[HOST] == page.filled[DEVICE]:
            return True
        host_page, device_page, parent = page.ids[HOST], page.ids[DEVICE], page.parent
        assert device_page is not None
        if host_page is None:
            if not self.host.free:
                leaf = self.host.choose()
                if leaf is None:
                    return False
                self.drop(leaf, self.host)
            assert parent is not None
            host_page = page.ids[HOST] = self.host.free.pop()
            self.host.unranked[page] = None
            self.host.cover(parent)
            if self.host.changed is not None:
                self.host.changed.add(page)
        page.filled[HOST] = page.filled[DEVICE]
        self._saved[host_page] = device_page
        self._count_reclaimable(page)
        return True

    def drain_moves(self, *, can_copy: bool = True) -> Moves:
        """Return what happens to pages before the rows of the step that was scheduled are computed.

        Loads go before copies that can wait (Pensieve 5.1). `can_copy`: ahead of need too.
        """
        if can_copy and not self._loaded and not self.grafts:
            self._copy_ahead()
        for tier in self.tiers:
            if tier.unranked:
                tier.rank()
        saves = [(device, host) for host, device in self._saved.items()]
        moves = Moves(saves, list(self.fresh), list(self._loaded.values()), self.grafts)
        self.num_moved["saved"] += len(moves.saves)
        self.num_moved["loaded"] += len(moves.loads)
        self.forget_moves()
        self.fresh.clear()
        return moves

    def forget_moves(self) -> None:
        """Pages taken are still to be hidden; nothing else of the step that was scheduled counts."""
        self._saved.clear()
        self._loaded.clear()
        self.grafts = []

    def check(self, pages: list[Page]) -> None:
        """Assert every invariant; `pages` is the whole forest."""
        self.device.check(pages)
        self.host.check(pages)
        assert self.num_reclaimable == sum(page.is_reclaimable for page in pages)
        for page in pages:
            assert page.is_reclaimable == self._is_reclaimable(page)
            if not page.refs:
                assert page.children or max(page.filled) == len(page.tokens), "tokens that lead nowhere"
                assert page.filled[DEVICE] or page.ids[DEVICE] is None
        assert all(page.parent is not None for page in self._uncopied)

    def _prune(self, page: Page) -> None:
        """Take what has neither KV nor anything behind it out of the forest, from this page up."""
        while page.parent is not None and not page.refs and not page.children:
            num_tokens = max(page.filled)
            if num_tokens:
                if num_tokens < len(page.tokens):
                    del page.tokens[num_tokens:]
                    page.block = None
                return
            parent = page.parent
            for tier in self.tiers:
                if page.ids[tier.index] is not None:
                    tier.remove(page)
                tier.unranked.pop(page, None)
            self._count_reclaimable(page)
            del parent.children[parent.key_of(page, page.tokens[0])]
            self._owners.move_up(page, parent)
            self._uncopied.pop(page, None)
            page.parent = None
            page = parent
        if isinstance(page, Root):
            self._on_empty_root(page)

    def _mark_uncopied(self, pages: list[Page]) -> None:
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
            if not self.save(page):  # the host is full of what is in use
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
            if page.parent is not None and not page.refs and page.ids[DEVICE] is not None and not page.is_reclaimable:
                return page
            self._copying = None  # above a copied one all were, and what is held is released again
        return None

    def _count_reclaimable(self, page: Page) -> None:
        now = self._is_reclaimable(page)
        self.num_reclaimable += now - page.is_reclaimable
        page.is_reclaimable = now

    def _is_reclaimable(self, page: Page) -> bool:
        return not page.refs and page.ids[DEVICE] is not None and page.filled[HOST] >= page.filled[DEVICE]
