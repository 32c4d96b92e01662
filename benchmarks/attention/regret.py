"""The share decision: `auto` against the better of `always` and `never`, over prefixes, trees and documents.

Regret is the median of the rounds' ratios of `auto` to the arm with the smaller median. Where `auto` made the very plan
of one of them, the two are one arm, timed once: its regret is 1 or that of the choice, free of noise.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
from attention.arms import ours
from attention.bench import DTYPES, Bench, NotRun, ran
from attention.scenes import Block, Heads, Scene, Use, build_scene, documents_scene, prefix_scene
from harness import PartResult, at_most, geometric_mean

from mneme.kernels.work import Share, WorkList

_GEOMETRIC_MEAN_TARGET, _WORST_TARGET = 1.03, 1.10
_HEADS = (Heads(32, 8, 128), Heads(8, 4, 64), Heads(8, 8, 64))


class Point(NamedTuple):
    kind: str  # "prefix"; "tree": groups of four share as much again; "documents": four of eight, shuffled
    dtype: str
    heads: Heads
    batch: int
    shared: int
    private: int


def run(bench: Bench) -> PartResult:
    """Points in random order, so that a run that is cut short has seen all kinds."""
    points = _grid(bench)
    random.Random(bench.seed).shuffle(points)
    rows = bench.sweep(points, lambda point: _measure(bench, point))
    regrets = [row["regret"] for row in ran(rows) if row["regret"] is not None]
    device = bench.device.type
    checks = [
        at_most(f"{device}_auto_regret_geometric_mean", geometric_mean(regrets) if regrets else None,
                _GEOMETRIC_MEAN_TARGET),
        at_most(f"{device}_auto_regret_worst", max(regrets, default=None), _WORST_TARGET),
    ]  # fmt: skip
    rows.sort(key=lambda row: -(row.get("regret") or 0.0))
    title = f"share decision, {len(regrets)} of {len(points)} points, worst first; ms per call"
    return PartResult(name="regret", title=title, rows=rows, checks=checks)


def _grid(bench: Bench) -> list[Point]:
    batches = bench.pick(cuda=(2, 8, 32, 128), cpu=(2, 4, 8, 32), quick=(2, 8))
    shares = bench.pick(cuda=(64, 512, 2048, 8192), cpu=(64, 256, 1024, 2048), quick=(64, 512))
    privates = bench.pick(cuda=(128, 1024), cpu=(64, 512), quick=(64,))
    dtypes = bench.pick(cuda=("bfloat16",), cpu=("bfloat16", "float32"), quick=("bfloat16", "float32"))
    heads = _HEADS[:2] if bench.quick else _HEADS
    grid = [
        Point("prefix", d, h, b, s, c) for d in dtypes for h in heads for b in batches for s in shares for c in privates
    ]
    kinds = ("tree", "documents")
    return grid + [
        Point(kind, d, h, b, s, privates[0])
        for kind in kinds for d in dtypes for h in heads for b in batches[1:] for s in shares[:3]
    ]  # fmt: skip


def scene_of(point: Point, options: dict[str, Any]) -> Scene:
    """The point's page tables; `shared` is the length of each shared block."""
    if point.kind == "prefix":
        return prefix_scene(point.batch, point.shared, point.private, **options)
    if point.kind == "documents":
        rng = random.Random(0)
        orders = [rng.sample(range(8), 4) for _ in range(point.batch)]
        return documents_scene(orders, 8, point.shared, point.private, **options)
    blocks = [Block(point.shared)] + [Block(point.shared, point.shared)] * (-(-point.batch // 4))
    first_own = len(blocks)
    blocks += [Block(point.private, 2 * point.shared)] * point.batch
    uses = [[Use(0), Use(1 + i // 4), Use(first_own + i)] for i in range(point.batch)]
    return build_scene(blocks, uses, **options)


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    per_token = 2 * point.heads.kv * point.heads.dim * DTYPES[point.dtype].itemsize
    blocks = {"prefix": 1, "tree": 2, "documents": 4}[point.kind]
    if not bench.may_read(point.batch * (blocks * point.shared + point.private) * per_token):
        raise NotRun("too long for this device")
    scene = scene_of(point, bench.options(point.heads, DTYPES[point.dtype]))
    plans = {share: scene.plan(share) for share in ("auto", "always", "never")}
    twin = next((share for share in ("always", "never") if same_work(plans["auto"].work, plans[share].work)), None)
    shares: tuple[Share, ...] = ("always", "never") if twin else ("auto", "always", "never")
    times = bench.time(scene, [ours(scene, share, share) for share in shares])
    better = min(("always", "never"), key=times.ms)
    chosen = twin or "auto"
    return {
        "auto_is": twin or "mixed",
        "auto": times.ms(chosen),
        "always": times.ms("always"),
        "never": times.ms("never"),
        "regret": times.ratio(chosen, better),
    }


def same_work(left: WorkList, right: WorkList) -> bool:
    """Whether two plans of one scene read the same pages for the same rows in the same pieces."""
    same = left.num_shared == right.num_shared and all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("row_begin", "row", "run_begin", "delta_begin", "delta")
    )
    return same and all(
        np.array_equal(left.page_id[left_pages], right.page_id[right_pages])
        for left_pages, right_pages in zip(_page_ranges(left), _page_ranges(right), strict=True)
    )


def _page_ranges(work: WorkList) -> list[slice]:
    return [slice(begin, end) for begin, end in zip(work.page_begin, work.page_end, strict=True)]
