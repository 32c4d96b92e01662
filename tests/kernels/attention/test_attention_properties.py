"""Properties of `attend` over random pools and tables: every arrangement of the work gives the oracle's
answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels.attention import (
    PageRef,
    PageTable,
    QueryRows,
    RopeTable,
    mark_written,
    new_slot_position,
)
from mneme.kernels.torch import backend as torch_backend
from tests.budget import examples
from tests.kernels.cases import CPU_BACKENDS, Scene, assert_close, make_scene, needs_native, scenes

bounded = settings(max_examples=examples(60, at_length=150))
each_backend = pytest.mark.parametrize("backend", CPU_BACKENDS)


@each_backend
@given(scene=scenes())
@pytest.mark.at_length
@bounded
def test_sharing_always_never_and_by_cost_equal_the_reference(backend: str, scene: Scene) -> None:
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in ("always", "never", "auto"):
        assert_close(scene.attend(scene.plan(share=share), backend=backend), wanted)


@pytest.mark.parametrize(
    ("backend", "dtype", "kv_dtype"),
    [
        ("torch", torch.bfloat16, None),
        ("torch", torch.float16, None),
        ("torch", torch.float32, torch.int8),
        ("torch", torch.bfloat16, torch.int8),
        pytest.param("native", torch.bfloat16, None, marks=needs_native),
        pytest.param("native", torch.float32, torch.int8, marks=needs_native),
        pytest.param("native", torch.bfloat16, torch.int8, marks=needs_native),
    ],
)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_smaller_types_equal_the_reference(
    backend: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, data: Any
) -> None:
    scene = data.draw(scenes(dtype=dtype, kv_dtype=kv_dtype))
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in ("always", "never"):
        assert_close(scene.attend(scene.plan(share=share), backend=backend), wanted, backend)


@given(scene=scenes(most_rows=40))
@pytest.mark.at_length
@bounded
def test_torch_computes_few_rows_at_a_time_where_they_have_many_keys(scene: Scene) -> None:
    wanted = scene.attend(scene.plan(), backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "_MOST_SCORES", 64)
        assert_close(scene.attend(scene.plan(), backend="torch"), wanted)


@each_backend
@pytest.mark.parametrize(
    ("num_sequences", "num_shared", "num_private", "num_rows"),
    [(24, 8, 8, 1), (2, 40, 5, 80)],
    ids=["decode", "prefill"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes_equal_the_reference(
    num_sequences: int, num_shared: int, num_private: int, num_rows: int, dtype: torch.dtype, backend: str
) -> None:
    """More pieces, keys and rows than one tile holds, with the sizes as they are; 64 dimensions, pages of 32."""
    first_private = num_shared * 32
    length = first_private + num_private * 32 - 5
    slot_position = new_slot_position((num_shared + num_sequences * num_private) * 32)
    slot_position[:first_private] = torch.arange(first_private, dtype=torch.int32)
    tables = []
    for own in np.random.default_rng(1).permutation(num_sequences * num_private).reshape(num_sequences, -1):
        pages = own + num_shared
        slots = (torch.from_numpy(pages)[:, None] * 32 + torch.arange(32)).flatten()[: length - first_private]
        mark_written(slot_position, slots, torch.arange(first_private, length))
        tables.append([PageRef(int(page)) for page in (*range(num_shared), *pages)])
    rows = QueryRows(
        np.repeat(np.arange(num_sequences), num_rows), np.tile(np.arange(length - num_rows, length), num_sequences)
    )
    rope = RopeTable.from_theta(10_000.0, 64, 2048)
    sizes: dict[str, Any] = {"page_size": 32, "head_dim": 64, "num_kv_heads": 4, "slot_position": slot_position}
    scene = make_scene(np.random.default_rng(0), tables, rows, rope=rope, dtype=dtype, **sizes)
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in ("always", "never"):
        assert_close(scene.attend(scene.plan(share=share), backend=backend), wanted, backend)


@each_backend
@given(scene=scenes(), data=st.data())
@pytest.mark.at_length
@bounded
def test_a_row_does_not_depend_on_the_other_rows(backend: str, scene: Scene, data: Any) -> None:
    plan = scene.plan()
    out, lse = scene.attend(plan, backend=backend)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=plan.num_rows, max_size=plan.num_rows)), bool)
    fewer = plan.with_rows(QueryRows(plan.sequence[kept], plan.position[kept]))
    assert_close(scene.attend(fewer, scene.q[kept], backend=backend), (out[kept], lse[kept]))


@each_backend
@given(scene=scenes(), data=st.data())
@pytest.mark.at_length
@bounded
def test_edited_plans_equal_fresh_ones(backend: str, scene: Scene, data: Any) -> None:
    """New pages and other rows, in any order, against a plan built from the final tables and rows."""
    plan = scene.plan(share=data.draw(st.sampled_from(["always", "never", "auto"])))
    spare = iter(range(24, 32))
    scene.attend(plan, backend=backend)  # what the plan keeps from this step must not leak into the next
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()) and plan.num_sequences:
            sequence, page = np.array([data.draw(st.integers(0, plan.num_sequences - 1))]), np.array([next(spare)])
            plan = plan.append_new_pages(sequence, page) or plan
        else:
            step = data.draw(st.sampled_from([1, 2, -1]))
            plan = plan.with_rows(QueryRows(plan.sequence[::step], plan.position[::step] + 1))
    fresh = scene.plan(tables=list(plan.page_tables), rows=plan.rows, share=plan.share)
    q = torch.randn(plan.num_rows, plan.num_q_heads, plan.head_dim, generator=torch.Generator().manual_seed(1))
    wanted = scene.attend(fresh, q, backend="reference")
    assert_close(scene.attend(plan, q, backend=backend), wanted)
    assert_close(scene.attend(fresh, q, backend=backend), wanted)


@given(scene=scenes(), seed=st.integers(0, 99))
@settings(max_examples=examples(40))
def test_the_order_of_references_does_not_matter(scene: Scene, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shuffled = []
    for refs in scene.tables:
        table = PageTable.from_refs(refs)
        order = rng.permutation(len(table))
        shuffled.append(PageTable(table.page_ids[order], table.deltas[order], table.masks[order]))
    assert_close(scene.attend(scene.plan(tables=shuffled)), scene.attend(scene.plan(), backend="reference"))
