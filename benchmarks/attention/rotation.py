"""What rotating queries by a delta costs: random deltas against deltas of zero, over the same pages and rows.

Positions of the rows are the same in both, so that both see all keys. `pages` gives every page a delta of its own, the
worst that a page table can hold; `documents` every 512 tokens; `shared` one document to all sequences, each with its
own delta.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from attention.arms import ours
from attention.bench import DTYPES, Bench, ran
from attention.scenes import Block, Heads, Scene, Use, build_scene, prefix_scene
from harness import PartResult, at_most

from mneme.kernels.attention import PageTable

_HEADS = Heads(32, 8, 128)
_DOCUMENT_TOKENS = 512
_ROOM = 4096  # deltas are drawn under this
_TARGET = 1.03


class Point(NamedTuple):
    deltas: str  # one for each of these: "pages", "documents", "shared"
    dtype: str
    batch: int
    tokens: int


def run(bench: Bench) -> PartResult:
    """The promise is for documents and shared segments; a delta per page is shown beside them."""
    batch, tokens = bench.pick(cuda=(64, 4096), cpu=(32, 2048), quick=(8, 1024))
    points = [Point(kind, "bfloat16", batch, tokens) for kind in ("documents", "shared", "pages")]
    rows = bench.sweep(points, lambda point: _measure(bench, point))
    judged = [row for row in ran(rows) if bench.is_cuda and row["deltas"] != "pages"]
    promised = [row["overhead"] for row in judged if row["overhead"] is not None]
    check = at_most("gpu_rotation_random_over_zero_deltas", max(promised, default=None), _TARGET)
    title = f"random deltas over deltas of zero, heads {_HEADS}; ms per call"
    return PartResult(name="rotation", title=title, rows=rows, checks=[check])


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    zero = _zero_scene(bench, point)
    turned = replace(zero, tables=with_random_deltas(zero, point, np.random.default_rng(bench.seed)))
    times = bench.time(zero, [ours(zero, "zero")], others=[(turned, ours(turned, "random"))])
    return {
        "launched": times.launches("zero", "random"),
        "zero": times.ms("zero"),
        "random": times.ms("random"),
        "overhead": times.ratio("random", "zero"),
    }


def _zero_scene(bench: Bench, point: Point) -> Scene:
    options = bench.options(_HEADS, DTYPES[point.dtype]) | {"room": _ROOM}
    if point.deltas == "shared":
        blocks, uses = [Block(point.tokens)], [[Use(0)]] * point.batch
        return build_scene(blocks, uses, **options)
    return prefix_scene(point.batch, 0, point.tokens, **options)


def with_random_deltas(scene: Scene, point: Point, rng: np.random.Generator) -> tuple[PageTable, ...]:
    run_pages = {"pages": 1, "documents": _DOCUMENT_TOKENS // scene.page_size}.get(point.deltas)
    tables = []
    for table in scene.tables:
        pages_per_run = run_pages or len(table)
        drawn = rng.integers(0, _ROOM, -(-len(table) // pages_per_run))
        deltas = np.repeat(drawn, pages_per_run)[: len(table)].astype(np.int32)
        tables.append(PageTable(table.page_ids, deltas, table.masks))
    return tuple(tables)
