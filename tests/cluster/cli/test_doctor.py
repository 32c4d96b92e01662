"""Whether `mneme doctor` finds what would keep a server from working here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mneme.cluster.cli import doctor as doctor_command
from mneme.cluster.cli.doctor import doctor

pytestmark = pytest.mark.engine
LOADS = "mneme.replicas.engine.build.cuda_trouble"


def findings(capsys: pytest.CaptureFixture[str], *, is_fine: bool) -> dict[str, dict[str, Any]]:
    assert doctor(port=1, as_json=True) == (not is_fine)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is is_fine
    return {each["name"]: each for each in found["findings"]}


def test_ray_without_tokens_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("disabled", "token"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        assert ("token" in findings(capsys, is_fine=True)["RAY_AUTH_MODE"]["advice"]) == (mode == "disabled")


@pytest.mark.parametrize(
    ("num_gpus", "patched", "trouble", "value"),
    [
        (0, LOADS, None, "2 replicas on the CPU"),
        (1, LOADS, "torch is a CPU build", "1 replica with 1 GPU each, but torch is a CPU build"),
        (1, "mneme.cluster.cli.doctor.importlib.util.find_spec", None, "triton is not installed"),
        (1, "mneme.cluster.cli.doctor.shutil.which", None, "triton finds no C compiler"),
    ],
)
def test_what_keeps_replicas_from_their_gpus_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_gpus: int,
    patched: str,
    trouble: str | None,
    value: str,
) -> None:
    monkeypatch.setattr(doctor_command, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(LOADS, lambda: None)
    monkeypatch.setattr(patched, lambda *_: trouble)
    assert value in findings(capsys, is_fine=not num_gpus)["placement"]["value"]


@pytest.mark.parametrize("room", [2**36, 10])
def test_a_model_fits_or_not(room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mneme.replicas.engine.build.available_bytes", lambda: room)
    monkeypatch.setattr(doctor_command, "count_gpus", lambda: 1)  # that torch cannot use: as on a CPU
    monkeypatch.setattr(LOADS, lambda: "torch is a CPU build")
    monkeypatch.setattr(doctor_command, "_examinations", lambda port: [])
    assert doctor(port=1, as_json=True, model="mneme-tiny") == (0 if room > 10 else 1)
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    kv_bytes = 2 * 6 * 2 * 64 * 2  # keys and values, layers, heads, dimensions, bfloat16
    tokens = 2**30 // kv_bytes if room > 10 else 0
    assert findings["kv"]["value"].startswith(f"{tokens:,} tokens in a replica's pool")
    assert findings["weights"]["is_ok"] == (room > 10)
    assert findings["documents"]["value"].endswith(": the quality report allows hkvd from 0.2")
    assert re.search(
        r"as they are served, as far as headers tell \((bfloat16|float32) \d+ MiB\)", findings["weights"]["value"]
    )
    assert findings["cache tier"]["value"].startswith(f"{2**30 // kv_bytes:,} tokens")


def test_a_model_that_is_not_served_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    monkeypatch.setattr(doctor_command, "_examinations", lambda port: [])
    for model, said in ((str(tmp_path), "model_type: must be one of"), ("no such", "no such model directory")):
        assert doctor(port=1, as_json=False, model=model) == 1
        assert said in capsys.readouterr().out
