"""Writing keys and values, and the positions of slots."""

from __future__ import annotations

import pytest
import torch

from mneme.kernels.arguments import dequantized, quantized
from mneme.kernels.attention import FREE_SLOT_POSITION, RopeTable, mark_free, mark_written, new_slot_position, write_kv

ROPE = RopeTable.from_theta(100.0, 8, 64)


pytestmark = pytest.mark.usefixtures("kv_path")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_rotated_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """Rows are slices of a joint projection."""
    joint = torch.randn(3, 6, 8).to(dtype)
    k, v = joint[:, 2:4], joint[:, 4:]
    k_pages, v_pages = torch.zeros(2, 2, 4, 4, 8, dtype=dtype)
    slots, positions = torch.tensor([9, 2, 15]), torch.tensor([40, 41, 3], dtype=torch.int32)
    write_kv(k, v, slots, positions, k_pages, v_pages, ROPE)
    stored_k, stored_v = (pages.view(2, 16, 8)[:, slots].transpose(0, 1) for pages in (k_pages, v_pages))
    assert torch.equal(stored_k, ROPE.rotate(k, positions).to(dtype))
    assert torch.equal(stored_v, v)
    untouched = [slot for slot in range(16) if slot not in slots]
    assert not k_pages.view(2, 16, 8)[:, untouched].any()


def test_without_a_rope_keys_are_stored_as_they_are() -> None:
    k, v = torch.randn(2, 1, 2, 8)
    k_pages, v_pages = torch.zeros(2, 2, 1, 4, 8)
    write_kv(k, v, torch.tensor([3], dtype=torch.int32), torch.tensor([900]), k_pages, v_pages, None)
    assert torch.equal(k_pages[:, 0, 3], k[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(6, 4), (64, 64), (80, 32)])
def test_int8_pages_hold_rotated_keys_that_were_rounded_once(
    dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    """The same bits by both paths; half a step from what was written at most, which is the scale."""
    joint, rope = torch.randn(40, 4, head_dim).to(dtype), RopeTable.from_theta(100.0, rotary_dim, 64)
    joint[:, :, 1] *= 30  # a channel of outliers
    k, v = joint[:, :2], joint[:, 2:]
    k_pages, v_pages = torch.zeros(2, 2, 3, 16, head_dim + 4, dtype=torch.int8)
    slots, positions = torch.randperm(48)[:40], torch.arange(40) + 20
    write_kv(k, v, slots, positions, k_pages, v_pages, rope)
    exact = torch.zeros(2, 2, 3, 16, head_dim)
    write_kv(k.float(), v.float(), slots, positions, *exact, rope)
    for pages, unrounded in zip((k_pages, v_pages), exact, strict=True):
        written = unrounded.flatten(1, 2)[:, slots].transpose(0, 1)
        stored = pages.flatten(1, 2)[:, slots].transpose(0, 1)
        assert torch.equal(stored, quantized(written))
        step = written.abs().amax(-1, keepdim=True) / 127
        assert ((dequantized(stored) - written).abs() <= step * 0.501).all()
    others = [slot for slot in range(48) if slot not in slots]
    assert not k_pages.flatten(1, 2)[:, others].any()


def test_int8_rows_without_numbers_are_zeros_or_nan() -> None:
    """A row of zeros, one too small for a scale, a NaN, infinities, the least and the greatest numbers."""
    rows = torch.zeros(7, 8)
    rows[1, 3], rows[2, 3], rows[3, 3], rows[4, 3] = 1e-38, torch.nan, torch.inf, -torch.inf
    rows[5], rows[6] = 2.0**-100, 3e38
    pages = torch.zeros(2, 1, 1, 8, 12, dtype=torch.int8)
    write_kv(rows[:, None], rows[:, None], torch.arange(7), torch.zeros(7), *pages, None)
    found = dequantized(pages[0, 0, 0, :7])
    for kind in pages:
        assert torch.equal(kind[0, 0, :7], quantized(rows))
    assert not found[:2].any()
    assert found[2:5].isnan().all()
    torch.testing.assert_close(found[5:], rows[5:], rtol=1e-6, atol=0.0)


def test_slots_are_free_until_written_and_after_being_freed() -> None:
    slot_position = new_slot_position(6)
    assert slot_position.dtype == torch.int32
    mark_written(slot_position, torch.tensor([4, 1]), torch.tensor([10, 11]))
    free = FREE_SLOT_POSITION
    assert slot_position.tolist() == [free, 11, free, free, 10, free]
    mark_free(slot_position, torch.tensor([1]))
    assert slot_position.tolist() == [free, free, free, free, 10, free]


@pytest.mark.parametrize(("slots", "positions"), [([0, 16], [0, 1]), ([-1, 3], [0, 1]), ([0, 1], [0, 128])])
def test_slots_and_positions_that_do_not_exist_are_refused(slots: list[int], positions: list[int]) -> None:
    pages, k = torch.zeros(2, 4, 4, 8), torch.randn(2, 2, 8)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        write_kv(k, k, torch.tensor(slots), torch.tensor(positions), pages, pages.clone(), ROPE)
    assert not pages[:, 1:].any()
