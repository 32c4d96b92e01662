"""Shapes and types that would make the decoder's compiled operations read or write beyond: refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mneme.kernels import ops
from mneme.kernels.native.linear import PackedLinear
from tests.kernels.cases import needs_native


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 9, 800])
def test_a_norm_has_a_weight_per_column(size: int, dtype: torch.dtype) -> None:
    rows, weight = zeros(20, 8, dtype=dtype), zeros(size, dtype=dtype)
    with pytest.raises(ValueError, match=r"^weight: "):
        ops.rms_norm(rows, weight, 1e-6)
    with pytest.raises(ValueError, match=r"^weight: "):
        ops.rms_norm(rows.view(5, 4, 8), weight, 1e-6)
    with pytest.raises(ValueError, match=r"^weight: "):
        ops.add_rms_norm(rows, rows, weight, 1e-6)
    with pytest.raises(ValueError, match=r"^weight: "):
        ops.rms_norm(rows, zeros(1, 8, dtype=dtype), 1e-6)


def test_a_weight_lies_on_the_device_of_its_rows() -> None:
    with pytest.raises(ValueError, match=r"^weight: .* on meta"):
        ops.rms_norm(zeros(2, 8), torch.zeros(8, device="meta"), 1e-6)
    with pytest.raises(ValueError, match=r"^delta: .* on meta"):
        ops.add_rms_norm(zeros(2, 8), torch.zeros(2, 8, device="meta"), zeros(8), 1e-6)


@pytest.mark.parametrize("shape", [(1, 8), (19, 8), (20, 1), (8,), (20, 1, 8)])
def test_what_is_added_has_the_shape_of_the_rows(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^delta: "):
        ops.add_rms_norm(zeros(20, 8), zeros(*shape), zeros(8), 1e-6)


@pytest.mark.parametrize("shape", [(3, 7), (8,), (2, 3, 8)])
def test_gates_and_ups_are_pairs(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^gate_up: "):
        ops.gated(zeros(*shape), "silu")


def test_an_unknown_activation_is_refused() -> None:
    unknown: Any = "relu"
    with pytest.raises(ValueError, match=r"^activation: must be one of silu, gelu, gelu_tanh \(got 'relu'\)"):
        ops.gated(zeros(3, 8), unknown)


@pytest.mark.parametrize("logits", [zeros(4, 100).bfloat16(), zeros(4, 100).double(), zeros(100), zeros(4, 0)])
def test_logits_are_rows_of_float32(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^logits: must be float32"):
        ops.best_tokens(logits)
    with pytest.raises(ValueError, match=r"^logits: must be float32"):
        ops.draw_whole(logits, [1.0] * len(logits), [0.5] * len(logits))


@pytest.mark.parametrize(("num_temperatures", "num_numbers"), [(1, 4), (4, 1), (1, 1), (5, 5)])
def test_each_row_has_a_temperature_and_a_number(num_temperatures: int, num_numbers: int) -> None:
    with pytest.raises(ValueError, match=r"^temperatures, numbers: "):
        ops.draw_whole(zeros(4, 100), [1.0] * num_temperatures, [0.5] * num_numbers)


@needs_native
def test_a_packed_weight_takes_what_fits_it() -> None:
    weight = zeros(64, 8)
    for bias in (zeros(3), zeros(65), zeros(1, 64), torch.zeros(64, device="meta")):
        with pytest.raises(ValueError, match=r"^bias: must have shape \(64,\)"):
            PackedLinear(weight, bias)
    for other in (zeros(64, 8).half(), zeros(8), torch.zeros(64, 8, device="meta")):
        with pytest.raises(ValueError, match=r"^weight: "):
            PackedLinear(other)
    linear = PackedLinear(weight)
    for x in (zeros(8), zeros(1, 2, 8), torch.zeros(2, 8, device="meta")):
        with pytest.raises(ValueError, match=r"^x: must be torch.float32"):
            linear(x)


@needs_native
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float32, torch.float64)],
)
def test_a_packed_weight_gives_float32_or_its_own_type(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    linear, x = PackedLinear(zeros(64, 8, dtype=dtype)), zeros(512, 8, dtype=dtype)
    with pytest.raises(ValueError, match=r"^out_dtype: must be float32 or"):
        linear(x, out_dtype)
    for fitting in (None, dtype, torch.float32):
        assert linear(x, fitting).dtype == (fitting or dtype)
