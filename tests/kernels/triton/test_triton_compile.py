"""A sample of the Triton kernels compiled for GPUs that are not here; `make kernels-compile` compiles all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.triton_compile import Case, Report, faults_of, product_loops

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


GOOD = Report(registers=255, stack_bytes=0, loop_spills=0, shared_bytes=100_000, wgmma=8, mma_sync=8, async_copies=8)


@pytest.mark.parametrize(
    ("architecture", "change", "fault"),
    [
        (90, {}, None),
        (80, {"wgmma": 0}, None),
        (90, {"stack_bytes": 648}, "648 bytes of stack, more than 640"),
        (90, {"loop_spills": 3}, "3 spills in inner loops"),
        (80, {"shared_bytes": 200_000}, "200000 bytes of shared memory, more than 166912"),
        (90, {"shared_bytes": 200_000}, None),
        (90, {"wgmma": 0}, "no wgmma"),
        (80, {"wgmma": 0, "mma_sync": 0}, "no tensor-core instruction"),
    ],
)
def test_faults_are_named(architecture: int, change: dict[str, int], fault: str | None) -> None:
    case = Case("any", None, {}, {}, {}, tensor_cores="wgmma")
    assert faults_of(case, architecture, GOOD._replace(**change)) == ([] if fault is None else [fault])


def test_float32_may_spill_but_within_the_bound_of_the_stack() -> None:
    case = Case("exact", None, {}, {}, {})
    report = GOOD._replace(wgmma=0, mma_sync=0, loop_spills=9)
    assert faults_of(case, 90, report) == []
    assert faults_of(case, 90, report._replace(stack_bytes=641)) == ["641 bytes of stack, more than 640"]


def test_only_innermost_loops_with_products_are_searched_for_spills() -> None:
    listing = """
.L_x_0:
  STL [R1], R2 ;
.L_x_1:
  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
  LDL R2, [R1] ;
  @P1 BRA `(.L_x_1) ;
  @P0 BRA `(.L_x_0) ;
.L_x_2:
  LDG.E R2, [R4] ;
  @P0 BRA `(.L_x_2) ;
"""
    loops = list(product_loops(listing.splitlines()))
    assert [[line.split()[0] for line in loop] for loop in loops] == [[".L_x_1:", "HGMMA.64x64x16.F32.BF16", "LDL"]]
