"""A chain of chunks as an engine reads it from a store: located at once, then read layer by layer."""

from __future__ import annotations

import time

import numpy as np
from tier_io.chunks import Chain

from mneme.cachetier.chunk.header import Miss, U8Array
from mneme.cachetier.store import ChainQuery, ChunkSource, ChunkStore, Edge
from mneme.errors import MnemeError

_FOUND_S = 20.0  # until chunks that were put can be found, those of another node too
_LOOK_S = 1.0
_POLL_S = 0.02


class ChainReads:
    """One reader. A chunk that is missing, or elsewhere than the arm says, is a `MnemeError`."""

    def __init__(self, store: ChunkStore, chain: Chain) -> None:
        self.query = ChainQuery.of(
            chain.lineage, chain.fingerprint.digest, chain.token_ids.reshape(-1).tolist(), chain.shape.num_tokens
        )
        self._store = store
        self.buffer = np.zeros_like(chain.payload[0])
        self._sources: list[ChunkSource] = []

    def wait(self) -> None:
        """Until all can be found."""
        until_s = time.monotonic() + _FOUND_S
        while len(self._store.locate(self.query, _LOOK_S)) < len(self.query.keys):
            if time.monotonic() > until_s:
                raise MnemeError(f"chunks were not found within {_FOUND_S:g} s")
            time.sleep(_POLL_S)

    def locate(self, edge: Edge) -> float:
        """Ask for the whole chain, once; how many seconds that took."""
        self.close()
        began_s = time.perf_counter()
        self._sources = self._store.locate(self.query, _LOOK_S)
        took_s = time.perf_counter() - began_s
        found = [source.edge for source in self._sources]
        if found != [edge] * len(self.query.keys):
            raise MnemeError(f"{edge}: of {len(self.query.keys)} chunks {found} were found")
        return took_s

    def read(self, index: int) -> None:
        """All layers; the checksum is of the bytes where they are."""
        for layer in range(len(self.buffer)):
            self._layer(index, layer)

    def copy(self, index: int) -> None:
        """Likewise, into one contiguous buffer."""
        for layer, copy in enumerate(self.buffer):
            np.copyto(copy, self._layer(index, layer))

    def close(self) -> None:
        for source in self._sources:
            source.close()
        self._sources = []

    def _layer(self, index: int, layer: int) -> U8Array:
        found = self._sources[index].read(layer)
        if isinstance(found, Miss):
            raise MnemeError(f"chunk {index}, layer {layer}: {found.value}")
        return found
