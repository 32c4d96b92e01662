"""Chooses which tokens of reused documents are computed anew. Policy only: no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import IntArray
from mneme.replicas.documents import Selector

FloatArray = npt.NDArray[np.float64]

NEEDS_SCORES: frozenset[Selector] = frozenset({"hkvd", "query", "query+first-k"})

_WIDTH = 5.0
_WIDEST = 0.5  # below 1: comparing keys and reading between the others costs more than it saves (31M)
_NEARLY_ALL = 0.95
_FALL = 0.5


class ReusedSpan(NamedTuple):
    """Holds what is reused of one document: the positions [start, end) of a sequence."""

    start: int
    end: int


def no_rows() -> IntArray:
    """Return no positions."""
    return np.empty(0, np.int64)


def count(num_tokens: int, ratio: float) -> int:
    """Count the tokens that are computed anew: rounded up."""
    return min(math.ceil(num_tokens * ratio - 1e-9), num_tokens)  # 100 * .07 is a bit more than 7


def choose(
    selector: Selector, documents: Sequence[ReusedSpan], ratio: float, seed: int, scores: FloatArray | None = None
) -> IntArray:
    """Return positions, in order.

    first-k        the first of each document, `count` of it (EPIC): those that miss most what stands before it
    random         any of each document: the control
    query          those with the best scores, `count` of all documents together: what the question looks at (InfoFlow
                   KV); of equal scores the first
    hkvd           the same of other scores: how far a key is from the one that it has behind its own text (CacheBlend)
    query+first-k  half the count of the first ones, and the best of the others

    scores  float64 by position; for the selectors that need them (`NEEDS_SCORES`). What is no number is the worst.
    """
    if not documents:
        return no_rows()
    every = [np.arange(start, end) for start, end in documents]
    if selector in NEEDS_SCORES:
        assert scores is not None, f"{selector} needs scores"
        positions = np.concatenate(every)
        wanted = np.nan_to_num(scores[positions], nan=-np.inf)
        if selector == "query+first-k":
            wanted[np.isin(positions, choose("first-k", documents, ratio / 2, seed))] = np.inf
        best = np.argsort(-wanted, kind="stable")[: count(len(positions), ratio)]
        return np.sort(positions[best])
    generator = np.random.default_rng(seed % 2**64)
    chosen = []
    for positions in every:
        number = {"none": 0, "all": len(positions)}.get(selector, count(len(positions), ratio))
        if selector == "random":
            positions = np.sort(generator.permutation(positions)[:number])
        chosen.append(positions[:number])
    return np.concatenate(chosen)


def first_share(num_layers: int, ratio: float) -> float:
    """Return which share of the tokens `hkvd` computes anew in the first layer that it chooses for.

    It is much wider than the mean, the ratio: what is computed there makes right what all later layers build on.
    (CacheBlend attends to all fresh keys there and stores none of them: first tokens are right then, and what is
    decoded after them is not.)
    """
    num_chosen = num_layers - 1
    if num_chosen < 2:
        return ratio
    wide = _WIDTH * ratio if _WIDTH * ratio <= _WIDEST else 1.0
    share = min(wide, 0.93 * num_chosen * ratio)
    return share if share <= _NEARLY_ALL else 1.0


def filter_counts(num_layers: int, num_first: int, ratio: float) -> dict[int, int]:
    """Return how many of `num_first` tokens, those of `first_share`, stay from some layers on.

    Fewer do in each of three steps, so that the mean over all layers but the first, which is exact, is the ratio.
    """
    first, num_deep = first_share(num_layers, ratio), num_layers - 2
    if num_deep < 1 or not 0 < ratio < 1:
        return {}
    mean = (ratio * (num_layers - 1) - first) / num_deep
    fall = min(_FALL, (1 - mean) / mean)
    starts = sorted({2 + num_deep * step // 3 for step in range(3)})
    counts = {}
    for start, end in zip(starts, [*starts[1:], num_layers], strict=True):
        middle = (start + end - 1) / 2 - 2
        share = mean * (1 + fall - 2 * fall * middle / max(num_deep - 1, 1)) if num_deep > 1 else mean
        counts[start] = count(num_first, min(share / first, 1.0))
    return counts
