"""Saving through the actor of a node, as engines do that are served; the `--ray` part of bench_cache_save.py."""

from __future__ import annotations

from pathlib import Path

import ray
from cache_engines import FLUSH_S, cache_config
from cache_saving import SavingTier

from mneme.cachetier.distributed.lifecycle import node_actor, own_identity, shutdown_cache_tier, start_cache_tier
from mneme.errors import MnemeError

APPLICATION = "bench-saving"
HOST_BYTES = 256 << 20
_SESSION_TTL_S = 3600.0
_CLOSE_S = 20.0


def served_tier(folder: Path) -> SavingTier:
    """This process puts chunks; the actor of its node, another process, keeps them and writes the files."""
    config = cache_config(folder, host_bytes=HOST_BYTES)
    store = start_cache_tier(config, APPLICATION)
    node = node_actor(config, own_identity(config, APPLICATION, _SESSION_TTL_S))

    def flush() -> None:
        if not (store.settle(FLUSH_S) and ray.get(node.flush.remote(FLUSH_S), timeout=2 * FLUSH_S)):
            raise MnemeError(f"the node's disk was not written within {FLUSH_S:g} s")

    return SavingTier(store, config, flush, lambda: shutdown_cache_tier(APPLICATION, timeout_s=_CLOSE_S))
