"""The page ids of one tier: each is free, cached (of a page that nobody holds) or in use; and which cached ones go.

Pages go leaves first: a leaf is a page that is here, that nobody holds, and with no such page below it. A *run* is what
the eviction of one leaf's session would free: the leaf and the pages above it that were given back together with it and
carry nothing else: no other idle page below, no path that holds them, no end of another session's path. A shared page
is thus part of no run until one session is left on it, and unowned leaves are runs like any other.

A run that shrinks (a path holds its upper part) is measured again when the policy chooses it; one that grows (a sibling
went, or the path that ended on it is another now) is offered again at once. So each choice is the policy's for the
runs as they are, and no change costs more than the length of a path.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from mneme.cachetier.policy.eviction import Candidate, EvictionPolicy
from mneme.replicas.forest.owners import Owners
from mneme.replicas.forest.pages import Owner, Page

_MAX_CLIMB = 4096  # pages that one look at the queue climbs from where sessions end to what this tier has of them


class PagePool:
    """Offers runs of cached pages to a policy and names its victims, page by page.

    `index` is DEVICE or HOST; page ids are [first_page, first_page + num_pages).
    """

    def __init__(
        self, index: int, num_pages: int, policy: EvictionPolicy, owners: Owners, *, first_page: int = 0
    ) -> None:
        self.index = index
        self.num_pages = num_pages
        self.free = list(range(first_page + num_pages - 1, first_page - 1, -1))  # pops the lowest first
        self.num_in_use = 0
        self.policy = policy
        self._owners = owners
        self.changed: set[Page] | None = None  # pages that came or went; None: nobody wants to know
        self._victim: Page | None = None  # the leaf that goes next, no candidate any more
        self._num_victims = 0  # pages that are to go with it, itself too

    @property
    def num_cached(self) -> int:
        return self.num_pages - len(self.free) - self.num_in_use

    def look_ahead(self, queue: Callable[[], Iterable[Owner | None]]) -> None:
        """Tell the policy what waits: the sessions of waiting requests, in order; None for one without."""

        def keys() -> Iterable[Hashable | None]:
            steps = _MAX_CLIMB
            for owner in queue():
                page = None if owner is None else self._owners.tail_of(owner)
                while page is not None and page.ids[self.index] is None and steps:
                    page, steps = page.parent, steps - 1
                yield page

        self.policy.set_queue(keys)

    def has(self, page: Page) -> bool:
        return page.ids[self.index] is not None

    def place(self, page: Page, page_id: int) -> None:
        """Give the page this id, still without KV."""
        page.ids[self.index], page.filled[self.index] = page_id, 0
        if self.changed is not None:
            self.changed.add(page)
        if page.refs:
            self.num_in_use += 1
        else:
            self._add_below(page)
            self.offer_through(page)

    def remove(self, page: Page) -> None:
        """Free the id of a page of the forest."""
        page_id = page.ids[self.index]
        assert page_id is not None
        self.free.append(page_id)
        page.ids[self.index], page.filled[self.index] = None, 0
        if self.changed is not None:
            self.changed.add(page)
        if page.refs:
            self.num_in_use -= 1
        else:
            self._remove_cached(page, _parent(page))

    def discard(self, page: Page) -> None:
        """Free the id of a page that was in use, and in no forest."""
        page_id = page.ids[self.index]
        assert page_id is not None
        self.free.append(page_id)
        self.num_in_use -= 1

    def hold(self, page: Page) -> None:
        """Hold a page for its first path; its `refs` say so already."""
        if not self.has(page):
            return
        self.num_in_use += 1
        if page is self._victim:
            self._victim = None
        self.policy.withdraw(page)
        parent = _parent(page)
        parent.below[self.index] -= 1
        if not parent.refs:  # a truncated session does not hold what it dropped
            self.offer_through(parent)

    def release(self, page: Page) -> None:
        """Release a page that its last path gave back; it is offered once the whole path is."""
        if self.has(page):
            self.num_in_use -= 1
            self._add_below(page)

    def offer_if_leaf(self, page: Page) -> None:
        if self._is_leaf(page) and page is not self._victim:
            self._offer(page, self._run_length(page))

    def offer_through(self, page: Page) -> None:
        """Offer the run that this page is or may be part of, if it is one."""
        while page.below[self.index] == 1:
            page = next(child for child in page.children.values() if self._is_idle(child))
        self.offer_if_leaf(page)

    def choose(self) -> Page | None:
        """Choose the leaf to go next; None if no page is cached. `remove` is to follow."""
        if self._victim is not None:
            return self._victim
        while (victim := self.policy.choose()) is not None:
            leaf = victim.candidate.key
            assert isinstance(leaf, Page)
            length = self._run_length(leaf)
            if length == victim.candidate.num_pages:
                self._victim, self._num_victims = leaf, victim.num_pages
                return leaf
            self._offer(leaf, length)
        return None

    def check(self, pages: list[Page]) -> None:
        """Assert every invariant; `pages` is the whole forest."""
        ids = [page_id for page in pages if (page_id := page.ids[self.index]) is not None]
        assert sorted(ids + self.free) == sorted(set(ids) | set(self.free)), "a page has two owners"
        assert len(ids) + len(self.free) == self.num_pages, "a page is lost"
        assert self.num_in_use == sum(self.has(page) and page.refs > 0 for page in pages)
        for page in pages:
            assert 0 <= page.filled[self.index] <= (len(page.tokens) if self.has(page) else 0)
        leaves = {page for page in pages if self._is_leaf(page)}
        offered = self.policy.candidates
        assert leaves - {self._victim} == set(offered)
        assert self._victim is None or (self._victim in leaves and self._num_victims > 0)
        for key, candidate in offered.items():
            assert isinstance(key, Page)
            assert candidate.num_pages >= self._run_length(key)
            assert candidate.last_used_s == key.last_used_s
        for page in pages:
            assert page.below[self.index] == sum(self._is_idle(child) for child in page.children.values())

    def _withdraw(self, page: Page) -> None:
        """Withdraw a page that is no leaf here, or not idle, any more."""
        if page is self._victim:
            self._victim = None
        self.policy.withdraw(page)

    def _remove_cached(self, page: Page, parent: Page) -> None:
        """Follow an idle page that is gone: its parent goes next, or is offered, or the run of a sibling has grown."""
        parent.below[self.index] -= 1
        was_victim = page is self._victim
        self._num_victims -= was_victim
        self._withdraw(page)
        if not self._is_idle(parent):
            return
        if parent.below[self.index]:
            self.offer_through(parent)
        elif was_victim and self._num_victims and parent.released == page.released:
            self._victim = parent
        else:
            self.offer_if_leaf(parent)

    def _add_below(self, page: Page) -> None:
        parent = _parent(page)
        parent.below[self.index] += 1
        self._withdraw(parent)

    def _is_idle(self, page: Page) -> bool:
        return not page.refs and page.ids[self.index] is not None

    def _is_leaf(self, page: Page) -> bool:
        return self._is_idle(page) and not page.below[self.index]

    def _run_length(self, leaf: Page) -> int:
        """Count the pages of the run that ends at an idle leaf."""
        length, page, parent = 1, leaf, leaf.parent
        while parent is not None and self._continues(page, parent):
            length, page, parent = length + 1, parent, parent.parent
        return length

    def _continues(self, page: Page, parent: Page) -> bool:
        """Return whether the run that `page` is part of goes on in its parent."""
        is_of_release = parent.released == page.released and parent.claim is None
        return is_of_release and self._is_idle(parent) and parent.below[self.index] == 1

    def _offer(self, leaf: Page, num_pages: int) -> None:
        page = leaf
        for _ in range(num_pages // 3):
            assert page.parent is not None  # the run is longer
            page = page.parent
        self.policy.offer(Candidate(leaf, num_pages, leaf.last_used_s, page.num_uses > 1))


def _parent(page: Page) -> Page:
    assert page.parent is not None
    return page.parent
