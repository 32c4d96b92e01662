"""Long prompts by a library: what it gets, and what is merged. In cuDNN's place stand plain products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mneme.kernels.arguments import AttendArgs
from mneme.kernels.attention import PageRef, QueryRows, RopeTable, new_slot_position
from mneme.kernels.long import backend as long
from mneme.kernels.long.backend import Library
from mneme.kernels.native import backend as native_backend
from mneme.kernels.torch.backend import attend_torch
from tests.kernels.cases import Scene, assert_close, make_scene, needs_native

PAGE = 4


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = q.double() @ k.mT * scale
    if is_causal:
        assert q.shape[2] == k.shape[2]
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1).float()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Small sizes; rows, keys and causality of what cuDNN is asked."""
    asked: list[tuple[int, int, bool]] = []

    def note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        asked.append((q.shape[2], k.shape[2], bool(options["is_causal"])))
        return plain(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(long, "_given_up", set())
    monkeypatch.setattr(long, "CUDNN", Library("cuDNN", note, 6, 8, row_step=4, key_step=8))
    return asked


def prompt(
    num_rows: int,
    length: int,
    *,
    shared: int = 0,
    scattered: bool = False,
    hole: bool = False,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Scene:
    """A prompt's last rows beside a decode that shares its first pages; free slots hold NaN."""
    num_pages = -(-length // PAGE)
    ids = np.random.default_rng(2).permutation(32)[:num_pages] if scattered else np.arange(3, 3 + num_pages)
    slot_position = new_slot_position(40 * PAGE)
    for index, page in enumerate(ids.tolist()):
        positions = torch.arange(index * PAGE, min((index + 1) * PAGE, length), dtype=torch.int32)
        slot_position[page * PAGE : page * PAGE + len(positions)] = positions
    if hole:
        slot_position[int(ids[1]) * PAGE + 1] = 2**30
    slot_position[39 * PAGE] = shared * PAGE
    pages = [PageRef(int(page)) for page in ids]
    tables = [pages, [*pages[:shared], PageRef(39)]]
    rows = QueryRows([0] * num_rows + [1], [*range(length - num_rows, length), shared * PAGE])
    rope = RopeTable.from_theta(100.0, 8, 256)
    return make_scene(
        np.random.default_rng(1), tables, rows,
        page_size=PAGE, head_dim=16, rope=rope, slot_position=slot_position, dtype=dtype, kv_dtype=kv_dtype,
    )  # fmt: skip


def check(scene: Scene, library: Library | None = None, rest: Any = attend_torch) -> None:
    plan = scene.plan()
    pool = (scene.k_pages, scene.v_pages, scene.slot_position)
    wanted = scene.attend(plan, backend="reference")
    options = {"window": None, "soft_cap": None} | scene.options
    for _ in range(2):  # two layers
        args = AttendArgs(scene.q, *pool, scene.rope, plan, **options)
        assert_close(long.attend_long(args, library or long.CUDNN, rest=rest), wanted)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "length", "shared", "wanted"),
    [
        (10, 10, 0, [(12, 12, True)]),
        (12, 20, 0, [(12, 12, True), (12, 8, False)]),
        (7, 98, 0, [(12, 12, True), (8, 64, False), (8, 16, False), (8, 8, False)]),
        (9, 70, 5, [(12, 12, True), (12, 32, False), (12, 8, False)]),  # but the five pages that a decode reads too
    ],
)
def test_a_prompt_goes_by_a_square_and_pieces_of_few_sizes(
    calls: list[tuple[int, int, bool]],
    num_rows: int,
    length: int,
    shared: int,
    wanted: list[tuple[int, int, bool]],
    scattered: bool,
) -> None:
    check(prompt(num_rows, length, shared=shared, scattered=scattered))
    assert calls[: len(calls) // 2] == wanted


def test_pages_that_do_not_hold_what_their_places_say_are_read_by_the_rest(calls: list[tuple[int, int, bool]]) -> None:
    check(prompt(12, 40, hole=True))
    assert calls


@pytest.mark.parametrize("change", ["delta", "mask", "gap", "short"])
def test_what_is_moved_masked_or_short_is_not_its_kind(change: str, calls: list[tuple[int, int, bool]]) -> None:
    scene = prompt(12, 40)
    last = scene.tables[0][-1]
    changed = {
        "delta": [*scene.tables[0][:-1], last._replace(delta=5)],
        "mask": [*scene.tables[0][:-1], last._replace(mask=0b0111)],
        "gap": scene.tables[0][1:],
        "short": scene.tables[0],
    }[change]
    rows = QueryRows([0] * 3, [37, 38, 39]) if change == "short" else scene.rows
    plan = scene.plan(tables=[changed, scene.tables[1]], rows=rows)
    replace(scene, q=scene.q[: plan.num_rows]).attend(plan)
    assert not calls


def test_where_it_fails_the_rest_does_all_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise RuntimeError("No execution plans support the graph.")

    monkeypatch.setattr(long, "CUDNN", long.CUDNN._replace(sdpa=fail))
    check(prompt(12, 40))
    assert "cuDNN attends to no long prompt from now on" in caplog.text


def test_a_window_is_left_to_the_rest(calls: list[tuple[int, int, bool]]) -> None:
    scene = prompt(12, 40)
    check(replace(scene, options=scene.options | {"window": 5}))
    assert not calls


@needs_native
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "length", "shared"),
    [
        (8, 8, 0),
        (9, 9, 0),
        (31, 32, 0),
        (32, 33, 0),
        (33, 97, 0),
        (100, 101, 0),
        (8, 120, 3),
        (64, 128, 5),
        (65, 127, 1),
    ],
)
def test_on_a_cpu_torch_attends_to_prompts(
    num_rows: int, length: int, shared: int, scattered: bool, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Rows and keys around the sizes of its tiles, and a decode beside them, which has the rest."""
    scene = prompt(num_rows, length, shared=shared, scattered=scattered, dtype=dtype, kv_dtype=kv_dtype)
    plan = scene.plan()
    assert long.has_long(long.torch_on_cpu(8), torch.device("cpu"), dtype, plan)
    assert_close(scene.attend(plan, prompt_rows=8), scene.attend(plan, backend="reference"))
    ours = scene.attend(scene.plan())
    assert all(map(torch.equal, scene.attend(scene.plan(), prompt_rows=num_rows + 1), ours))
    check(scene, long.torch_on_cpu(8), native_backend.attend_native)


@needs_native
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("pool", ["k_pages", "v_pages"])
def test_on_a_cpu_what_is_not_finite_reaches_no_row_before_it(value: float, pool: str) -> None:
    scene = prompt(20, 40)
    page = scene.tables[0][32 // PAGE].page_id
    getattr(scene, pool)[:, page, 32 % PAGE, 3] = value
    found, ours = scene.attend(scene.plan(), prompt_rows=8), scene.attend(scene.plan())
    before = scene.plan().position < 32
    assert found[0][before].isfinite().all()
    for got, wanted in zip(found, ours, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5, equal_nan=True)


@needs_native
def test_on_a_cpu_a_page_with_a_hole_is_read_by_the_rest() -> None:
    scene = prompt(20, 40, hole=True)
    assert_close(scene.attend(scene.plan(), prompt_rows=8), scene.attend(scene.plan(), backend="reference"))


@needs_native
def test_two_threads_attend_as_one() -> None:
    scene, before = prompt(65, 127, shared=2), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_close(scene.attend(scene.plan(), prompt_rows=8), scene.attend(scene.plan(), backend="reference"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_on_a_device(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.undo()
    from tests.kernels.triton.test_triton_backend import on

    length, ids = 6000, np.arange(7, 7 + 94)
    slot_position = new_slot_position(110 * 64)
    slot_position[7 * 64 : 7 * 64 + length] = torch.arange(length, dtype=torch.int32)
    scene = make_scene(
        np.random.default_rng(0), [[PageRef(int(page)) for page in ids]],
        QueryRows(np.zeros(1100, int), np.arange(length - 1100, length)), page_size=64, num_groups=4, head_dim=128,
        rope=RopeTable.from_theta(1e4, 128, 8192), dtype=torch.bfloat16, slot_position=slot_position,
    )  # fmt: skip
    monkeypatch.setattr(long, "CUDNN", long.CUDNN._replace(least_keys=4096))
    monkeypatch.setattr(long, "is_on", True)
    placed, plan = on(torch.device("cuda"), scene), scene.plan()
    assert long.has_long(long.CUDNN, torch.device("cuda"), torch.bfloat16, plan)
    got = placed.attend(plan)
    wanted = placed.attend(plan, backend="triton")
    assert "cuDNN attends to no long prompt" not in caplog.text
    assert_close((got[0].cpu(), got[1].cpu()), (wanted[0].cpu(), wanted[1].cpu()))
