"""What the papers compute: RelayAttention Eq. 10, ChunkAttention Eq. 3 and 4 and the counts behind its appendix A.

Lengths in tokens; `group` is the number of query heads per KV head. Torch-free.
"""

from __future__ import annotations

from typing import NamedTuple

_BYTES = 2  # ChunkAttention's appendix A counts 16-bit elements


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


class Dims(NamedTuple):
    """A decoder's sizes."""

    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def q_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


LLAMA_2_7B = Dims(4096, 11008, 32, 32, 128, 32000)


class Cost(NamedTuple):
    """Work of one module of one layer (the output projection: of the model)."""

    flops: float
    io_bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.io_bytes


def linear_costs(dims: Dims, rows: int) -> dict[str, Cost]:
    """QKV projection, gated MLP (three products, each reading its input) and output projection of `rows` tokens."""
    qkv = dims.q_width + 2 * dims.kv_width
    gated = 3 * (dims.hidden + dims.intermediate)
    return {
        "qkv": _linear(dims.hidden * qkv, dims.hidden + qkv, rows),
        "mlp": _linear(3 * dims.hidden * dims.intermediate, gated, rows),
        "output": _linear(dims.hidden * dims.vocab, dims.hidden + dims.vocab, rows),
    }


def attention_prefill(dims: Dims, batch: int, length: int) -> Cost:
    """As appendix A counts: all pairs, scores written once and read once."""
    elements = 2 * length * (dims.q_width + dims.kv_width) + 2 * dims.num_q_heads * length**2
    return Cost(4.0 * batch * length**2 * dims.q_width, _BYTES * batch * elements)


def attention_prefill_fused(dims: Dims, batch: int, length: int) -> Cost:
    """What a fused causal kernel has to do: half the pairs, no scores in memory."""
    elements = 2 * length * (dims.q_width + dims.kv_width)
    return Cost(2.0 * batch * length**2 * dims.q_width, _BYTES * batch * elements)


def attention_decode(dims: Dims, batch: int, length: int) -> Cost:
    """One row per sequence; scores written and read."""
    elements = 2 * length * dims.kv_width + 2 * dims.q_width + 2 * dims.num_q_heads * length
    return Cost(4.0 * batch * length * dims.q_width, _BYTES * batch * elements)


def attention_decode_fused(dims: Dims, batch: int, length: int) -> Cost:
    """One row per sequence, no scores in memory."""
    elements = 2 * length * dims.kv_width + 2 * dims.q_width
    return Cost(4.0 * batch * length * dims.q_width, _BYTES * batch * elements)


def _linear(num_weights: int, activations_per_row: int, rows: int) -> Cost:
    return Cost(2.0 * rows * num_weights, _BYTES * (num_weights + rows * activations_per_row))
