"""Modules of Triton kernels, imported when a CUDA tensor first needs them, and what to say when Triton fails.

Needs no triton itself.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from functools import cache
from importlib import import_module, metadata
from subprocess import CalledProcessError
from typing import Any

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 80  # of Triton's own message, which may go over many lines


class CompileError(RuntimeError):
    """A kernel cannot be compiled; the message is one line that names it and what to do."""


@cache
def triton_module(name: str) -> Any:
    """`mneme.kernels.triton.<name>`; None, with one warning, where triton cannot be imported: torch works instead."""
    try:
        return kernels_of(f"mneme.kernels.triton.{name}")
    except ImportError as error:
        logger.warning("triton cannot be imported; plain torch runs in its place module=%s error=%s", name, error)
        return None


def kernels_of(module: str) -> Any:
    """Import a module of kernels, and have Triton make their cache keys in the order in which they are defined.

    A key depends on whether those of the functions that it calls were made before. So every process makes them in this
    order: what one has compiled, another finds.
    """
    found = import_module(module)
    _make_keys(module)
    return found


@cache
def _make_keys(module: str) -> None:
    """Those of functions from other modules first, all of such a module."""
    functions = [each for each in vars(sys.modules[module]).values() if hasattr(type(each), "cache_key")]
    for home in {each.module: None for each in functions if each.module != module}:
        _make_keys(home)
    for function in functions:
        _ = function.cache_key


def triton_trouble(error: BaseException, kernel: str = "a kernel") -> str | None:
    """Say in one line what Triton could not do with a kernel, and what helps; None for an error that is not Triton's.

    Triton's own errors (of its compiler, of kernels that a device has no room for) are no RuntimeErrors.
    """
    if isinstance(error, CompileError):
        return str(error)
    # The other arguments of a command name libraries.
    message = str(error.cmd[0] if isinstance(error, CalledProcessError) else error)
    for pattern, advice in _ADVICE.items():
        if re.search(pattern, message):
            return f"{advice} ({in_one_line(error)})"
    if isinstance(error, CalledProcessError):  # it builds what launches its kernels
        return f"{_NO_COMPILER} ({in_one_line(error)})"
    if isinstance(error, OSError) and _is_of_cache(error):
        return f"triton cannot write its cache: set TRITON_CACHE_DIR to a folder that it can ({in_one_line(error)})"
    if type(error).__module__.partition(".")[0] == "triton" or "PassManager::run failed" in message:
        return does_not_run(f"{kernel} ({in_one_line(error)})")
    return None


_NO_COMPILER = "triton finds no C compiler, or no headers of this Python: install gcc and python3-dev"
_ADVICE = {  # pattern of what Triton, CUDA or torch say -> what it means and what helps
    "C compiler": _NO_COMPILER,
    "Cannot find ptxas|^[^ ]*ptxas[^ ]*$|No such file.*ptxas|Permission denied.*ptxas": (
        "triton's ptxas cannot be run: reinstall triton, or set TRITON_PTXAS_PATH to that of a CUDA toolkit"
    ),
    r"libcuda\.so|ldconfig|active drivers": (
        "triton finds no CUDA driver: install NVIDIA's, or set TRITON_LIBCUDA_PATH to the folder of libcuda.so.1"
    ),
    "no kernel image|kernel image is invalid|unsupported toolchain|PTX JIT": (
        "this GPU or its driver does not take what was compiled: update the driver, use a torch built for this GPU"
    ),
    "create or locate cache dir": "triton has no cache: set TRITON_CACHE_DIR to a folder that it can write",
}


def _is_of_cache(error: OSError) -> bool:
    """Tell whether it was raised while Triton read or wrote its cache."""
    frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    return "triton.runtime.cache" in frames


def does_not_run(kernels: str) -> str:
    """Say so of the Triton that is installed, and what compiles them all."""
    version = metadata.version("triton")
    advice = "use 3.6.0 or 3.7.1, and a GPU of capability 8.0 or 9.0: A100, H100 or H200"
    return f"triton {version} does not run {kernels}: {advice}"


def in_one_line(error: BaseException) -> str:
    """Return the kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN_CHARS]}"
