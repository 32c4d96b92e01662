"""The least and the greatest slot position of every page of a pool, followed as slots are marked.

They say which pages a row sees entirely and which not at all, without a look at their slots. Following costs a step
what it marks; were they looked up anew, every step would walk its whole context.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class PageBounds:
    """The bounds of a pool's pages, as its `slot_position` was at one version."""

    page_size: int
    first: Int32Array  # [num_pages] least position of a page's slots
    last: Int32Array  # [num_pages] greatest
    version: int | None

    def look(self, positions: npt.NDArray[np.int32], pages: npt.NDArray[np.int64]) -> None:
        """Take the bounds of these pages anew."""
        by_page = positions.reshape(-1, self.page_size)[pages]
        self.first[pages], self.last[pages] = by_page.min(1), by_page.max(1)


_followed: MutableMapping[Tensor, PageBounds] = WeakTensorKeyDictionary()  # by slot_position


def version_of(tensor: Tensor) -> int | None:
    """Return a number that grows when a tensor is written.

    Inference tensors count no versions; there the caller keeps the rule that a plan belongs to one step.
    """
    return None if tensor.is_inference() else tensor._version


def page_bounds(slot_position: Tensor, page_size: int) -> PageBounds:
    """Return the bounds as they are now. `mark_written` and `mark_free` keep them; after any other change the whole
    pool is looked at once.

    slot_position   int32 [num_pages * page_size], on the CPU
    """
    version = version_of(slot_position)
    found = _followed.get(slot_position)
    if found is None or version is None or found.version != version or found.page_size != page_size:
        by_page = slot_position.numpy().reshape(-1, page_size)
        found = PageBounds(page_size, by_page.min(1), by_page.max(1), version)
        _followed[slot_position] = found
    return found


@contextmanager
def following(slot_position: Tensor, slots: Tensor) -> Iterator[None]:
    """Keep the bounds true while these slots, and no others, are changed in the block."""
    found = _followed.get(slot_position)
    is_current = found is not None and found.version is not None and found.version == version_of(slot_position)
    yield
    if found is not None and is_current:
        pages = slots.numpy() // found.page_size  # those of a run of slots follow each other
        found.look(slot_position.numpy(), pages[np.diff(pages, prepend=-1) != 0])
        found.version = version_of(slot_position)
