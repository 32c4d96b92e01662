"""What the papers compute: RelayAttention Eq. 10, ChunkAttention Eq. 3 and 4.

Lengths in tokens; `group` is the number of query heads per KV head. Torch-free.
"""

from __future__ import annotations


def relay_speedup(batch: int, shared: int, private: int) -> float:
    """RelayAttention Eq. 10 as printed: one query head per KV head, a token's key and value counted as one."""
    return (shared + private + 2) / (shared / batch + private + 7)


def relay_speedup_bytes(batch: int, shared: int, private: int, group: int) -> float:
    """Eq. 10 in bytes: keys and values both counted, queries, outputs and partial results `group` times.

    Equal to `relay_speedup` at two query heads per KV head, as many as there are tensors in the cache.
    """
    apart = 2 * (shared + private) + 2 * group
    relayed = 2 * (shared / batch + private) + 7 * group
    return apart / relayed


def chunk_memory_ops(batch: int, heads: int, length: int, head_dim: int, shared_ratio: float, chunk: int) -> float:
    """ChunkAttention Eq. 3: elements that its kernel moves; `shared_ratio` of each sequence is shared."""
    shared = length * shared_ratio
    per_head = 2 * shared * (1 / batch + 1 / chunk) + 2 + 2 * (length - shared)
    return batch * heads * head_dim * per_head


def naive_memory_ops(batch: int, heads: int, length: int, head_dim: int) -> float:
    """ChunkAttention Eq. 4: elements that a kernel without sharing moves."""
    return batch * heads * head_dim * (2 + 2 * length)
