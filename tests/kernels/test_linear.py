"""Packed linears against float64, in the builds for three kinds of CPU, and against themselves in other batches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mneme.kernels.linear import PackedLinear, PlainLinear, make_linear
from tests.kernels.native.native_variants import VARIANTS, use_variant

DTYPES = (torch.float32, torch.bfloat16)
# Rows, inputs, outputs: one and many tiles of rows, panels that are full and cut, inputs that are odd.
SHAPES = [(0, 24, 40), (1, 1, 1), (3, 7, 5), (8, 512, 96), (12, 33, 31), (13, 48, 33), (40, 100, 130), (97, 16, 64)]


@pytest.fixture(scope="module", params=VARIANTS)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with use_variant(request.param, tmp_path_factory):
        yield


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within the rounding of a float32 sum in any order, and of the result."""
    wanted = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wanted, terms = wanted + bias.double(), terms + bias.double().abs()
    result_eps = torch.finfo(y.dtype).eps / 2
    allowed = wanted.abs() * result_eps + terms * 2.0**-23 * (4 + x.shape[1] / 16) + 1e-30
    assert ((y.double() - wanted).abs() <= allowed).all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_float64(dtype: torch.dtype, rows: int, inputs: int, outputs: int, with_bias: bool) -> None:
    """Of rows that lie apart, too."""
    x = draw(2 * rows, inputs + 5, dtype=dtype)[::2, 2 : inputs + 2]
    weight = draw(outputs, inputs, dtype=dtype, seed=1)
    bias = draw(outputs, dtype=dtype, seed=2) if with_bias else None
    linear = PackedLinear(weight, bias)
    assert_close(linear(x), x, weight, bias)
    assert linear(x).dtype == dtype
    assert linear(x, torch.float32).dtype == torch.float32
    assert_close(linear(x, torch.float32), x, weight, bias)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x = draw(77, 130, dtype=dtype)
    linear = PackedLinear(draw(70, 130, dtype=dtype, seed=1))
    together = linear(x)
    for begin, end in ((0, 1), (3, 7), (10, 22), (10, 23), (49, 50), (1, 50), *((0, size) for size in range(2, 77))):
        assert torch.equal(linear(x[begin:end]), together[begin:end])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_a_cache_holds(dtype: torch.dtype) -> None:
    """Their inputs, 1 MB and 2, pass in blocks of rows."""
    x, weight = draw(1027, 512, dtype=dtype), draw(40, 512, dtype=dtype, seed=1)
    linear = PackedLinear(weight)
    y = linear(x)
    assert_close(y, x, weight, None)
    for row in (0, 300, 513, 1026):
        assert torch.equal(y[row : row + 1], linear(x[row : row + 1]))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_weight_come_back(dtype: torch.dtype) -> None:
    weight = draw(70, 33, dtype=dtype)
    index = torch.tensor([0, 69, 31, 32, 32])
    assert torch.equal(PackedLinear(weight).weight_rows(index), weight[index])


@pytest.mark.parametrize("torch_rows", [None, 1])
def test_threads_change_nothing(torch_rows: int | None) -> None:
    weight = draw(200, 64, dtype=torch.bfloat16, seed=1)
    x, linear = draw(30, 64, dtype=torch.bfloat16), make_linear(weight, None, torch_rows)
    alone = linear(x)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_close(linear(x), x, weight, None)
        assert torch_rows is not None or torch.equal(linear(x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 15), (32, 32), (33, 33), (70, 130), (200, 64)])
def test_what_torch_multiplies_is_the_weight_itself(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """One after the other in the same memory, and from that number of rows on alone."""
    weight, bias = draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype, seed=2)
    linear, ours = PackedLinear(weight, bias, torch_rows=4), PackedLinear(weight, bias)
    assert torch.equal(PackedLinear(draw(300, 70, dtype=dtype)).unpacked(), draw(300, 70, dtype=dtype))
    assert torch.equal(linear.unpacked(), weight)
    for rows in (0, 1, 3, 4, 5, 33):
        x = draw(rows, inputs + 3, dtype=dtype, seed=3)[:, 2 : inputs + 2]
        assert_close(linear(x), x, weight, bias)
        assert torch.equal(linear(x, torch.float32), ours(x, torch.float32) if dtype != torch.float32 else linear(x))
        assert torch.equal(linear(x), F.linear(x, weight, bias) if rows >= 4 else ours(x))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("torch_rows", [None, 1])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, torch_rows: int | None) -> None:
    x, weight = draw(40, 70, dtype=dtype), draw(33, 70, dtype=dtype, seed=1)
    x[3, 5], x[17, 69], x[39, 0] = torch.nan, torch.inf, -torch.inf
    y = PackedLinear(weight, None, torch_rows)(x)
    touched = [3, 17, 39]
    assert not y[touched].isfinite().any()
    kept = [row for row in range(40) if row not in touched]
    assert_close(y[kept], x[kept], weight, None)


def test_one_weight_serves_several_threads() -> None:
    weight = draw(200, 64, dtype=torch.bfloat16)
    x, linear = draw(30, 64, dtype=torch.bfloat16, seed=1), make_linear(weight, None, 1)
    wanted = linear(x)
    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(y, wanted) for y in threads.map(lambda _: linear(x), range(40)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_plain_equals_float64(dtype: torch.dtype) -> None:
    x, weight, bias = draw(5, 24, dtype=dtype), draw(7, 24, dtype=dtype, seed=1), draw(7, dtype=dtype, seed=2)
    linear = PlainLinear(weight, bias)
    assert_close(linear(x), x, weight, bias)
    assert linear(x, torch.float32).dtype == torch.float32
    assert torch.equal(linear.weight_rows(torch.tensor([6, 0])), weight[[6, 0]])


def test_float32_of_a_half_product_holds_what_float16_does_not() -> None:
    x, weight, bias = (200 * draw(*size, dtype=torch.float16).abs() for size in ((3, 64), (5, 64), (5,)))
    linear = PlainLinear(weight, bias)
    assert linear(x).isinf().any()
    wanted = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(linear(x, torch.float32).double(), wanted, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_cuda_float32_comes_from_the_product(dtype: torch.dtype, with_bias: bool) -> None:
    """Traced without a device: logits that were rounded to 16 bits and widened again would show as a cast."""
    with FakeTensorMode():
        x, weight, bias = (torch.empty(size, dtype=dtype, device="cuda") for size in ((3, 8), (5, 8), (5,)))
        linear = PlainLinear(weight, bias if with_bias else None)
        with _Operations() as traced:
            y = linear(x, torch.float32)
    assert (y.dtype, y.shape) == (torch.float32, (3, 5))
    assert not [name for name in traced.names if "_to_copy" in name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_logits_are_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    x, weight, bias = (t.cuda() for t in (draw(5, 256, dtype=dtype), draw(96, 256, dtype=dtype), draw(96, dtype=dtype)))
    linear = PlainLinear(weight, bias)
    assert_close(linear(x, torch.float32), x, weight, bias)
    assert linear(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_goes_where_it_is_wanted(dtype: torch.dtype) -> None:
    x, weight, bias = draw(5, 64, dtype=dtype), draw(40, 64, dtype=dtype, seed=1), draw(40, dtype=dtype, seed=2)
    for linear in (make_linear(weight, bias), PlainLinear(weight, bias)):
        room = torch.full((8, 40), torch.nan)
        found = linear(x, torch.float32, room[:5])
        assert found.data_ptr() == room.data_ptr()
        assert torch.equal(room[:5], linear(x, torch.float32))
        assert room[5:].isnan().all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_on_cuda_the_product_itself_goes_there(with_bias: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight, out = (torch.empty(*size, dtype=kind, device="cuda") for size, kind in (
            ((5, 64), torch.bfloat16), ((40, 64), torch.bfloat16), ((5, 40), torch.float32)
        ))  # fmt: skip
        linear = PlainLinear(weight, torch.empty(40, dtype=torch.bfloat16, device="cuda") if with_bias else None)
        with _Operations() as operations:
            assert linear(x, torch.float32, out) is out
    assert [name for name in operations.names if "mm" in name or "copy" in name] == ["aten.mm.dtype_out"]


class _Operations(TorchDispatchMode):
    """Names of what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_type_without_compiled_code_stays_plain() -> None:
    assert isinstance(make_linear(draw(4, 4, dtype=torch.float16)), PlainLinear)
