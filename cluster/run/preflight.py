"""Checks what can be wrong before anything is started: the port, the model's files, the cache's folder."""

from __future__ import annotations

import json
from pathlib import Path

from mneme.cachetier.node.folder import check_usable
from mneme.cluster.config import ClusterConfig
from mneme.cluster.run.environment import check_port
from mneme.errors import CheckpointError
from mneme.replicas.model.config import load_model_config, model_directory


def check(config: ClusterConfig) -> None:
    """Raises `ConfigError` or `CheckpointError`. Tensors are read by the replicas, which check them then."""
    directory = model_directory(config.model)
    load_model_config(directory)
    _check_tokenizer_files(directory)
    _check_weight_files(directory)
    check_port(config)
    disk = config.cache.disk if config.cache.enabled else None
    if disk is not None and "%n" not in disk.folder:  # else a replica finds it, which knows its node's name
        check_usable(disk.folder)


def _check_tokenizer_files(directory: Path) -> None:
    """The tokenizer is there and is one; `tokenizer_config.json` may be missing, but not be broken."""
    import tokenizers

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{directory}: has no tokenizer.json (slow tokenizers are not supported)")
    try:
        tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises nothing narrower
        raise CheckpointError(f"{file}: is not a tokenizer: {_first_line(error)}") from error
    config = directory / "tokenizer_config.json"
    try:
        is_mapping = not config.exists() or isinstance(json.loads(config.read_bytes()), dict)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{config}: cannot be read as JSON: {_first_line(error)}") from error
    if not is_mapping:
        raise CheckpointError(f"{config}: must be a JSON object")


def _check_weight_files(directory: Path) -> None:
    """Each file's header: offsets inside the file, no overlap, shapes that fit their bytes."""
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: has no *.safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
