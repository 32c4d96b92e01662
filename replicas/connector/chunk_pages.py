"""The interface of what copies chunks between their bytes and a pool's pages; `device_pages` has it. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mneme.cachetier.chunk.header import U8Array
from mneme.kernels.page_table import IntArray

if TYPE_CHECKING:
    from mneme.cachetier.host_pages.streams import Event


class ChunkTokens(NamedTuple):
    """Tokens of one chunk, and where the pool has them."""

    num_tokens: int  # of the chunk
    runs: IntArray  # int64 [r, 4]: page id, first offset, number of tokens, first in the chunk; no slot twice


class PageBatch(Protocol):
    """Chunks whose layers move together. One thread calls it, but for `put`."""

    chunks: range  # which of those that were given

    def begin(self) -> None:
        """Return when the next layer may be put."""

    def put(self, index: int, layer: U8Array) -> None:
        """Hand over a chunk's bytes of the next layer to be scattered, unchanged until then. From any thread."""

    def scatter(self, layer: int, after: Event | None) -> Event | None:
        """Copy what was put into the pool, behind an event; the pool has it when the event that is returned has come.

        Tokens of chunks that were not put get any bytes.
        """

    def gather(self, layer: int, into: Sequence[U8Array], after: Event | None) -> None:
        """Copy out of the pool, behind an event; returns when the bytes are in `into`, one array for each chunk."""


class ChunkPages(Protocol):
    """The pages of one pool, for copies one way. Events are None where there are no streams."""

    num_readers: int  # threads that should put at once
    by_layer: bool  # whether a layer is best copied out while the layers above are computed

    def issued(self) -> Event | None:
        """Record all that the engine has issued so far; the engine's thread calls it."""

    def wait(self, event: Event | None) -> None:
        """Order what the engine issues from now on behind this; the engine's thread calls it."""

    def batches(self, chunks: Sequence[ChunkTokens]) -> Sequence[PageBatch]:
        """Group chunks whose layers move together. Raises ValueError for runs that do not fit the pool or a chunk."""
