"""Every arm computes the attention that it is timed for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention.arms import (
    TOLERANCE,
    check,
    contiguous,
    error_of,
    gathered,
    ours,
    reference_rows,
    virtual_queries,
)
from attention.optional_arms import contiguous_by_head
from attention.scenes import Heads, Scene, documents_scene, prefix_scene, unshared
from attention.timing import Arm, interleaved

HEADS = Heads(4, 2, 16)


def options(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    return {"heads": HEADS, "dtype": dtype, "device": torch.device("cpu"), "page_size": 16} | changes


def all_arms(scene: Scene) -> list[Arm]:
    shares = [ours(scene, share, share) for share in ("auto", "always", "never")]
    named = [ours(scene, "torch", backend="torch")]
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
