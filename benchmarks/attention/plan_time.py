"""What planning a step costs on the host: a plan built anew, moved on by a token, and with pages that were begun.

The step that it is held against is attention alone in all layers (the products of the layers would only make it
longer). `prepare` is what the backend derives from a new plan, once per step. What a step costs must grow with the
pages that changed, not with the context.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from attention.arms import ours
from attention.bench import DTYPES, Bench, NotRun, ran
from attention.scenes import Heads, Scene, prefix_scene
from attention.timing import interleaved
from harness import Check, PartResult, at_most

from mneme.kernels.arguments import AttendArgs
from mneme.kernels.attention import Plan, QueryRows, mark_written
from mneme.kernels.native import backend as native_backend
from mneme.kernels.native import library as native_library

_SHARE_OF_STEP, _GROWTH = 0.05, 1.5
_RUNS = 9
Clock = Callable[[], float]  # seconds


class Point(NamedTuple):
    batch: int
    tokens: int  # per sequence, half of them shared by all


def run(bench: Bench) -> PartResult:
    """The promise: 128 sequences of 4,096 tokens; contexts of 1k to 16k for the growth."""
    grid = bench.pick(cuda=[(128, 1024), (128, 4096), (128, 16384), (8, 4096)],
                      cpu=[(128, 1024), (128, 4096), (128, 16384), (8, 4096)],
                      quick=[(128, 1024), (128, 4096)])  # fmt: skip
    points = [Point(*point) for point in grid]
    rows = bench.sweep(points, lambda point: _measure(bench, point))
    heads, layers = _model(bench)
    title = f"host time of a step's plan, ms; attention of {layers} layers with heads {heads}"
    return PartResult(name="plan_time", title=title, rows=rows, checks=_checks(bench, rows))


def _model(bench: Bench) -> tuple[Heads, int]:
    """Llama-3-8B on CUDA; the 31M model of the other benchmarks on a CPU."""
    return (Heads(32, 8, 128), 32) if bench.is_cuda else (Heads(8, 4, 64), 8)


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    heads, num_layers = _model(bench)
    token_bytes = 4 * heads.kv * heads.dim
    if not bench.may_copy(point.batch * point.tokens // 2 * token_bytes):
        raise NotRun("too long for this device")
    half = point.tokens // 2
    options = bench.options(heads, DTYPES["bfloat16"]) | {"cache_bytes": 0, "room": 1}
    scene = prefix_scene(point.batch, half, half, **options)
    plan = scene.plan()
    clock = bench.now_s
    attention_ms = interleaved([ours(scene)], bench.device, budget_s=bench.point_s, now_s=clock).ms("auto")
    prepare_ms = _prepare_ms(scene, clock)
    step_ms = num_layers * attention_ms
    row = {
        "build": _median_ms(scene.plan, clock),
        "with_rows": _median_ms(lambda: plan.with_rows(_next_rows(scene)), clock),
        "append_1_page": _appending_ms(scene, 1, clock),
        "append_all": _appending_ms(scene, point.batch, clock),
        "prepare": prepare_ms,
        "attention_layer": attention_ms,
    }
    moved_on = row["with_rows"] + prepare_ms  # each step
    return row | {"decode_of_step": moved_on / step_ms, "rebuild_of_step": (row["build"] + prepare_ms) / step_ms}


def _prepare_ms(scene: Scene, clock: Clock) -> float:
    """What the backend derives from a plan that moved on, once per step; the median over steps.

    Each step marks a token per sequence, as an engine does.
    """
    plan = scene.plan()
    slots = torch.from_numpy(np.array([int(table.page_ids[-1]) for table in scene.tables]) * scene.page_size)
    slots = slots.to(scene.q.device)
    times = []
    for _ in range(_RUNS):
        mark_written(scene.slot_position, slots, scene.slot_position[slots])  # as it was: only the change counts
        plan = plan.with_rows(_next_rows(scene))
        times.append(_once_ms(partial(_prepare, scene, plan), scene.q.device, clock))
    return statistics.median(times)


def _prepare(scene: Scene, plan: Plan) -> None:
    if scene.q.device.type == "cuda":
        from mneme.kernels.triton.backend import stage

        stage(plan, scene.slot_position, scene.q.dtype, scene.rope.num_positions)
    elif native_library.library() is not None:
        pool = (scene.q, *scene.layers[0], scene.slot_position)
        native_backend.prepare(AttendArgs(*pool, scene.rope, plan, scene.scale, window=None, soft_cap=None))


def _next_rows(scene: Scene) -> QueryRows:
    sequence, position = scene.rows.arrays()
    return QueryRows(sequence, position + 1)


def _appending_ms(scene: Scene, num_pages: int, clock: Clock) -> float:
    """Steps one after the other in which so many sequences begin a page and all go on by a token; the median."""
    plan, times = scene.plan(), []
    sequences, (numbers, positions) = np.arange(num_pages), scene.rows.arrays()
    for step in range(_RUNS):
        started = clock()
        grown = plan.append_new_pages(sequences, np.arange(plan.num_pages, plan.num_pages + num_pages))
        plan = (grown or scene.plan()).with_rows(QueryRows(numbers, positions + 1 + step))
        times.append((clock() - started) * 1e3)
    return statistics.median(times)


def _median_ms(call: Callable[[], object], clock: Clock) -> float:
    cpu = torch.device("cpu")
    call()
    return statistics.median(_once_ms(call, cpu, clock) for _ in range(_RUNS))


def _once_ms(call: Callable[[], object], device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - started) * 1e3


def _increment_ms(row: dict[str, Any]) -> float:
    """A step in which one page was begun: its plan and its preparation."""
    return float(row["append_1_page"] + row["prepare"])


def _checks(bench: Bench, rows: list[dict[str, Any]]) -> list[Check]:
    by_point = {(row["batch"], row["tokens"]): row for row in ran(rows)}
    promised = by_point.get((128, 4096), {})
    contexts = sorted(tokens for batch, tokens in by_point if batch == 128)
    growth = None
    if len(contexts) > 1:
        short, long = by_point[128, contexts[0]], by_point[128, contexts[-1]]
        growth = _increment_ms(long) / _increment_ms(short)
    device = bench.device.type
    return [
        at_most(f"{device}_plan_of_step_128x4k", promised.get("decode_of_step"), _SHARE_OF_STEP, "of attention"),
        at_most(
            f"{device}_plan_rebuilt_of_step_128x4k", promised.get("rebuild_of_step"), _SHARE_OF_STEP, "of attention"
        ),
        at_most(
            f"{device}_plan_increment_growth_with_context", growth, _GROWTH, f"x from {contexts[:1]} to {contexts[-1:]}"
        ),
    ]
