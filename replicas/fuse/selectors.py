"""Chooses which tokens of reused documents are computed anew. Policy only: no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mneme.kernels.page_table import IntArray
from mneme.replicas.documents import Selector


class Wanted(NamedTuple):
    """What is reused of one document: the positions [start, end) of a sequence."""

    start: int
    end: int


def count(num_tokens: int, ratio: float) -> int:
    """Count the tokens that are computed anew: rounded up."""
    return min(math.ceil(num_tokens * ratio - 1e-9), num_tokens)  # 100 * .07 is a bit more than 7


def choose(selector: Selector, documents: Sequence[Wanted], ratio: float, seed: int) -> IntArray:
    """Return positions, in order: `count` of each document.

    first-k  the first ones (EPIC), which miss most what stands before the document
    random   any: the control
    """
    generator = np.random.default_rng(seed % 2**64)
    chosen = [np.empty(0, np.int64)]
    for start, end in documents:
        positions = np.arange(start, end)
        number = {"none": 0, "all": len(positions)}.get(selector, count(len(positions), ratio))
        if selector == "random":
            positions = np.sort(generator.permutation(positions)[:number])
        chosen.append(positions[:number])
    return np.concatenate(chosen)
