"""Where a model's files are."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from mneme.errors import CheckpointError

EMBEDDED_MODEL = "mneme-tiny"


def model_directory(model: str) -> Path:
    """The directory of a model: the embedded one by its name, any other by its path."""
    if model == EMBEDDED_MODEL:
        return Path(str(importlib.resources.files("mneme.replicas") / "mneme_tiny"))
    path = Path(model).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"{model}: no such model directory (the embedded model is {EMBEDDED_MODEL!r})")
    return path
