"""Sequence-first decode over private KV: its share of the measured copy bandwidth, and FlashInfer's decode."""

from __future__ import annotations

from typing import Any, NamedTuple

from attention.arms import contiguous, ours
from attention.bench import DTYPES, Bench, NotRun, least, ran
from attention.optional_arms import contiguous_by_head, flashinfer_decode
from attention.scenes import Heads, prefix_scene
from harness import PartResult, at_least

_HEADS = Heads(32, 8, 128)


class Point(NamedTuple):
    dtype: str
    batch: int
    tokens: int


def run(bench: Bench) -> PartResult:
    """A copy reads and writes each byte; attention only reads, so its share may pass 1 where reading is cheaper."""
    grid = bench.pick(
        cuda=[(32, 1024), (32, 4096), (64, 2048), (128, 1024), (128, 4096), (32, 16384), (1, 16384)],
        cpu=[(1, 4096), (8, 1024), (32, 1024), (32, 4096)],
        quick=[(8, 512), (32, 512)],
    )
    points = [Point("bfloat16", *point) for point in grid]
    rows = bench.sweep(points, lambda point: _measure(bench, point))
    judged = [row for row in ran(rows) if bench.is_cuda and row["batch"] >= 32 and row["tokens"] >= 1024]
    checks = [
        at_least("gpu_sequence_first_of_copy_bandwidth", least(row["of_copy"] for row in judged), 0.8),
        at_least(
            "gpu_sequence_first_over_flashinfer_decode",
            least(row["flashinfer/ours"] for row in judged), 1.0,
        ),
    ]  # fmt: skip
    title = f"sequence-first decode over private KV, heads {_HEADS}; ms per call, GB/s of KV read"
    return PartResult(name="bandwidth", title=title, rows=rows, checks=checks)


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    dtype = DTYPES[point.dtype]
    if not bench.may_read(point.batch * point.tokens * 2 * _HEADS.kv * _HEADS.dim * dtype.itemsize):
        raise NotRun("too long for this device")
    scene = prefix_scene(point.batch, 0, point.tokens, **bench.options(_HEADS, dtype))
    times = bench.time(
        scene,
        [ours(scene, "never", "never"), *contiguous(scene)],
        [lambda: flashinfer_decode(scene), lambda: contiguous_by_head(scene)],
    )
    read_per_s = scene.bytes_apart / times.ms("never") * 1e3
    has_peer = "flashinfer_decode" in times
    return {
        "launched": times.launches("never", "flashinfer_decode"),
        "ours": times.ms("never"),
        "contiguous": times.ms("contiguous"),
        "flashinfer": times.ms("flashinfer_decode") if has_peer else None,
        "ours_GB/s": read_per_s / 1e9,
        "of_copy": read_per_s / bench.ceilings.copy_bytes_per_s,
        "flashinfer/ours": times.ratio("flashinfer_decode", "never") if has_peer else None,
    }
