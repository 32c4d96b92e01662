"""Modules of Triton kernels, imported when a CUDA tensor first needs them, and what to say when Triton fails.

Needs no triton itself.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module, metadata
from subprocess import CalledProcessError
from typing import Any

log = logging.getLogger(__name__)

_SHOWN_CHARS = 80  # of Triton's own message, which may go over many lines


class CompileError(RuntimeError):
    """A kernel cannot be compiled; the message is one line that names it and what to do."""


@cache
def triton_module(name: str) -> Any:
    """`mneme.kernels.triton.<name>`; None, with one warning, where triton cannot be imported: torch works instead."""
    try:
        return import_module(f"mneme.kernels.triton.{name}")
    except ImportError as error:
        log.warning("triton cannot be imported; plain torch runs in its place module=%s error=%s", name, error)
        return None


def triton_trouble(error: BaseException) -> str | None:
    """What Triton could not do, and what helps, in one line; None for an error that is not Triton's.

    Triton's own errors (of its compiler, of kernels that a device has no room for) are no RuntimeErrors.
    """
    if isinstance(error, CompileError):
        return str(error)
    if isinstance(error, CalledProcessError) or "C compiler" in str(error):  # it builds what launches its kernels
        return "triton finds no C compiler, or no headers of this Python: install gcc and python3-dev"
    if type(error).__module__.partition(".")[0] != "triton":
        return None
    return does_not_run(f"a kernel ({in_one_line(error)})")


def does_not_run(kernels: str) -> str:
    """Say so of the Triton that is installed, and what compiles them all."""
    return f"triton {metadata.version('triton')} does not run {kernels}: use 3.6.0 or 3.7.1, and an A100, H100 or H200"


def in_one_line(error: BaseException) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN_CHARS]}"
