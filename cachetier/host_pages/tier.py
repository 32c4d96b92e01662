"""The tier under an engine's device pool, as the policy sees it: it says which pages move, a tier moves them.

A *host page* is room for one page of the pool, all layers, keys and values. What a policy keeps to, and gets for it:

- It gives out the page ids: device pages are the pool's, host pages are 0..num_pages-1. No id twice in one call.
- All calls come from one thread, the engine's.
- A save counts as done when it is issued, a load too: whatever reads or overwrites their pages later is put behind
  them. So a host page may be loaded, or given to another save, at once.
- Before the engine writes to device pages that others had, it calls `before_reuse`; `load` does so for its own.
  Slots of a page that is being saved may be filled meanwhile; the copy then has either content of those slots.
- The first forward pass that reads loaded pages carries the `PageLoad`; later ones need nothing.
- Loads go before saves that have not begun (Pensieve 5.1).
- Neighbouring host pages, in rising order, are moved as one where that is cheaper.
- A failed transfer raises `TransferFailed`, once: in the next `save`, `load` or `before_reuse`, or in a `wait_layer` of
  a load that it took along. Saves and loads issued before are lost then, so the policy forgets all host pages, and the
  device pages that were loaded. After that the tier works again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mneme.kernels.page_table import IntArray


class PageLoad(Protocol):
    """Pages on their way into the device pool."""

    def wait_layer(self, layer: int) -> None:
        """Return when this layer's pages may be read and written; on CUDA the current stream waits, not the caller.

        Raises `TransferFailed` if they will never be there.
        """


class KvTier(Protocol):
    """Room for KV pages beside the device pool."""

    @property
    def num_pages(self) -> int:
        """Host pages; 0: there is no such tier."""

    @property
    def is_idle(self) -> bool:
        """No save is under way or waits: the time for copies ahead of need. Asked in every step: saves go on by it."""

    def save(self, device_pages: IntArray, host_pages: IntArray) -> None:
        """Begin to copy pages out; device_pages[i] goes to host_pages[i]."""

    def load(self, host_pages: IntArray, device_pages: IntArray) -> PageLoad:
        """Begin to copy pages in, layer 0 first; host_pages[i] goes to device_pages[i]."""

    def before_reuse(self, device_pages: IntArray) -> None:
        """Put what the engine does next to these pages behind saves that read them and loads that write them."""

    def close(self) -> None:
        """Drop what has not begun, wait for the rest, give the memory back. Called twice it does nothing."""


class SpanRecorder(Protocol):
    """Says where a tier says what it did when; `mneme.replicas.model.timeline.Timeline` is one."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds; the clock of all spans."""

    def span(self, name: str, start_s: float, end_s: float, track: str, **args: int | str) -> None:
        """Something that took from start to end; spans of one track follow each other."""

    def before_write(self, flush: Callable[[], None]) -> None:
        """Call `flush` before the spans are read: it adds those whose end was not known yet."""


class NoTier:
    """There is no room but the device pool."""

    num_pages = 0
    is_idle = True

    def save(self, device_pages: IntArray, host_pages: IntArray) -> None:
        checked_pages(host_pages, self.num_pages, device_pages)

    def load(self, host_pages: IntArray, device_pages: IntArray) -> PageLoad:
        checked_pages(host_pages, self.num_pages, device_pages)
        return JoinedPageLoad([])

    def before_reuse(self, device_pages: IntArray) -> None:
        pass

    def close(self) -> None:
        pass


class JoinedPageLoad:
    """Several loads that one forward pass waits for."""

    def __init__(self, loads: Sequence[PageLoad]) -> None:
        self._loads = tuple(loads)

    def wait_layer(self, layer: int) -> None:
        for load in self._loads:
            load.wait_layer(layer)


def joined(loads: Sequence[PageLoad]) -> PageLoad | None:
    """Return what `StepInputs.load` is for a step that needs these loads."""
    if len(loads) < 2:
        return loads[0] if loads else None
    return JoinedPageLoad(loads)


def checked_pages(pages: IntArray, num_pages: int, partners: IntArray | None = None) -> IntArray:
    """A copy as int64. Raises ValueError for an id out of range or given twice, or other than one for each partner."""
    ids = np.array(pages, np.int64)
    if ids.ndim != 1 or (partners is not None and len(ids) != len(partners)):
        num_partners = "" if partners is None else f" for {len(partners)}"
        raise ValueError(f"pages: must be a vector, one id for each partner (got {ids.shape}{num_partners})")
    if len(ids) and not 0 <= ids.min() <= ids.max() < num_pages:
        raise ValueError(f"pages: must be in [0, {num_pages}) (got {ids.min()}..{ids.max()})")
    if len(np.unique(ids)) != len(ids):
        raise ValueError("pages: must not be given twice in one call")
    return ids
