"""Node caches without threads, on a clock that is set; what they are asked and what they give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mneme.cachetier.chunk.file import open_chunk
from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.chunk.keys import Lineage
from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.disk import make_disk_tier
from mneme.cachetier.node.index import Change
from mneme.cachetier.node.memory import ProcessMemory
from mneme.cachetier.node.search import Located
from mneme.cachetier.store import ChainQuery
from tests.cachetier.chunks import CHUNK_TOKENS, FINGERPRINT, LINEAGE, is_payload, read_all

T = TypeVar("T")
OPENED: list[Any] = []  # what a test need not close: it is at the test's end, whatever that is
BLOCK = 4096  # each of the chunks of these tests takes one, in either tier


def opened(one: T) -> T:
    OPENED.append(one)
    return one


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class RefusingMemory(ProcessMemory):
    """Takes nothing while `is_full`."""

    is_full = False

    def accept(self, payload: object) -> object:
        if self.is_full:
            raise MemoryError
        return super().accept(payload)

    def keep(self, layers: Any) -> object:
        if self.is_full:
            raise MemoryError
        return super().keep(layers)


def make_node(
    folder: Path | None = None,
    host_blocks: int = 100,
    disk_blocks: int = 100,
    *,
    clock: Callable[[], float] | None = None,
    memory: ProcessMemory | None = None,
    files: FileOperations | None = None,
    on_change: Callable[[Change], None] | None = None,
    free_share: float = 0.0,
    **config: Any,
) -> NodeCache:
    clock = clock or Clock()
    disk = None if folder is None else DiskTierConfig(folder=str(folder), capacity_bytes=disk_blocks * BLOCK)
    config = {"eviction": "lru"} | config
    cache = CacheConfig(host_bytes=host_blocks * BLOCK, disk=disk, **config)
    tier = make_disk_tier(cache, files=files, clock=clock)
    return opened(
        NodeCache(
            cache,
            memory or ProcessMemory(),
            host_blocks * BLOCK,
            tier,
            clock=clock,
            on_change=on_change,
            has_threads=False,
            free_share=free_share,
        )
    )


def query(
    token_ids: list[int], *, lineage: Lineage = LINEAGE, fingerprint: bytes = FINGERPRINT.digest, **fields: Any
) -> ChainQuery:
    return ChainQuery.of(lineage, fingerprint, token_ids, CHUNK_TOKENS, **fields)


def put(node: NodeCache, chunk: Chunk) -> str:
    return node.put(chunk.header, chunk.layers).value


def write_due(node: NodeCache) -> None:
    """What is due goes to the disk."""
    assert node.writer is not None
    while node.writer.step() == 0.0:
        pass


def prefetch(node: NodeCache) -> None:
    while node.step() == 0.0:
        pass


def is_right(located: Located, chunk: Chunk) -> bool:
    """It is this chunk, and its bytes can be had."""
    if located.header.key != chunk.header.key:
        return False
    if located.path is None:
        assert isinstance(located.held, tuple)
        return all(map(np.array_equal, located.held, chunk.layers))
    return is_payload(read_all(open_chunk(FileOperations(), located.path)), chunk)


def found(node: NodeCache, token_ids: list[int], **fields: Any) -> list[tuple[str, int]]:
    return [(each.tier, each.num_usable) for each in node.locate(query(token_ids, **fields))]
