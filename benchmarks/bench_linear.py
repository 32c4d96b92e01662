"""Linears by our kernel and by torch (oneDNN): all projections of a small Llama, by rows, dtype and arm.

    python benchmarks/bench_linear.py [--quick] [--runs 15] [--json FILE]

    packed    our kernel
    unpacked  torch, of the weight that our packing holds: what an engine does where that was measured to be faster
    torch     torch, of a second copy of the weight as it is

What bounds it: few rows read every weight once (27M weights: 54 MB in bfloat16, 108 MB in float32, against the measured
rate of reading); many rows multiply 2 x 27M times a row, against what vectors reach that stay in registers, without
AMX. One thread, the thread's own time, arms in turns, medians. The star marks what this machine's timings choose.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Check, PartResult, Run, at_least, options_of, take_turns
from torch import Tensor
from workloads import MODEL_SHAPE

from mneme.kernels.linear import PackedLinear
from mneme.kernels.native.library import can_pack, find_compiler
from mneme.replicas.engine.choice import machine_choice

ROWS = (1, 8, 16, 32, 64, 128, 512, 2048)
MAX_FEW_ROWS = 16
QUICK_ROWS = (1, 8, 128)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


PEAK = """
#include <immintrin.h>
typedef float Vec __attribute__((vector_size(64)));
extern "C" float peak(long rounds, int is_half, float one, float little) {
  Vec sum[12], x = Vec{} + one, y = Vec{} + little;
  for (int k = 0; k < 12; ++k) sum[k] = Vec{} + (float)k;  // else one would do for all
  for (long i = 0; i < rounds; ++i) {
#if defined(__AVX512BF16__)
    if (is_half) {
#pragma GCC unroll 12
      for (int k = 0; k < 12; ++k) sum[k] = (Vec)_mm512_dpbf16_ps((__m512)sum[k], (__m512bh)x, (__m512bh)y);
      continue;
    }
#endif
#pragma GCC unroll 12
    for (int k = 0; k < 12; ++k) sum[k] = sum[k] * x + y;
  }
  Vec total = sum[0];
  for (int k = 1; k < 12; ++k) total += sum[k];
  return total[0];
}
#if defined(__AVX512BF16__)
extern "C" int half_width() { return 2; }
#else
extern "C" int half_width() { return 1; }
#endif
"""
PEAK_ROUNDS = 1_000_000


def peaks() -> dict[str, float]:
    """Operations a second, in 1e9, of vectors that stay in registers; in bfloat16 where the CPU multiplies that."""
    compiler = find_compiler()
    assert compiler is not None, "there are compiled kernels"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.cpp"), Path(folder, "peak.so")
        source.write_text(PEAK)
        flags = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-Wno-psabi")
        subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        peak, width = loaded.peak, {"float32": 1, "bfloat16": loaded.half_width()}
        peak.argtypes, peak.restype = (ctypes.c_long, ctypes.c_int, *[ctypes.c_float] * 2), ctypes.c_float
        arms = {name: lambda half=name == "bfloat16": peak(PEAK_ROUNDS, half, 1.0, 1e-9) for name in DTYPES}
        taken = medians(arms, 5)
    return {name: 1e-6 * PEAK_ROUNDS * 2 * 16 * 12 * width[name] / ms for name, ms in taken.items()}


def projections() -> list[tuple[int, int]]:
    """(outputs, inputs) of every projection of the engine benchmark's model, in the order of a forward pass."""
    hidden, inner = MODEL_SHAPE["hidden_size"], MODEL_SHAPE["intermediate_size"]
    kv_size = hidden // MODEL_SHAPE["num_attention_heads"] * MODEL_SHAPE["num_key_value_heads"]
    layer = [(hidden + 2 * kv_size, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    return [*layer * MODEL_SHAPE["num_hidden_layers"], (MODEL_SHAPE["vocab_size"], hidden)]


def medians(arms: dict[str, Callable[[], Any]], num_runs: int) -> dict[str, float]:
    """Milliseconds of each arm."""

    def take(name: str) -> float:
        started = time.thread_time()
        arms[name]()
        return time.thread_time() - started

    return {name: round(1e3 * statistics.median(taken), 3) for name, taken in take_turns(arms, take, num_runs).items()}


def measure(name: str, rows: tuple[int, ...], num_runs: int, peak: float) -> list[dict[str, Any]]:
    """One entry for each number of rows."""
    dtype, torch_rows = DTYPES[name], machine_choice().kernels(name).product_rows
    shapes = projections()
    weights = [torch.randn(shape).mul_(0.05).to(dtype) for shape in shapes]
    packed = [PackedLinear(weight) for weight in weights]
    unpacked = [PackedLinear(weight, torch_rows=1) for weight in weights]
    num_weights = sum(weight.numel() for weight in weights)
    read = torch.ones(32 << 20)  # 128 MB, more than any cache
    read_ms = medians({"read": read.sum}, num_runs)["read"]
    floor_ms = num_weights * dtype.itemsize / read.nbytes * read_ms
    results = []
    for num_rows in rows:
        inputs = {size: torch.randn(num_rows, size).to(dtype) for _, size in shapes}

        def run(multiply: Callable[[int, Tensor], Tensor], inputs: dict[int, Tensor] = inputs) -> None:
            for index, (_, size) in enumerate(shapes):
                multiply(index, inputs[size])

        arms = {
            "packed": lambda: run(lambda index, x: packed[index](x)),
            "unpacked": lambda: run(lambda index, x: unpacked[index](x)),
            "torch": lambda: run(lambda index, x: F.linear(x, weights[index])),
        }
        taken = medians(arms, num_runs if num_rows < 512 else max(3, num_runs // 4))
        chosen = "packed" if torch_rows is None or num_rows < torch_rows else "unpacked"
        rate = {arm: 2e-6 * num_rows * num_weights / ms for arm, ms in taken.items()}
        results.append({
            "rows": num_rows,
            "chosen": chosen,
            "ms": taken,
            "gflop_per_s": {arm: round(each) for arm, each in rate.items()},
            "share_of_peak": {arm: round(each / peak, 3) for arm, each in rate.items()},
            "share_of_bandwidth": {arm: round(floor_ms / ms, 3) for arm, ms in taken.items()},
        })  # fmt: skip
    return results


def checks_of(results: dict[str, list[dict[str, Any]]]) -> list[Check]:
    """The engine packs weights because few rows, a decode step's, are sooner multiplied so, and many as soon."""
    checks = []
    for name, entries in results.items():
        ratio = {entry["rows"]: entry["ms"]["torch"] / entry["ms"][entry["chosen"]] for entry in entries}
        few = [each for rows, each in ratio.items() if rows <= MAX_FEW_ROWS]
        many = [each for rows, each in ratio.items() if rows > MAX_FEW_ROWS]
        checks.append(at_least(f"over_torch_to_{MAX_FEW_ROWS}_rows_{name}", min(few), 1.2))
        checks.append(at_least(f"over_torch_from_{2 * MAX_FEW_ROWS}_rows_{name}", min(many), 0.9))
    return checks


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A line for each kernel."""
    return [
        {
            "dtype": name,
            "rows": entry["rows"],
            "kernel": f"{arm}{' *' if arm == entry['chosen'] else ''}",
            "ms": ms,
            "torch's ms over it": entry["ms"]["torch"] / ms,
            "GF/s": entry["gflop_per_s"][arm],
            "of peak": entry["share_of_peak"][arm],
            "of bandwidth": entry["share_of_bandwidth"][arm],
        }
        for name, entries in results.items()
        for entry in entries
        for arm, ms in entry["ms"].items()
    ]


def main() -> None:
    parser = options_of(__doc__, quick="few rows, 5 runs", seed=False)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the closing line to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not can_pack(torch.empty(1, 1)):
        raise SystemExit("no compiled kernels here: nothing to compare")
    rows, num_runs = (QUICK_ROWS, 5) if args.quick else (ROWS, args.runs)
    torch.set_num_threads(1)
    found = peaks()
    peak = {name: round(each) for name, each in found.items()}
    run = Run("linear", args, threads=1, model=MODEL_SHAPE, runs=num_runs, peak_gflop_per_s=peak)
    with torch.inference_mode():
        results = {name: measure(name, rows, num_runs, found[name]) for name in DTYPES}
    run.show(PartResult(name="linear", title="shares of the core's peak and of its bandwidth", rows=rows_of(results)))
    run.check(*checks_of(results))
    run.end(results)


if __name__ == "__main__":
    main()
