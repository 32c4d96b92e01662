"""The promised CPU figures: one shape, `auto` against SDPA over contiguous KV and over gathered pages."""

from __future__ import annotations

from typing import Any, NamedTuple

from attention.arms import backends, contiguous, gathered, ours
from attention.bench import DTYPES, Bench
from attention.optional_arms import contiguous_by_head, flashinfer_cascade, flashinfer_decode, flex
from attention.scenes import Heads, prefix_scene
from harness import Check, PartResult, at_least

HEADS = Heads(32, 8, 128)
BATCH, SHARED, PRIVATE = 32, 2048, 128
_TARGETS = {"bfloat16": (6.0, 10.0), "float32": (3.0, 5.0)}  # times contiguous, times gather + SDPA


class Point(NamedTuple):
    dtype: str


def run(bench: Bench) -> PartResult:
    """On CUDA the same shape, without a promise."""
    rows = bench.sweep([Point("bfloat16"), Point("float32")], lambda point: _measure(bench, point))
    title = f"batch {BATCH}, {SHARED} shared + {PRIVATE} private tokens, heads {HEADS}, one row each; ms per call"
    return PartResult(name="headline", title=title, rows=rows, checks=_checks(bench, rows))


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    options = bench.options(HEADS, DTYPES[point.dtype])
    scene = prefix_scene(BATCH, SHARED, PRIVATE, **options)
    named = [ours(scene, f"auto_by_{name}", backend=name) for name in backends(scene)]
    arms = [ours(scene), ours(scene, "never", "never"), *named, *contiguous(scene), *gathered(scene)]
    peers = [
        lambda: flashinfer_decode(scene), lambda: flashinfer_cascade(scene, SHARED // scene.page_size),
        lambda: flex(scene), lambda: contiguous_by_head(scene),
    ]  # fmt: skip
    times = bench.time(scene, arms, peers)
    row: dict[str, Any] = {"launched": times.launched["auto"], "auto": times.ms("auto"), "never": times.ms("never")}
    for family in ("contiguous", "gather"):
        row |= {family: times.ms(family), f"{family}/auto": times.ratio(family, "auto")}
    row |= {arm: times.ms(arm) for arm in times.samples if arm not in row and "/" not in arm}
    return row | {"best_contiguous": times.best("contiguous"), "best_gather": times.best("gather")}


def _checks(bench: Bench, rows: list[dict[str, Any]]) -> list[Check]:
    promised = not bench.is_cuda and bench.num_threads == 1
    by_dtype = {row["dtype"]: row for row in rows}
    checks = []
    for dtype, (contiguous_target, gather_target) in _TARGETS.items():
        row = by_dtype[dtype] if promised else {}
        for family, target in (("contiguous", contiguous_target), ("gather", gather_target)):
            checks.append(at_least(f"cpu_{dtype}_auto_over_{family}_sdpa", row.get(f"{family}/auto"), target))
    return checks
