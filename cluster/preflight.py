"""What can be found wrong before anything is started: the port, the model's files."""

from __future__ import annotations

from pathlib import Path

from mneme.cluster.config import ClusterConfig
from mneme.cluster.environment import check_port
from mneme.errors import CheckpointError
from mneme.replicas.model_config import load_model_config
from mneme.replicas.model_directory import model_directory


def check(config: ClusterConfig) -> None:
    """Raises `ConfigError` or `CheckpointError`. Tensors are read by the replicas, which check them then."""
    directory = model_directory(config.model)
    load_model_config(directory)
    _check_weight_files(directory)
    check_port(config)


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
            raise CheckpointError(f"{file}: {str(error).splitlines()[0]}") from error
