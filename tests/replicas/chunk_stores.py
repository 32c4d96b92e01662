"""A cache tier of one process for tests of engines: chunks in a dictionary, and faults on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from mneme.cachetier.chunk.header import Chunk, ChunkHeader, U8Array, checksum
from mneme.cachetier.chunk.keys import Lineage, LineageKind
from mneme.cachetier.names import CostEdge, Edge, Miss
from mneme.cachetier.policy.cost_model import Calibration, CostModel, Terms
from mneme.cachetier.store import ChainQuery, ChunkSource

CHUNK_TOKENS = 64
Fault = Callable[[ChunkHeader, int], Miss | None]  # of a chunk's layer


@dataclass
class FakeStore:
    """Finds the longest run of chunks, also the last in part."""

    edge: Edge = "host"
    fault: Fault = lambda header, layer: None
    before_read: Callable[[int], None] = lambda layer: None
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    num_open: int = 0
    waiting: set[str] = field(default_factory=set)
    refuses: bool = False
    num_reads: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def locate(self, query: ChainQuery, timeout_s: float) -> list[ChunkSource]:
        with self.lock:
            self.waiting.add(query.request_id)
            sources: list[ChunkSource] = []
            for index in range(query.first, len(query.keys)):
                chunk = self.chunks.get(query.keys[index])
                if chunk is None:
                    break
                sources.append(FakeSource(self, chunk, chunk.header.num_tokens))
            else:
                index = len(query.keys)
            wanted = query.tokens_of(index)
            siblings = [c for c in self.chunks.values() if c.header.parent == query.parent(index)]
            if query.lineage.kind is LineageKind.SESSION:  # under its root are chunks of other events, too
                keys = query.lineage.beginnings(query.parent(index), wanted)
                siblings = [c for c in siblings if c.header.key in keys]
            usable, best = max(((_common(c, wanted), i) for i, c in enumerate(siblings)), default=(0, 0))
            if usable:
                sources.append(FakeSource(self, siblings[best], usable))
            self.num_open += len(sources)
            return sources

    def forget(self, request_ids: Collection[str]) -> None:
        self.waiting.difference_update(request_ids)

    def known(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset(key for key in keys if key in self.chunks)

    def put(self, chunk: Chunk, lineage: Lineage) -> bool:
        assert chunk.header.checksums == tuple(checksum(layer.data) for layer in chunk.layers)
        if self.refuses:
            return False
        with self.lock:
            self.chunks[chunk.header.key] = chunk
        return True

    def stats(self) -> dict[str, int]:
        return {"reads": self.num_reads}

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass
class FakeSource:
    store: FakeStore
    chunk: Chunk
    num_usable: int
    is_closed: bool = False

    @property
    def header(self) -> ChunkHeader:
        return self.chunk.header

    @property
    def edge(self) -> Edge:
        return self.store.edge

    def read(self, layer: int) -> U8Array | Miss:
        if self.is_closed:
            return Miss.ABSENT
        self.store.before_read(layer)
        self.store.num_reads += 1
        return self.store.fault(self.header, layer) or self.chunk.layers[layer]

    def close(self) -> None:
        with self.store.lock:
            self.store.num_open -= not self.is_closed
            self.is_closed = True


def _common(chunk: Chunk, wanted: np.ndarray) -> int:
    ours = chunk.header.token_ids[: len(wanted)]
    differs = np.flatnonzero(ours != wanted[: len(ours)])
    return int(differs[0]) if len(differs) else len(ours)


class SlowRows(CostModel):
    """Loading is always worth it, whatever is measured: a row takes so long."""

    def __init__(
        self, row_s: float = 1.0, *, step_s: float = 0.0, step_rows: int = 64, chunk_s: float | None = None
    ) -> None:
        """`step_s`: of each step, as long as an answer is waited for; `chunk_s`: to load a chunk from memory."""
        terms = (step_s, row_s, 0.0)
        edges: dict[CostEdge, Terms] = {} if chunk_s is None else {"host": (0.0, chunk_s, 0.0)}
        super().__init__(
            Calibration(prefill=terms, decode=terms, edges=edges, step_rows=step_rows, kv_bytes_per_token=1)
        )

    def learn_step(self, sequences: Sequence[tuple[int, int]], seconds: float) -> None:
        pass
