"""The examples run, and show what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import rarer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.lab

NUMBERS = r"(\d+) of (\d+) prompt tokens found"


@pytest.mark.parametrize(
    "name", ["survives_kill.py", *rarer(["shared_prompt.py", "documents.py", "agent.py", "ssd.py"])]
)
def test_an_example_shows_what_it_says(name: str) -> None:
    quick = {
        "shared_prompt.py": ("--users", "12"),
        "agent.py": ("--turns", "6"),
        "ssd.py": ("--trace", "synthetic:num_sessions=30", "--disk-gb", "0,5,50"),
    }
    options = quick.get(name, ())
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *options], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "survives_kill.py":
        first, after = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
        (found, computed) = re.findall(r"(\d+) from the disk, (\d+) computed", after)[0]
        assert " 0 from the disk" in first
        assert int(found) > 20 * int(computed) > 0
    elif name in ("shared_prompt.py", "agent.py"):
        assert int(re.findall(r"(\d+)% of them found", done.stdout)[0]) > (80 if name == "shared_prompt.py" else 60)
    elif name == "ssd.py":
        assert re.search(r"^(5|50) GB are enough", done.stdout, re.MULTILINE)
    else:
        assert "quality report allows: True" in done.stdout
        assert len(re.findall(r"^document-\d: blended", done.stdout, re.MULTILINE)) == 3
        counts = [(int(found), int(whole)) for found, whole in re.findall(NUMBERS, done.stdout)]
        assert [found > 0.95 * whole for found, whole in counts] == [False, True, False]


@pytest.mark.slow
@pytest.mark.e2e
def test_replicas_follow_the_load_and_a_page_shows_it(tmp_path: Path) -> None:
    report = tmp_path / "autoscale.html"
    options = ("--peak", "6", "--seconds", "30", "--report", str(report))
    done = subprocess.run(
        [sys.executable, EXAMPLES / "autoscale.py", *options], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "<svg" in report.read_text()


def test_the_page_names_each_example() -> None:
    named = set(re.findall(r"examples/(\w+\.py)", (EXAMPLES / "README.md").read_text()))
    assert named | {"server.py"} == {path.name for path in EXAMPLES.glob("*.py")}
