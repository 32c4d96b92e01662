"""`mneme models`: what is here, what it takes, and why something is not served."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from mneme.cluster.cli.main import main
from mneme.replicas.model.directory import model_directory


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MNEME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_models_are_listed_with_what_they_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models"
    shutil.copytree(model_directory("mneme-tiny"), folder / "mine")
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text('{"model_type": "mamba"}')
    assert main(["models", str(folder), "--json"]) == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    tiny = listed["mneme-tiny"]
    with safe_open(model_directory("mneme-tiny") / "model.safetensors", framework="numpy") as file:
        num_weights = sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  # no mapping
    assert tiny["weights_bytes"] == 2 * num_weights
    assert tiny["kv_bytes_per_1k_tokens"] == 1000 * 2 * 6 * 2 * 64 * 2
    assert listed[str(folder / "mine")] == {**tiny, "name": str(folder / "mine")}
    assert "model_type: must be one of" in listed[str(folder / "other")]["problem"]
    assert "not here yet" in listed["smollm2"]["about"]
