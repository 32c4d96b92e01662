"""How far cached keys and values are from new ones, and copies between slots."""

from __future__ import annotations

import pytest
import torch

from mneme.kernels.arguments import dequantized
from mneme.kernels.attention import RopeTable, write_kv
from mneme.kernels.kv_write import copy_slots, kv_deviation

NUM_PAGES, PAGE_SIZE = 5, 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


pytestmark = pytest.mark.usefixtures("kv_path")


def rotated(k: torch.Tensor, positions: torch.Tensor, theta: float, rotary_dim: int) -> torch.Tensor:
    """Rotate in float64, from the definition."""
    half = rotary_dim // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = k.double().split([half, half, k.shape[2] - rotary_dim], 2)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], 2)


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "head_dim", "rotary_dim"), [(1, 1, 8, 8), (37, 2, 20, 12), (300, 4, 64, 64)]
)
def test_it_is_the_squared_distance_over_heads_and_dimensions(
    num_rows: int, num_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    joint = torch.randn(num_rows, 3 * num_heads, head_dim).to(dtype)  # rows of a joint projection are not side by side
    k, v = joint[:, num_heads : 2 * num_heads], joint[:, 2 * num_heads :]
    k_pages, v_pages = torch.randn(2, num_heads, NUM_PAGES, PAGE_SIZE, head_dim).to(dtype)
    slots = torch.randint(NUM_PAGES * PAGE_SIZE, (num_rows,))
    positions = torch.randint(200, (num_rows,), dtype=torch.int32)
    rope = RopeTable.from_theta(100.0, rotary_dim, 100)
    cached = [pages.view(num_heads, -1, head_dim)[:, slots].transpose(0, 1).double() for pages in (k_pages, v_pages)]
    wanted = [
        (new - old).square().sum((1, 2))
        for new, old in zip((rotated(k, positions, 100.0, rotary_dim), v.double()), cached, strict=True)
    ]
    found = kv_deviation(k, v, slots, positions, k_pages, v_pages, rope)
    torch.testing.assert_close(found.double(), torch.stack(wanted, 1), rtol=1e-4, atol=1e-5)


@DTYPES
def test_what_was_just_written_deviates_by_its_rounding_alone(dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 9, 2, 8).to(dtype)
    k_pages, v_pages = torch.zeros(2, 2, NUM_PAGES, PAGE_SIZE, 8, dtype=dtype)
    slots, positions = torch.randperm(NUM_PAGES * PAGE_SIZE)[:9], torch.arange(9) + 50
    for rope in (RopeTable.from_theta(100.0, 8, 64), None):
        write_kv(k, v, slots, positions, k_pages, v_pages, rope)
        of_keys, of_values = kv_deviation(k, v, slots, positions, k_pages, v_pages, rope).unbind(1)
        assert not of_values.any()
        bound = torch.zeros(9) if dtype is torch.float32 else k.float().square().sum((1, 2)) * 2.0**-16
        assert (of_keys <= bound).all()


def test_int8_pages_deviate_by_what_they_stand_for() -> None:
    k, v, fresh_k, fresh_v = torch.randn(4, 9, 2, 20)
    k_pages, v_pages = torch.zeros(2, 2, NUM_PAGES, PAGE_SIZE, 24, dtype=torch.int8)
    slots, positions, rope = torch.randperm(80)[:9], torch.arange(9) + 50, RopeTable.from_theta(100.0, 12, 64)
    write_kv(k, v, slots, positions, k_pages, v_pages, rope)
    cached = [dequantized(pages.flatten(1, 2)[:, slots]).transpose(0, 1).double() for pages in (k_pages, v_pages)]
    fresh = rotated(fresh_k, positions, 100.0, 12), fresh_v.double()
    wanted = [(new - old).square().sum((1, 2)) for new, old in zip(fresh, cached, strict=True)]
    found = kv_deviation(fresh_k, fresh_v, slots, positions, k_pages, v_pages, rope)
    torch.testing.assert_close(found.double(), torch.stack(wanted, 1), rtol=1e-4, atol=1e-5)
    before = k_pages.clone()
    copy_slots(slots[:2], slots[2:4], k_pages, v_pages)
    assert torch.equal(k_pages.flatten(1, 2)[:, slots[2:4]], before.flatten(1, 2)[:, slots[:2]])


@pytest.mark.parametrize(("slots", "positions"), [([0, 80], [0, 1]), ([-1, 3], [0, 1]), ([0, 1], [0, 128])])
def test_slots_and_positions_that_do_not_exist_are_refused(
    slots: list[int], positions: list[int], kv_path: str
) -> None:
    pages, k = torch.zeros(2, NUM_PAGES, PAGE_SIZE, 8), torch.randn(2, 2, 8)
    if kv_path == "torch":
        slots = [abs(slot) + NUM_PAGES * PAGE_SIZE if slot < 0 else slot for slot in slots]  # torch counts from the end
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        kv_deviation(
            k, k, torch.tensor(slots), torch.tensor(positions), pages, pages, RopeTable.from_theta(100.0, 8, 64)
        )


def test_rows_that_do_not_fit_the_pool_are_refused() -> None:
    pages, k = torch.zeros(2, NUM_PAGES, PAGE_SIZE, 8), torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="must fit the pool"):
        kv_deviation(k, k, torch.tensor([0, 1]), torch.tensor([0, 1]), pages, pages, None)


@DTYPES
def test_copied_slots_are_the_same_bit_by_bit_and_others_stay(dtype: torch.dtype) -> None:
    pools = torch.randn(2, 2, NUM_PAGES, PAGE_SIZE, 8).to(dtype)
    before = pools.clone().flatten(2, 3)
    source, target = torch.tensor([3, 40, 3]), torch.tensor([70, 0, 17], dtype=torch.int32)
    copy_slots(source, target, *pools)
    after = pools.flatten(2, 3)
    assert torch.equal(after[:, :, [70, 0, 17]], before[:, :, source])
    others = [slot for slot in range(NUM_PAGES * PAGE_SIZE) if slot not in (70, 0, 17)]
    assert torch.equal(after[:, :, others], before[:, :, others])
