"""Whether reading a segment once for all its sharers pays."""

from __future__ import annotations

import numpy as np

from mneme.kernels.page_table import IntArray

# A backend goes over the keys once for about this many rows of one group.
_ROWS_PER_READING = 64
# What a segment of its own costs in every layer (20 small operations, a merge), as elements of K that could be read
# and multiplied instead. Measured on one CPU core with 8 query heads, 4 KV heads of 64: sharing breaks even at 250 to
# 450 saved tokens in float32 and 500 to 900 in bfloat16.
_BREAK_EVEN_ELEMENTS = 512 * 4 * 64


def worth_sharing(rows_per_sharer: IntArray, num_tokens: int, kv_width: int) -> bool:
    """Whether a pass of its own over a segment costs less than reading it for every sharer.

    Rows of a long prefill gain nothing: they fill a reading by themselves. `kv_width` is the size of a token's key.
    """
    readings_apart = np.ceil(rows_per_sharer / _ROWS_PER_READING).sum()
    readings_shared = np.ceil(rows_per_sharer.sum() / _ROWS_PER_READING)
    return bool((readings_apart - readings_shared) * num_tokens * kv_width >= _BREAK_EVEN_ELEMENTS)
