"""A step's work as flat arrays, which compiled kernels read as they are.

A *piece* is a set of query rows that read the same pages. Its pages come in *runs*: within a run every row uses all
pages with one delta, so a kernel rotates its rows once per run; segments of the same sharers are runs of one piece,
and so are a sequence's own pages under several deltas, so that a row has few partial results. Pieces of shared
segments come first; of the pieces behind them, each query row is in one at most.

Row i of piece p, in run r, uses the key in slot s of page j with `d = delta[delta_begin[r] + i]`: it sees the key iff
its mask bit is set and `slot_position[s] + d <= position[row]` (and `> position[row] - window`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mneme.kernels.page_table import References

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkList:
    """P pieces with R runs in all. Ranges are half-open; those of pages leave gaps for pages to come."""

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
    run_of_sharer: dict[tuple[int, int], int]  # (sequence, delta) -> its private run
    room_end: Int32Array  # [R] pages up to here fit before the next run begins
    filled_end: Int32Array = field(repr=False)  # [R] how far any list with these arrays has filled its run
    # What a backend derives from the work and reads in every step that has it, by the backend's own key.
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_pieces(self) -> int:
        """P"""
        return len(self.run_begin) - 1

    def append(self, added: References) -> WorkList | None:
        """The same work with one more private page for each of these references, in time proportional to their number
        (and the number of runs); None where a page has no run to join or no room, or another list took that room.

        The arrays of pages and masks are this list's own, filled behind what it reads.
        """
        sharers = zip(added.sequence.tolist(), added.delta.tolist(), strict=True)
        found = [self.run_of_sharer.get(sharer) for sharer in sharers]
        runs = np.array([run for run in found if run is not None], np.int64)
        if len(runs) < len(found) or len(np.unique(runs)) < len(runs):
            return None
        at = self.page_end[runs]
        if (at >= self.room_end[runs]).any() or (self.filled_end[runs] > at).any():
            return None
        self.page_id[at] = added.page_id
        self.mask[self.mask_begin[runs] + at - self.page_begin[runs]] = added.mask
        self.filled_end[runs] = at + 1
        page_end = self.page_end.copy()
        page_end[runs] = at + 1
        return replace(self, page_end=page_end, derived={})
