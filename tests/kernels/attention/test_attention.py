"""The rules of the segment primitive, one test each, for all backends."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mneme.kernels.attention import (
    FREE_SLOT_POSITION,
    PageRef,
    QueryRows,
    RopeTable,
    mark_written,
    new_slot_position,
    write_kv,
)
from tests.kernels.cases import TOLERANCE, Scene, assert_close, make_scene, needs_native

PAGE_SIZE = 4
ROPE = RopeTable.from_theta(100.0, 8, 64)  # reaches 128
triton = pytest.param(
    "triton", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")
)
native = pytest.param("native", marks=needs_native)
fast_backends = pytest.mark.parametrize("backend", ["torch", native, triton])
all_backends = pytest.mark.parametrize("backend", ["reference", "torch", native, triton])


def positions_of(**first_position_by_page: int) -> Tensor:
    """Full pages of consecutive positions, `p3=20` for page 3 from 20 on; all others are free."""
    slot_position = new_slot_position(12 * PAGE_SIZE)
    for name, first in first_position_by_page.items():
        start = int(name[1:]) * PAGE_SIZE
        slot_position[start : start + PAGE_SIZE] = first + torch.arange(PAGE_SIZE, dtype=torch.int32)
    return slot_position


def scene_of(tables: list[list[PageRef]], rows: list[tuple[int, int]], slot_position: Tensor, **changes: Any) -> Scene:
    sequence, position = zip(*rows, strict=True)
    options = {"rope": ROPE, "page_size": PAGE_SIZE, "slot_position": slot_position} | changes
    return make_scene(np.random.default_rng(0), tables, QueryRows(sequence, position), **options)


def attend_both_ways(scene: Scene, backend: str) -> tuple[Tensor, Tensor]:
    """Shared and not shared, checked to be equal."""
    always = scene.attend(scene.plan(share="always"), backend=backend)
    assert_close(scene.attend(scene.plan(share="never"), backend=backend), always)
    return always


@all_backends
def test_a_key_is_visible_from_its_position_on(backend: str) -> None:
    """With one visible key, out is its value and the mask's other bits hide the rest."""
    scene = scene_of([[PageRef(3, 5, 0b0100)]], [(0, 26), (0, 27), (0, 60)], positions_of(p3=20))
    out, lse = attend_both_ways(scene, backend)
    value = scene.v_pages[:, 3, 2].repeat_interleave(2, 0)
    assert torch.equal(out[0], torch.zeros(4, 8))
    assert torch.equal(lse[0], torch.full((4,), -torch.inf))
    torch.testing.assert_close(out[1:], value.expand(2, -1, -1))
    assert torch.isfinite(lse[1:]).all()


@all_backends
def test_a_window_hides_keys_by_their_position_in_the_sequence(backend: str) -> None:
    scene = scene_of(
        [[PageRef(3, 5, 0b0100)]], [(0, 36), (0, 37)], positions_of(p3=20), options={"softmax_scale": 1.0, "window": 10}
    )
    _, lse = attend_both_ways(scene, backend)
    assert torch.isfinite(lse[0]).all()
    assert torch.isneginf(lse[1]).all()


@all_backends
def test_free_slots_are_never_read(backend: str) -> None:
    """Pages are full of NaN behind the last token, all their mask bits set; so is a page that holds nothing."""
    slot_position = positions_of(p3=0, p4=4)
    slot_position[4 * PAGE_SIZE + 1 :] = FREE_SLOT_POSITION
    scene = scene_of([[PageRef(3), PageRef(4), PageRef(5)], [PageRef(3), PageRef(5)]], [(0, 4), (1, 9)], slot_position)
    assert scene.k_pages[:, 4, 1:].isnan().all()
    out, lse = attend_both_ways(scene, backend)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@all_backends
def test_the_far_future_does_not_reveal_free_slots(backend: str) -> None:
    scene = scene_of([[PageRef(5, -(2**29) + 1)]], [(0, 2**29 - 1)], positions_of())
    _, lse = attend_both_ways(scene, backend)
    assert torch.isneginf(lse).all()


@all_backends
def test_lse_is_the_natural_logarithm(backend: str) -> None:
    """All scores 0 over 4 keys."""
    scene = scene_of([[PageRef(3)]], [(0, 9)], positions_of(p3=0))
    _, lse = scene.attend(scene.plan(), q=torch.zeros_like(scene.q), backend=backend)
    torch.testing.assert_close(lse, torch.full((1, 4), float(np.log(4))))


@all_backends
def test_a_page_twice_with_two_deltas_is_seen_twice(backend: str) -> None:
    """Equal to two copies of the page, whose keys were rotated to the two places."""
    twice = scene_of([[PageRef(3, 4), PageRef(3, 30)]], [(0, 60)], positions_of(p3=0, p6=4, p7=30))
    raw = torch.randn(PAGE_SIZE, 2, 8)
    for page, first in ((3, 0), (6, 4), (7, 30)):
        slots = page * PAGE_SIZE + torch.arange(PAGE_SIZE)
        at = first + torch.arange(PAGE_SIZE)
        write_kv(raw, raw, slots, at, twice.k_pages, twice.v_pages, ROPE)
    copies = replace(twice, tables=[[PageRef(6), PageRef(7)]])
    assert_close(attend_both_ways(twice, backend), attend_both_ways(copies, backend))


@all_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_at_another_delta_equals_its_keys_rotated_afresh(backend: str, dtype: torch.dtype) -> None:
    """Two sequences use a document at 11 and 40; fresh pages hold the same keys rotated there."""
    slot_position = new_slot_position(12 * PAGE_SIZE)
    raw_k, raw_v = torch.randn(2, 2 * PAGE_SIZE, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tables: list[list[PageRef]] = [[PageRef(1, 11), PageRef(2, 11)], [PageRef(1, 40), PageRef(2, 40)]]
    scene = scene_of(tables, [(0, 20), (0, 50), (1, 44), (1, 90)], slot_position, dtype=dtype)
    for first_page, first_position in ((1, 0), (3, 11), (5, 40)):
        slots = first_page * PAGE_SIZE + torch.arange(2 * PAGE_SIZE)
        at = first_position + torch.arange(2 * PAGE_SIZE)
        mark_written(scene.slot_position, slots, at)
        write_kv(raw_k, raw_v, slots, at, scene.k_pages, scene.v_pages, ROPE)
    fresh = replace(scene, tables=[[PageRef(3), PageRef(4)], [PageRef(5), PageRef(6)]])
    out, lse = attend_both_ways(scene, backend)
    wanted_out, wanted_lse = attend_both_ways(fresh, backend)
    tolerance = TOLERANCE[dtype].out  # of scores too: the keys of the two were rounded at different angles
    torch.testing.assert_close(out, wanted_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=tolerance, rtol=tolerance)


@all_backends
def test_a_row_before_a_document_is_clamped_and_sees_nothing_of_it(backend: str) -> None:
    """position - delta is -35 for the first row of the tile; 140 (too far) is no fault of a row that sees nothing."""
    scene = scene_of(
        [[PageRef(3, 40), PageRef(4)], [PageRef(3, 40)]], [(0, 5), (0, 50), (1, 60)], positions_of(p3=0, p4=0)
    )
    out, lse = attend_both_ways(scene, backend)
    alone = replace(scene, tables=[[PageRef(4)], []])
    wanted = attend_both_ways(alone, backend)
    torch.testing.assert_close((out[0], lse[0]), (wanted[0][0], wanted[1][0]))
    beyond = scene_of([[PageRef(5, -90)], [PageRef(3)]], [(0, 50), (1, 50)], positions_of(p3=0))
    _, lse = attend_both_ways(beyond, backend)
    assert torch.isneginf(lse[0]).all()
    assert torch.isfinite(lse[1]).all()


@all_backends
def test_a_visible_pair_out_of_the_table_is_refused(backend: str) -> None:
    fits = scene_of([[PageRef(3, -60)]], [(0, 67)], positions_of(p3=80))
    assert torch.isfinite(attend_both_ways(fits, backend)[1]).all()
    scene = scene_of([[PageRef(3, -60)]], [(0, 68)], positions_of(p3=80))
    with pytest.raises(ValueError, match=r"^rows: a visible pair .* table ends at 128"):
        scene.attend(scene.plan(), backend=backend)
    assert torch.isfinite(attend_both_ways(replace(scene, rope=None), backend)[1]).all()


@all_backends
def test_a_recomputed_token_replaces_the_shared_one(backend: str) -> None:
    """Selective recompute: the shared page without one bit, and a private slot in the document's frame."""
    slot_position = positions_of(p3=0)
    slot_position[8 * PAGE_SIZE] = 2
    recomputing, sharing = [PageRef(3, 10, 0b1011), PageRef(8, 10)], [PageRef(3, 20)]
    scene = scene_of([recomputing, sharing], [(0, 30), (1, 40)], slot_position)
    for pages in (scene.k_pages, scene.v_pages):
        pages[:, 8, 0] = pages[:, 3, 2]
    untouched = replace(scene, tables=[[PageRef(3, 10)], sharing])
    assert_close(attend_both_ways(scene, backend), attend_both_ways(untouched, backend))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a kernel is interpreted
@pytest.mark.parametrize(("window", "broken", "whole_rows"), [(None, 5, [0, 1, 4, 5]), (3, 3, [2, 3, 6, 7])])
@pytest.mark.parametrize("share", ["always", "never"])
@fast_backends
def test_broken_numbers_reach_only_rows_that_see_their_token(
    backend: str, share: str, window: int | None, broken: int, whole_rows: list[int]
) -> None:
    """Two sequences, four rows each at positions 3, 4, 6, 7: some come before the token, or its window has passed."""
    scene = scene_of(
        [[PageRef(3), PageRef(4)], [PageRef(3), PageRef(5)]],
        [(sequence, position) for sequence in (0, 1) for position in (3, 4, 6, 7)],
        positions_of(p3=0, p4=4, p5=4),
    )
    plan = scene.plan(share=share)
    wanted = scene.attend(plan, backend="reference", window=window)
    offset = broken % PAGE_SIZE
    for page in (3,) if broken < PAGE_SIZE else (4, 5):
        scene.v_pages[:, page, offset] = torch.nan
        scene.k_pages[:, page, offset] = torch.inf
    out, lse = scene.attend(scene.plan(share=share), backend=backend, window=window)
    assert_close((out[whole_rows], lse[whole_rows]), (wanted[0][whole_rows], wanted[1][whole_rows]), backend)
    others = [row for row in range(8) if row not in whole_rows]
    assert not out[others].isfinite().all((1, 2)).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a kernel is interpreted
@pytest.mark.parametrize("share", ["always", "never"])
@fast_backends
def test_broken_numbers_of_one_sequence_do_not_reach_another(backend: str, share: str) -> None:
    """Sequence 0 goes on in the shared page, sequence 1 masks that tail and goes on elsewhere."""
    scene = scene_of(
        [[PageRef(3), PageRef(4)], [PageRef(3), PageRef(4, 0, 0b0001), PageRef(5, 0, 0b1110)], [PageRef(4, 0, 0b1000)]],
        [(0, 7), (1, 4), (1, 7), (2, 6)],
        positions_of(p3=0, p4=4, p5=4),
    )
    scene.v_pages[:, 4, 2] = torch.inf
    scene.k_pages[:, 4, 1] = torch.nan
    out, lse = scene.attend(scene.plan(share=share), backend=backend)
    assert out[0].isnan().all()
    wanted = scene.attend(scene.plan(), backend="reference")
    assert_close((out[1:], lse[1:]), (wanted[0][1:], wanted[1][1:]))


@fast_backends
def test_no_rows_and_no_sequences(backend: str) -> None:
    scene = scene_of([[PageRef(3)]], [(0, 9)], positions_of(p3=0))
    for plan in (scene.plan(rows=QueryRows([], [])), scene.plan(tables=[], rows=QueryRows([], []))):
        out, lse = scene.attend(plan, scene.q[:0], backend=backend)
        assert out.shape == (0, 4, 8)
        assert lse.shape == (0, 4)


@fast_backends
def test_changed_slot_positions_are_noticed(backend: str) -> None:
    """The same plan, after a slot was written that it shows."""
    scene = scene_of([[PageRef(3), PageRef(4)]], [(0, 9)], positions_of(p3=0))
    plan = scene.plan()
    before = scene.attend(plan, backend=backend)
    scene.k_pages[:, 4], scene.v_pages[:, 4] = 1.0, 1.0
    mark_written(scene.slot_position, torch.tensor([4 * PAGE_SIZE]), torch.tensor([4]))
    after = scene.attend(plan, backend=backend)
    assert not torch.equal(before[1], after[1])
    assert_close(after, scene.attend(plan, backend="reference"))


@fast_backends
def test_layers_may_differ_in_window_and_rope(backend: str) -> None:
    """One plan for all layers of a model whose local layers have a window and a rope of their own."""
    scene = scene_of([[PageRef(3), PageRef(4)]], [(0, 9)], positions_of(p3=0, p4=4))
    plan, local = scene.plan(), RopeTable.from_theta(10.0, 4, 64)
    for _ in range(2):
        for options in ({"window": 3}, {"window": None}):
            for rope in (ROPE, local):
                layer = replace(scene, rope=rope)
                wanted = layer.attend(plan, backend="reference", **options)
                assert_close(layer.attend(plan, backend=backend, **options), wanted)


@fast_backends
def test_inference_mode_works(backend: str) -> None:
    with torch.inference_mode():
        scene = scene_of([[PageRef(3)]], [(0, 9)], positions_of(p3=0))
        assert_close(scene.attend(scene.plan(), backend=backend), scene.attend(scene.plan(), backend="reference"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_torch_backend_runs_on_any_device(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    tables = [[PageRef(1), PageRef(2), PageRef(7, 30 + i), PageRef(10 + i)] for i in range(4)]
    scene = make_scene(rng, tables, QueryRows([0, 1, 1, 2, 3], [90] * 5), page_size=8, rope=ROPE, dtype=dtype)
    wanted = scene.attend(scene.plan(share="always"), backend="reference")
    names = ("q", "k_pages", "v_pages", "slot_position")
    on_device = replace(scene, rope=ROPE.to("cuda"), **{name: getattr(scene, name).cuda() for name in names})
    out, lse = on_device.attend(scene.plan(share="always"), backend="torch")
    assert_close((out.cpu(), lse.cpu()), wanted, "torch")
