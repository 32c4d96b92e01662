"""Serves prompts of known answers from a cache tier until it is killed: `kill_engine MODEL FOLDER SEED`.

Says "ready" when the first of them is answered, so that a kill hits an engine that computes and saves.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from mneme.cachetier.config import CacheConfig, DiskTierConfig
from mneme.cachetier.node.sources import ProcessChunkStore
from mneme.replicas.model.decoder import Decoder
from mneme.replicas.model.directory import load_model_config
from mneme.replicas.model.weights import load_weights
from tests.replicas.chunk_stores import CHUNK_TOKENS
from tests.replicas.tiered_engine import draw, make_cached_engine, run, submit

CAPACITY_BYTES = 1 << 20  # some 20 chunks: it is full soon, and evicts
NUM_HISTORIES = 12
HISTORY_TOKENS = 150


def config_in(folder: Path) -> CacheConfig:
    disk = DiskTierConfig(folder=str(folder), capacity_bytes=CAPACITY_BYTES)
    return CacheConfig(chunk_tokens=CHUNK_TOKENS, host_bytes=1 << 20, disk=disk)


def prompt(number: int) -> list[int]:
    """One of a few, which share beginnings."""
    return draw(number // 3, 70) + draw(1000 + number, HISTORY_TOKENS - 70)


def load(model: Path) -> Decoder:
    config = load_model_config(model)
    return Decoder(config, load_weights(model, config, torch.device("cpu"), torch.float32), share="always")


def main(model: Path, folder: Path, seed: int) -> None:
    chance, decoder = random.Random(seed), load(model)
    config = config_in(folder)
    store = ProcessChunkStore(config)
    engine = make_cached_engine(decoder, store, num_pages=24, config=config)
    for name in range(1_000_000):
        submit(engine, str(name), prompt(chance.randrange(NUM_HISTORIES)), 3)
        run(engine)
        if name == 0:
            sys.stdout.write("ready\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
