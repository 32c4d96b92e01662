"""Where Triton kernels run: in the interpreter, and natively with `-m gpu`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mneme.kernels.native import kv as native_kv
from tests.kernels.cases import needs_native


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """The device of tensors that Triton kernels get; see `tests/conftest.py`."""
    pytest.importorskip("triton")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process")
    return torch.device(request.param)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def kv_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A test runs on both paths of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(native_kv, "can_write", lambda *_: False)
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_that_patches_once() -> Iterator[None]:
    """Triton's interpreter replaces the functions of `triton.language` at every call of one kernel function by another.

    Doing so only where they are not replaced yet makes kernels two to four times as fast.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if os.environ.get("TRITON_INTERPRET") != "1" or not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    original: Callable[[Any], Any] = interpreter._patch_lang
    language = interpreter.tl

    def patch(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is language or value is language.core]
        is_patched = not any(language.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if is_patched else original(function)

    interpreter._patch_lang = patch
    yield
    interpreter._patch_lang = original
