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

NEEDS_SCORES: frozenset[Selector] = frozenset({"query", "query+first-k"})


class Wanted(NamedTuple):
    """What is reused of one document: the positions [start, end) of a sequence."""

    start: int
    end: int


def count(num_tokens: int, ratio: float) -> int:
    """Count the tokens that are computed anew: rounded up."""
    return min(math.ceil(num_tokens * ratio - 1e-9), num_tokens)  # 100 * .07 is a bit more than 7


def choose(
    selector: Selector, documents: Sequence[Wanted], ratio: float, seed: int, scores: FloatArray | None = None
) -> IntArray:
    """Return positions, in order.

    first-k        the first of each document, `count` of it (EPIC): those that miss most what stands before it
    random         any of each document: the control
    query          those with the best scores, `count` of all documents together: what the question looks at (InfoFlow
                   KV); of equal scores the first
    query+first-k  half the count of the first ones, and the best of the others

    scores  float64 by position; for the selectors that need them (`NEEDS_SCORES`). What is no number is the worst.
    """
    if not documents:
        return np.empty(0, np.int64)
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
