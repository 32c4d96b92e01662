"""A sample of the Triton kernels compiled for GPUs that are not here; `make kernels-compile` compiles all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_sample_compiles_within_its_bounds() -> None:
    """In a process of its own: kernels of this one may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.triton_compile", "--sample"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 5
    assert all(line.endswith(" ok") for line in lines[1:])
