"""A model's directory, and the decoder that its `config.json` describes."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mneme.errors import CheckpointError
from mneme.replicas.model.config import DecoderConfig
from mneme.replicas.model.families import FAMILIES
from mneme.replicas.model.fields import Fields

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


def load_model_config(model_dir: Path) -> DecoderConfig:
    """Read `config.json`; raises `CheckpointError` that names the file or the field."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; {model_dir} is not a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({type(error).__name__})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return parse_model_config(raw, str(path))


def parse_model_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the decoder of a parsed config.json; `where` begins each error message."""
    fields = Fields(raw, where)
    family = fields.one_of("model_type", tuple(FAMILIES))
    fields.refuse("quantization_config", "quantized checkpoints are not supported")
    return FAMILIES[family].read(fields)
