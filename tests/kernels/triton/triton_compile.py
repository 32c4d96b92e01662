"""Compiles Triton kernels for GPUs that are not here, and reads what the assembler made of them.

`triton_cases.CASES` has every kernel; `compile_case` gives its `Report`, and `faults_of` says in words what breaks a
bound. `python -m tests.kernels.triton.triton_compile` (`make kernels-compile`) compiles all cases for all
architectures and prints a table of them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mneme.kernels.triton.configs import shared_bytes

# Shared memory that one program may have on each architecture, in bytes.
SHARED_BYTES = {architecture: shared_bytes(architecture) - 1024 for architecture in (80, 89, 90, 100, 120)}
ARCHITECTURES = tuple(SHARED_BYTES)
# Registers that do not fit spill to the stack. Around a tile's or a run's beginning some may, once per 64 KB or more of
# keys and values; inside the innermost loops that multiply none may.
STACK_BYTES = 640

_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*\(?`?\((\.L_x_\d+)\)")
_SPILL = re.compile(r"\b(STL|LDL)\b")


class Case(NamedTuple):
    """One kernel under one configuration."""

    name: str
    kernel: Any  # what @triton.jit gave
    signature: dict[str, str]  # argument -> Triton type, "*bf16", "i32", "fp32"; "constexpr" for those below
    constexprs: dict[str, Any]
    options: dict[str, int]  # num_warps, num_stages
    tensor_cores: str | None = None  # "wgmma" (on sm_90; tcgen05 on sm_100; else mma.sync), "mma" (anywhere) or none
    aligned: tuple[str, ...] = ()  # arguments that are multiples of 16, beside all pointers
    architectures: tuple[int, ...] = (80, 90)
    most_loop_spills: int = 0
    most_stack_bytes: int = STACK_BYTES
    is_sample: bool = False  # compiled in `make test-all`, too


class Report(NamedTuple):
    """What the assembler says of a compiled kernel."""

    registers: int
    stack_bytes: int
    loop_spills: int  # instructions that store to or load from the stack in innermost loops with products
    shared_bytes: int
    wgmma: int  # instructions in PTX
    mma_sync: int
    async_copies: int
    tcgen05: int = 0


def compile_case(case: Case, architecture: int) -> Report:
    """Compile for `sm_<architecture>`; no device is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    assert set(names) == set(case.signature) | set(case.constexprs), set(names) ^ {*case.signature, *case.constexprs}
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *case.aligned)}
    source = ASTSource(case.kernel, signature=signature, constexprs=case.constexprs, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(case.options))
    registers, stack, sass = _assembled(built.asm["cubin"])
    ptx = built.asm["ptx"]
    return Report(
        registers=registers,
        stack_bytes=stack,
        loop_spills=sum(_SPILL.search(line) is not None for loop in product_loops(sass) for line in loop),
        shared_bytes=built.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma_sync=len(re.findall(r"mma\.sync", ptx)),
        async_copies=len(re.findall(r"cp\.async\.(?:c[ag]|bulk\.tensor)", ptx)),
        tcgen05=len(re.findall(r"tcgen05\.mma", ptx)),
    )


def faults_of(case: Case, architecture: int, report: Report) -> list[str]:
    """What is wrong with a compiled kernel, one sentence each."""
    faults = []
    if report.stack_bytes > case.most_stack_bytes:
        faults.append(f"{report.stack_bytes} bytes of stack, more than {case.most_stack_bytes}")
    # Exact float32 has no tensor cores; it is for checking, not for speed.
    if report.loop_spills > case.most_loop_spills and case.tensor_cores:
        faults.append(f"{report.loop_spills} spills in inner loops")
    if report.shared_bytes > SHARED_BYTES[architecture]:
        faults.append(f"{report.shared_bytes} bytes of shared memory, more than {SHARED_BYTES[architecture]}")
    if case.tensor_cores == "wgmma" and architecture == 90 and not report.wgmma:
        faults.append("no wgmma")
    if case.tensor_cores and not (report.wgmma or report.mma_sync or report.tcgen05):
        faults.append("no tensor-core instruction")
    return faults


def _assembled(cubin: bytes) -> tuple[int, int, list[str]]:
    """Registers, stack bytes and instructions, from the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _printed("cuobjdump", "--dump-resource-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        return int(found[1]), int(found[2]), _printed("nvdisasm", "-c", file.name).splitlines()


def _printed(tool: str, *arguments: str) -> str:
    from triton import backends

    command = [str(Path(backends.__file__).parent / "nvidia" / "bin" / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def product_loops(sass: list[str]) -> Iterator[list[str]]:
    """The innermost loops that multiply on tensor cores: from a label to a branch back to it."""
    label_at: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for number, line in enumerate(sass):
        if label := _LABEL.match(line):
            label_at[label[1]] = number
        branch = _BRANCH.search(line)
        if branch and branch[1] in label_at:
            loops.append((label_at[branch[1]], number))
    for start, end in loops:
        holds_another = any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
        if not holds_another and any("MMA" in line for line in sass[start:end]):
            yield sass[start:end]


_COLUMNS = ("regs", "stack", "spills", "shared", "wgmma", "mma", "async", "tcgen05")
_LINE = "{:<66} {:>3} {:>4} {:>5} {:>6} {:>6} {:>5} {:>4} {:>5} {:>7}  {}"


def main() -> int:
    """Compile what was asked for, one line each; 1 if any kernel has a fault."""
    from tests.kernels.triton.triton_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="only the cases that `make test-all` compiles")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES, help="only this one")
    arguments = parser.parse_args()
    num_faults = 0
    print(_LINE.format("case", "sm", *_COLUMNS, "faults"))  # noqa: T201
    for case in CASES:
        if arguments.only not in case.name or (arguments.sample and not case.is_sample):
            continue
        for architecture in case.architectures:
            if arguments.architecture in (None, architecture):
                report = compile_case(case, architecture)
                faults = faults_of(case, architecture, report)
                num_faults += len(faults)
                print(_LINE.format(case.name, architecture, *report, "; ".join(faults) or "ok"), flush=True)  # noqa: T201
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
