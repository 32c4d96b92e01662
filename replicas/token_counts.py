"""How often each token occurs in a growing list, kept as arrays that the sampler's penalties index with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SPARE = 256  # tokens that may come before the arrays have to grow


class TokenCounts:
    """Adding a token costs the same however many there are; counting them anew would cost milliseconds a step."""

    def __init__(self, ids: Sequence[int]) -> None:
        distinct, counts = np.unique(np.array(ids, np.int64), return_counts=True)
        self._size = len(distinct)
        self._ids, self._counts = _with_room(distinct), _with_room(counts)
        self._index_by_id = dict(zip(distinct.tolist(), range(self._size), strict=True))

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens; a view that is good until the next `add`."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Parallel to `ids`."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        index = self._index_by_id.setdefault(token_id, self._size)
        if index == self._size:
            if index == len(self._ids):
                self._ids, self._counts = _with_room(self._ids), _with_room(self._counts)
            self._ids[index], self._counts[index] = token_id, 0
            self._size += 1
        self._counts[index] += 1


def _with_room(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((array, np.empty(len(array) // 2 + _SPARE, np.int64)))
