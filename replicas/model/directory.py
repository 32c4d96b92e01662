"""Finds a model's files."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

from mneme.errors import CheckpointError

EMBEDDED_MODEL = "mneme-tiny"


def model_directory(model: str) -> Path:
    """The directory of a model: the embedded one by its name, any other by its path."""
    if model == EMBEDDED_MODEL:
        return Path(str(importlib.resources.files("mneme.replicas") / "mneme_tiny"))
    path = Path(model).expanduser()
    if not path.is_dir():
        rule = f"no such model directory (the embedded model is {EMBEDDED_MODEL!r})"
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):  # the form of a name on the Hugging Face hub
            name = model.partition("/")[2]
            rule += f"; models are not downloaded: `hf download {model} --local-dir {name}`, then give {name!r}"
        raise CheckpointError(f"{model}: {rule}")
    return path
