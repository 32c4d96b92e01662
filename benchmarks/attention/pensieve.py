"""Pensieve Fig. 10: eight prompt tokens of each of 32 requests over their past KV in scattered pages.

Ours reads the pages as they lie; copy-out gathers them into contiguous KV first; rounds run one token after the other
as a single-row kernel would have to; ideal finds its KV contiguous already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attention.arms import contiguous, gathered, ours, own_buffers
from attention.bench import DTYPES, Bench, NotRun
from attention.optional_arms import contiguous_by_head
from attention.scenes import Heads, Scene, prefix_scene
from attention.timing import Arm
from harness import PartResult

from mneme.kernels.attention import QueryRows

_BATCH, _ROWS = 32, 8


class Point(NamedTuple):
    context: int


def run(bench: Bench) -> PartResult:
    """Heads of the paper's OPT-13B on CUDA; fewer on a CPU."""
    contexts = bench.pick(cuda=(512, 1024, 2048, 4096, 8192, 16384), cpu=(512, 1024, 2048, 4096), quick=(512,))
    rows = bench.sweep([Point(context) for context in contexts], lambda point: _measure(bench, point))
    title = f"Pensieve Fig. 10, batch {_BATCH}, {_ROWS} rows each, heads {_heads(bench)}, {_dtype(bench)}; ms per call"
    return PartResult(name="pensieve", title=title, rows=rows)


def _heads(bench: Bench) -> Heads:
    return Heads(40, 40, 128) if bench.is_cuda else Heads(8, 8, 128)


def _dtype(bench: Bench) -> str:
    return "float16" if bench.is_cuda else "bfloat16"


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    heads = _heads(bench)
    if not bench.may_copy(_BATCH * point.context * 4 * heads.kv * heads.dim):
        raise NotRun("too long for this device")
    options = bench.options(heads, DTYPES[_dtype(bench)])
    scene = prefix_scene(_BATCH, 0, point.context, rows_per_sequence=_ROWS, **options)
    arms = [ours(scene), one_row_at_a_time(scene), *gathered(scene), *contiguous(scene)]
    times = bench.time(scene, arms, [lambda: contiguous_by_head(scene)])
    names = {"auto": "ours", "gather": "copy_out", "rounds": "rounds", "contiguous": "ideal"}
    row: dict[str, Any] = {"launched": times.launches(*names)}
    row |= {column: times.ms(family) for family, column in names.items()}
    return row | {f"{names[f]}/ours": times.ratio(f, "auto") for f in ("gather", "rounds", "contiguous")}


def one_row_at_a_time(scene: Scene) -> Arm:
    """As many calls as a sequence has rows, each with one row of every sequence."""
    num_rows, batch = scene.rows_per_sequence, len(scene.tables)
    sequence, position = (array.reshape(batch, num_rows) for array in scene.rows.arrays())
    plans = [scene.plan_of(scene.tables, QueryRows(sequence[:, i], position[:, i]), "auto") for i in range(num_rows)]
    by_row = scene.q.view(batch, num_rows, scene.heads.q, scene.heads.dim).unbind(1)
    queries = [q.contiguous() for q in by_row]
    buffers = [own_buffers(scene.q.device) for _ in plans]

    def call(layer: int) -> list[torch.Tensor]:
        outs = []
        for plan, q, own in zip(plans, queries, buffers, strict=True):
            with own:
                outs.append(scene.attend_rows(layer, plan, q)[0])
        return outs

    return Arm("rounds", call, len(scene.layers), lambda outs: torch.stack(outs, 1).flatten(0, 1))
