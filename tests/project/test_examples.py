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


@pytest.mark.parametrize("name", ["survives_kill.py", *rarer(["shared_prompt.py", "documents.py"])])
def test_an_example_shows_what_it_says(name: str) -> None:
    options = ("--users", "12") if name == "shared_prompt.py" else ()
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *options], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "survives_kill.py":
        first, after = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
        (found, computed) = re.findall(r"(\d+) from the disk, (\d+) computed", after)[0]
        assert " 0 from the disk" in first
        assert int(found) > 20 * int(computed) > 0
    elif name == "shared_prompt.py":
        assert int(re.findall(r"(\d+)% of them found", done.stdout)[0]) > 80
    else:
        counts = [(int(found), int(whole)) for found, whole in re.findall(NUMBERS, done.stdout)]
        assert [found > 0.95 * whole for found, whole in counts] == [False, True, False]


def test_the_page_names_each_example() -> None:
    named = set(re.findall(r"examples/(\w+\.py)", (EXAMPLES / "README.md").read_text()))
    assert named | {"server.py"} == {path.name for path in EXAMPLES.glob("*.py")}
