"""Configuration of the cache tier: key `cache`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from mneme.cachetier.names import MAX_CHUNK_TOKENS, NodePolicyName
from mneme.config import check_range
from mneme.errors import ConfigError

logger = logging.getLogger(__name__)

# In an engine's process, of chunks on their way out (more are not saved) and in: eight chunks of an 8B model each.
WRITE_BUFFER_BYTES = READ_BUFFER_BYTES = 256 << 20
SESSION_LOG_BYTES = 1 << 30  # of token logs beside a disk's chunks; k8s/chart adds it to the volume
_FEW_CHUNKS = 100
LoadPolicy = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig:
    """A folder for chunks and session logs that outlive a restart."""

    # Of each node of a cluster. `%n` becomes the node's name: that of `ray start --node-name`, by default its address,
    # which a pod that comes back does not keep.
    folder: str
    capacity_bytes: int  # of chunks on each node

    def __post_init__(self) -> None:
        if not self.folder.strip():
            raise ConfigError("cache.disk.folder: must not be empty")
        check_range("capacity_bytes", self.capacity_bytes, 0, 2**60)


def warn_of_few_chunks(option: str, num_bytes: int, chunk_bytes: int) -> None:
    """Say in the log if a tier has room for so little of a model's KV that most goes before it is asked for again."""
    if 0 < num_bytes < _FEW_CHUNKS * chunk_bytes:
        told = "%s=%s has room for %s chunks of this model, of %s bytes: give it more, or 0 for none"
        logger.warning(told, option, num_bytes, num_bytes // chunk_bytes, chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Says how a node keeps chunks and session logs; the same on all nodes of a cluster."""

    enabled: bool = True  # false: KV leaves no engine
    chunk_tokens: int = 256  # of a full chunk; a multiple of every page size
    # Of chunks in the node's memory; None: two fifths of the object store; without Ray, a tenth of the memory that is
    # available, at least 1 GiB.
    host_bytes: int | None = None
    # None: nothing is written to a disk, and a restart starts cold. `mneme serve` on one machine, if told nothing of
    # disks, not even null, has a folder of its user's (~/.local/state/mneme): a tenth of what is free, at most 64 GiB.
    disk: DiskTierConfig | None = None
    eviction: NodePolicyName = "returning"  # of both tiers
    ttl_s: float | None = None  # since the last use, in every tier; None: until room is needed
    tenant_bytes: int | None = None  # of one tenant in each tier; None: no quota
    # What is done with chunks that a tier has of a prompt. auto: what brings its first token soonest; always: they are
    # waited for and loaded, however long that takes; never: nothing is looked for, chunks are only saved.
    load: LoadPolicy = "auto"

    def __post_init__(self) -> None:
        is_multiple = self.chunk_tokens % 64 == 0 and 64 <= self.chunk_tokens <= MAX_CHUNK_TOKENS
        if not is_multiple:
            rule = f"must be a multiple of 64, at most {MAX_CHUNK_TOKENS}"
            raise ConfigError(f"cache.chunk_tokens: {rule} (got {self.chunk_tokens})")
        if self.host_bytes is not None:
            check_range("cache.host_bytes", self.host_bytes, 0, 2**48)
        if self.ttl_s is not None:  # with 0 chunks would be served until their age is checked
            check_range("cache.ttl_s", self.ttl_s, 1e-3, 1e9)
        if self.tenant_bytes is not None:
            check_range("cache.tenant_bytes", self.tenant_bytes, 0, 2**60)
