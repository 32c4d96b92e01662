"""The arithmetic of what is said of documents: bounds, fits."""

from __future__ import annotations

import bench_blend
import numpy as np
import pytest
from workloads import WORKLOADS, make_prompts

from mneme.replicas.documents import BlendOptions


def test_costs_are_fitted_and_none_is_negative() -> None:
    design = np.array([[1, n, n * n / 2] for n in (1000, 2000, 3000)], float)
    costs = np.array([0.002, 3e-6, 1e-9])
    assert bench_blend.fitted(design, design @ costs) == pytest.approx(costs)
    noisy = bench_blend.fitted(design, design @ np.array([-0.002, 3e-6, 1e-9]))
    assert (noisy >= 0).all()
    assert noisy[0] == 0


def test_the_bound_of_an_arm_counts_its_rows() -> None:
    rows_alone, num_documents = np.array([0, 1, 0]), 6 * 512
    bound = {
        name: bench_blend.bound_s(BlendOptions(mode="selective", selector=name, ratio=0.25), 24, rows_alone)
        for name in ("first-k", "query", "hkvd")
    } | {"narrow": bench_blend.bound_s(bench_blend.selective("hkvd", 0.1), 24, rows_alone)}
    assert bound["first-k"] == num_documents / 4 + 64
    assert bound["query"] == num_documents / 4 + 2 * 64
    # All are computed in the second layer, as its share of 1.25 is cut to 1, so none is compared before; the mean over
    # the layers above the first is the ratio.
    assert bound["hkvd"] == pytest.approx((num_documents + 23 * num_documents / 4) / 24 + 64, rel=0.01)
    assert bound["narrow"] == pytest.approx((1.5 * num_documents + 23 * num_documents / 10) / 24 + 64, rel=0.01)
    assert bench_blend.bound_s(bench_blend.REUSE, 24, rows_alone) == 64


def test_peers_read_the_same_documents_in_other_orders() -> None:
    (one,), (other,) = (make_prompts(WORKLOADS["D"], seed) for seed in (1, 2))
    assert len(one) == 32 + 6 * 512 + 64
    assert one[:32] == other[:32]
    documents = [{tuple(ids[at : at + 512]) for at in range(32, 32 + 6 * 512, 512)} for ids in (one, other)]
    assert documents[0] == documents[1]
    assert one != other
