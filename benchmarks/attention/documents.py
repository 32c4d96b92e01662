"""Shuffled documents: every sequence sees some of 32 documents of 512 tokens, in an order of its own.

Arms beside ours: sequence-first; *virtual queries*, a copy of each query per document, rotated beforehand and attended
as a sequence of its own, then merged (what a kernel without a delta per row must do; Hogwild! inference rotates like
this, arXiv 2504.06261); and contiguous KV whose keys were turned to each sequence's positions, outside of the timing.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from attention.arms import contiguous, ours, own_buffers
from attention.bench import DTYPES, Bench, NotRun, ran
from attention.scenes import Heads, Scene, documents_scene
from attention.timing import Arm
from harness import Check, PartResult, at_most

from mneme.kernels.attention import PageTable, QueryRows
from mneme.kernels.work import Share

_HEADS = Heads(32, 8, 128)
_BATCH, _DOCUMENT_TOKENS, _PRIVATE = 32, 512, 128
_NUM_DOCUMENTS = 32
_SAME_DOCUMENTS = 4  # 2,048 shared tokens, the shape of the headline
_PLACE_TARGET = 1.1


class Point(NamedTuple):
    dtype: str
    documents: int  # that a sequence sees
    of: int


def run(bench: Bench) -> PartResult:
    """The last rows: all sequences see the same four documents, each in its own order, against one order."""
    dtypes = bench.pick(cuda=("bfloat16",), cpu=("bfloat16", "float32"), quick=("bfloat16",))
    seen = bench.pick(cuda=(2, 4, 8, 16), cpu=(2, 4, 8), quick=(4,))
    points = [Point(dtype, _SAME_DOCUMENTS, _SAME_DOCUMENTS) for dtype in dtypes]
    points += [Point("bfloat16", k, _NUM_DOCUMENTS) for k in seen]
    rows = bench.sweep(points, lambda point: _measure(bench, point))
    title = f"shuffled documents of {_DOCUMENT_TOKENS} tokens, batch {_BATCH}, heads {_HEADS}; ms per call"
    return PartResult(name="documents", title=title, rows=rows, checks=_checks(bench, rows))


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    dtype = DTYPES[point.dtype]
    length = point.documents * _DOCUMENT_TOKENS + _PRIVATE
    if not bench.may_read(_BATCH * length * 2 * _HEADS.kv * _HEADS.dim * dtype.itemsize):
        raise NotRun("too long for this device")
    rng = random.Random(bench.seed)
    orders = [rng.sample(range(point.of), point.documents) for _ in range(_BATCH)]
    options = bench.options(_HEADS, dtype)
    scene = documents_scene(orders, point.of, _DOCUMENT_TOKENS, _PRIVATE, **options)
    arms = [ours(scene), ours(scene, "always", "always"), ours(scene, "never", "never"), virtual_queries(scene)]
    if bench.may_copy(scene.bytes_apart):
        arms += contiguous(scene, bench.ceilings.cache_bytes)
    if point.documents == point.of:  # the same pages in the same memory, one order for all
        one_order = documents_scene([orders[0]] * _BATCH, point.of, _DOCUMENT_TOKENS, _PRIVATE, **options)
        times = bench.time(scene, arms, others=[(one_order, ours(one_order, "equal_positions"))])
    else:
        times = bench.time(scene, arms)
    families = ("auto", "always", "never", "virtual", "contiguous", "equal_positions")
    row: dict[str, Any] = {"launched": times.launches(*families)}
    row |= {name: times.ms(name) if name in times else None for name in families}
    row |= {f"{name}/auto": times.ratio(name, "auto") for name in ("never", "virtual", "contiguous") if name in times}
    if "equal_positions" in times:
        row["auto/equal_positions"] = times.ratio("auto", "equal_positions")
    return row


def virtual_queries(scene: Scene, share: Share = "auto") -> Arm:
    """Each query once per delta of its sequence, rotated in a pass of its own; un-rotated attention; a merge."""
    tables, rows = _tables_by_delta(scene)
    sequence, delta = (torch.tensor(values, device=scene.q.device) for values in zip(*rows, strict=True))
    position = torch.from_numpy(scene.rows.arrays()[1]).to(scene.q.device)[sequence] - delta
    local = QueryRows(np.arange(len(rows)), position.cpu().numpy())
    plan = scene.plan_of(tables, local, share)
    num_parts = len(rows) // len(scene.tables)  # of a sequence; the same for all
    buffers = own_buffers(scene.q.device)

    def call(layer: int) -> torch.Tensor:
        q = scene.rope.rotate(scene.q.index_select(0, sequence), position).to(scene.q.dtype)
        with buffers:
            out, lse = scene.attend_rows(layer, plan, q, rope=False)
        weights = lse.view(-1, num_parts, lse.shape[1]).softmax(1)
        return (out.float().view(-1, num_parts, *out.shape[1:]) * weights[..., None]).sum(1).to(q.dtype)

    return Arm("virtual", call, len(scene.layers))


def _tables_by_delta(scene: Scene) -> tuple[list[PageTable], list[tuple[int, int]]]:
    """A page table for each (sequence, delta), and that pair; delta 0 in the frame of the pages."""
    tables, rows = [], []
    for number, table in enumerate(scene.tables):
        for delta in np.unique(table.deltas):
            tables.append(PageTable.own(table.page_ids[table.deltas == delta]))
            rows.append((number, int(delta)))
    return tables, rows


def _checks(bench: Bench, rows: list[dict[str, Any]]) -> list[Check]:
    promised = ran(rows) if not bench.is_cuda and bench.num_threads == 1 else []
    ratios = {row["dtype"]: row.get("auto/equal_positions") for row in promised if row["documents"] == row["of"]}
    return [
        at_most(f"cpu_{dtype}_documents_over_equal_positions", ratios.get(dtype), _PLACE_TARGET)
        for dtype in ("bfloat16", "float32")
    ]
