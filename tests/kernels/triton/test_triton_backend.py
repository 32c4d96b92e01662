"""The Triton backend against the oracle: interpreted on small scenes, and natively with `-m gpu`.

The rules of the primitive, one by one, are in `test_attention.py`, which runs them on this backend too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mneme.kernels import attention
from mneme.kernels.arguments import dequantized, quantized
from mneme.kernels.attention import PageRef, PageTable, QueryRows, RopeTable, build_plan, mark_written
from mneme.kernels.triton import modules as triton_modules
from mneme.kernels.triton import tiles as triton_tiles
from mneme.kernels.triton.configs import HEAD_DIMS
from mneme.kernels.triton.pack import Header
from tests.budget import examples, rarer
from tests.kernels.cases import TOLERANCE, Scene, assert_close, make_scene, scenes

triton_backend = pytest.importorskip("mneme.kernels.triton.backend")
triton_step = pytest.importorskip("mneme.kernels.triton.step")

few = settings(
    max_examples=examples(3, at_length=6),  # natively most compile a variant, for seconds
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking interpreted kernels takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
kinds = pytest.mark.parametrize("kinds", [(dtype, kv) for dtype in TOLERANCE for kv in (None, torch.int8)])  # of q, KV
SHARES = ("always", "never")


def on(device: torch.device, scene: Scene) -> Scene:
    """The same scene with its tensors on a device."""
    names = ("k_pages", "v_pages", "slot_position", "q")
    options = scene.options | {
        name: value.to(device) for name, value in scene.options.items() if isinstance(value, torch.Tensor)
    }
    rope = None if scene.rope is None else scene.rope.to(device)
    return replace(scene, rope=rope, options=options, **{name: getattr(scene, name).to(device) for name in names})


def attend_triton(scene: Scene, plan: attention.Plan, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = scene.attend(plan, backend="triton", **changes)
    return out.cpu(), lse.cpu()


@pytest.fixture
def ranges_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is cut into ranges of one page or a few."""
    monkeypatch.setattr(triton_tiles, "_SHORTEST_RANGE_TOKENS", 1)
    monkeypatch.setattr(triton_tiles, "_TOKENS_PER_PROGRAM", 0)
    monkeypatch.setattr(triton_tiles, "_TOKENS_PER_MERGE", 0)
    monkeypatch.setattr(triton_backend, "_INTERPRETED_PROGRAMS", 64)


@kinds
@given(data=st.data())
@pytest.mark.at_length
@few
def test_sharing_always_and_never_equal_the_reference(
    triton_device: torch.device, kinds: tuple[torch.dtype, torch.dtype | None], data: st.DataObject
) -> None:
    dtype, kv_dtype = kinds
    scene = data.draw(scenes(dtype=dtype, kv_dtype=kv_dtype))
    wanted = scene.attend(scene.plan(), backend="reference")
    weights = torch.bfloat16 if kv_dtype and dtype == torch.float16 else None  # with a row's scale in them
    for share in SHARES:
        assert_close(attend_triton(on(triton_device, scene), scene.plan(share=share)), wanted, weights=weights)


@pytest.mark.usefixtures("ranges_of_a_page")
@given(scene=scenes(most_rows=40), share=st.sampled_from(SHARES), prefill=st.booleans())
@pytest.mark.at_length
@few
def test_many_parts_and_large_tiles_equal_the_reference(
    triton_device: torch.device, scene: Scene, share: str, prefill: bool
) -> None:
    wanted = scene.attend(scene.plan(), backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        if prefill:  # with a search for the pages that a tile's rows see
            patch.setattr(triton_tiles, "_PREFILL_ROWS", 1)
        assert_close(attend_triton(on(triton_device, scene), scene.plan(share=share)), wanted)


def forest_scene(
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    num_groups: int,
    rotary_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Scene:
    """Three sequences over a prefix of two pages, one document at three places, own pages, and a cut prefix."""
    rng = np.random.default_rng(head_dim + page_size)
    length = 2 * page_size
    slot_position = torch.full((14 * page_size,), 2**30, dtype=torch.int32)
    firsts = {0: 0, 1: page_size, 2: 0, 3: page_size} | {4 + i: length + 2 * page_size for i in range(3)}
    for page, first in firsts.items():
        filled = page_size - 3 if page >= 4 else page_size
        slots = page * page_size + torch.arange(filled)
        mark_written(slot_position, slots, first + torch.arange(filled))
    cut = (1 << (page_size - 5)) - 1
    tables = [
        [PageRef(0), PageRef(1, 0, cut if i == 2 else -1), PageRef(2, 50 + i), PageRef(3, 50 + i), PageRef(4 + i)]
        for i in range(3)
    ]
    rows = QueryRows([0, 1, 1, 1, 2], np.array([0, -2, -1, 0, 0]) + 5 * page_size)
    rope = RopeTable.from_theta(10_000.0, rotary_dim or head_dim, 5 * page_size + 60)
    sizes: dict[str, Any] = {"page_size": page_size, "head_dim": head_dim, "num_groups": num_groups, "num_kv_heads": 2}
    return make_scene(
        rng, tables, rows, rope=rope, dtype=dtype, kv_dtype=kv_dtype, slot_position=slot_position, **sizes
    )


_SIZES = list(zip(HEAD_DIMS, (16, 32, 64, 16, 32), strict=True))


@dtypes
@pytest.mark.parametrize(("head_dim", "page_size"), [*_SIZES[:2], *rarer(_SIZES[2:])])
def test_every_head_dimension(triton_device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> None:
    scene = forest_scene(dtype, head_dim, page_size, num_groups=4)
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in SHARES:
        assert_close(attend_triton(on(triton_device, scene), scene.plan(share=share)), wanted)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 32), *rarer([(64, 64), (96, 96), (128, 128), (256, 64)])])
def test_int8_rows_of_every_head_dimension(triton_device: torch.device, head_dim: int, rotary_dim: int) -> None:
    """With a channel of outliers, which costs its rows alone."""
    scene = forest_scene(torch.bfloat16, head_dim, 16, 4, rotary_dim, torch.int8)
    for pages in (scene.k_pages, scene.v_pages):
        rows = dequantized(pages)
        rows[..., 3] *= 20
        pages.copy_(quantized(rows))
    wanted = scene.attend(scene.plan(), backend="reference")
    for share in SHARES:
        got = attend_triton(on(triton_device, scene), scene.plan(share=share))
        assert_close((got[0] / 20, got[1]), (wanted[0] / 20, wanted[1]))


@dtypes
def test_broken_int8_rows_stay_with_the_rows_that_see_them(triton_device: torch.device, dtype: torch.dtype) -> None:
    """A key of sequence 0, a value of sequence 1 behind all rows but its last, a value that sequence 2's mask hides."""
    scene = forest_scene(dtype, 64, 16, 4, kv_dtype=torch.int8)
    broken, zeros = quantized(torch.full((64,), torch.nan)), quantized(torch.zeros(64))
    scene.k_pages[:, 4, 2], scene.v_pages[:, 5, 12] = broken, quantized(torch.full((64,), torch.inf))
    scene.v_pages[:, 1, 15], scene.v_pages[:, 0, 3], scene.k_pages[:, 0, 4] = broken, zeros, zeros
    tables = [[ref for ref in table if ref.page_id != 1 or i == 2] for i, table in enumerate(scene.tables)]
    scene = replace(scene, tables=tables, rows=QueryRows([0, 1, 1, 1, 2], [80, 74, 75, 76, 80]))
    wanted = scene.attend(scene.plan(), backend="reference")
    is_fine = wanted[0].isfinite().flatten(1).all(1)
    assert is_fine.tolist() == [False, True, True, False, True]
    for share in SHARES:
        out, lse = attend_triton(on(triton_device, scene), scene.plan(share=share))
        assert torch.equal(out.isfinite(), wanted[0].isfinite())
        assert_close((out[is_fine], lse[is_fine]), (wanted[0][is_fine], wanted[1][is_fine]))


@pytest.mark.parametrize("is_dense", [True, False])
def test_queries_are_read_where_they_lie(triton_device: torch.device, is_dense: bool) -> None:
    """As the first columns of a product that has keys and values in the others; and where nothing is dense."""
    scene = forest_scene(torch.float32, 64, 32, num_groups=4)
    wanted = scene.attend(scene.plan(), backend="reference")
    q = torch.cat((scene.q, torch.full_like(scene.q, torch.nan)), 1 if is_dense else 2)[:, : scene.q.shape[1], :64]
    assert q.is_contiguous() is False
    strided = on(triton_device, scene)
    strided = replace(strided, q=q.to(triton_device))
    assert strided.q.stride() == q.stride()
    for share in SHARES:
        assert_close(attend_triton(strided, scene.plan(share=share)), wanted)


@pytest.mark.parametrize("num_groups", [1, 7, 16, 32])
def test_every_number_of_query_heads(triton_device: torch.device, num_groups: int) -> None:
    scene = forest_scene(torch.float32, 64, 32, num_groups)
    wanted = scene.attend(scene.plan(), backend="reference")
    assert_close(attend_triton(on(triton_device, scene), scene.plan(share="always")), wanted)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 32), (64, 16), (96, 72), (256, 64)])
def test_partial_rotation(triton_device: torch.device, head_dim: int, rotary_dim: int) -> None:
    scene = forest_scene(torch.float32, head_dim, 16, 2, rotary_dim)
    wanted = scene.attend(scene.plan(), backend="reference")
    assert_close(attend_triton(on(triton_device, scene), scene.plan(share="always")), wanted)


@given(scene=scenes(plain=True), data=st.data())
@pytest.mark.at_length
@settings(few, max_examples=examples(2, at_length=3))
def test_steps_that_follow_each_other_equal_the_reference(
    triton_device: torch.device, scene: Scene, data: st.DataObject
) -> None:
    """Decode steps, appended pages and fresh plans through one device's buffers, the last two plans in turn."""
    plan = scene.plan(share=data.draw(st.sampled_from(SHARES)))
    placed = on(triton_device, scene)
    for page in range(24, 24 + data.draw(st.integers(1, 3))):
        edit = data.draw(st.sampled_from(["rows", "append", "fresh"]))
        previous = plan
        if edit == "append" and plan.page_tables:
            sequence = np.array([data.draw(st.integers(0, plan.num_sequences - 1))])
            plan = plan.append_new_pages(sequence, np.array([page])) or plan
        elif edit == "fresh":
            plan = scene.plan(tables=list(plan.page_tables), rows=plan.rows)
        plan = plan.with_rows(QueryRows(plan.sequence, plan.position + 1))
        for each in (plan, previous, plan):
            wanted = scene.attend(each, backend="reference")
            assert_close(attend_triton(placed, each), wanted)


@pytest.mark.parametrize("method", ["_copy", "_place_keys"])
@pytest.mark.parametrize("edit", ["append", *rarer(["rows", "fresh"])])
def test_after_a_failed_upload_the_next_one_is_whole(triton_device: torch.device, method: str, edit: str) -> None:
    """Whatever was to change, neither the plan that failed nor the one before it meets what half an upload left."""
    scene = forest_scene(torch.float32, 64, 16, 2)
    placed, plan = on(triton_device, scene), scene.plan(share="always")
    attend_triton(placed, plan)
    moved = QueryRows(plan.sequence, plan.position + 1)
    changed = {
        "rows": lambda: plan.with_rows(moved),
        "append": lambda: plan.append_new_pages(np.array([1]), np.array([9])).with_rows(moved),
        "fresh": lambda: scene.plan(tables=[[PageRef(4)], [PageRef(0), PageRef(5)], [PageRef(6)]], rows=moved),
    }[edit]()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of pinned memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_step.DeviceStep, method, fail)
        with pytest.raises(RuntimeError, match="out of pinned memory"):
            attend_triton(placed, changed)
    for each in (changed, plan, changed):
        assert_close(attend_triton(placed, each), scene.attend(each, backend="reference"))


def test_own_buffers_keep_a_plan_while_others_run(triton_device: torch.device) -> None:
    """What a graph that was captured inside the block would read is still there."""
    scene = forest_scene(torch.float32, 64, 16, 2)
    placed, own = on(triton_device, scene), triton_step.OwnStep(torch.zeros(0, device=triton_device).device)
    plan, other = scene.plan(share="always"), scene.plan(share="never")
    with own as step:
        wanted = attend_triton(placed, plan)
        words = step.words.clone()
    before = step.uploaded_bytes
    attend_triton(placed, other)
    assert torch.equal(step.words, words)
    with own:
        assert_close(attend_triton(placed, plan), wanted)
    assert step.uploaded_bytes == before


@pytest.mark.usefixtures("ranges_of_a_page")
@pytest.mark.parametrize("num_programs", [3, *rarer([1, 40])])
def test_few_programs_take_many_tiles_and_many_programs_few(
    triton_device: torch.device, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch after the other: each leaves the count of tiles as it found it; with nothing to do, too."""
    scene = forest_scene(torch.float32, 64, 16, 2)
    placed, step = on(triton_device, scene), triton_step.step_of(torch.zeros(0, device=triton_device).device)
    plans = [scene.plan(share=share) for share in SHARES] + [scene.plan(tables=[[], [], []])]
    for plan in plans:  # cut for the device as it is
        triton_backend._choice(step.device, torch.float32, plan)
    monkeypatch.setattr(triton_backend, "_num_programs", lambda _device, _per_processor: num_programs)
    for plan in [*plans, *plans]:
        wanted = scene.attend(plan, backend="reference")
        for _ in range(2):
            assert_close(attend_triton(placed, plan), wanted)
    assert int(step.words[Header.num_taken]) == 0


def test_a_plan_that_reserved_buffers_do_not_hold_is_put_beside_and_cannot_be_captured(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = forest_scene(torch.float32, 64, 16, 2)
    placed, own = on(triton_device, scene), triton_step.OwnStep(torch.zeros(0, device=triton_device).device)
    monkeypatch.setattr(triton_step, "_MOST_RESERVED_WORDS", 0)
    small, large = (
        scene.plan(share="always"),
        scene.plan(tables=[[PageRef(4)]] * 60, rows=QueryRows(range(60), [80] * 60)),
    )

    def stage(plan: attention.Plan) -> Any:
        return triton_backend.stage(plan, placed.slot_position, placed.q.dtype, None)

    def check(plan: attention.Plan) -> None:
        q = torch.cat([scene.q] * 12)[: plan.num_rows]
        wanted = replace(scene, q=q).attend(plan, backend="reference")
        assert_close(attend_triton(replace(placed, q=q.to(triton_device)), plan), wanted)

    with own as step:
        triton_backend.reserve(small, placed.slot_position, placed.q.dtype)
        buffers = [step.words, step.key_position, *step.partials]
        for plan in (small, large, small, large, large, small):
            assert (stage(plan) is None) == (plan is large)
            check(plan)
            check(plan.with_rows(QueryRows(plan.sequence, plan.position + 1)))
        monkeypatch.setattr(step, "_copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # what failed is forgotten, and where things are is not
            stage(scene.plan(share="always"))
        monkeypatch.undo()
        check(small)
        now = [step.words, step.key_position, *step.partials]
    assert [buffer.data_ptr() for buffer in now] == [buffer.data_ptr() for buffer in buffers]


def test_a_plan_may_be_launched_in_every_way_that_does_more(triton_device: torch.device) -> None:
    """As a graph is for plans that do not need all of it; rows without keys are defined where nothing was staged."""
    scene = forest_scene(torch.bfloat16, 64, 16, 4)
    placed, plan = on(triton_device, scene), scene.plan(share="never")
    wanted = scene.attend(plan, backend="reference")
    launches = triton_backend.launches_of(plan, placed.q.device, torch.bfloat16)
    assert [(launch.config.wide_m > 0, launch.merges) for launch in launches] == [
        (False, False), (False, True), (True, True)
    ]  # fmt: skip
    best = triton_backend.stage(plan, placed.slot_position, torch.bfloat16, None)
    for launch in launches[launches.index(best) :]:
        assert triton_backend.stage(plan, placed.slot_position, torch.bfloat16, None, launch) == launch
        assert_close(attend_triton(placed, plan), wanted)
    padded = scene.plan(tables=[[], [PageRef(4)], []])
    out, lse = attend_triton(placed, padded)
    assert not out[[0, 4]].any()
    assert torch.isneginf(lse[[0, 4]]).all()
    assert_close((out, lse), scene.attend(padded, backend="reference"))


def test_a_capture_that_would_read_another_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    plan = forest_scene(torch.float32, 64, 16, 2).plan()
    step = triton_step.DeviceStep(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="must have been staged"):
        step.check_capture(plan)
    step.staged = plan
    step.check_capture(plan)
    triton_step.DeviceStep(torch.device("cpu"), is_own=True).check_capture(plan)


def test_the_reach_is_checked_again_when_positions_have_changed(triton_device: torch.device) -> None:
    scene = forest_scene(torch.float32, 64, 16, 2)
    hidden = torch.full_like(scene.slot_position, 2**30)
    rows = QueryRows([0, 1], [79, 320])
    plan = scene.plan(tables=[[PageRef(0)], [PageRef(1)]], rows=rows)
    placed = on(triton_device, replace(scene, q=scene.q[:2], slot_position=hidden))
    _, lse = attend_triton(placed, plan)
    assert torch.isneginf(lse[1]).all()
    with pytest.raises(ValueError, match=r"^rows: a visible pair is 320 apart"):  # another tensor
        attend_triton(replace(placed, slot_position=scene.slot_position.to(triton_device)), plan)
    attend_triton(placed, plan)
    placed.slot_position[16] = 0
    with pytest.raises(ValueError, match=r"^rows: a visible pair is 320 apart"):  # the same, written since
        attend_triton(placed, plan)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_dim": 512, "num_q_heads": 2}, r"holds heads of up to 256 dimensions \(got 512\)"),
        ({"head_dim": 64, "num_q_heads": 258}, r"holds up to 128 query heads per KV head \(got 129\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(triton_device: torch.device, sizes: dict[str, int], reason: str) -> None:
    plan = build_plan([PageTable.own([0])], QueryRows([0], [3]), page_size=16, num_kv_heads=2, **sizes)
    q = torch.zeros(1, sizes["num_q_heads"], sizes["head_dim"], device=triton_device)
    pages = torch.zeros(2, 1, 16, sizes["head_dim"], device=triton_device)
    positions = torch.arange(16, dtype=torch.int32, device=triton_device)
    with pytest.raises(ValueError, match=rf"^backend: 'triton' {reason}"):
        attention.attend(q, pages, pages, positions, None, plan, softmax_scale=1.0, backend="triton")


def test_without_triton_cuda_falls_back_to_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    scene = forest_scene(torch.float32, 64, 16, 2)
    monkeypatch.setattr(triton_modules, "import_module", missing)
    triton_modules.triton_module.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^backend: 'triton' is not installed"):
                scene.attend(scene.plan(), backend="triton")
        chosen = attention.choose("auto", torch.device("cuda"), torch.float32, scene.plan())
    finally:
        triton_modules.triton_module.cache_clear()
    assert chosen is attention.attend_torch
    assert [record.levelname for record in caplog.records] == ["WARNING"]
