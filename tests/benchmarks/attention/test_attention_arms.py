"""Every arm computes the attention that it is timed for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention import optional_arms, rotation
from attention.arms import TOLERANCE, backends, check, contiguous, error_of, gathered, ours, reference_rows
from attention.documents import virtual_queries
from attention.optional_arms import contiguous_by_head
from attention.regret import Point, same_work, scene_of
from attention.scenes import Heads, Scene, contiguous_kv, documents_scene, layers_for, prefix_scene, unshared
from attention.timing import Arm, interleaved

from mneme.kernels.work import Share

HEADS = Heads(4, 2, 16)


def options(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    return {"heads": HEADS, "dtype": dtype, "device": torch.device("cpu"), "page_size": 16} | changes


def all_arms(scene: Scene) -> list[Arm]:
    shares = [ours(scene, share, share) for share in ("auto", "always", "never")]
    named = [ours(scene, name, backend=name) for name in backends(scene)]
    return [*shares, *named, ours(unshared(scene), "unshared", "never"), *contiguous(scene)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3])
def test_arms_over_a_prefix(dtype: torch.dtype, rows: int) -> None:
    scene = prefix_scene(3, 32, 16, rows_per_sequence=rows, **options(dtype))
    wanted = reference_rows(scene)
    by_head = contiguous_by_head(scene, is_dry=True)
    assert by_head is not None
    for arm in (*all_arms(scene), *gathered(scene), by_head):
        check(arm, wanted, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_arms_over_documents_at_different_positions(dtype: torch.dtype) -> None:
    scene = documents_scene([[0, 1], [2, 0], [1, 2]], 3, 32, 16, **options(dtype))
    wanted = reference_rows(scene)
    for arm in (*all_arms(scene), virtual_queries(scene), virtual_queries(scene, "always")):
        check(arm, wanted, dtype)


@pytest.mark.parametrize(("deltas", "num_runs"), [("pages", 34), ("documents", 3), ("shared", 1)])
def test_arms_with_random_deltas(deltas: str, num_runs: int) -> None:
    zero = prefix_scene(2, 0, 34 * 32, **options(room=4096, page_size=32))
    point = rotation.Point(deltas, "float32", 2, 34 * 32)
    turned = replace(zero, tables=rotation.with_random_deltas(zero, point, np.random.default_rng(0)))
    assert [1 + np.count_nonzero(np.diff(table.deltas)) for table in turned.tables] == [num_runs] * 2
    for scene in (zero, turned):
        check(ours(scene), reference_rows(scene), torch.float32)


def test_a_wrong_arm_is_not_timed() -> None:
    scene = prefix_scene(2, 32, 16, **options())
    wrong = Arm("wrong", lambda layer: scene.attend(layer, scene.plan()) * 1.01)
    with pytest.raises(AssertionError, match="wrong: relative error"):
        check(wrong, reference_rows(scene), torch.float32)
    nan = Arm("nan", lambda layer: scene.attend(layer, scene.plan()) * torch.nan)
    with pytest.raises(AssertionError, match="nan: relative error"):
        check(nan, reference_rows(scene), torch.float32)


def test_the_check_looks_at_several_sequences() -> None:
    scene = prefix_scene(5, 32, 16, **options())
    wanted = reference_rows(scene)
    assert sorted(wanted) == [0, 2, 4]
    out = scene.attend(0, scene.plan())
    assert error_of(out, wanted) < TOLERANCE[torch.float32]
    out[2] = 0
    assert error_of(out, wanted) == pytest.approx(1.0)


def test_layers_hold_the_same_numbers_in_other_memory() -> None:
    scene = prefix_scene(2, 32, 16, **options(cache_bytes=8192))
    assert len(scene.layers) == layers_for(4 * 16 * HEADS.kv * HEADS.dim * 4 * 2, 8192) == 2
    (first, _), (second, _) = scene.layers
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_bytes_of_a_scene() -> None:
    scene = prefix_scene(3, 32, 16, **options())
    assert scene.token_bytes == 2 * HEADS.kv * HEADS.dim * 4
    assert scene.bytes_apart == 3 * 48 * scene.token_bytes
    assert scene.bytes_once == (32 + 3 * 16) * scene.token_bytes
    copies = unshared(scene)
    assert copies.bytes_once == copies.bytes_apart == scene.bytes_apart
    for left, right in zip(contiguous_kv(scene), contiguous_kv(copies), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("share", "tokens", "rows"), [("always", 64 + 4 * 32, 4 + 4), ("never", 4 * 96, 4)])
def test_a_plan_reads_what_chunk_attentions_equations_say(share: Share, tokens: int, rows: int) -> None:
    """Eq. 3 with the whole shared prefix as one chunk, as a segment is; Eq. 4 without sharing."""
    work = prefix_scene(4, 64, 32, **options(heads=Heads(4, 4, 16))).plan(share).work
    assert int((work.page_end - work.page_begin).sum()) * 16 == tokens
    assert int(work.row_begin[-1]) == rows


@pytest.mark.parametrize("kind", ["prefix", "tree", "documents"])
def test_plans_with_the_same_work_are_told_apart_from_others(kind: str) -> None:
    scene = scene_of(Point(kind, "float32", HEADS, 5, 32, 16), options())
    check(ours(scene, "always", "always"), reference_rows(scene), torch.float32)
    assert same_work(scene.plan("always").work, scene.plan("always").work)
    assert not same_work(scene.plan("always").work, scene.plan("never").work)
    assert not same_work(scene.plan("never").work, unshared(scene).plan("never").work)


class PlayedWrapper:
    """FlashInfer's decode or cascade wrapper, in plain torch: what it is planned with says which KV a query sees."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def plan(self, *arrays: Any, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        *tables, self._num_q, self._num_kv, self._dim, self._page_size = arrays
        if len(tables) == 3:  # one level, a table for each query
            tables = [[table] for table in (torch.arange(len(tables[0])), *tables)]
        self._levels = list(zip(*tables, strict=True))

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.stack([self._attend(index, row, *pages) for index, row in enumerate(q)])

    def _attend(self, index: int, q: torch.Tensor, *pages: torch.Tensor) -> torch.Tensor:
        seen = []
        for queries, begins, ids, last in self._levels:
            table = int(torch.searchsorted(queries, index, right=True)) - 1
            assert int(last[table]) == self._page_size
            seen.append(ids[begins[table] : begins[table + 1]])
        # [pages, Hkv, page size, D] -> [Hkv, L, D]
        keys, values = (part[torch.cat(seen)].transpose(0, 1).flatten(1, 2) for part in pages)
        assert keys.shape[::2] == (self._num_kv, self._dim)
        return F.scaled_dot_product_attention(q[:, None], keys, values, enable_gqa=True)[:, 0]


def test_flashinfers_arms_plan_what_a_scene_says(monkeypatch: pytest.MonkeyPatch) -> None:
    played = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=PlayedWrapper, MultiLevelCascadeAttentionWrapper=PlayedWrapper
    )
    monkeypatch.setattr(optional_arms, "flashinfer", lambda: played)
    scene = prefix_scene(3, 64, 32, **options(torch.bfloat16))
    wanted = reference_rows(scene)
    num_shared_pages = 64 // scene.page_size
    for arm in (optional_arms.flashinfer_decode(scene), optional_arms.flashinfer_cascade(scene, num_shared_pages)):
        assert arm is not None
        check(arm, wanted, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 3])
def test_arms_on_a_gpu(rows: int) -> None:
    cuda = torch.device("cuda")
    heads = Heads(8, 2, 64)
    scene = prefix_scene(3, 64, 32, **options(torch.float16, device=cuda, heads=heads), rows_per_sequence=rows)
    by_head = contiguous_by_head(scene)
    assert by_head is not None
    arms = [*all_arms(scene), *gathered(scene), by_head]
    wanted = reference_rows(scene)
    for arm in arms:
        check(arm, wanted, torch.float16)
    times = interleaved(arms, cuda, budget_s=0.1)
    assert set(times.launched.values()) <= {"graph", "eager"}
    assert times.launched["gather/batched"] == "graph"
    assert all(times.ms(arm.name) > 0 for arm in arms)
    for arm in arms:  # what was captured left the arms as they were
        check(arm, wanted, torch.float16)
