"""Chunks of two models' shapes, arms that move them in turns, and an engine's way to read a chain of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from harness import median_ratio, take_turns

from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.header import Chunk, U8Array, Wanted, checksum, make_chunk
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage
from mneme.cachetier.names import Edge, Miss
from mneme.cachetier.store import ChainQuery, ChunkSource, ChunkStore
from mneme.errors import MnemeError

_FOUND_S = 20.0  # until chunks that were put can be found, those of another node too
_LOOK_S = 1.0
_POLL_S = 0.02


class Shape(NamedTuple):
    """A model's KV, and how many chunks of it are moved."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_chunks: int  # together several times as large as a cache of the CPU
    num_tokens: int = 256

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            chunk_tokens=self.num_tokens,
        )

    @property
    def layer_bytes(self) -> int:
        return self.layout.layer_bytes(self.num_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


LARGE = Shape("8x128", 32, 8, 128, 8)
TINY = Shape("2x64", 6, 2, 64, 96)  # of the embedded model


class Chain:
    """Chunks of random bytes, one behind the other; also as plain memory."""

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.shape = shape
        self.fingerprint = ModelFingerprint(weights="random", layout=shape.layout, inv_freq=(1.0,))
        self.lineage: Lineage = prefix_lineage(self.fingerprint, "tenant")
        self.payload: U8Array = generator.integers(
            0, 256, (shape.num_chunks, shape.num_layers, shape.layer_bytes), dtype=np.uint8
        )
        self.token_ids = generator.integers(0, 2**31, (shape.num_chunks, shape.num_tokens)).astype(np.uint32)
        self.chunks = list(self._chunks())

    def make(self, index: int, parent: bytes, layers: U8Array) -> Chunk:
        """The chunk at an index, its checksums computed of these layers."""
        positions = np.arange(index * self.shape.num_tokens, (index + 1) * self.shape.num_tokens, dtype=np.int32)
        return make_chunk(self.lineage, self.fingerprint, parent, self.token_ids[index], positions, list(layers))

    def wanted(self, index: int) -> Wanted:
        key = self.chunks[index].header.key
        return Wanted(key=key, fingerprint=self.fingerprint, token_ids=self.token_ids[index])

    def _chunks(self) -> Iterator[Chunk]:
        parent = self.lineage.root
        for index, layers in enumerate(self.payload):
            yield (chunk := self.make(index, parent, layers))
            parent = chunk.header.key


def copy_checked(source: U8Array, target: U8Array, checksums: tuple[bytes, ...]) -> None:
    """Layer by layer: the checksum of the bytes that are then used, as every read of the tier does it."""
    for layer, copy, expected in zip(source, target, checksums, strict=True):
        np.copyto(copy, layer)
        if checksum(copy.data) != expected:
            raise ValueError("a checksum does not fit")


def nothing() -> None:
    """Before or after an arm that needs no preparation."""


class Arm(NamedTuple):
    """One way to move chunks across an edge. `before` and `after` a round's chunks are not timed."""

    edge: str
    name: str
    call: Callable[[int], Any]  # index of a chunk
    base: str | None = None  # the arm that it is held against
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


class Samples(NamedTuple):
    """What one arm took: seconds by round and chunk."""

    arm: Arm
    rounds: list[list[float]]

    def total_s(self) -> list[float]:
        """Add up each round's chunks."""
        return [sum(chunks) for chunks in self.rounds]

    def per_chunk_s(self) -> list[float]:
        return sorted(second for chunks in self.rounds for second in chunks)


def measured(arms: Sequence[Arm], num_chunks: int, num_rounds: int) -> dict[str, Samples]:
    """By the arm's name; all arms move all chunks in every round."""
    by_name = {arm.name: arm for arm in arms}
    found = take_turns(by_name, lambda name: _one_round(by_name[name], num_chunks), num_rounds)
    return {name: Samples(by_name[name], rounds) for name, rounds in found.items()}


def _one_round(arm: Arm, num_chunks: int) -> list[float]:
    arm.before()
    seconds = []
    for index in range(num_chunks):
        started = time.perf_counter()
        arm.call(index)
        seconds.append(time.perf_counter() - started)
    arm.after()
    return seconds


def table(found: dict[str, Samples], shape: str, chunk_bytes: int) -> list[dict[str, Any]]:
    """A row for each arm, in order."""
    rows = []
    for samples in found.values():
        arm, per_chunk = samples.arm, samples.per_chunk_s()
        num_chunks = len(samples.rounds[0])
        rows.append({
            "shape": shape, "edge": arm.edge, "arm": arm.name, "rounds": len(samples.rounds),
            "GB/s": num_chunks * chunk_bytes / statistics.median(samples.total_s()) / 1e9,
            "chunk ms": statistics.median(per_chunk) * 1e3,
            "p99 ms": per_chunk[min(len(per_chunk) - 1, len(per_chunk) * 99 // 100)] * 1e3,
            "of": arm.base,
            "share": median_ratio(found[arm.base].total_s(), samples.total_s()) if arm.base else None,
        })  # fmt: skip
    return rows


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
