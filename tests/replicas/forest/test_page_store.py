"""The store of pages: what it counts in rare orders, and what a change costs."""

from __future__ import annotations

from mneme.replicas.forest.forest import PrefixForest
from mneme.replicas.forest.paths import Path
from mneme.replicas.forest.tree import Owner

PAGE = 4


def computed(forest: PrefixForest, salt: str, ids: list[int], num_rows: int = 1_000_000) -> Path:
    """A path over tokens of which so many have got their KV."""
    path = forest.open_path(salt, ids)
    path.extend(ids, len(ids))
    path.take_rows(ids, num_rows)
    forest.store.drain_moves(can_copy=False)
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
