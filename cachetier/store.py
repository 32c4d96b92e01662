"""The cache tier as an engine sees it: chunks beyond its own pages, on its node or another, found by what they hold.

An engine asks with a `ChainQuery` and gets sources for a run of chunks, in order. It reads them layer by layer;
whatever goes wrong with one is a `Miss`, and the engine computes its tokens. It puts chunks that it has computed, and
hears nothing of what becomes of them. All calls block for a bounded time and may come from several threads of the
engine's process, never (but for `known` and `stats`) from the thread that runs its steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mneme.cachetier.chunk.fingerprint import ChunkLayout
from mneme.cachetier.chunk.header import Chunk, ChunkHeader, U8Array
from mneme.cachetier.chunk.keys import Lineage, TokenIds, U32Array, encoded
from mneme.cachetier.names import Edge, Miss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainQuery:
    """A sequence that is looked for: all of its tokens from the lineage's root on, and the keys of its full chunks.

    Keys are made under the lineage's secret, which only the cluster's own processes have; who answers compares the
    token ids too.
    """

    request_id: str  # of the request that waits for it; "": nobody waits
    lineage: Lineage
    fingerprint: bytes  # of the model, 32 bytes
    chunk_tokens: int
    keys: tuple[bytes, ...]  # item i: of the tokens [i * chunk_tokens, (i + 1) * chunk_tokens)
    token_ids: U32Array  # [n]
    first: int = 0  # the chunk from which on it is wanted: what is before it, the engine has
    layout: ChunkLayout | None = None  # of what may be read; None: nobody reads it

    @staticmethod
    def of(
        lineage: Lineage,
        fingerprint: bytes,
        token_ids: TokenIds,
        chunk_tokens: int,
        *,
        request_id: str = "",
        first: int = 0,
        layout: ChunkLayout | None = None,
    ) -> ChainQuery:
        ids = encoded(token_ids)
        num_full = len(ids) // chunk_tokens
        chain = lineage.chain(ids[: num_full * chunk_tokens], chunk_tokens)
        return ChainQuery(
            request_id=request_id,
            lineage=lineage,
            fingerprint=fingerprint,
            chunk_tokens=chunk_tokens,
            keys=tuple(each.key for each in chain),
            token_ids=ids,
            first=first,
            layout=layout,
        )

    @property
    def root(self) -> bytes:
        """Return what stands in for the parent of the first chunk."""
        return self.lineage.root

    @property
    def tenant(self) -> bytes:
        """The tenant."""
        return self.lineage.tenant

    def parent(self, index: int) -> bytes:
        """Return the key of the chunk before the one at an index, or the root."""
        return self.keys[index - 1] if index else self.root

    def tail_key(self) -> bytes:
        """Return the key of the chunk that would end where the sequence does, behind its full chunks."""
        rest = self.tokens_of(len(self.keys))
        return self.lineage.beginnings(self.parent(len(self.keys)), rest, [len(rest)])[0]

    def tokens_of(self, index: int) -> U32Array:
        """Return what the chunk at an index would hold at most."""
        return self.token_ids[index * self.chunk_tokens : (index + 1) * self.chunk_tokens]


class ChunkSource(Protocol):
    """One chunk that was found. Reads of one source come from one thread at a time; `close` may come from any."""

    @property
    def header(self) -> ChunkHeader:
        """Parsed; its fingerprint, layout and parent are what was asked for."""

    @property
    def num_usable(self) -> int:
        """Its leading tokens that are those of the query; at least one, and all but for the last source."""

    @property
    def edge(self) -> Edge: ...

    def read(self, layer: int) -> U8Array | Miss:
        """The layer's bytes [layer_bytes], whose checksum was just computed of them; read-only, valid until `close`."""

    def close(self) -> None:
        """Release the bytes; called twice it does nothing."""


class ChunkStore(Protocol):
    """Says where an engine's chunks are kept and found."""

    def locate(self, query: ChainQuery, timeout_s: float) -> list[ChunkSource]:
        """Sources of the chunks from `query.first` on, without a gap; the last may be short or usable in part.

        Never raises for a fault of the tier: what cannot be had in time is not there. The request counts as waiting,
        and what it waits for is brought closer and kept, until `forget`.
        """

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget requests that wait no longer."""

    def known(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Return which of these chunks need not be put; a guess from what this process has seen, without a call."""

    def put(self, chunk: Chunk, lineage: Lineage) -> bool:
        """Keep a chunk, whose bytes are the store's from now on; False: refused. Blocks while much is written."""

    def stats(self) -> Mapping[str, int]:
        """Counters of this process since its start, and gauges, without a call; from any thread."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put before can be found, or was refused; False if that took too long."""

    def close(self) -> None:
        """Write what is still to be written, within a bounded time."""
