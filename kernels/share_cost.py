"""Whether reading a segment once for all its sharers pays: bytes, flops and the overhead of another piece.

A *pass* takes the M query heads of a piece's rows over the keys and values of L tokens, in each KV head, and costs

    L * elements of a key * (key + M * head)

with one pair of constants for many heads, for which keys are packed first, and another for few, where each row reads
keys where they lie, one after the other. Sharing replaces one pass per sharer by one for all of them, and costs a
piece: its own set-up, the rotation of its queries and the merge of its results. Only ratios of the constants decide.
Those that are written down were fitted to measured times; each says for which device. On a GPU an engine that keeps
costs measures its own once (`replicas/engine/calibration.py: measured_share_cost`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCost:
    """Holds what passes cost on one device, in picoseconds."""

    many_heads: int  # from this many query heads on a pass is one of many heads
    key_few: float  # per element of a key and its value, for any number of heads
    head_few: float  # and per query head that meets it
    reread: float  # less of `key_few` for each further row of a pass: the row before left keys in a near cache
    key_many: float
    head_many: float
    piece: float  # per piece and KV head
    merge: float  # per query head and element of its result, that a piece adds

    def pass_(self, num_rows: IntArray, num_groups: int) -> FloatArray:
        """Cost a pass per element of a key, for so many rows of `num_groups` query heads per KV head."""
        few = num_rows * (self.key_few + num_groups * self.head_few) - (num_rows - 1) * self.reread
        many = self.key_many + num_rows * num_groups * self.head_many
        return np.where(num_rows * num_groups < self.many_heads, few, many)

    def pay(
        self, rows_per_sharer: IntArray, begin: IntArray, num_tokens: IntArray, *, num_groups: int, head_dim: int
    ) -> npt.NDArray[np.bool_]:
        """Tell for each segment whether one pass for all sharers and its overhead cost less than a pass for each; KV
        heads are alike.

        rows_per_sharer   int [c]  query rows in this step of each sharer of each segment, 0 where it has none
        begin             int [s]  of each segment's sharers
        num_tokens        int [s]  of each segment
        num_groups        query heads per KV head
        """
        total = np.add.reduceat(rows_per_sharer, begin)
        passes = np.where(rows_per_sharer > 0, self.pass_(rows_per_sharer, num_groups), 0.0)
        saved = (np.add.reduceat(passes, begin) - self.pass_(total, num_groups)) * num_tokens * head_dim
        overhead = self.piece + self.merge * total * num_groups * head_dim
        worthwhile: npt.NDArray[np.bool_] = saved > overhead
        return worthwhile


# One core of a CPU with AVX-512 BF16.
COMPILED_BFLOAT16 = ShareCost(
    many_heads=8, key_few=74.0, head_few=13.0, reread=0.0, key_many=119.0, head_many=10.4, piece=6.7e4, merge=780.0
)
COMPILED_FLOAT32 = ShareCost(
    many_heads=8, key_few=141.0, head_few=16.0, reread=18.0, key_many=269.0, head_many=19.4, piece=6.7e4, merge=560.0
)
# An H100, 16-bit keys, tiles of 64 rows: fitted to the 39 times in benchmarks/results/gpu-2026-11-26/first, which it
# misses by 5% in the median.
TRITON = ShareCost(
    many_heads=1, key_few=0.0, head_few=0.0, reread=0.0, key_many=0.558, head_many=0.013, piece=0.0, merge=47.0
)
