"""One plan of the compiled attention in several hands: blocks of a row on several threads, several callers, options."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from mneme.kernels.attention import PageRef, QueryRows
from tests.kernels.cases import Scene, assert_close, make_scene, needs_native

pytestmark = needs_native


def two_documents(num_rows: int, *, num_groups: int) -> Scene:
    """Two sequences that use one document of 6400 tokens twice each and see 20 tokens and more of its second use."""
    tables = [[PageRef(page, delta) for delta in (0, 7000) for page in range(100)] for _ in range(2)]
    rows = QueryRows(np.repeat([0, 1], num_rows), np.tile(np.arange(num_rows) + 7020, 2))
    return make_scene(
        np.random.default_rng(0), tables, rows, page_size=64, num_kv_heads=1, num_groups=num_groups, head_dim=64,
        slot_position=torch.arange(100 * 64, dtype=torch.int32),
    )  # fmt: skip


def test_a_row_that_stands_twice_in_a_piece_is_in_one_threads_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are in neighbouring blocks of 32 rows; side by side, the quick one would be done first."""
    scene = two_documents(32, num_groups=8)
    plan = scene.plan(share="always")
    shared_rows = plan.work.row[: plan.work.row_begin[plan.work.num_shared]]
    assert len(shared_rows) == 2 * len(np.unique(shared_rows))
    assert len(shared_rows) * scene.num_q_heads == 4 * 256
    alone = scene.attend(plan, backend="native")
    assert_close(alone, scene.attend(plan, backend="reference"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for _ in range(10):
        together = scene.attend(plan, backend="native")
        assert torch.equal(together[0], alone[0])
        assert torch.equal(together[1], alone[1])


def test_two_threads_may_attend_by_one_plan() -> None:
    """The interpreter's lock is given back during a call."""
    scene = two_documents(32, num_groups=8)
    plan = scene.plan(share="always")
    queries = (scene.q, -scene.q)
    alone = [scene.attend(plan, q, backend="native")[0] for q in queries]

    def attend_often(number: int) -> list[Tensor]:
        return [scene.attend(plan, queries[number], backend="native")[0] for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        for wanted, found in zip(alone, pool.map(attend_often, range(2)), strict=True):
            assert all(torch.equal(out, wanted) for out in found)
