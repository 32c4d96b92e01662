"""What a policy may not ask, and what there is where there is no tier."""

from __future__ import annotations

import numpy as np
import pytest

from mneme.cachetier.host_pages.cpu import CpuTier
from mneme.cachetier.host_pages.cuda import make_tier
from mneme.cachetier.host_pages.tier import JoinedPageLoad, KvTier, NoTier, checked_pages, joined
from mneme.errors import ConfigError
from tests.cachetier.pools import make_pool


class NotedLoad:
    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def wait_layer(self, layer: int) -> None:
        self._seen.append(f"{self._name}{layer}")


def test_one_load_joins_those_of_a_step() -> None:
    seen: list[str] = []
    first, second = NotedLoad("a", seen), NotedLoad("b", seen)
    assert joined([]) is None
    assert joined([first]) is first
    both = joined([first, second])
    assert both is not None
    both.wait_layer(1)
    JoinedPageLoad([]).wait_layer(0)
    assert seen == ["a1", "b1"]


def test_pages_that_do_not_fit_are_refused() -> None:
    for bad, rule in (([3], "in"), ([-1], "in"), ([1, 1], "twice"), ([[1]], "vector")):
        with pytest.raises(ValueError, match=rule):
            checked_pages(np.array(bad), 3)
    with pytest.raises(ValueError, match="partner"):
        checked_pages(np.array([1, 2]), 3, np.array([1]))
    given = np.array([2, 0], np.int32)
    checked = checked_pages(given, 3)
    given[:] = 1
    assert checked.dtype == np.int64
    assert checked.tolist() == [2, 0]  # a copy
    assert checked_pages(np.array([]), 0).tolist() == []


def test_a_tier_of_no_pages_has_room_for_none() -> None:
    tier: KvTier = make_tier(make_pool(), 0)
    assert isinstance(tier, NoTier)
    assert (tier.num_pages, tier.is_idle) == (0, True)
    tier.before_reuse(np.array([1]))
    with pytest.raises(ValueError, match="in"):
        tier.save(np.array([1]), np.array([0]))
    with pytest.raises(ValueError, match="in"):
        tier.load(np.array([0]), np.array([1]))
    tier.close()


def test_the_memory_is_refused_or_lazy() -> None:
    pool = make_pool()
    with pytest.raises(ConfigError, match="host tier"):
        make_tier(pool, 2**50)
    tier = make_tier(pool, 100_000)  # some 115 MB, of which one page is touched
    assert isinstance(tier, CpuTier)
    assert tier.num_pages == 100_000
    tier.save(np.array([3]), np.array([77_777]))
    expected = pool.page(3)
    tier.before_reuse(np.array([3]))
    pool.write(3, expected * 0)
    tier.load(np.array([77_777]), np.array([5])).wait_layer(2)
    assert (pool.page(5) == expected).all()
    tier.close()
    tier.close()
