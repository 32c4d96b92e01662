"""Refusing visible pairs that are farther apart than a rope table reaches, without asking the device if possible."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mneme.kernels.plan import Plan
from mneme.kernels.triton.step import version_of
from mneme.kernels.work_list import WorkList

_IntArray = npt.NDArray[np.int64]


def check_reach(plan: Plan, slot_position: Tensor, num_positions: int, window: int | None) -> None:
    """Raise ValueError for a row that sees a key under a delta which takes it to `num_positions` or beyond.

    Positions and deltas alone accept almost every step. Only where they do not, `slot_position` is read back, once
    per plan and state of it, to see whether such a row sees anything.
    """
    work = plan.work
    if not len(work.delta) or plan.position.max() - work.delta.min() < num_positions:
        return
    key = ("triton", "reach", num_positions, window)
    version = version_of(slot_position)
    checked: tuple[Tensor, int | None] | None = plan.prepared.get(key)
    if checked is not None and checked[0] is slot_position and checked[1] == version:
        return
    effective = plan.position[_row_of_delta(work)] - work.delta
    beyond = np.flatnonzero(effective >= num_positions)
    if len(beyond):
        _check_visible(plan, beyond, effective, slot_position.cpu().numpy(), num_positions, window)
    plan.prepared[key] = (slot_position, version)


def _row_of_delta(work: WorkList) -> _IntArray:
    """The query row of each entry of `delta`."""
    key = ("triton", "row_of_delta")
    rows: _IntArray | None = work.derived.get(key)
    if rows is None:
        piece_of_run = np.repeat(np.arange(work.num_pieces), np.diff(work.run_begin))
        counts = np.diff(work.row_begin)[piece_of_run]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.zeros(len(work.delta), np.int64)
        at = np.repeat(work.delta_begin, counts) + within
        rows[at] = work.row[np.repeat(work.row_begin[piece_of_run], counts) + within]
        work.derived[key] = rows
    return rows


def _check_visible(
    plan: Plan,
    beyond: _IntArray,
    effective: _IntArray,
    positions: npt.NDArray[np.int32],
    reach: int,
    window: int | None,
) -> None:
    work = plan.work
    by_begin = np.argsort(work.delta_begin, kind="stable")
    runs = by_begin[np.searchsorted(work.delta_begin[by_begin], beyond, side="right") - 1]
    offsets = np.arange(plan.page_size)
    for entry, run in zip(beyond.tolist(), runs.tolist(), strict=True):
        listed = np.arange(work.page_begin[run], work.page_end[run])
        first = work.mask_begin[run] + work.mask_number[entry] * work.mask_stride[run] - work.page_begin[run]
        shown = (work.mask[first + listed][:, None] >> offsets) & 1 == 1
        keys = positions[work.page_id[listed].astype(np.int64)[:, None] * plan.page_size + offsets]
        visible = shown & (keys <= effective[entry])
        if window is not None:
            visible &= keys > effective[entry] - window
        if visible.any():
            raise ValueError(f"rows: a visible pair is {effective[entry]} apart, the rope table ends at {reach}")
