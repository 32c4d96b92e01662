"""Small chunks of known content, and file operations of which one fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mneme.cachetier.chunk.file import ChunkReader
from mneme.cachetier.chunk.fingerprint import ChunkLayout, ModelFingerprint
from mneme.cachetier.chunk.header import Chunk, U8Array, make_chunk
from mneme.cachetier.chunk.keys import Lineage, prefix_lineage
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.names import Miss
from mneme.cachetier.node.disk import DiskRead

CHUNK_TOKENS = 8
OPERATIONS = ("make_folder", "lock", "list_folder", "open_to_read", "create", "close", "status", "read", "write")
OPERATIONS += ("rename", "unlink")


def make_fingerprint(weights: str = "w", **layout: Any) -> ModelFingerprint:
    fields = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 4, "dtype": "float16", "chunk_tokens": CHUNK_TOKENS}
    return ModelFingerprint(weights=weights, layout=ChunkLayout(**(fields | layout)), inv_freq=(1.0, 0.1))


FINGERPRINT = make_fingerprint()
LINEAGE = prefix_lineage(FINGERPRINT, "tenant")


def layers_of(fingerprint: ModelFingerprint, num_tokens: int, seed: int) -> list[U8Array]:
    layout, generator = fingerprint.layout, np.random.default_rng(seed)
    size = layout.layer_bytes(num_tokens)
    return [generator.integers(0, 256, size, dtype=np.uint8) for _ in range(layout.num_layers)]


def chunk_of(
    token_ids: list[int],
    parent: bytes | None = None,
    fingerprint: ModelFingerprint = FINGERPRINT,
    lineage: Lineage = LINEAGE,
) -> Chunk:
    """Its payload is a function of its last token."""
    layers = layers_of(fingerprint, len(token_ids), token_ids[-1])
    positions = np.arange(len(token_ids), dtype=np.int32)
    return make_chunk(lineage, fingerprint, parent or lineage.root, token_ids, positions, layers)


def chain_of(token_ids: list[int], lineage: Lineage = LINEAGE) -> list[Chunk]:
    return [
        chunk_of(token_ids[r.start : r.end], r.parent, lineage=lineage) for r in lineage.chain(token_ids, CHUNK_TOKENS)
    ]


def read_all(reader: ChunkReader | DiskRead | Miss) -> list[U8Array] | Miss:
    """All layers, each with a read of its own, last first; closes the reader."""
    if isinstance(reader, Miss):
        return reader
    with reader:
        layout, size = reader.header.layout, reader.header.layer_bytes
        layers = [np.empty(size, np.uint8) for _ in range(layout.num_layers)]
        for layer in reversed(range(layout.num_layers)):
            miss = reader.read(layer, [layers[layer]])
            if miss is not None:
                return miss
    return layers


def is_payload(read: list[U8Array] | Miss, chunk: Chunk) -> bool:
    return not isinstance(read, Miss) and all(map(np.array_equal, read, chunk.layers))


class FailingFiles(FileOperations):
    """`fails(operation, number)` says whether the number-th call of all fails, and with which errno."""

    def __init__(self, fails: Callable[[str, int], int | None]) -> None:
        self.num_calls = 0
        self.fails = fails

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        def call(*args: Any) -> Any:
            self.num_calls += 1
            code = self.fails(name, self.num_calls)
            if code is not None:
                if name == "close":
                    found(*args)  # a descriptor is gone even if its close fails
                raise OSError(code, os.strerror(code))
            return found(*args)

        return call


def failing_at(number: int, code: int = errno.EIO) -> FailingFiles:
    return FailingFiles(lambda _operation, call: code if call == number else None)


def folder_bytes(folder: Path) -> int:
    """Add up chunks and temporary files, in whole blocks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))
