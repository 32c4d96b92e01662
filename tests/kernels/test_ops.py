"""Norms and gates against float64, in torch and in the builds for three kinds of CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mneme.kernels import ops
from mneme.kernels.native import ops as native_ops
from mneme.kernels.torch import ops as torch_ops
from tests.kernels.native.native_variants import VARIANTS, use_variant

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5


@pytest.fixture(scope="module", params=("torch", *VARIANTS))
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let `ops` choose this one."""
    if request.param == "torch":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_ops, "can_compute", lambda _x: False)
            yield
    else:
        with use_variant(request.param, tmp_path_factory):
            yield


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_rounded(found: Tensor, wanted: Tensor, num_roundings: int = 1, scale: Tensor | float = 1.0) -> None:
    """Equal up to so many roundings to the type, and float32's own on the way, of numbers of that scale."""
    allowed = wanted.abs() * (num_roundings * torch.finfo(found.dtype).eps / 2 + 2e-6) + 1e-6 * scale
    assert found.dtype in DTYPES
    assert ((found.double() - wanted).abs() <= allowed).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 16), (3, 17), (8, 512), (5, 100), (2, 2047)])
def test_rms_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = draw(rows, size, dtype=dtype), draw(size, dtype=dtype, seed=1)
    assert_rounded(ops.rms_norm(x, weight, EPS), normed(x, weight), 2)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_a_wider_row(dtype: torch.dtype) -> None:
    heads = draw(4, 6, 40, dtype=dtype)
    weight = draw(40, dtype=dtype, seed=1)
    for view in (heads[:, 1:4], heads[:, 5:], heads[:0], heads.transpose(0, 1), heads[..., ::2].repeat(1, 1, 2)):
        assert_rounded(ops.rms_norm(view, weight, EPS), normed(view, weight), 2)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 5), (7, 512), (0, 16)])
def test_add_rms_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    hidden, delta = draw(rows, size, dtype=dtype), draw(rows, size, dtype=dtype, seed=1)
    weight = draw(size, dtype=dtype, seed=2)
    total = hidden.double() + delta.double()
    added, norm = ops.add_rms_norm(hidden, delta, weight, EPS)
    assert_rounded(added, total)
    assert_rounded(norm, normed(added, weight), 2)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (6, 112), (3, 37)])
def test_gated(dtype: torch.dtype, activation: ops.Activation, rows: int, size: int) -> None:
    gate_up = draw(rows, 2 * size, dtype=dtype)
    far_out = torch.tensor([-1e30, -200.0, -89.0, -0.0, 0.0, 1e-30, 89.0, 200.0, 1e18])[:size]
    gate_up[0, : len(far_out)] = far_out
    gate, up = gate_up.double().chunk(2, -1)
    wide = {"silu": F.silu(gate), "gelu": F.gelu(gate), "gelu_tanh": F.gelu(gate, approximate="tanh")}[activation]
    assert_rounded(ops.gated(gate_up, activation), wide * up, 3, 1 + (gate * up).abs())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_one_and_harms_no_other_row(dtype: torch.dtype) -> None:
    x, weight = draw(3, 32, dtype=dtype), torch.ones(32, dtype=dtype)
    x[1, 7] = torch.nan
    bad = torch.tensor([False, True, False])
    for found in (ops.rms_norm(x, weight, EPS), ops.add_rms_norm(x.clone(), x, weight, EPS)[1]):
        assert torch.equal(found.isnan().any(-1), bad)
    assert torch.equal(ops.gated(x, "silu").isnan().any(-1), bad)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x, weight = draw(20, 98, dtype=dtype), draw(98, dtype=dtype, seed=1)
    for row in (0, 19):
        one = slice(row, row + 1)
        assert torch.equal(ops.rms_norm(x, weight, EPS)[one], ops.rms_norm(x[one], weight, EPS))
        assert torch.equal(ops.gated(x, "silu")[one], ops.gated(x[one], "silu"))
        added = [ops.add_rms_norm(rows.clone(), rows, weight, EPS)[1] for rows in (x, x[one])]
        assert torch.equal(added[0][one], added[1])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [1, 15, 16, 33, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_a_temperature_the_first_best_token_and_none_where_it_is_not_finite(
    size: int, temperature: float
) -> None:
    logits = draw(5, size, dtype=torch.float32).round()  # so that there are equal ones
    logits[1] = -torch.inf
    logits[2, size // 2] = torch.inf
    logits[3, size - 1] = torch.nan
    found = ops.draw_whole(logits, [0.0] + [temperature] * 3 + [0.0], [0.5] * 5)
    assert found[1:4] == [-1] * 3
    for row in (0, 4):
        assert found[row] == int((logits[row] == logits[row].max()).nonzero()[0])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 3000])
def test_masked_logits_are_barred_and_the_others_stay(size: int) -> None:
    logits = draw(4, size, dtype=torch.float32)
    logits[:, 0] = torch.nan
    allowed = draw(4, size + 40, dtype=torch.float32, seed=1) > 0  # bits behind the vocabulary mean nothing
    allowed[0], allowed[1] = True, False
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    expected = logits.masked_fill(~allowed[:, :size], -torch.inf)
    ops.mask_logits(logits, torch.from_numpy(packed.view(np.int32)))
    assert torch.equal(logits.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [1, 16, 37, 256, 257, 3000])
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 2.0])
def test_draws_invert_the_cumulative_distribution(size: int, temperature: float) -> None:
    """`number` falls between the ends of the drawn token and of the one before it, up to float32's rounding."""
    logits = draw(1, size, dtype=torch.float32)
    logits[0, size // 3 : size // 2] = -torch.inf
    numbers, temperatures = [0.0, 1e-9, 0.25, 0.5, 0.75, 1 - 2**-53], [temperature, 1.5 * temperature] * 3
    tokens = ops.draw_whole(logits.repeat(6, 1), temperatures, numbers)
    for number, each, token in zip(numbers, temperatures, tokens, strict=True):
        ends = (logits[0].double() / each).softmax(-1).cumsum(-1)
        assert logits[0, token] > -torch.inf
        before = float(ends[token - 1]) if token else 0.0
        assert before - 2e-5 <= number <= float(ends[token]) + 2e-5


@pytest.mark.usefixtures("backend")
def test_norms_of_float32_rows_have_the_weight_s_type() -> None:
    """A float16 model keeps the sum over its layers in float32: a channel beyond 65504 is an infinity in the other."""
    hidden, delta = (draw(3, 64, dtype=torch.float32, seed=seed) for seed in (0, 1))
    hidden[:, 5] = 2e5
    weight = 1000 * draw(64, dtype=torch.float16, seed=2)
    weight[5] = 1.0
    added, norm = ops.add_rms_norm(hidden.clone(), delta, weight, EPS)
    assert (added.dtype, norm.dtype) == (torch.float32, torch.float16)
    wanted = normed(hidden + delta, weight)
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(ops.rms_norm(hidden + delta, weight, EPS).double(), wanted, rtol=1e-3, atol=1e-6)


def test_half_floats_are_left_to_torch() -> None:
    x = draw(2, 8, dtype=torch.float16)
    assert torch.equal(ops.gated(x, "silu"), torch_ops.gated(x, "silu"))
