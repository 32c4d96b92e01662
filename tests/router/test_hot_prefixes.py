from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mneme.router import hot_prefixes
from mneme.router.hot_prefixes import HotPrefixes

SYSTEM, OTHER = tuple(range(500)), tuple(range(1000, 1100))


def test_what_most_prompts_share_comes_first_for_each_tenant() -> None:
    hot = HotPrefixes()
    for number in range(3):
        hot.add((*SYSTEM, number, 7), salt="a")
        hot.add((*OTHER, number), salt="a")
    for number in range(2):
        hot.add((*SYSTEM, number), salt="b")
    assert hot.hottest(8) == [("a", SYSTEM), ("b", SYSTEM), ("a", OTHER)]
    assert hot.hottest(1) == [("a", SYSTEM)]


def test_what_only_one_prompt_had_or_is_short_is_not_hot() -> None:
    hot = HotPrefixes()
    hot.add(SYSTEM, salt="")
    hot.add(OTHER[:40], salt="")
    hot.add(OTHER[:40], salt="")
    assert hot.hottest(8) == []


def test_the_groups_that_were_used_last_stay() -> None:
    hot = HotPrefixes()
    for number in range(2 * hot_prefixes.MAX_GROUPS):
        hot.add(SYSTEM, salt=str(number))
        hot.add(SYSTEM, salt="often")
    assert hot.hottest(8) == [("often", SYSTEM)]


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_the_common_part_is_the_longest(one: list[int], other: list[int]) -> None:
    hot, start = HotPrefixes(), [9] * 64
    hot.add(start + one, salt="")
    hot.add(start + other, salt="")
    ((_, found),) = hot.hottest(1)
    num = len(found) - 64
    assert one[:num] == other[:num]
    assert num == min(len(one), len(other)) or one[num] != other[num]
