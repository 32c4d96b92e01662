"""What a plan says, in an order that does not depend on how it was found."""

from __future__ import annotations

from typing import Any

import numpy as np

from mneme.kernels.plan import Plan


def segments_of(plan: Plan) -> set[Any]:
    found = set()
    for page_ids, sequences, deltas, masks in plan.segments.segments:
        shown = np.broadcast_to(masks, (len(sequences), len(page_ids)))
        found.add((*map(tuple, (page_ids.tolist(), sequences.tolist(), deltas.tolist(), shown.ravel().tolist())),))
    return found


def pieces_of(plan: Plan) -> tuple[list[Any], list[Any]]:
    """Shared pieces in any order, each with its runs, and private ones in theirs: rows, pages, deltas and masks."""
    work, pieces = plan.work, []
    for piece in range(work.num_pieces):
        rows = work.row[work.row_begin[piece] : work.row_begin[piece + 1]].tolist()
        runs = []
        for run in range(work.run_begin[piece], work.run_begin[piece + 1]):
            begin, end = work.page_begin[run], work.page_end[run]
            entries = slice(work.delta_begin[run], work.delta_begin[run] + len(rows))
            first = work.mask_begin[run] + work.mask_number[entries] * work.mask_stride[run]
            masks = work.mask[first[:, None] + np.arange(end - begin)]
            runs.append((work.page_id[begin:end].tolist(), work.delta[entries].tolist(), masks.tolist()))
        pieces.append((rows, sorted(runs)))
    return sorted(pieces[: work.num_shared]), pieces[work.num_shared :]
