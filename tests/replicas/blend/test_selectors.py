"""Which tokens of documents selectors choose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mneme.replicas.blend.selectors import ReusedSpan, choose, count, filter_counts, first_share
from mneme.replicas.documents import Selector

DOCUMENTS = [ReusedSpan(5, 25), ReusedSpan(25, 32), ReusedSpan(40, 41)]


def test_a_share_is_rounded_up_and_no_further() -> None:
    for percent in range(101):
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
    one, again, other = (choose("random", [ReusedSpan(0, 500)], 0.2, seed).tolist() for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("selector", ["hkvd", "query", "query+first-k"])
def test_scored_selectors_spend_one_count_on_all_documents(selector: Selector, ratio: float) -> None:
    scores = np.random.default_rng(1).random(41)
    chosen = choose(selector, DOCUMENTS, ratio, 0, scores)
    assert len(chosen) == count(28, ratio)
    assert set(chosen.tolist()) <= {*range(5, 32), 40}
    assert (np.diff(chosen) > 0).all()


def test_a_question_chooses_what_it_looks_at_most_and_of_equals_the_first() -> None:
    scores = np.zeros(41)
    scores[[30, 40, 7]] = 3, 2, 1
    scores[0] = 9  # in no document
    assert choose("query", DOCUMENTS, 3 / 28, 0, scores).tolist() == [7, 30, 40]
    assert choose("query", DOCUMENTS, 5 / 28, 0, scores).tolist() == [5, 6, 7, 30, 40]
    scores[30] = np.nan
    assert choose("query", DOCUMENTS, 3 / 28, 0, scores).tolist() == [5, 7, 40]


def test_the_union_takes_the_first_of_each_document_and_the_best_of_the_others() -> None:
    scores = np.zeros(41)
    scores[[30, 5, 12]] = 3, 2, 1
    assert choose("query+first-k", DOCUMENTS, 6 / 28, 0, scores).tolist() == [5, 6, 7, 25, 30, 40]


@given(st.integers(2, 80), st.integers(1, 5000), st.floats(0.01, 0.99))
def test_fewer_rows_stay_from_layer_to_layer_and_their_mean_is_the_ratio(
    layers: int, tokens: int, ratio: float
) -> None:
    """Layer 0 is exact; in the next all of the first choice are computed."""
    num_first = count(tokens, first_share(layers, ratio))
    counts = {1: num_first, **filter_counts(layers, num_first, ratio)}
    starts = [*counts, layers]
    assert starts == sorted(set(starts))
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    rows = sum(number * (end - start) for (start, number), end in zip(counts.items(), starts[1:], strict=True))
    assert ratio * tokens - 1e-6 <= rows / (layers - 1) <= ratio * tokens + 2


def test_a_ratio_of_nothing_or_all_narrows_nothing() -> None:
    assert filter_counts(24, 77, 0.0) == filter_counts(24, 77, 1.0) == filter_counts(2, 77, 0.5) == {}
    assert first_share(24, 1.0) == 1.0
    assert first_share(6, 0.15) == pytest.approx(0.6975)
    assert first_share(24, 0.1) == 0.5
    assert first_share(24, 0.11) == first_share(8, 0.15) == 1.0
