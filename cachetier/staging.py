"""Device buffers between pages that are scattered in a pool and runs of them in host memory."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mneme.cachetier.streams import Event, Stream
from mneme.kernels.page_table import IntArray


class Staging:
    """Buffers taken in turn; who takes one waits, on its stream, until its last user has done with it."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._free: list[Event | None] = [None] * len(buffers)
        self._next = 0

    @property
    def num_pages(self) -> int:
        """Pages of one layer that a buffer holds."""
        return len(self._buffers[0])

    def take(self, stream: Stream) -> tuple[int, Tensor]:
        """A buffer's number, and the buffer; to be given back before it is taken again."""
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        free = self._free[number]
        if free is not None:
            stream.wait(free)
        return number, self._buffers[number]

    def give_back(self, number: int, free: Event) -> None:
        """From `free` on the buffer is another's."""
        self._free[number] = free


def runs(pages: IntArray) -> list[tuple[int, int, int]]:
    """(offset, first, end) of each run of neighbours: pages[offset:][:end - first] are first..end-1."""
    if not len(pages):
        return []
    starts = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    lengths = np.diff(starts, append=len(pages))
    return [(int(s), int(pages[s]), int(pages[s] + n)) for s, n in zip(starts, lengths, strict=True)]


def parts(num_pages: int, most: int) -> list[slice]:
    """`num_pages` in slices of at most so many."""
    return [slice(start, start + most) for start in range(0, num_pages, most)]
