"""Which session owns which path: the path of its last turn, remembered by the page where it ends.

An owner holds its claim itself, so that owners cost nothing here and are as many as there are sessions.

Pages go from the tail, so what is left of a path is always a path, and its end moves up to the parent. Sessions whose
paths end at the same page share one claim; claims that meet are merged into the larger one, so that an eviction costs
the same however many sessions own the page.
"""

from __future__ import annotations

from mneme.replicas.forest.tree import Claim, Owner, Page


class Owners:
    """Gives claims to owners and takes them back; whoever forgets an owner drops it here first."""

    def __init__(self) -> None:
        self._num_owners = 0

    def __len__(self) -> int:
        """Owners with a claim, also those of whose path nothing is left."""
        return self._num_owners

    def tail_of(self, owner: Owner) -> Page | None:
        """Find where what is left of its path ends; None if nothing is."""
        return None if owner.claim is None else _merged(owner.claim).page

    def claim(self, owner: Owner, page: Page) -> list[Page]:
        """Let the owner's path end at this page from now on. Returns the pages at which none ends any more."""
        left = self.drop(owner)
        if page.claim is None:
            page.claim = Claim(page)
        page.claim.num_owners += 1
        owner.claim = page.claim
        self._num_owners += 1
        return left

    def drop(self, owner: Owner) -> list[Page]:
        """Forget an owner. Returns the page at which no path ends any more, if there is one."""
        if owner.claim is None:
            return []
        claim, owner.claim = _merged(owner.claim), None
        self._num_owners -= 1
        claim.num_owners -= 1
        page = claim.page
        if claim.num_owners or page is None:
            return []
        page.claim = claim.page = None
        return [page]

    def move_up(self, page: Page, parent: Page) -> None:
        """Move the paths that end at a page that goes to its parent."""
        claim, page.claim = page.claim, None
        if claim is None:
            return
        if parent.parent is None:  # a root: nothing is left of them
            claim.page = None
            return
        if parent.claim is not None:
            small, claim = sorted((claim, parent.claim), key=lambda one: one.num_owners)
            small.into, small.page = claim, None
            claim.num_owners += small.num_owners
        parent.claim, claim.page = claim, parent

    def check(self, pages: list[Page]) -> None:
        """Assert that claims and pages know each other; `pages` are all pages."""
        claims = [page.claim for page in pages if page.claim is not None]
        assert all(page.claim.page is page and page.claim.into is None for page in pages if page.claim is not None)
        assert all(claim.num_owners > 0 for claim in claims)
        assert len(self) >= sum(claim.num_owners for claim in claims)


def _merged(claim: Claim) -> Claim:
    """Find the claim that this one became part of; halves the way for the next time."""
    while claim.into is not None:
        if claim.into.into is not None:
            claim.into = claim.into.into
        claim = claim.into
    return claim
