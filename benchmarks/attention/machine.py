"""The device at hand: its measured ceilings and its last cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_PRODUCT_SIDE = {"cpu": 1024, "cuda": 8192}
_DEFAULT_CACHE_BYTES = 32 << 20


class Ceilings(NamedTuple):
    """What the device did in this run: the roofs that times are held against."""

    copy_bytes_per_s: float  # read and written, of one large copy
    flops_per_s: dict[torch.dtype, float]  # of a square matrix product
    cache_bytes: int


def measure_ceilings(
    device: torch.device,
    dtypes: list[torch.dtype],
    num_runs: int = 5,
    *,
    now_s: Callable[[], float] = time.perf_counter,
) -> Ceilings:
    """Medians of a few runs of a copy and of a matrix product per dtype."""
    num_bytes = _COPY_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device, num_runs, now_s)
    side = _PRODUCT_SIDE[device.type]
    flops = {}
    for dtype in dtypes:
        factors = [torch.randn(side, side, device=device).to(dtype) for _ in range(2)]
        flops[dtype] = 2 * side**3 / _median_s(partial(torch.mm, *factors), device, num_runs, now_s)
    return Ceilings(2 * num_bytes / copy_s, flops, last_cache_bytes(device))


def last_cache_bytes(device: torch.device) -> int:
    """L2 of a GPU; the largest cache that Linux reports of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=_DEFAULT_CACHE_BYTES)


def _median_s(call: Callable[[], object], device: torch.device, num_runs: int, now_s: Callable[[], float]) -> float:
    call()
    times = []
    for _ in range(num_runs):
        _wait(device)
        started = now_s()
        call()
        _wait(device)
        times.append(now_s() - started)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
