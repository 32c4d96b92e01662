"""Says what a step does with pages before its forward pass, in this order: save, hide, load. Policy only: no tensors.

A *graft* brings the KV of pages that nobody had from the cache tier's chunks; unlike other loads it may fail, and what
is then lost is taken back after the step (`Scheduler.retract`).

A save counts as done when it is listed, because whatever reads or reuses its pages later is ordered behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mneme.cachetier.chunk.header import I32Array
from mneme.replicas.forest.tree import Page


class LoadedPage(NamedTuple):
    """A page that comes back from the host: the keys of its first `num_tokens` tokens are rotated from `start` on."""

    host_page: int
    device_page: int
    start: int
    num_tokens: int


class Chunks(Protocol):
    """Chunks of one sequence that were found in the cache tier; the mover knows more: it is `replicas.load.Load`."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The positions whose KV each has, in order, without a gap."""

    def rotated(self, index: int) -> I32Array:
        """Where the keys of a chunk's tokens are rotated; in a truncated session's not where they stand."""


class GraftPiece(NamedTuple):
    """Says what one chunk gives to a path: KV for pages of their own."""

    chunk: int  # its index
    start: int  # positions [start, end)
    end: int
    runs: list[tuple[int, int, int]]  # (page id, first offset, number of tokens), in order
    pages: tuple[Page, ...]  # one for each run


class Graft(NamedTuple):
    chunks: Chunks
    pieces: list[GraftPiece]
    is_last: bool = True  # else more of these chunks comes with later steps


class Moves(NamedTuple):
    """No page stands twice in one column."""

    saves: list[tuple[int, int]]  # (device page, host page), as the device page was before this step
    fresh: list[int]  # device pages with a new owner: nothing of what they held may be seen
    loads: list[LoadedPage]
    grafts: list[Graft]
