"""Which tokens of documents selectors choose."""

from __future__ import annotations

import numpy as np
import pytest

from mneme.replicas.documents import Selector
from mneme.replicas.fuse.selectors import Wanted, choose, count

DOCUMENTS = [Wanted(5, 25), Wanted(25, 32), Wanted(40, 41)]


@pytest.mark.parametrize("percent", range(101))
def test_a_share_is_rounded_up_and_no_further(percent: int) -> None:
    assert count(100, percent / 100) == percent
    assert count(10, percent / 100) == -(-percent // 10)


@pytest.mark.parametrize("selector", ["first-k", "random"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
def test_each_document_gives_its_share(selector: Selector, ratio: float) -> None:
    chosen = choose(selector, DOCUMENTS, ratio, 7)
    assert (np.diff(chosen) > 0).all()
    for start, end in DOCUMENTS:
        inside = chosen[(chosen >= start) & (chosen < end)].tolist()
        assert len(inside) == count(end - start, ratio)
        if selector == "first-k":
            assert inside == [*range(start, start + len(inside))]


def test_all_none_and_no_document() -> None:
    assert choose("all", DOCUMENTS, 0.0, 0).tolist() == [*range(5, 32), 40]
    assert choose("none", DOCUMENTS, 1.0, 0).tolist() == []
    assert choose("random", [], 0.5, 0).tolist() == []


def test_random_tokens_are_those_of_the_seed() -> None:
    one, again, other = (choose("random", [Wanted(0, 500)], 0.2, seed).tolist() for seed in (1, 1, 2))
    assert one == again != other
