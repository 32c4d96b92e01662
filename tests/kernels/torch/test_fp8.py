"""Products of FP8 against float64, by torch's product for CPUs: what GPUs compute, in the same calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mneme.kernels.torch.fp8 import Fp8Codes, Fp8Linear, fits, join_fp8, quantize_fp8, round_rows


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def meant(codes: Fp8Codes) -> Tensor:
    return codes.values.double() * codes.scales.double()[:, None]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 33])
def test_a_product_is_that_of_what_both_sides_are_rounded_to(
    num_rows: int, out_dtype: torch.dtype | None, has_bias: bool
) -> None:
    """In float32 within sums of it, in bfloat16 rounded once. Rows and channels differ by orders of magnitude."""
    weight, x = drawn(48, 64) * torch.logspace(-3, 2, 48)[:, None].bfloat16(), drawn(num_rows, 64, seed=1)
    x = x * torch.logspace(2, -3, max(num_rows, 1))[:num_rows, None].bfloat16()
    bias = drawn(48, seed=2) if has_bias else None
    codes = quantize_fp8(weight)
    rounded, scales = round_rows(x)
    wanted = (rounded.double() * scales.double()) @ meant(codes).T + (0 if bias is None else bias.double())
    linear = Fp8Linear(codes, bias)
    found = linear(x, out_dtype)
    assert found.dtype is (out_dtype or torch.bfloat16)
    magnitude = (rounded.double() * scales.double()).abs() @ meant(codes).abs().T
    exact = 1e-6 * magnitude + (0 if bias is None else 1e-6 * bias.double().abs())
    assert ((found.double() - wanted).abs() <= exact + (2.0**-8 * wanted.abs() if out_dtype is None else 0)).all()
    out = torch.empty_like(found)
    assert linear(x, out_dtype, out) is out
    assert torch.equal(out, found)


def test_rounding_is_within_half_a_step_of_e4m3() -> None:
    """3 bits behind the point; what is 2^-15 of a row's largest, or less, is on the grid of the smallest numbers."""
    x = drawn(64, 256) * torch.logspace(-30, 30, 64)[:, None].bfloat16()
    rounded, scales = round_rows(x)
    error = (rounded.double() * scales.double() - x.double()).abs()
    largest = x.double().abs().amax(1, keepdim=True)
    assert (error <= (2.0**-4 * x.double().abs()).clamp_min(largest / 448 * 2.0**-10) * (1 + 1e-6)).all()
    assert ((rounded.double() * scales.double()).abs().amax(1, keepdim=True) / largest - 1).abs().max() < 1e-6


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_a_bad_input_is_its_own_rows_alone(out_dtype: torch.dtype | None) -> None:
    x, bias = drawn(4, 64), drawn(48, seed=2)
    alone = Fp8Linear(quantize_fp8(drawn(48, 64)), bias)(x[:1], out_dtype)
    x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, 0
    found = Fp8Linear(quantize_fp8(drawn(48, 64)), bias)(x, out_dtype)
    assert torch.equal(found[:1], alone)
    assert found[1:3].isnan().all()
    assert torch.equal(found[3], bias.to(found.dtype)), "zeros"


def test_rows_of_weights() -> None:
    """All zeros among them, joined and moved."""
    weight = drawn(32, 16)
    weight[7] = 0
    codes = join_fp8([quantize_fp8(weight[:20]), quantize_fp8(weight[20:])])
    assert torch.equal(meant(codes), meant(quantize_fp8(weight)))
    assert not meant(codes)[7].any()
    index = torch.tensor([7, 3, 31, 3])
    assert torch.equal(Fp8Linear(codes).weight_rows(index).double(), meant(codes)[index].bfloat16().double())
    moved = codes.rows(lambda rows: rows.flip(0))
    assert torch.equal(meant(moved), meant(codes).flip(0))
    assert Fp8Linear(codes).num_bytes == 32 * 16 + 32 * 4


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_sizes_that_nothing_multiplies_are_refused(shape: tuple[int, int]) -> None:
    assert not fits(*shape)
    with pytest.raises(ValueError, match="16 must divide both sizes"):
        Fp8Linear(quantize_fp8(drawn(*shape)))
