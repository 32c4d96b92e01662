"""A step's work as flat arrays, which compiled kernels read as they are.

A *piece* is a set of query rows that read the same pages. Its pages come in *runs*: within a run every row uses all
pages with one delta, so a kernel rotates its rows once per run; consecutive segments of the same sharers are runs of
one piece, and so are a sequence's own pages under several deltas, so that a row has few partial results. Pieces of
shared segments come first; of the pieces behind them, each query row is in one at most.

Row i of piece p, in run r, uses the key in slot s of page j with `d = delta[delta_begin[r] + i]`: it sees the key iff
its mask bit is set and `slot_position[s] + d <= position[row]` (and `> position[row] - window`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class WorkList(NamedTuple):
    """P pieces with R runs in all. Ranges are half-open; those of pages may leave gaps for pages to come."""

    num_shared: int  # pieces [0, num_shared) are shared segments, the others private pages
    row_begin: Int32Array  # [P + 1] piece p has the rows row[row_begin[p]:row_begin[p + 1]]
    row: Int32Array  # query rows; one may stand twice in a shared piece, with two deltas
    run_begin: Int32Array  # [P + 1] piece p has the runs [run_begin[p], run_begin[p + 1])
    page_begin: Int32Array  # [R] run r has the pages page_id[page_begin[r]:page_end[r]]
    page_end: Int32Array  # [R]
    page_id: Int32Array
    delta_begin: Int32Array  # [R] the i-th row of the piece has delta[delta_begin[r] + i]
    delta: Int32Array
    mask_number: Int32Array  # parallel to delta: which of the run's masks the row reads
    mask_begin: Int32Array  # [R] mask m of page j is mask[mask_begin[r] + m * mask_stride[r] + j - page_begin[r]]
    mask_stride: Int32Array  # [R] 0 where all rows read one mask
    mask: Int64Array  # bit i shows offset i; bits at and behind page_size are clear
