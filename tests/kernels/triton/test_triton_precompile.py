"""Variants are compiled in other processes for a GPU that is not here; what cannot be compiled is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from mneme.kernels.triton.modules import CompileError, triton_trouble

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources, PTXASError

PROGRAM = """
import json, os, sys
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
    for activation, block in ((0, 256), (2, 256), (0, 257), (1, 256))
]
first, again, errors = [], [], []
before = [is_compiled(variant) for variant in variants]
compile_all(variants[:2], first.append, 2)
compile_all(variants[:2], again.append)
try:
    compile_all(variants[:3], again.append, 1)
except CompileError as error:
    errors.append(str(error))
os.environ["TRITON_PTXAS_PATH"] = sys.argv[1]
try:
    compile_all([variants[3], variants[2]], again.append, 1, limit_s=10)
except CompileError as error:
    errors.append(str(error))
after = [is_compiled(variant) for variant in variants]
print(json.dumps({"before": before, "after": after, "first": first, "again": again, "errors": errors}))
"""


@pytest.mark.slow
def test_a_pool_compiles_what_the_cache_does_not_have_and_names_what_cannot_be_compiled(tmp_path: Path) -> None:
    """In a process of its own: kernels of this one may be interpreted."""
    real = pytest.importorskip("triton").knobs.nvidia.ptxas.path
    hanging = tmp_path / "ptxas"
    hanging.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nexec sleep 30 > /dev/null 2>&1\n')
    hanging.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "c"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(hanging)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"] == [False, False, False, False]
    assert found["after"] == [True, True, False, False]
    assert found["first"] == [0.5, 1.0]
    assert found["again"] == [1.0, 1.0, 0.5, 1.0]  # nothing was left to do; one fails; one hangs, then the other fails
    refused, both = found["errors"]
    assert "gated_kernel(ACTIVATION=0, BLOCK=257, num_warps=4, num_stages=3) for cuda:90 (" in refused
    assert "gated_kernel(ACTIVATION=1, BLOCK=256, num_warps=4, num_stages=3) for cuda:90 (took more than 10 s)" in both
    assert both.endswith("1 more failed")
    assert "\n" not in refused + both


DOES_NOT_RUN = ": use 3.6.0 or 3.7.1, and a GPU of capability 8.0 or 9.0: A100, H100 or H200"
CUDA_ERROR = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call.\n"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OutOfResources(300_000, 232_448, "shared memory"), DOES_NOT_RUN),
        (PTXASError("`ptxas` failed with error code 255\n`ptxas` stderr:\nfatal\n"), DOES_NOT_RUN),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install gcc and python3-dev"),
        (CalledProcessError(1, ["gcc", "main.c", "-l:libcuda.so.1"]), "install gcc and python3-dev"),
        (RuntimeError("Cannot find ptxas"), "set TRITON_PTXAS_PATH"),
        (PermissionError(13, "Permission denied", "/opt/triton/bin/ptxas"), "set TRITON_PTXAS_PATH"),
        (AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"), "set TRITON_LIBCUDA_PATH"),
        (RuntimeError("0 active drivers ([]). There should only be one."), "set TRITON_LIBCUDA_PATH"),
        (RuntimeError(CUDA_ERROR.format("no kernel image is available for execution on the device")), "update the"),
        (RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain"), "update"),
        (RuntimeError("Could not create or locate cache dir"), "set TRITON_CACHE_DIR"),
        (CompileError("triton 1.0 does not run gated_kernel"), "triton 1.0 does not run gated_kernel"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_what_triton_could_not_do_is_one_line_that_says_what_helps(error: Exception, advice: str) -> None:
    trouble = triton_trouble(error, "this_kernel")
    assert trouble is not None
    assert advice in trouble
    assert ("this_kernel" in trouble) == (advice == DOES_NOT_RUN)
    assert "\n" not in trouble


def test_what_is_not_of_triton_is_left_to_others() -> None:
    assert triton_trouble(RuntimeError(CUDA_ERROR.format("an illegal memory access was encountered"))) is None
    assert triton_trouble(PermissionError(13, "Permission denied", "/data/chunks")) is None


KEYS = """
import json, sys
from importlib import import_module
from mneme.kernels.triton.modules import kernels_of
names = json.loads(sys.argv[1])
for name in names:
    kernels_of(f"mneme.kernels.triton.{name}")
found = {}
for name in sorted(names):
    functions = vars(import_module(f"mneme.kernels.triton.{name}")).items()
    found[name] = {key: value.cache_key for key, value in functions if hasattr(value, "cache_key")}
print(json.dumps(found))
"""


def test_what_one_process_has_compiled_another_finds() -> None:
    """Whatever modules it has met before: the names under which Triton keeps kernels are the same."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    modules = ["attention", "kv", "ops", "sampling", "backend"]
    found = []
    for names in (modules, modules[::-1]):
        command = [sys.executable, "-c", KEYS, json.dumps(names)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
    assert "weigh_kernel" in json.loads(found[0])["sampling"]
