"""Packed linears against `torch.nn.functional.linear`: all projections of a small Llama, by rows, dtype and arm.

    python benchmarks/bench_linear.py [--quick] [--runs 15] [--json FILE]

What bounds it: few rows read every weight once (27M weights: 54 MB in bfloat16, 108 MB in float32, against the measured
rate of reading); many rows multiply 2 x 27M times a row. One thread, the thread's own time, arms in turns, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Check, Run, at_least, options_of
from torch import Tensor
from workloads import MODEL_SHAPE

from mneme.kernels.linear import PackedLinear, can_pack

ROWS = (1, 8, 32, 128, 512, 2048)
MAX_FEW_ROWS = 32
QUICK_ROWS = (1, 8, 128)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def projections() -> list[tuple[int, int]]:
    """(outputs, inputs) of every projection of the engine benchmark's model, in the order of a forward pass."""
    hidden, inner = MODEL_SHAPE["hidden_size"], MODEL_SHAPE["intermediate_size"]
    kv_size = hidden // MODEL_SHAPE["num_attention_heads"] * MODEL_SHAPE["num_key_value_heads"]
    layer = [(hidden + 2 * kv_size, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    return [*layer * MODEL_SHAPE["num_hidden_layers"], (MODEL_SHAPE["vocab_size"], hidden)]


def medians(arms: dict[str, Callable[[], Any]], num_runs: int) -> dict[str, float]:
    """Milliseconds of each arm."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for run in range(num_runs + 1):
        for name, arm in arms.items():
            started = time.thread_time()
            arm()
            taken[name] += [time.thread_time() - started] if run else []  # the first is a warm-up
    return {name: round(1e3 * statistics.median(values), 3) for name, values in taken.items()}


def measure(dtype: torch.dtype, rows: tuple[int, ...], num_runs: int) -> list[dict[str, Any]]:
    """One entry for each number of rows."""
    shapes = projections()
    weights = [torch.randn(shape).mul_(0.05).to(dtype) for shape in shapes]
    packed = [PackedLinear(weight) for weight in weights]
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
            "torch": lambda: run(lambda index, x: F.linear(x, weights[index])),
        }
        taken = medians(arms, num_runs if num_rows < 512 else max(3, num_runs // 4))
        rate = {arm: round(2e-6 * num_rows * num_weights / ms) for arm, ms in taken.items()}
        results.append({"rows": num_rows, "ms": taken, "gflop_per_s": rate, "read_floor_ms": round(floor_ms, 2)})
    return results


def checks_of(results: dict[str, list[dict[str, Any]]]) -> list[Check]:
    """The engine packs weights because few rows, a decode step's, are sooner multiplied so."""
    checks = []
    for name, entries in results.items():
        ratios = [entry["ms"]["torch"] / entry["ms"]["packed"] for entry in entries if entry["rows"] <= MAX_FEW_ROWS]
        checks.append(at_least(f"packed_over_torch_to_{MAX_FEW_ROWS}_rows_{name}", min(ratios), 1.0))
    return checks


def main() -> None:
    parser = options_of(__doc__, quick="few rows, 5 runs", seed=False)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the closing line to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not can_pack(torch.empty(1, 1)):
        raise SystemExit("no compiled kernels here: nothing to compare")
    rows, num_runs = (QUICK_ROWS, 5) if args.quick else (ROWS, args.runs)
    run = Run("linear", args, threads=1, model=MODEL_SHAPE, runs=num_runs)
    with torch.inference_mode():
        results = {name: measure(dtype, rows, num_runs) for name, dtype in DTYPES.items()}
    print(f"{'dtype':<10}{'rows':>6}{'packed ms':>11}{'torch ms':>10}{'ratio':>7}{'GF/s':>6}{'read floor ms':>15}")
    for name, entries in results.items():
        for entry in entries:
            ours, theirs = entry["ms"]["packed"], entry["ms"]["torch"]
            rate, floor = entry["gflop_per_s"]["packed"], entry["read_floor_ms"]
            print(f"{name:<10}{entry['rows']:>6}{ours:>11}{theirs:>10}{theirs / ours:>7.2f}{rate:>6}{floor:>15}")
    run.check(*checks_of(results))
    run.end(results)


if __name__ == "__main__":
    main()
