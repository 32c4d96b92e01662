"""The store of pages: what it counts in rare orders, and what a change costs."""

from __future__ import annotations

from unittest.mock import patch

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.page_store import PageTier
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.tree import Owner

PAGE = 4


def computed(forest: PrefixForest, salt: str, ids: list[int], num_rows: int = 1_000_000) -> Path:
    """A path over tokens of which so many have got their KV."""
    path = forest.open_path(salt, ids)
    path.extend(ids, len(ids))
    path.take_rows(ids, num_rows)
    forest.drain_moves(can_copy=False)
    return path


def test_a_page_that_leads_nowhere_is_not_counted_as_reclaimable() -> None:
    """A truncated session keeps page D; A to C are evicted, begun again by a prompt, and left as both end."""
    forest = PrefixForest(6, PAGE, num_host_pages=2, copy_out_below=0.9)
    ids = list(range(100, 100 + 4 * PAGE))
    kept = forest.truncate(computed(forest, "a", ids), [(3 * PAGE, 4 * PAGE)], Owner())
    for number in range(4):
        forest.release(computed(forest, "b", [1000 * number + i for i in range(5 * PAGE)]))
    begun = computed(forest, "a", ids[: 3 * PAGE], num_rows=1)
    forest.release(kept)
    forest.delete(Owner(), kept.root)
    forest.release(begun)
    forest.check()
    forest.clear()
    assert forest.store.num_reclaimable == forest.device.num_cached == 0


def test_copies_ahead_pass_no_page_of_a_long_path_twice_in_a_step() -> None:
    """They mark 64 pages of one run, and each of them looked for the run's leaf."""
    num_pages = 1000
    forest = PrefixForest(num_pages, PAGE, num_host_pages=num_pages, copy_out_below=1.0)
    forest.release(computed(forest, "", list(range(PAGE * num_pages))))
    num_passed, is_idle = 0, PageTier._is_idle

    def count(tier: PageTier, page: object) -> bool:
        nonlocal num_passed
        num_passed += 1
        return is_idle(tier, page)  # type: ignore[arg-type]

    for _ in range(12):  # from the leaf up
        forest.drain_moves(can_copy=True)
    with patch.object(PageTier, "_is_idle", count):
        moves = forest.drain_moves(can_copy=True)
    assert len(moves.saves) > 10
    assert num_passed < 8 * num_pages  # both tiers, up and down
