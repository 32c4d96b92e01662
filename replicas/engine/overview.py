"""Shows an engine's prefix forest as a tree of runs (`queries.Tree`), for people who look inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from mneme.cachetier.names import PUBLIC_SALT, tenant_of
from mneme.replicas.forest.tree import DEVICE, HOST, Page, Root
from mneme.replicas.queries import GetTree, Run, Tree

if TYPE_CHECKING:
    from mneme.replicas.engine.engine import Engine

_MAX_PAGES, _RUN_COST = 20_000, 12  # that are walked between two steps of the engine: 22 ms
_RUN_PAGES = 20  # of a run, on average: a walk of longer ones ends before it has as many as are asked for
_MAX_FIRST_IDS = 24


@dataclass(slots=True)
class TreeWalk:
    """Walks a tenant's lineages, in as many parts as the runs that are asked for may take; changes nothing.

    The engine steps between two parts. Each page is shown as it was when the walk came to it: one that was dropped
    since its parent was seen may be among them.
    """

    query: GetTree
    _runs: list[Run] = field(default_factory=list)  # parents first
    _depths: list[int] = field(default_factory=list)
    _roots: Iterator[Root] | None = None
    _stack: list[tuple[Page, int, int, Root]] = field(default_factory=list)
    _num_parts: int = field(init=False)  # that are left

    def __post_init__(self) -> None:
        self._num_parts = 1 + self.query.max_runs * (_RUN_COST + _RUN_PAGES) // _MAX_PAGES

    def go_on(self, engine: Engine) -> bool:
        """Walk the next part; returns whether there is another one."""
        if self._roots is None:
            self._roots = iter((*engine.forest.roots.values(), *engine.forest.kept_roots))
        tenant, now_s = None if self.query.salt is None else tenant_of(self.query.salt), engine.clock()
        cost, stack = 0, self._stack  # in pages of a run
        while cost < _MAX_PAGES:
            if not stack:
                if (root := next(self._roots, None)) is None:
                    return False
                cost += 1
                if _is_shown(root, tenant):
                    cost += len(root.children) // 16
                    stack += [(child, -1, 0, root) for child in root.children.values() if _is_shown(child, tenant)]
                continue
            page, parent, depth, root = stack.pop()
            pages = [page]
            while len(page.children) == 1:
                only = next(iter(page.children.values()))
                if only.start != page.end or only.salt != page.salt:  # behind a public page it is one tenant's
                    break
                pages.append(page := only)
            index = len(self._runs)
            cost += len(pages) + len(page.children) // 16 + _RUN_COST
            self._runs.append(_run_of(pages, parent, root, now_s, with_ids=tenant is not None))
            self._depths.append(depth)
            stack += [(child, index, depth + 1, root) for child in page.children.values() if _is_shown(child, tenant)]
        self._num_parts -= 1
        return self._num_parts > 0

    def tree(self) -> Tree:
        """Return what was walked; once."""
        runs = self._runs
        for run in reversed(runs):
            if run["parent"] >= 0:
                runs[run["parent"]]["below"] += run["below"]
        num_tokens = sum(run["tokens"] for run in runs)
        return {"runs": _largest(runs, self._depths, self.query), "num_runs": len(runs), "num_tokens": num_tokens}


def _is_shown(page: Page, tenant: str | None) -> bool:
    """Return whether a tenant may see a page: its own, or a public one, behind which each tenant has its own."""
    return page.salt == PUBLIC_SALT or tenant in (None, tenant_of(page.salt))


def _run_of(pages: list[Page], parent: int, root: Root, now_s: float, *, with_ids: bool) -> Run:
    first, num_tokens = pages[0], sum(len(page.tokens) for page in pages)
    ends = (page.claim for page in pages if page.claim is not None and page.claim.page is page)
    return {
        "parent": parent,
        "start": first.start,
        "tokens": num_tokens,
        "below": num_tokens,
        "device": sum(page.filled[DEVICE] for page in pages),
        "host": sum(max(page.filled[HOST] - page.filled[DEVICE], 0) for page in pages),
        "running": max(first.refs - first.pins, 0),
        "pinned": any(page.pins for page in pages),
        "sessions": sum(claim.num_owners for claim in ends),
        "uses": first.num_uses,
        "idle_s": 0.0 if first.refs else max(now_s - first.last_used_s, 0.0),
        "kind": "documents" if root.is_blend else "truncated" if root.is_own else "prompt",
        "first_ids": list(islice(chain.from_iterable(page.tokens for page in pages), _MAX_FIRST_IDS * with_ids)),
    }


def _largest(runs: list[Run], depths: list[int], query: GetTree) -> list[Run]:
    """List those that the question asks for: what follows a run is smaller than it, so parents are listed too."""
    asked = [i for i, run in enumerate(runs) if depths[i] < query.depth and run["below"] >= query.min_tokens]
    place, listed = {-1: -1}, list[Run]()
    for index in sorted(sorted(asked, key=lambda i: -runs[i]["below"])[: query.max_runs]):
        place[index] = len(listed)
        listed.append({**runs[index], "parent": place[runs[index]["parent"]]})
    return listed
