"""The C interface of the compiled kernels as ctypes sees it: types, numbers of dtypes, every function's signature."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from mneme.kernels.native.library import library

POINTER, COUNT, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1}  # native_common.h: DType

_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "mneme_attend": ((*[POINTER] * 2, COUNT, *[POINTER] * 2, COUNT, *[POINTER] * 3, NUMBER), None),
    "mneme_attend_prepare": ((POINTER,), COUNT),
    "mneme_write_kv": ((POINTER,), COUNT),
    "mneme_copy_pages": ((*[POINTER] * 4, *[COUNT] * 4, NUMBER), None),
    "mneme_copy_tokens": ((*[POINTER] * 4, *[COUNT] * 6, NUMBER), COUNT),
    "mneme_linear": ((*[POINTER] * 2, *[COUNT] * 2, POINTER, *[NUMBER] * 2), None),
    "mneme_rms_norm": ((*[POINTER] * 3, *[COUNT] * 5, REAL, *[NUMBER] * 2), None),
    "mneme_add_rms_norm": ((*[POINTER] * 4, *[COUNT] * 2, REAL, *[NUMBER] * 2), None),
    "mneme_best_tokens": ((*[POINTER] * 3, *[COUNT] * 2, NUMBER), None),
    "mneme_draw_whole": ((*[POINTER] * 4, *[COUNT] * 2, NUMBER), None),
    "mneme_gated": ((*[POINTER] * 2, *[COUNT] * 2, *[NUMBER] * 3), None),
}


@cache
def native_function(name: str) -> Any:
    """A function of the library, typed; only for callers that know that there is one."""
    loaded = library()
    assert loaded is not None, "the caller asked"
    function = getattr(loaded, name)
    function.argtypes, function.restype = _SIGNATURES[name]
    return function
