"""The benchmarks as commands: they end in one line of JSON of a known form, and leave files where they are told to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CHECK = {
    "type": "object",
    "required": ["name", "value", "unit", "target", "ok"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "value": {"type": "number"},
        "unit": {"type": "string"},
        "target": {"type": "string", "pattern": "^[<>]="},
        "ok": {"type": "boolean"},
    },
}
CLOSING = {
    "type": "object",
    "required": [
        *("benchmark", "device", "kind", "quick", "seed", "load_average", "elapsed_s"),
        *("results", "checks", "not_measured"),
    ],
    "properties": {
        "kind": {"enum": ["cpu", "cuda"]},
        "load_average": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "checks": {"type": "array", "items": CHECK},
        "not_measured": {"type": "array", "items": {"type": "string"}},
    },
}


def closing_line(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *command], cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(found, CLOSING)
    assert not {check["name"] for check in found["checks"]} & set(found["not_measured"])
    assert found["checks"] or found["not_measured"]  # it can fail, or says what it could not look at
    return found


def test_a_paper_s_experiment_is_resumed(tmp_path: Path) -> None:
    command = ["benchmarks/bench_papers.py", "attention-store-capacity", "--quick", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command, "--minutes", "0"], cwd=BENCHMARKS.parent, check=False, timeout=600)
    kept = tmp_path / "attention-store-capacity.json"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *command], cwd=BENCHMARKS.parent, check=True, timeout=600, capture_output=True
        )
        assert [row["ratio"] for row in json.loads(kept.read_text())["results"]] == [0.1, 0.25]
    assert b"2 of 2 points are there" in done.stdout


def test_a_paper_s_experiment_over_http(tmp_path: Path) -> None:
    command = ["benchmarks/bench_papers.py", "histories", "--quick", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command], cwd=BENCHMARKS.parent, check=True, timeout=600)
    (row,) = json.loads((tmp_path / "histories.json").read_text())["results"]
    assert row["none cached"] == 0
    assert row["device cached"] > 0.7 < row["+host cached"]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((BENCHMARKS / "results").glob("**/*.json")) if path.name != "table.json"],
    ids=lambda path: path.stem,
)
def test_a_committed_result_says_what_was_met_what_missed_and_what_not_measured(path: Path) -> None:
    found = json.loads(path.read_text())
    names = path.parent.name, path.stem
    if path.parent.parent.name.startswith("gpu-"):  # of `make gpu`: rows that are held against predictions and limits
        rows = found if isinstance(found, list) else found["rows"]
        assert rows
        assert all(row.get("value") is not None or row["note"] for row in rows if "of_limit" in row)
        return
    is_report = names[0].startswith(("clients-", "autoscale-", "quality-"))
    if is_report or names[1].startswith("peer-"):
        return  # of other programs, of `mneme bench` or `quality`, or no measurement
    assert isinstance(found["quick"], bool)
    jsonschema.validate(found["checks"], {"type": "array", "items": CHECK})
    assert not {check["name"] for check in found["checks"]} & set(found["not_measured"])


def test_bench_restart(tmp_path: Path) -> None:
    """The claim of README's picture, over HTTP."""
    found = closing_line(["benchmarks/bench_restart.py", "--quick", "--model", "mneme-tiny", "--out", str(tmp_path)])
    rows = {row["prompt is"]: row for row in found["results"]["restart"]}
    assert [row["tokens"] > 800 for row in rows.values()] == [True] * 3
    assert rows["computed"]["recomputed"] > 0.9 * rows["computed"]["tokens"]
    assert rows["found on the device"]["recomputed"] == 1
    # Of so small a model some is sooner computed than loaded.
    assert rows["found on the disk, after a restart"]["disk"] > 0.5 * rows["computed"]["tokens"]
    assert found["checks"][0]["name"] == "answers that changed"
    assert found["checks"][0]["ok"]
    assert (tmp_path / "restart.svg").read_text().count("<rect") == 3
