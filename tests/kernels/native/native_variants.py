"""The compiled kernels as other CPUs would have them: built for a feature set and put in the library's place."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from mneme.kernels import linear
from mneme.kernels.native import backend as native_backend
from mneme.kernels.native import kv as native_kv
from mneme.kernels.native import layers as native_layers
from mneme.kernels.native import library as native_library
from mneme.kernels.native import ops as native_ops
from mneme.kernels.native import quantized
from mneme.kernels.native.library import build, find_compiler
from tests.budget import rarer

# What this machine has (with AVX-512 BF16 or not), a CPU with AVX2 only, and the least that every 64-bit PC has.
VARIANTS = ("native", *rarer(["haswell", "x86-64"]))


@contextmanager
def use_variant(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All modules of compiled code call this build inside the block; the name may carry more flags.

    All worker processes of a run share what is built: a build takes 10 to 20 s.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "variants"
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    with use_library(ctypes.CDLL(str(build(compiler, folder, flags=tuple(f"-march={name}".split()))))):
        yield


@contextmanager
def use_library(library: ctypes.CDLL | None) -> Iterator[None]:
    """All modules of compiled code call this one inside the block; None: they do without."""
    with pytest.MonkeyPatch.context() as patch:
        typed = cache(native_library.native_function.__wrapped__)
        for module in (native_library, native_kv, native_ops):
            patch.setattr(module, "library", lambda: library)
        for module in (native_backend, native_kv, native_layers, linear, quantized, native_ops):
            patch.setattr(module, "native_function", typed)
        yield
