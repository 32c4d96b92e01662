"""Whether reading a segment once for all its sharers pays: bytes, flops and the overhead of another piece.

A *pass* takes M query heads over the keys and values of L tokens, in each KV head. A device does it in one of two ways:

    few heads     M * head_few                 each head goes over the keys by itself; nothing is prepared
    many heads    key + M * head_many          keys are read (and packed) once, then multiplied with all heads

both times L * elements of a key. Sharing replaces one pass per sharer by one for all of them, and costs a piece: its
own set-up, the rotation of its queries and the merge of its results. Only ratios of the constants decide. Measured ones
come from `benchmarks/fit_share_cost.py`; the constants say for which device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCost:
    """What passes cost on one device, in picoseconds."""

    key: float  # per element of a key and its value, for any number of heads
    head_many: float  # and per query head that meets it
    head_few: float  # per element and query head without preparation
    piece: float  # per piece
    merge: float  # per query head and element of its result, that a piece adds

    def pass_(self, num_heads: FloatArray) -> FloatArray:
        """Per element of a key, for passes of so many query heads."""
        return np.minimum(num_heads * self.head_few, self.key + num_heads * self.head_many)

    def pays(self, rows_per_sharer: IntArray, num_groups: int, num_tokens: int, kv_width: int) -> bool:
        """Whether one pass for all sharers and its overhead cost less than a pass for each.

        rows_per_sharer   int [c]  query rows of each sharer in this step
        num_groups        query heads per KV head
        num_tokens        of the segment
        kv_width          elements of a token's key, over all KV heads
        """
        heads = (rows_per_sharer * num_groups).astype(np.float64)
        total = heads.sum()
        saved = (self.pass_(heads).sum() - float(self.pass_(total))) * num_tokens * kv_width
        return bool(saved > self.piece + self.merge * total * kv_width)


# One core of a CPU with AVX-512, pages in the second and third cache.
COMPILED_BFLOAT16 = ShareCost(key=210.0, head_many=13.0, head_few=50.0, piece=8e6, merge=300.0)
COMPILED_FLOAT32 = ShareCost(key=210.0, head_many=30.0, head_few=50.0, piece=8e6, merge=300.0)
# The torch backend on the same core: a reading for about 64 rows at a time, twenty small operations for a piece.
TORCH = ShareCost(key=2000.0, head_many=10.0, head_few=2000.0, piece=2.6e8, merge=300.0)
# From an H200's data sheet, not measured: 4.3 TB/s (16 bits), tensor cores under a padded tile, a merge's launch.
TRITON = ShareCost(key=0.93, head_many=0.005, head_few=0.93, piece=2e6, merge=2.0)
