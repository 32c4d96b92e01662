"""Writes chunks of known content into a disk tier until it is killed: `kill_writer FOLDER SEED direct|behind`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from mneme.cachetier.chunk.header import Chunk
from mneme.cachetier.chunk.keys import prefix_lineage
from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.cache import NodeCache
from mneme.cachetier.node.disk import DiskTier
from mneme.cachetier.node.memory import ProcessMemory
from mneme.cachetier.policy.eviction import LruPolicy
from tests.cachetier.chunks import chunk_of, make_fingerprint

BIG = make_fingerprint(head_dim=256)  # 6 KB a token: a write that a kill can hit
BIG_LINEAGE = prefix_lineage(BIG, "tenant")
CAPACITY_BYTES = 1 << 20


def chunk_number(number: int) -> Chunk:
    """Short ones and full ones, so that tails are superseded."""
    root, num_tokens = number // 8, number % 8 + 1
    return chunk_of([1000 * root + place for place in range(num_tokens)], fingerprint=BIG, lineage=BIG_LINEAGE)


def open_tier(folder: str) -> DiskTier:
    """Raises `ConfigError` while another process has the folder."""
    return DiskTier(DiskTierConfig(folder=folder, capacity_bytes=CAPACITY_BYTES), LruPolicy(), clock=time.monotonic)


def put_behind(tier: DiskTier) -> Callable[[Chunk], object]:
    """By way of a node cache, whose thread writes."""
    host_bytes = 4 * CAPACITY_BYTES
    node = NodeCache(CacheConfig(eviction="lru"), ProcessMemory(), host_bytes, tier, tail_delay_s=0.0)
    return lambda chunk: node.put(chunk.header, chunk.layers)


def main(folder: str, seed: int, way: str) -> None:
    chance, tier = random.Random(seed), open_tier(folder)
    put = put_behind(tier) if way == "behind" else tier.put
    chunks = [chunk_number(number) for number in range(320)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        put(chance.choice(chunks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
