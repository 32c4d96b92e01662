"""Row-wise operations and the KV write in Triton, against float64 and against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mneme.kernels import kv_write
from mneme.kernels.arguments import KvRows, dequantized
from mneme.kernels.rope import RopeTable
from mneme.kernels.torch import ops as torch_ops

triton_kv = pytest.importorskip("mneme.kernels.triton.kv")
triton_ops = pytest.importorskip("mneme.kernels.triton.ops")

# One unit in the last place of each type: the interpreter cuts where hardware rounds.
RELATIVE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ABSOLUTE = 2e-6
DTYPES = list(RELATIVE)
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """`expected` in float64."""
    assert got.shape == expected.shape
    bound = RELATIVE[got.dtype] * expected.abs() + ABSOLUTE
    worst = ((got.double() - expected).abs() - bound).max()
    assert worst <= 0, worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1), (5, 64), (5, 200), (5, 4096), (7, 9, 64), (7, 9, 80), (7, 9, 256)])
def test_rms_norm(triton_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of rows, and of heads in a joint projection."""
    x = randn(*shape, dtype=dtype, device=triton_device)
    x = x[:, 2:7] if len(shape) == 3 else x
    weight = randn(shape[-1], dtype=dtype, device=triton_device)
    assert_close(triton_ops.rms_norm(x, weight, EPS), torch_ops.rms_norm(x.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_place_and_normalises_what_it_stored(
    triton_device: torch.device, dtype: torch.dtype
) -> None:
    hidden, delta = (randn(5, 200, dtype=dtype, device=triton_device, seed=seed) for seed in (1, 2))
    weight = randn(200, dtype=dtype, device=triton_device)
    total = hidden.double() + delta.double()
    stored, normed = triton_ops.add_rms_norm(hidden, delta, weight, EPS)
    assert stored is hidden
    assert_close(stored, total)
    assert_close(normed, torch_ops.rms_norm(stored.double(), weight.double(), EPS))


def test_norms_of_float32_rows_have_the_weight_s_type(triton_device: torch.device) -> None:
    hidden, delta = (randn(5, 200, dtype=torch.float32, device=triton_device, seed=seed) for seed in (1, 2))
    hidden[:, 7] = 2e5
    weight = 1000 * randn(200, dtype=torch.float16, device=triton_device)
    weight[7] = 1.0
    stored, normed = triton_ops.add_rms_norm(hidden, delta, weight, EPS)
    assert (stored.dtype, normed.dtype) == (torch.float32, torch.float16)
    wanted = torch_ops.rms_norm(stored.double(), weight.double(), EPS)
    assert_close(normed, wanted)
    assert_close(triton_ops.rms_norm(stored, weight, EPS), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated(triton_device: torch.device, dtype: torch.dtype, activation: str) -> None:
    gate_up = 4 * randn(3, 2 * 1100, dtype=dtype, device=triton_device)
    gate_up[0, :6] = torch.tensor([-200.0, -88.0, -20.0, 20.0, 200.0, 0.0])  # where a careless exp overflows
    assert_close(triton_ops.gated(gate_up, activation), torch_ops.gated(gate_up.double(), activation))


def test_a_row_does_not_depend_on_the_others(triton_device: torch.device) -> None:
    x = randn(9, 80, dtype=torch.float32, device=triton_device)
    weight = randn(80, dtype=torch.float32, device=triton_device)
    together = triton_ops.rms_norm(x, weight, EPS)
    for row in range(9):
        assert torch.equal(together[row : row + 1], triton_ops.rms_norm(x[row : row + 1], weight, EPS))


def test_no_rows(triton_device: torch.device) -> None:
    x, weight = torch.zeros(0, 8, device=triton_device), torch.ones(8, device=triton_device)
    assert triton_ops.rms_norm(x, weight, EPS).shape == (0, 8)
    assert triton_ops.add_rms_norm(x, x, weight, EPS)[1].shape == (0, 8)
    assert triton_ops.gated(x, "silu").shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "page_size"),
    [(64, 64, 16), (80, 80, 32), (80, 32, 16), (96, 48, 64), (128, 128, 32), (256, 64, 16), (64, None, 16)],
)
def test_write_kv(
    triton_device: torch.device, dtype: torch.dtype, head_dim: int, rotary_dim: int | None, page_size: int
) -> None:
    num_heads, num_pages, num_rows = 3, 4, 6
    joint = randn(num_rows, 8, head_dim, dtype=dtype, device=triton_device)
    k, v = joint[:, 2:5], joint[:, 5:8]
    rope = None if rotary_dim is None else RopeTable.from_theta(1e4, rotary_dim, 64).to(triton_device)
    generator = torch.Generator().manual_seed(4)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_rows].to(triton_device)
    positions = torch.randint(0, 128, (num_rows,), generator=generator).to(triton_device)
    before = randn(2, num_heads, num_pages, page_size, head_dim, dtype=dtype, device=triton_device)
    k_pages, v_pages = before.clone()
    triton_kv.write_kv(KvRows(k, v, slots, positions, k_pages, v_pages, rope))
    stored_k, stored_v = (pages.view(num_heads, -1, head_dim) for pages in (k_pages, v_pages))
    rotated = k.double() if rope is None else rope.rotate(k, positions).double()
    assert_close(stored_k[:, slots].transpose(0, 1), rotated)
    assert torch.equal(stored_v[:, slots].transpose(0, 1), v)
    kept = torch.ones(num_pages * page_size, dtype=torch.bool)
    kept[slots.cpu()] = False
    for stored, old in zip((stored_k, stored_v), before, strict=True):
        assert torch.equal(stored[:, kept], old.view(num_heads, -1, head_dim)[:, kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, None)])
def test_int8_rows_have_the_bits_that_a_cpu_gives_them(
    triton_device: torch.device, dtype: torch.dtype, head_dim: int, rotary_dim: int | None
) -> None:
    """Beside rows of zeros, of numbers too small for a scale, and with a NaN or an infinity; a channel of outliers."""
    joint = randn(40, 8, head_dim, dtype=dtype, device=torch.device("cpu"))
    joint[:, :, 1] *= 30
    joint[3], joint[4, :, 7], joint[5, :, 0], joint[6] = 0, torch.nan, torch.inf, torch.tensor(1e-38).to(dtype)
    k, v = joint[:, 2:5], joint[:, 5:8]
    rope = None if rotary_dim is None else RopeTable.from_theta(1e4, rotary_dim, 64)
    generator = torch.Generator().manual_seed(5)
    slots = torch.randperm(64, generator=generator)[:40]
    positions = torch.randint(0, 128, (40,), generator=generator)
    wanted, found = torch.zeros(2, 2, 3, 4, 16, head_dim + 4, dtype=torch.int8)
    kv_write.write_kv(k, v, slots, positions, *wanted, rope)
    here = KvRows(k, v, slots, positions, *found, rope)
    there = KvRows(*(None if each is None else each.to(triton_device) for each in here))
    triton_kv.write_kv(there)
    for ours, theirs in ((there.k_pages, wanted[0]), (there.v_pages, wanted[1])):
        assert torch.equal(ours.cpu(), theirs)
    written = dequantized(wanted.flatten(2, 3)[:, :, slots]).isfinite().all(-1).all(1)
    assert (~written).sum() == 4  # keys and values of two tokens
    assert wanted.any()


def test_write_kv_outside_the_pool_writes_nothing(triton_device: torch.device) -> None:
    k = randn(3, 2, 64, dtype=torch.float32, device=triton_device)
    pages = torch.zeros(2, 2, 1, 16, 64, device=triton_device)
    slots = torch.tensor([-1, 16, 3], dtype=torch.int32, device=triton_device)
    positions = torch.tensor([1, 2, 10**6], dtype=torch.int32, device=triton_device)
    rope = RopeTable.from_theta(1e4, 64, 32).to(triton_device)
    triton_kv.write_kv(KvRows(k, k, slots, positions, pages[0], pages[1], rope))
    assert pages[:, :, 0, 3].any(-1).all()
    pages[:, :, 0, 3] = 0
    assert not pages.any()
