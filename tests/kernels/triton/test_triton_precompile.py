"""Variants compiled by processes of their own, for a GPU that is not here, and found in Triton's cache afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json
from mneme.kernels.triton.precompile import CompileError, Variant, compile_all, is_compiled
options = {"num_warps": 4, "num_stages": 3, "extern_libs": None}
pointers = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32", "stride_row": "i32"}
aligned = {(index,): [["tt.divisibility", 16]] for index in range(4)}
variants = [
    Variant(
        "mneme.kernels.triton.ops", "gated_kernel",
        {**pointers, "ACTIVATION": "constexpr", "BLOCK": "constexpr"}, {(4,): activation, (5,): block}, aligned,
        options, ("cuda", 90, 32),
    )
    for activation, block in ((0, 256), (2, 256), (0, 257))
]
first, again, errors = [], [], []
before = [is_compiled(variant) for variant in variants]
compile_all(variants[:2], first.append, 2)
compile_all(variants[:2], again.append)
try:
    compile_all(variants, again.append, 1)
except CompileError as error:
    errors.append(str(error))
after = [is_compiled(variant) for variant in variants]
print(json.dumps({"before": before, "after": after, "first": first, "again": again, "errors": errors}))
"""


def test_a_pool_compiles_what_the_cache_does_not_have_and_names_what_cannot_be_compiled(tmp_path: Path) -> None:
    """In a process of its own: kernels of this one may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"] == [False, False, False]
    assert found["after"] == [True, True, False]
    assert found["first"] == [0.5, 1.0]
    assert found["again"] == [1.0, 1.0]  # nothing was left to do; then the one that fails
    (error,) = found["errors"]
    assert "gated_kernel(ACTIVATION=0, BLOCK=257, num_warps=4, num_stages=3) for cuda:90 (" in error
    assert "\n" not in error
