"""Fits the constants of `ShareCost` to measured times of attention.

A call's time is modelled as the sum over its pieces of what `ShareCost` says, and two terms that do not depend on
sharing. The constants are the non-negative least-squares solution of the relative errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mneme.kernels.plan import Plan
from mneme.kernels.share_cost import FloatArray

_CONSTANTS = ("key_few", "head_few", "key_many", "head_many", "piece", "merge", "cold", "call")


def features_of(plan: Plan) -> list[float]:
    """Sum over the pieces of a plan what each constant is multiplied with, in the order of `fitted`'s constants.

    The last two do not depend on sharing: elements that come from memory the first time that they are read, and what a
    call costs whatever it does.
    """
    work, width, group = plan.work, plan.num_kv_heads * plan.head_dim, plan.num_q_heads // plan.num_kv_heads
    few, many, merge = [0.0, 0.0], [0.0, 0.0], 0.0
    for piece in range(work.num_pieces):
        rows = int(work.row_begin[piece + 1] - work.row_begin[piece])
        runs = slice(work.run_begin[piece], work.run_begin[piece + 1])
        elements = int((work.page_end[runs] - work.page_begin[runs]).sum()) * plan.page_size * width
        if rows * group < plan.cost.many_heads:  # a pass for each row
            few[0] += elements * rows
            few[1] += elements * rows * group
        else:
            many[0] += elements
            many[1] += elements * rows * group
        merge += rows * group * width
    distinct = len({int(page) for table in plan.page_tables for page in table.page_ids}) * plan.page_size * width
    return [*few, *many, work.num_pieces * plan.num_kv_heads, merge, distinct, 1.0]


def fitted(features: Sequence[Sequence[float]], picoseconds: Sequence[float]) -> tuple[dict[str, float], float]:
    """Return the constants by name, and the median relative error of the model with them."""
    matrix, times = np.array(features), np.array(picoseconds)
    constants = _non_negative_fit(matrix / times[:, None], np.ones(len(times)))
    error = float(np.median(np.abs(matrix @ constants / times - 1)))
    return dict(zip(_CONSTANTS, constants.tolist(), strict=True)), error


def _non_negative_fit(matrix: FloatArray, wanted: FloatArray, num_steps: int = 50_000) -> FloatArray:
    """Least squares under x >= 0, by projected gradient on scaled columns."""
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    scaled = matrix / scale
    step = 1 / np.linalg.norm(scaled, 2) ** 2
    x = np.zeros(matrix.shape[1])
    for _ in range(num_steps):
        x = np.maximum(0.0, x - step * (scaled.T @ (scaled @ x - wanted)))
    found: FloatArray = x / scale
    return found
