"""Chunks of two models' shapes, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.header import Chunk, U8Array, Wanted, checksum, make_chunk
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage


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
