"""What a model directory lacks is said in one line, before anything is started."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mneme.cachetier.chunk.syscalls import FileOperations
from mneme.cachetier.node.folder import DiskFolder
from mneme.cluster.config import ClusterConfig
from mneme.cluster.run.local_cluster import check_files
from mneme.config import parse
from mneme.errors import CheckpointError, ConfigError
from mneme.replicas.config import EMBEDDED_MODEL
from mneme.replicas.model.directory import model_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_directory(EMBEDDED_MODEL), tmp_path / "model"))


def check(directory: Path) -> None:
    check_files(ClusterConfig(model=str(directory)))


def test_the_embedded_model_passes(directory: Path) -> None:
    check(directory)
    (directory / "tokenizer_config.json").unlink()
    check(directory)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text('{"model": 1}'), "tokenizer.json: is not a tokenizer"),
        (lambda d: (d / "tokenizer_config.json").write_bytes(b"\xff"), "tokenizer_config.json: not readable as JSON"),
        (lambda d: (d / "generation_config.json").write_text('{"top_p": 2}'), "generation_config.json: top_p: must be"),
        (
            lambda d: (d / "model.safetensors").unlink(),
            "has neither model.safetensors nor model.safetensors.index.json",
        ),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "weights in PyTorch's pickles form"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"t": "model-1.safetensors"}}'),
            "model-1.safetensors: no such file, which model.safetensors.index.json names",
        ),
        (lambda d: (d / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors: "),
    ],
)
def test_what_is_missing_or_damaged_is_named(directory: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as raised:
        check(directory)
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_that_the_cache_cannot_use_is_refused(directory: Path, tmp_path: Path) -> None:
    def check_folder(folder: Path, *, enabled: bool = True) -> None:
        cache = {"enabled": enabled, "disk": {"folder": str(folder), "capacity_bytes": 1 << 20}}
        check_files(parse(ClusterConfig, {"model": str(directory), "cache": cache}))

    check_folder(tmp_path / "new" / "kv")
    held = DiskFolder(str(tmp_path / "new" / "kv"), FileOperations())
    (tmp_path / "file").touch()
    check_folder(tmp_path / "file", enabled=False)
    check_folder(tmp_path / "file" / "%n")
    for folder, reason in ((tmp_path / "file", "cannot be used"), (tmp_path / "new" / "kv", "in use by another")):
        with pytest.raises(ConfigError, match=f"disk tier: {folder} .*{reason}"):
            check_folder(folder)
    held.close()
