"""Products with weights of 8 and 4 bits against float64, in the builds for three kinds of CPU, and in other batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mneme.kernels.native.quantized import GROUP, Codes, QuantizedLinear, joined, quantize
from tests.kernels.native.native_variants import VARIANTS, use_variant
from tests.kernels.test_linear import DTYPES, draw

# Rows, inputs, outputs: one and many tiles of rows, groups and panels that are full and cut.
SHAPES = [(0, 32, 40), (1, 1, 1), (3, 7, 5), (6, 512, 96), (7, 33, 31), (13, 48, 33), (40, 100, 130), (97, 64, 64)]
BITS = (8, 4)


@pytest.fixture(scope="module", params=VARIANTS)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with use_variant(request.param, tmp_path_factory):
        yield


def in_groups(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def meant(weight: Tensor, bits: int) -> Tensor:
    """What the codes stand for, float64 [N, K]."""
    return stood_for(quantize(weight, bits))


def stood_for(codes: Codes) -> Tensor:
    least = -128 * codes.scales.double() if codes.minima is None else codes.minima.double()
    values = (codes.values.double() * codes.scales.double()[..., None] + least[..., None]).flatten(1)
    values = values[:, : codes.num_inputs]
    if codes.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, codes.order.long(), values)


def rounded(x: Tensor) -> Tensor:
    """Inputs in 8 bits, by row and group, float64 [T, K]."""
    groups = in_groups(x.float())
    most = groups.abs().amax(2, keepdim=True)
    units = torch.where(most > 0, 127 / most, 0)
    return ((groups * units).round().double() * (most / 127).double()).flatten(1)[:, : x.shape[1]]


def assert_close(y: Tensor, x: Tensor, weight: Tensor, bits: int, bias: Tensor | None = None) -> None:
    """Within rounding of float32 sums of groups, and of the result; a minimum times a sum may cancel a lot."""
    codes = quantize(weight, bits)
    scales, minima = codes.scales, codes.minima
    terms = rounded(x).abs() @ meant(weight, bits).abs().T
    if minima is not None:
        of_groups = (scales.double() * 15 + minima.double().abs()).repeat_interleave(GROUP, 1)[:, : x.shape[1]]
        terms = rounded(x).abs() @ of_groups.T
    wanted = rounded(x) @ meant(weight, bits).T + (0 if bias is None else bias.double())
    allowed = wanted.abs() * torch.finfo(y.dtype).eps / 2 + terms * 2.0**-20 + 1e-30
    assert ((y.double() - wanted).abs() <= allowed).all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_equal_float64(bits: int, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    """Of rows that lie apart, too; inputs lie off the middle between two numbers of 8 bits, where either is right."""
    x = (draw(2 * rows, inputs + 5, dtype=torch.float32) + 1e-4).to(dtype)[::2, 2 : inputs + 2]
    weight, bias = draw(outputs, inputs, dtype=dtype, seed=1), draw(outputs, dtype=dtype, seed=2)
    for each in (None, bias):
        linear = QuantizedLinear(quantize(weight, bits), each)
        y = linear(x, torch.float32)
        assert (y.dtype, linear(x).dtype) == (torch.float32, dtype)
        assert torch.equal(linear(x), y.to(dtype))
        in_middle = ((rounded(x) - x.double()).abs() * 2 > 0.999 * _step(x)).any(1)
        assert_close(y[~in_middle], x[~in_middle], weight, bits, each)


def _step(x: Tensor) -> Tensor:
    groups = in_groups(x.double())
    return (groups.abs().amax(2) / 127).repeat_interleave(GROUP, 1)[:, : x.shape[1]]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_every_batch(bits: int, dtype: torch.dtype) -> None:
    x, linear = draw(77, 130, dtype=dtype), QuantizedLinear(quantize(draw(70, 130, dtype=dtype, seed=1), bits))
    together = linear(x)
    for begin, end in ((0, 1), (3, 7), (10, 22), (49, 50), (1, 50), *((0, size) for size in range(2, 20))):
        assert torch.equal(linear(x[begin:end]), together[begin:end])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 33, 128])
def test_inputs_in_another_order(bits: int, dtype: torch.dtype, inputs: int) -> None:
    """Files of GPTQ with `desc_act`: the same bits as of inputs that are put in order before."""
    weight, x = draw(40, inputs, dtype=dtype, seed=1), draw(9, inputs + 3, dtype=dtype)[:, 2 : inputs + 2]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(5))
    plain = quantize(weight[:, order], bits)
    linear = QuantizedLinear(plain._replace(order=order))
    assert torch.equal(linear(x), QuantizedLinear(plain)(x[:, order].contiguous()))
    wanted = stood_for(plain._replace(order=order))
    assert torch.equal(linear.weight_rows(torch.arange(40)), wanted.float().to(dtype))


def test_rows_are_joined_of_one_order() -> None:
    first, second = quantize(draw(5, 64, dtype=torch.float32), 4), quantize(draw(3, 64, dtype=torch.float32, seed=1), 4)
    whole = joined([first, second])
    assert whole is not None
    assert torch.equal(stood_for(whole), torch.cat((stood_for(first), stood_for(second))))
    order = torch.randperm(64)
    assert joined([first._replace(order=order), second]) is None
    assert joined([first, second._replace(order=order)]) is None
    assert joined([first._replace(order=order), second._replace(order=order.flip(0))]) is None
    both = joined([each._replace(order=order) for each in (first, second)])
    assert both is not None
    assert torch.equal(stood_for(both), torch.empty_like(stood_for(whole)).index_copy_(1, order, stood_for(whole)))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", BITS)
def test_more_rows_than_a_cache_holds(bits: int) -> None:
    x, linear = (
        draw(1100, 1024, dtype=torch.bfloat16),
        QuantizedLinear(quantize(draw(40, 1024, dtype=torch.bfloat16), bits)),
    )
    y = linear(x)
    for row in (0, 300, 513, 1099):
        assert torch.equal(y[row : row + 1], linear(x[row : row + 1]))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", BITS)
def test_numbers_that_are_none_stay_in_their_rows(bits: int) -> None:
    x, weight = draw(9, 70, dtype=torch.float32), draw(40, 70, dtype=torch.float32, seed=1)
    linear = QuantizedLinear(quantize(weight, bits))
    clean = linear(x)
    x[2, 3], x[4, 69], x[5] = torch.nan, -torch.inf, 0
    y = linear(x)
    assert y[[2, 4]].isnan().all()
    assert torch.equal(y[5], torch.zeros(40))
    kept = [0, 1, 3, 6, 7, 8]
    assert torch.equal(y[kept], clean[kept])


@pytest.mark.parametrize("bits", BITS)
def test_one_large_input_costs_its_group_alone(bits: int) -> None:
    x, weight = draw(1, 96, dtype=torch.float32), draw(32, 96, dtype=torch.float32, seed=1)
    x[0, 40] = 1000
    error = (rounded(x) - x.double()).abs()
    assert error[0, 32:64].max() > 0.1
    assert error[0, torch.arange(96) // 32 != 1].max() < 0.02
    assert_close(QuantizedLinear(quantize(weight, bits))(x), x, weight, bits)


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_within_about_half_a_step(bits: int) -> None:
    """Weights of zeros and of one number, too; the weight itself stays as it is. 4 bits may cut the ends
    of a group, and move the grid once more behind rounding."""
    weight = draw(70, 130, dtype=torch.float32)
    weight[3], weight[4], weight[5, 7] = 0, 0.25, 30
    before = weight.clone()
    codes, scales = quantize(weight, bits)[:2]
    step = scales.double().repeat_interleave(GROUP, 1)[:, :130]
    error = (meant(weight, bits) - weight.double()).abs()
    is_inside = (
        ((codes > 0) & (codes < 15)).flatten(1)[:, :130] if bits == 4 else torch.ones_like(step, dtype=torch.bool)
    )
    assert (error <= (0.51 if bits == 8 else 0.75) * step + weight.double().abs() * 2.0**-8)[is_inside].all()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-6])
def test_small_weights_are_kept_in_8_bits(size: float) -> None:
    """Their scales are below float16's normal numbers."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)) * size
    assert (meant(weight, 8) - weight.double()).norm() / weight.norm() < 0.03


def test_no_group_loses_more_than_between_its_ends() -> None:
    """Against steps from the smallest to the largest number, in float64; normal numbers lose less."""
    weight = draw(200, 128, dtype=torch.float32)
    weight[:9] *= 1e-6
    weight[9:14, ::5] = 50.0
    weight[14], weight[15, :7], weight[16, 0], weight[17, 3] = 1e30, 0, float("inf"), float("nan")
    groups = in_groups(weight).double()
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    minima = least.half().double()
    step = ((most - minima) / 15).half().double()
    plain = (groups - minima).div(step).nan_to_num(0).round().clamp(0, 15) * step + minima
    lost, of_plain = ((each - groups).square().sum(2) for each in (in_groups(meant(weight, 4)), plain))
    is_finite = of_plain.isfinite()
    assert (lost <= of_plain * 1.001 + 1e-30)[is_finite].all()
    assert lost[18:].sum() < 0.88 * of_plain[18:].sum()


def test_errors_count_by_their_inputs() -> None:
    """Summed over all weights, times the mean square of each input, float64; what is not known counts alike."""
    weight = draw(200, 130, dtype=torch.float32)
    squares = draw(130, dtype=torch.float32, seed=1).mul(2).exp()
    squares[7] = 0
    blind, found = (
        ((stood_for(quantize(weight, 4, each)) - weight.double()).square() * squares.double()).sum()
        for each in (None, squares)
    )
    assert found < 0.6 * blind
    for same in (torch.full((130,), 4.0), squares * torch.inf):
        assert torch.equal(stood_for(quantize(weight, 4, same)), stood_for(quantize(weight, 4)))


@pytest.mark.parametrize("bits", BITS)
def test_what_was_rounded_so_before_is_found_again(bits: int) -> None:
    """As files of GGUF have it: codes that use all of their range, scales of 11 bits."""
    codes = torch.randint(1, 16 if bits == 4 else 256, (40, 3, GROUP), generator=torch.Generator().manual_seed(3))
    codes[..., 0], codes[..., 1] = (0, 15) if bits == 4 else (1, 255)
    scales, minima = draw(40, 3, dtype=torch.float16).abs() + 0.1, draw(40, 3, dtype=torch.float16, seed=1)
    least = minima.float() if bits == 4 else -128 * scales.float()
    found, of_scales = quantize((codes * scales.float()[..., None] + least[..., None]).flatten(1), bits)[:2]
    assert torch.equal(found, codes.to(torch.uint8))
    assert torch.allclose(of_scales.float(), scales.float(), rtol=2e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_weight_come_back(bits: int, dtype: torch.dtype) -> None:
    weight = draw(70, 33, dtype=dtype)
    linear, index = QuantizedLinear(quantize(weight, bits)), torch.tensor([0, 69, 31, 32, 32])
    found = linear.weight_rows(index)
    assert torch.equal(found, meant(weight, bits).float().to(dtype)[index])
    assert found.is_contiguous(), "layers in one call read it as packed"


def test_threads_change_nothing() -> None:
    x, linear = draw(30, 64, dtype=torch.bfloat16), QuantizedLinear(quantize(draw(200, 64, dtype=torch.bfloat16), 4))
    alone, before = linear(x), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x), alone)
    finally:
        torch.set_num_threads(before)


ZEROS = quantize(torch.zeros(4, 4), 8)


@pytest.mark.parametrize(
    ("said", "make"),
    [
        ("no kernel for 3 bits", lambda: quantize(torch.zeros(4, 4), 3)),
        ("no kernel for inputs of", lambda: QuantizedLinear(quantize(torch.zeros(4, 4, dtype=torch.float16), 8))),
        (r"bias: must have shape \(4,\)", lambda: QuantizedLinear(ZEROS, torch.zeros(5))),
        ("order must have each input once", lambda: QuantizedLinear(ZEROS._replace(order=torch.tensor([0, 1, 1, 3])))),
        ("order must have each input once", lambda: QuantizedLinear(ZEROS._replace(order=torch.tensor([1, 2, 3, 4])))),
        ("x: must be", lambda: QuantizedLinear(ZEROS)(torch.zeros(2, 5))),
        ("out_dtype: ", lambda: QuantizedLinear(ZEROS)(torch.zeros(2, 4), torch.float16)),
    ],
)
def test_what_it_cannot_do_is_refused(said: str, make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=said):
        make()
