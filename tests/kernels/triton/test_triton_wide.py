"""Wide tiles in a launch of their own against the oracle: interpreted, of a few rows and of any page size and type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mneme.kernels.arguments import quantized
from mneme.kernels.attention import PageRef, QueryRows
from mneme.kernels.triton.configs import WideConfig
from tests.budget import examples, rarer
from tests.kernels.cases import Scene, assert_close, scenes
from tests.kernels.triton.test_triton_backend import (
    SHARES,
    attend_triton,
    dtypes,
    few,
    forest_scene,
    on,
    triton_backend,
    triton_step,
    triton_tiles,
)


@pytest.fixture(autouse=True)
def small_wide_tiles(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """All tiles of more than 16 rows times heads stand apart; yields how many of each launch did."""
    launched: list[int] = []
    given_up: list[str] = []
    monkeypatch.setattr(triton_backend, "_given_up", given_up)
    if triton_device.type == "cpu":  # a device has the sizes that its rule gives
        monkeypatch.setattr(triton_backend, "wide_config_of", lambda **_: WideConfig(32, 4, 2, None))

    def cut(*arguments: object) -> object:
        tiles = real(*arguments)
        launched.append(tiles.num_apart)
        return tiles

    real = triton_backend.step_of.__globals__["cut"]
    monkeypatch.setitem(triton_backend.step_of.__globals__, "cut", cut)
    yield launched
    assert given_up in ([], ["expected"])


@dtypes
@given(data=st.data())
@pytest.mark.at_length
@settings(few, max_examples=examples(2, at_length=3))
def test_wide_tiles_equal_the_reference(
    triton_device: torch.device, small_wide_tiles: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    """With masks of rows, windows, a cap, parts of heads that rotate, deltas, free slots that hold NaN."""
    scene = data.draw(scenes(dtype=dtype, most_rows=40, head_dims=(16,), heads=((1, 1), (1, 2), (2, 3))))
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in SHARES:
        assert_close(attend_triton(on(triton_device, scene), scene.plan(share=share)), wanted)


@given(scene=scenes(most_rows=40, head_dims=(16,)), share=st.sampled_from(SHARES))
@pytest.mark.at_length
@settings(few, max_examples=examples(2, at_length=3))
def test_in_many_parts_too(triton_device: torch.device, scene: Scene, share: str) -> None:
    wanted = scene.attend(scene.plan(), backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tiles, "_SHORTEST_RANGE_TOKENS", 1)
        patch.setattr(triton_tiles, "_TOKENS_PER_PROGRAM", 0)
        patch.setattr(triton_tiles, "_TOKENS_PER_MERGE", 0)
        patch.setattr(triton_backend, "_INTERPRETED_PROGRAMS", 64)
        assert_close(attend_triton(on(triton_device, scene), scene.plan(share=share)), wanted)


def many_rows(dtype: torch.dtype, head_dim: int, rotary_dim: int | None = None) -> Scene:
    """A prompt's last rows and single rows over a prefix of pages of 64, at several deltas, under masks."""
    scene = forest_scene(dtype, head_dim, 64, 4, rotary_dim)
    sequence = np.array([0] + [1] * 40 + [2])
    position = np.concatenate(([320], np.arange(280, 320), [320]))
    rows = QueryRows(sequence, position)
    generator = torch.Generator().manual_seed(1)
    return replace(scene, rows=rows, q=torch.randn(42, 8, head_dim, generator=generator).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rotary_dim"), [(torch.bfloat16, 128, None), *rarer([(torch.float16, 64, 16)])], ids=str
)
def test_heads_of_models_in_pages_of_64(
    triton_device: torch.device, small_wide_tiles: list[int], dtype: torch.dtype, head_dim: int, rotary_dim: int | None
) -> None:
    scene = many_rows(dtype, head_dim, rotary_dim)
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in SHARES:
        assert_close(attend_triton(on(triton_device, scene), scene.plan(share=share)), wanted)
        assert small_wide_tiles[-1] > 0


def test_values_that_are_not_finite_reach_the_rows_that_see_them_only(triton_device: torch.device) -> None:
    scene = many_rows(torch.bfloat16, 64)
    values = scene.v_pages.clone()
    values[:, 5, 40:] = torch.nan  # from position 296 on; the first 16 of the prompt's rows stand before it
    scene = replace(scene, v_pages=values)
    wanted, _ = scene.attend(scene.plan(), backend="reference")
    got, _ = attend_triton(on(triton_device, scene), scene.plan())
    is_finite = torch.isfinite(wanted).all(-1).all(-1)
    assert is_finite.sum() == 18
    assert torch.equal(torch.isfinite(got).all(-1).all(-1), is_finite)
    torch.testing.assert_close(got[is_finite].float(), wanted[is_finite].float(), atol=3e-2, rtol=3e-2)


def test_rows_of_int8_share_the_launch_of_the_others(triton_device: torch.device) -> None:
    """Staged and not; what knows the pool's type says so before there is a tensor."""
    scene = many_rows(torch.bfloat16, 64)
    scene = replace(scene, k_pages=quantized(scene.k_pages), v_pages=quantized(scene.v_pages))
    placed, device = on(triton_device, scene), torch.zeros(0, device=triton_device).device
    plan, wanted = scene.plan(share="always"), scene.attend(scene.plan(), backend="reference")
    kinds = {"dtype": torch.bfloat16, "kv_dtype": torch.int8}
    assert all(launch.wide is None for launch in triton_backend.launches_of(plan, device, **kinds))
    assert_close(attend_triton(placed, plan), wanted)
    with triton_step.OwnStep(device):
        triton_backend.reserve(plan, placed.slot_position, **kinds)
        launch = triton_backend.stage(plan, placed.slot_position, num_rope_positions=None, **kinds)
        assert launch is not None
        assert launch.config.wide_m > 0
        assert_close(attend_triton(placed, plan), wanted)


def test_a_staged_step_is_launched_by_what_does_not_depend_on_its_work(triton_device: torch.device) -> None:
    """A graph that was captured with wide tiles is replayed with others, or with none."""
    scene = many_rows(torch.bfloat16, 64)
    placed, device = on(triton_device, scene), torch.zeros(0, device=triton_device).device
    plan, without = (
        scene.plan(share="always"),
        scene.plan(tables=[[PageRef(5)]] * 42, rows=QueryRows(range(42), [290] * 42)),
    )
    with triton_step.OwnStep(device):
        launch = triton_backend.stage(plan, placed.slot_position, torch.bfloat16, scene.rope.num_positions)
        assert launch.wide is not None
        assert launch == triton_backend.launches_of(plan, device, torch.bfloat16)[-1]
        assert_close(attend_triton(placed, plan), scene.attend(plan, backend="reference"))
        triton_backend.stage(without, placed.slot_position, torch.bfloat16, scene.rope.num_positions, launch)
        assert_close(attend_triton(placed, without), scene.attend(without, backend="reference"))


def test_a_kernel_that_does_not_compile_is_given_up_for_the_other(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.compiler.errors import CompilationError

    class Broken:
        def __getitem__(self, grid: object) -> object:
            raise CompilationError("", None, "no room")

    monkeypatch.setattr(triton_backend, "wide_kernel", Broken())
    scene = many_rows(torch.bfloat16, 64)
    wanted = scene.attend(scene.plan(), backend="reference")
    plan = scene.plan()
    for _ in range(2):
        assert_close(attend_triton(on(triton_device, scene), plan), wanted)
    assert caplog.text.count("wide tiles share the launch of the others") == 1
    triton_backend._given_up[:] = ["expected"]
