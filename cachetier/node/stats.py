"""What a node cache counts, as plain dictionaries: a moment's sizes, and counters since the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mneme.cachetier.node.index import BLOCK_BYTES
from mneme.cachetier.node.tiers import NodeTiers
from mneme.cachetier.node.write_behind import WriteBehind


def node_stats(tiers: NodeTiers, writer: WriteBehind | None) -> dict[str, Any]:
    """`host` and `disk` (None without one): chunks, bytes, capacity_bytes and counters; `writer`: the queue of writes;
    `owners`: bytes of each tenant by its name in hex; `waiting`: requests; `pins`: keys, bytes.

    Write amplification is disk.written_bytes / disk.(written_bytes - superseded_bytes); of the bytes given to `put`,
    host.put_bytes, those of tails that were replaced in time are writer.cancelled_bytes.
    """
    with tiers.lock:
        host: dict[str, int] = {
            "chunks": len(tiers.host.index),
            "bytes": tiers.host.used_blocks * BLOCK_BYTES,
            "capacity_bytes": tiers.host.max_blocks * BLOCK_BYTES,
            **tiers.host.counters,
        }
        blocks_by_owner = dict(tiers.host.index.blocks_by_owner)
        pins = {"keys": len(tiers.pins), "host_bytes": tiers.host_pins.num_bytes}
        if tiers.disk_pins is not None:
            pins["disk_bytes"] = tiers.disk_pins.num_bytes
    return {
        "host": host,
        "disk": _disk_stats(tiers),
        "writer": None if writer is None else writer.stats(),
        "owners": _owners(tiers, blocks_by_owner),
        "waiting": len(tiers.waiting),
        "pins": pins,
    }


def _owners(tiers: NodeTiers, blocks_by_owner: Mapping[bytes, int]) -> dict[str, dict[str, int]]:
    """`blocks_by_owner`: of the host tier."""
    owners = {owner.hex(): {"host": num * BLOCK_BYTES, "disk": 0} for owner, num in blocks_by_owner.items()}
    for owner, num_bytes in ({} if tiers.disk is None else tiers.disk.bytes_by_owner()).items():
        owners.setdefault(owner.hex(), {"host": 0, "disk": 0})["disk"] = num_bytes
    return owners


def _disk_stats(tiers: NodeTiers) -> dict[str, int] | None:
    if tiers.disk is None:
        return None
    stats = tiers.disk.stats()
    sizes = {"chunks": stats.num_chunks, "bytes": stats.used_bytes, "capacity_bytes": stats.capacity_bytes}
    return sizes | stats.counters
