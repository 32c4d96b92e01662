"""Where Triton kernels run: in the interpreter, and natively with `-m gpu`."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """The device of tensors that Triton kernels get; see `tests/conftest.py`."""
    pytest.importorskip("triton")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process")
    return torch.device(request.param)
