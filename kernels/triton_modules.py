"""Modules of Triton kernels, imported when a CUDA tensor first needs them. Needs no triton itself."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

log = logging.getLogger(__name__)


@cache
def triton_module(name: str) -> Any:
    """`mneme.kernels.<name>`; None, with one warning, where triton cannot be imported: torch does its work then."""
    try:
        return import_module(f"mneme.kernels.{name}")
    except ImportError as error:
        log.warning("triton cannot be imported; plain torch runs in its place module=%s error=%s", name, error)
        return None
