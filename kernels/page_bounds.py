"""The least and the greatest slot position of every page of a pool, followed as slots are marked.

They say which pages a row sees entirely and which not at all, without a look at their slots. Following costs a step
what it marks; were they looked up anew, every step would walk its whole context.
"""

from __future__ import annotations

from collections.abc import MutableMapping
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

    def follow(self, slot_position: Tensor, slots: Tensor) -> None:
        """Take the bounds of the pages of these slots anew: they, and no others, were changed."""
        pages = slots.numpy() // self.page_size
        if len(pages) > 1:  # those of a run of slots follow each other
            pages = np.concatenate((pages[:1], pages[1:][pages[1:] != pages[:-1]]))
        by_page = slot_position.numpy().reshape(-1, self.page_size)[pages]
        self.first[pages], self.last[pages] = by_page.min(1), by_page.max(1)
        self.version = version_of(slot_position)


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


def current_bounds(slot_position: Tensor) -> PageBounds | None:
    """Return bounds that are true now, for who changes slots and has them `follow`; None: nobody asked for any."""
    found = _followed.get(slot_position)
    is_current = found is not None and found.version is not None and found.version == version_of(slot_position)
    return found if is_current else None
