"""Writes chunks of known content into a disk tier until it is killed: `kill_writer FOLDER SEED`."""

from __future__ import annotations

import random
import sys
import time

from mneme.cachetier.chunk import Chunk
from mneme.cachetier.disk_interface import DiskTierConfig
from mneme.cachetier.disk_tier import DiskTier
from mneme.cachetier.eviction_lru import LruPolicy
from mneme.cachetier.keys import prefix_lineage
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


def main(folder: str, seed: int) -> None:
    chance, tier = random.Random(seed), open_tier(folder)
    chunks = [chunk_number(number) for number in range(320)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        tier.put(chance.choice(chunks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
