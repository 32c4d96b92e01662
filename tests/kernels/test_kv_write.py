"""Writing keys and values, and the positions of slots."""

from __future__ import annotations

import pytest
import torch

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
