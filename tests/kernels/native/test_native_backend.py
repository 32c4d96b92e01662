"""The compiled attention, built for several kinds of CPU, against the oracle; and what chooses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels.arguments import quantized
from mneme.kernels.attention import PageRef, QueryRows, RopeTable
from mneme.kernels.native import library as native_library
from tests.budget import examples, rarer
from tests.kernels.cases import Scene, assert_close, make_scene, needs_native, scenes
from tests.kernels.native.native_variants import VARIANTS, use_variant

pytestmark = needs_native

DTYPES = (torch.float32, torch.bfloat16)
Kinds = tuple[torch.dtype, torch.dtype | None]
each_kind = pytest.mark.parametrize("kinds", [(dtype, kv) for dtype in DTYPES for kv in (None, torch.int8)])  # of q, KV
# Whole vectors and parts of them, pairs and an odd end; few query heads per key and more than a vector has lanes.
HEAD_DIMS = (5, 6, 16, 20, 48, 64, 80, 96, 128, 256)
HEADS = ((1, 1), (2, 2), (1, 3), (2, 4), (1, 5), (1, 8), (1, 40))


@pytest.fixture(scope="module", params=(*VARIANTS, *rarer(["native -mno-avx512bf16"])))
def _build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with use_variant(request.param, tmp_path_factory):
        yield


each_build = pytest.mark.usefixtures("_build")


@each_build
@each_kind
@given(data=st.data())
@pytest.mark.at_length
@settings(max_examples=examples(10, at_length=20))
def test_any_shape_equals_the_reference(kinds: Kinds, data: Any) -> None:
    scene = data.draw(scenes(*kinds, most_rows=40, heads=HEADS, head_dims=HEAD_DIMS))
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in ("always", "never"):
        assert_close(scene.attend(scene.plan(share=share), backend="native"), wanted)


def long_scene(
    dtype: torch.dtype, num_rows: int, head_dim: int = 64, kv_dtype: torch.dtype | None = None, **options: Any
) -> Scene:
    """Three sequences that share 20 pages of 32 and have 3 of their own, the last in part; rows at their ends."""
    slot_position = torch.cat((torch.arange(640), *[torch.arange(640, 736)] * 3)).int()
    for sequence in range(3):
        slot_position[640 + 96 * sequence + 80 :][:16] = 2**30
    tables = [[PageRef(page) for page in (*range(20), *range(20 + 3 * i, 23 + 3 * i))] for i in range(3)]
    rows = QueryRows(np.repeat(np.arange(3), num_rows), np.tile(np.arange(720 - num_rows, 720), 3))
    options = {"softmax_scale": head_dim**-0.5} | options
    rope = RopeTable.from_theta(10_000.0, head_dim, 1024)
    sizes: dict[str, Any] = {"page_size": 32, "head_dim": head_dim, "num_groups": 2, "slot_position": slot_position}
    types: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype}
    return make_scene(np.random.default_rng(0), tables, rows, rope=rope, options=options, **types, **sizes)


@each_build
@each_kind
@pytest.mark.parametrize("num_rows", [1, 150])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 2.0}])
def test_long_contexts_equal_the_reference(kinds: Kinds, num_rows: int, options: dict[str, Any]) -> None:
    scene = long_scene(kinds[0], num_rows, kv_dtype=kinds[1], **options)
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in ("always", "never"):
        assert_close(scene.attend(scene.plan(share=share), backend="native"), wanted)


@each_build
@each_kind
@pytest.mark.parametrize(("num_rows", "parts"), [(1, (1, 2)), (40, (4, 17, 36, 40, 77))])
def test_without_sharing_a_row_is_the_same_bits_in_every_batch(
    kinds: Kinds, num_rows: int, parts: tuple[int, ...]
) -> None:
    """As one row of its sequence, or among four there and more: from eight query heads on it is another product."""
    scene = long_scene(kinds[0], num_rows, kv_dtype=kinds[1])
    sequences, positions = scene.rows.arrays()
    together = scene.attend(scene.plan(share="never"), backend="native")
    for size in parts:
        for begin in range(0, len(sequences) - size + 1, size):
            part = slice(begin, begin + size)
            if min(np.unique(sequences[part], return_counts=True)[1]) < min(num_rows, 4):
                continue
            plan = scene.plan(rows=QueryRows(sequences[part], positions[part]), share="never")
            alone = scene.attend(plan, scene.q[part], backend="native")
            assert torch.equal(alone[0], together[0][part])
            assert torch.equal(alone[1], together[1][part])


@each_build
@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("head_dim", [64, 8])
def test_scores_far_apart_neither_overflow_nor_vanish(num_rows: int, head_dim: int) -> None:
    """Scores of some thousands: one key takes all the weight, and the lse is its score."""
    scene = long_scene(torch.float32, num_rows, head_dim, softmax_scale=300.0)
    out, lse = scene.attend(scene.plan(), backend="native")
    wanted = scene.attend(scene.plan(), backend="reference")
    assert lse.abs().max() > 1000
    torch.testing.assert_close(lse, wanted[1], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(out, wanted[0], rtol=0.0, atol=2e-2)  # scores of 5000 are rounded to 5e-4


@each_build
@each_kind
@pytest.mark.parametrize("num_rows", [1, 12])
def test_broken_numbers_stay_with_the_rows_that_see_them(kinds: Kinds, num_rows: int) -> None:
    """A key and a value behind all rows but the last; a value that one sequence's mask hides."""
    scene = long_scene(kinds[0], num_rows, kv_dtype=kinds[1])
    for pages, page, offset, number in (
        (scene.k_pages, 25, 14, torch.nan), (scene.v_pages, 25, 15, torch.inf),  # sequence 1, positions 718 and 719
        (scene.v_pages, 7, 3, torch.nan),
    ):  # fmt: skip
        row = torch.full((64,), number)
        pages[:, page, offset] = quantized(row) if pages.dtype is torch.int8 else row.to(pages.dtype)
    tables = [list(table) for table in scene.tables]
    tables[0][7] = PageRef(7, 0, ~(1 << 3))
    scene = replace(scene, tables=tables)
    wanted = scene.attend(scene.plan(), backend="reference")
    assert wanted[0][-1].isnan().all()
    for share in ("always", "never"):
        out, lse = scene.attend(scene.plan(share=share), backend="native")
        assert torch.equal(out.isfinite(), wanted[0].isfinite())
        assert torch.equal(lse.isfinite(), wanted[1].isfinite())
        fine = wanted[0].isfinite().all(-1)
        assert_close((out[fine], lse[fine]), (wanted[0][fine], wanted[1][fine]))


@pytest.mark.parametrize("num_threads", [2, 5])
@given(scene=scenes(most_rows=60, heads=HEADS, head_dims=(16, 64)))
@settings(max_examples=examples(40))
def test_the_number_of_threads_changes_nothing(num_threads: int, scene: Scene) -> None:
    for share in ("always", "never"):
        alone = scene.attend(scene.plan(share=share), backend="native")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: num_threads)
            together = scene.attend(scene.plan(share=share), backend="native")
        assert torch.equal(alone[0], together[0])
        assert torch.equal(alone[1], together[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_be_slices_of_a_joint_projection(dtype: torch.dtype) -> None:
    scene = long_scene(dtype, 3)
    joint = torch.randn(len(scene.q), 8, 64).to(dtype)
    joint[:, :4] = scene.q
    plan = scene.plan()
    sliced = scene.attend(plan, joint[:, :4], backend="native")
    assert torch.equal(sliced[0], scene.attend(plan, backend="native")[0])
    spread = torch.stack((scene.q, scene.q), 2)[:, :, 0]  # heads apart
    assert torch.equal(scene.attend(plan, spread, backend="native")[0], sliced[0])


def test_auto_is_native_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = long_scene(torch.bfloat16, 20)
    plan = scene.plan()
    chosen = scene.attend(plan)[0]
    assert torch.equal(chosen, scene.attend(plan, backend="native")[0])
    assert not torch.equal(chosen, scene.attend(plan, backend="torch")[0])
    monkeypatch.setattr(native_library, "library", lambda: None)
    assert torch.equal(scene.attend(plan)[0], scene.attend(plan, backend="torch")[0])
    with pytest.raises(ValueError, match=r"^backend: the compiled kernels are switched off"):
        scene.attend(plan, backend="native")
    monkeypatch.undo()
    half = long_scene(torch.float16, 2)
    assert torch.equal(half.attend(half.plan())[0], half.attend(half.plan(), backend="torch")[0])
