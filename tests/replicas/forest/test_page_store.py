"""The store of pages: what it counts in rare orders, and what a change costs."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("other", [7, 1 << 40])  # the second one is no token
@pytest.mark.parametrize("limit", [21, 24])
def test_a_path_follows_cached_pages_to_the_token_that_differs(limit: int, other: int) -> None:
    """Whole pages are compared at once, the last one by its tokens."""
    forest, ids = PrefixForest(64, PAGE), list(range(100, 124))
    known = computed(forest, "", ids)
    page_ids = known.page_ids.tolist()
    forest.release(known)
    for num_same in range(limit + 1):
        path = forest.open_path("")
        asked = [*ids[:num_same], *[other] * (24 - num_same)]
        assert path.extend(asked, limit) == path.num_tokens == num_same
        assert path.page_ids.tolist() == page_ids[: -(-num_same // PAGE)]
        assert [page.refs for page in path.pages] == [1] * len(path.pages)
        assert not path.gaps
        forest.check()
        forest.release(path)
    forest.check()


def test_pages_of_which_the_device_lacks_something_are_gaps_of_who_follows_them() -> None:
    forest = PrefixForest(64, PAGE, num_host_pages=8)
    ids = list(range(100, 124))
    known = computed(forest, "", ids)
    third, store = known.pages[2], forest.store
    forest.release(known)
    while third.ids[0] is not None:
        store.evict()
    path = forest.open_path("")
    assert path.extend(ids, len(ids)) == 24
    assert path.gaps == [index for index, page in enumerate(path.pages) if page.ids[0] is None]
    assert path.gaps[0] <= 2
    forest.check()
