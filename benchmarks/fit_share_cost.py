"""The constants of `kernels/share_cost.py` for this device, from measured times.

    python benchmarks/fit_share_cost.py [--device cpu|cuda] [--dtype bfloat16]

Prefixes of several lengths and batches are attended with `share="always"` and `"never"`, in layers that together do not
fit the last cache, as those of a model do not. A call's time is modelled as
the sum over its pieces of what `ShareCost` says; the constants are the non-negative least-squares solution of the
relative errors. Ends in one line of JSON: the constants in picoseconds and the median relative error of the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from attention.arms import ours
from attention.machine import last_cache_bytes
from attention.scenes import Heads, prefix_scene
from attention.timing import interleaved
from harness import load_average

from mneme.kernels.work import Share
from mneme.replicas.engine.calibration import features_of, fitted

_HEADS = (Heads(32, 8, 128), Heads(8, 4, 64), Heads(8, 8, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = fit(torch.device(options.device), getattr(torch, options.dtype))
    report = {
        "benchmark": "fit_share_cost", "device": options.device, "dtype": options.dtype, **found,
        "load_average": load_average(),
    }  # fmt: skip
    print(json.dumps(report))


def fit(
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_late: Callable[[], bool] = lambda: False,
    point_s: float = 0.3,
) -> dict[str, Any]:
    """The constants in picoseconds, and how far the model is from the times; of the points begun before it is late."""
    samples: list[tuple[list[float], float]] = []
    for heads, batch, shared in _grid():
        if is_late():
            break
        samples += measure(heads, batch, shared, device, dtype, point_s)
    if not samples:
        return {"constants_ps": {}, "median_error": None, "points": 0}
    constants, error = fitted([features for features, _ in samples], [picoseconds for _, picoseconds in samples])
    constants = {name: round(value, 3) for name, value in constants.items()}
    return {"constants_ps": constants, "median_error": round(error, 3), "points": len(samples)}


def _grid() -> list[tuple[Heads, int, int]]:
    grid = list(itertools.product(_HEADS, (2, 4, 8, 16, 32), (32, 64, 128, 256, 512, 1024, 2048)))
    random.Random(0).shuffle(grid)
    return grid


def measure(
    heads: Heads, batch: int, shared: int, device: torch.device, dtype: torch.dtype, point_s: float
) -> list[tuple[list[float], float]]:
    """(features, picoseconds) of both arms; features are what each constant is multiplied with.

    Nothing on CUDA if an arm was launched call by call: the constants are of kernels, not of launches.
    """
    cache_bytes = last_cache_bytes(device)
    scene = prefix_scene(
        batch, shared, 64, heads=heads, dtype=dtype, device=device, page_size=32, cache_bytes=cache_bytes
    )
    shares: tuple[Share, ...] = ("always", "never")
    arms = [ours(scene, share, share) for share in shares]
    for arm in arms:
        arm.output()
    timings = interleaved(arms, device, budget_s=point_s, now_s=time.perf_counter)
    if "eager" in timings.launched.values():
        return []
    return [(features_of(scene.plan(share)), timings.ms(share) * 1e9) for share in shares]


if __name__ == "__main__":
    main()
