"""What a chunk's bytes depend on beside its tokens: the model, how KV is laid out, how keys were rotated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b

from mneme.errors import ConfigError, shown

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_CHUNK_TOKENS = 4096

_KV_VERSION = 1  # raised when the same weights and tokens no longer give KV that may be mixed with what is stored
_BOUNDS = {
    "num_layers": MAX_LAYERS,
    "num_kv_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "chunk_tokens": MAX_CHUNK_TOKENS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Of a chunk's payload: per layer [K and V, num_kv_heads, tokens, head_dim], one run of bytes.

    It knows nothing of pages: engines with pages of different sizes read each other's chunks.
    """

    num_layers: int
    num_kv_heads: int  # of one tensor-parallel shard
    head_dim: int
    dtype: str
    chunk_tokens: int = 256  # of a full chunk; chunks begin at its multiples

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype: must be one of {', '.join(DTYPE_BYTES)} (got {shown(self.dtype)})")
        for name, bound in _BOUNDS.items():
            if not 1 <= getattr(self, name) <= bound:
                raise ConfigError(f"{name}: must be from 1 to {bound} (got {shown(getattr(self, name))})")

    def layer_bytes(self, num_tokens: int) -> int:
        return 2 * self.num_kv_heads * num_tokens * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ModelFingerprint:
    """All that must be equal for two engines to read each other's KV."""

    weights: str  # hex, see `weights_digest`
    layout: ChunkLayout
    inv_freq: tuple[float, ...]  # radians per position
    attention_factor: float = 1.0
    architecture: str = ""  # whatever else of the configuration changes KV, in one canonical text
    tensor_parallel: tuple[int, int] = (0, 1)  # rank, size

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, the same in every process and on every machine."""
        # The last bits of a frequency are the C library's, so they are left out; float32 tables would round them away.
        fields = {
            "kv_version": _KV_VERSION,
            "weights": self.weights,
            "layout": asdict(self.layout),
            "inv_freq": [f"{f:.12e}" for f in self.inv_freq],
            "attention_factor": f"{self.attention_factor:.12e}",
            "architecture": self.architecture,
            "tensor_parallel": list(self.tensor_parallel),
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return blake2b(text.encode(), digest_size=32, person=b"mneme model").digest()
