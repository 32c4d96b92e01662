"""The GPU targets without a GPU, Ray and all else that they do not ask for: what goes wrong is said in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from gpu import check, preflight, steps
from gpu.steps import Row

ROOT = Path(__file__).resolve().parents[2]
# Installed here, and not needed: imports of these fail. pytest runs in a process that is forked from this one.
ABSENT = (
    *("ray", "llguidance", "referencing", "jsonschema", "pydantic", "fastapi", "starlette", "uvicorn", "httptools"),
    *("websockets", "prometheus_client", "shtab", "openai", "gguf"),
)
ALONE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
sys.path.insert(0, "benchmarks")
sys.argv = ["benchmarks/bench_gpu.py", *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FIGURES = {
    "check": {
        "smoke shared",
        "smoke draws",
        "smoke pages at the end of a large pool",
        "tests",
        "copy",
        "engine, 2 requests twice",
    },
    "attention": {"intercept shared", "int8 KV b128 x 1024", "rotation documents", "share cost"},
    "engine": {"decode churn b2, step", "decode int8 KV b2, step", "decode top-p 0.95 b2, step", "ttft 64"},
    "served": {"served ready", "served Poisson, over step", "kill -9 under 16 streams, identical"},
    "beside": {"ours private b128", "ours ttft 64 on a cached 3840", "vllm private b1"},
    "tiers": {"host tier load, runs of 64", "cache tier load of 4k", "decode b2, cache tier on"},
}


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(each, marks=[pytest.mark.e2e] if each == "served" else [])  # that one starts a Ray cluster
        for each in FIGURES
    ],
)
def test_a_target_runs_dry_without_what_it_does_not_ask_for(target: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, target, "--dry", "--out", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [Row(**row) for row in json.loads((tmp_path / target / f"{target}.json").read_text())]
    assert FIGURES[target] <= {row.name for row in rows}
    assert all(row.value is None for row in rows)  # what a dry run takes is no figure
    table = (tmp_path / target / "table.txt").read_text()
    assert table in done.stdout
    assert table.startswith(f"== {target} DRY: ")
    assert len(table.splitlines()) <= steps.TABLE_LINES
    with tarfile.open(tmp_path / target / f"{target}.tar.gz") as archive:
        assert {f"{target}/table.txt", f"{target}/{target}.json"} <= set(archive.getnames())
    if target == "check":  # the GPU tests were collected, all of them
        log = (tmp_path / target / "tests.log").read_text()
        assert re.search(r"\d+/\d+ tests collected", log), log[-2000:]
        for path in check.gpu_tests():
            assert Path(path).name in log


def test_a_job_that_fails_crashes_or_hangs_costs_its_own_rows_alone(tmp_path: Path) -> None:
    """In a process of its own: jobs fork."""
    script = """
import json, os, signal, sys, tarfile, time
from pathlib import Path
sys.path.insert(0, "benchmarks")
from gpu.steps import Row, Step, run_steps
(Path(sys.argv[1]) / "long.log").write_text("x" * 300_000)

def fine(run): yield Row("a figure", 2.0, "ms", 0.5)
def fails(run):
    yield Row("before", 1.0)
    raise ValueError("the reason\\nand more of it")
def crashes(run):
    os.kill(os.getpid(), signal.SIGSEGV)
    yield
def hangs(run):
    yield Row("begun", 3.0)
    signal.pause()
def looks(run):  # at what the steps before have left, should this be the end
    with tarfile.open(run.folder / "t.tar.gz") as archive:
        before = json.load(archive.extractfile("t/t.json"))
        assert len(archive.extractfile("t/long.log").read()) == 200_000
    yield Row("kept", len(before))

jobs = {"fine": fine, "fails": fails, "crashes": crashes, "hangs": hangs}
steps = [Step("s", 1, jobs, 4), Step("look", 1, {"looks": looks})]
steps += [Step("stop", 1, {"x": fails}, must_pass=True), Step("last", 1, {"y": fine})]
sys.exit(10 + run_steps("t", steps, Path(sys.argv[1]), is_dry=False, budget_s=8.0))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 11, done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "t.json").read_text())}
    assert (rows["a figure"]["value"], rows["before"]["value"], rows["begun"]["value"]) == (2.0, 1.0, 3.0)
    assert rows["fails"]["note"] == "ValueError: the reason; see fails.log"
    assert rows["crashes"]["note"] == "died of signal 11; see crashes.log"
    assert rows["hangs"]["note"] == "stopped: out of time; see hangs.log"
    assert rows["kept"]["value"] == 7  # of four jobs, three that ended badly, and what the step took
    assert rows["last"]["note"] == "not run: stop failed"


@pytest.mark.parametrize(
    ("name", "capability", "gigabytes", "reason"),
    [
        ("Tesla T4", (7, 5), 16, "Tesla T4 has compute capability 7.5: the kernels are for 8.0 and later"),
        ("NVIDIA L4", (8, 9), 22, "NVIDIA L4 has 22 GiB: an 8B model and its KV need 48, use a larger one"),
        ("NVIDIA H200", (9, 0), 139, None),
    ],
)
def test_a_device_that_does_not_do(name: str, capability: tuple[int, int], gigabytes: int, reason: str | None) -> None:
    found = preflight.reason_against_properties(name, capability, gigabytes << 30)
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)
