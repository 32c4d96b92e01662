"""`mneme simulate cluster` as a command: JSON, the table, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mneme.cluster.cli.main import main

SMALL = ["--trace", "synthetic:num_sessions=20", "--block-tokens", "64"]


def simulate(*arguments: str) -> int:
    return main(["simulate", "cluster", *arguments])


def test_one_router_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*SMALL, "--replicas", "3", "--router", "mneme", "--scale", "2", "--speed", "4", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    wanted = ("ttft_p50_s", "ttft_p99_s", "load_skew", "simulated_requests_per_minute")
    assert all(found[name] > 0 for name in wanted)
    assert (found["router"], found["replicas"], found["scale"]) == ("mneme", 3, 2)
    assert 0 < found["hit_ratio"] <= found["infinite_hit_ratio"]


@pytest.mark.slow
def test_a_scenario_needs_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--scenario", "herding", "--router", "mneme,polled", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["scenario"], run["router"]) for run in runs] == [("herding", "mneme"), ("herding", "polled")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--router", "clever"], "router: must be one of mneme, "),
        (["--replicas", "0..3"], "replicas: must be from 1 to 10000 (got 0)"),
        (["--replicas", "few"], "replicas: must be a number, or a range"),
        (["--speed", "nan"], "speed: must be from 1e-06 to 1e+06 (got nan)"),
        (
            ["--scenario", "herding", "--replicas", "8", "--rates", "nowhere", "--seed", "1", "--router", "hash"],
            "replicas, rates: cannot be given beside --scenario",
        ),
        (["--device-gb", "0.001"], "device-gb: must hold the longest request, of "),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--trace", "trace.jsonl"], "trace.jsonl:2: is no JSON"),
    ],
)
def test_bad_input_is_said_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]}
    Path("trace.jsonl").write_text(json.dumps(row) + "\nno\n")
    assert simulate(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize("simulator", ["cluster", "cache"])
def test_no_torch_and_no_ray_is_imported(simulator: str) -> None:
    code = (
        "import sys; from mneme.cluster.cli.main import main; "
        f"main(['simulate', '{simulator}', *{SMALL!r}, '--json']); assert not {{'torch', 'ray'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
