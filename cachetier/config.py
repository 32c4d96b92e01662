"""Configuration of the cache tier: key `cache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mneme.cachetier.names import MAX_CHUNK_TOKENS, EvictionPolicyName
from mneme.config import check_range
from mneme.errors import ConfigError

LoadPolicy = Literal["auto", "always", "never"]


def check_ttl(name: str, ttl_s: float) -> None:
    """Check a lifetime; raises `ConfigError`. 0 is refused: chunks would be served until their age is checked."""
    check_range(name, ttl_s, 0, 1e9)
    if not ttl_s:
        raise ConfigError(f"{name}: must be over 0 (got {ttl_s})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig:
    """A folder for chunks and session logs that outlive a restart."""

    # Of each node of a cluster. `%n` becomes the node's name: that of `ray start --node-name`, by default its address,
    # which a pod that comes back does not keep.
    folder: str
    capacity_bytes: int  # of chunks on each node
    max_files: int = 1_000_000  # a chunk is a file
    ttl_s: float | None = None  # since the last use; None: until room is needed

    def __post_init__(self) -> None:
        if not self.folder.strip():
            raise ConfigError("cache.disk.folder: must not be empty")
        check_range("capacity_bytes", self.capacity_bytes, 0, 2**60)
        check_range("max_files", self.max_files, 0, 2**32)
        if self.ttl_s is not None:
            check_ttl("cache.disk.ttl_s", self.ttl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Says how a node keeps chunks and session logs; the same on all nodes of a cluster."""

    enabled: bool = True  # false: KV leaves no engine
    chunk_tokens: int = 256  # of a full chunk; a multiple of every page size
    host_bytes: int | None = None  # of chunks in the node's memory; None: two fifths of the object store
    disk: DiskTierConfig | None = None  # None: nothing is written to a disk, and a restart starts cold
    eviction: EvictionPolicyName = "returning"  # of both tiers
    free_share: float = 0.05  # of the host tier, kept free for what comes in (AttentionStore 3.3.1)
    ttl_s: float | None = None  # since the last use, in every tier; None: until room is needed
    tenant_bytes: int | None = None  # of one tenant in each tier; None: no quota
    write_buffer_bytes: int = 256 << 20  # in an engine's process, of chunks on their way out; more are not saved
    read_buffer_bytes: int = 256 << 20  # likewise, of chunks on their way in
    min_load_tokens: int = 64  # fewer are computed without a question
    # What is done with chunks that a tier has of a prompt. auto: what brings its first token soonest; always: they are
    # waited for and loaded, however long that takes; never: nothing is looked for, chunks are only saved.
    load: LoadPolicy = "auto"
    directory_shards: int = 1  # actors that know which node has which chunk; more for hundreds of nodes
    session_log_bytes: int = 1 << 30  # of token logs beside `disk`'s chunks; nothing is written without it
    session_log_sync: bool = False  # wait for the disk at each record: a log survives its machine's fall too

    def __post_init__(self) -> None:
        is_multiple = self.chunk_tokens % 64 == 0 and 64 <= self.chunk_tokens <= MAX_CHUNK_TOKENS
        if not is_multiple:
            rule = f"must be a multiple of 64, at most {MAX_CHUNK_TOKENS}"
            raise ConfigError(f"cache.chunk_tokens: {rule} (got {self.chunk_tokens})")
        if self.host_bytes is not None:
            check_range("cache.host_bytes", self.host_bytes, 0, 2**48)
        check_range("cache.free_share", self.free_share, 0, 0.5)
        if self.ttl_s is not None:
            check_ttl("cache.ttl_s", self.ttl_s)
        if self.tenant_bytes is not None:
            check_range("cache.tenant_bytes", self.tenant_bytes, 0, 2**60)
        check_range("cache.write_buffer_bytes", self.write_buffer_bytes, 0, 2**48)
        check_range("cache.read_buffer_bytes", self.read_buffer_bytes, 0, 2**48)
        check_range("cache.min_load_tokens", self.min_load_tokens, 1, 2**31)
        check_range("cache.session_log_bytes", self.session_log_bytes, 0, 2**60)
        check_range("cache.directory_shards", self.directory_shards, 1, 256)
