"""ChunkAttention Fig. 3 to 5: token rate over shared length, completion length and batch size; latency of the first
token; memory operations beside its Eq. 3 and 4.

A completion of n tokens is not decoded token by token: steps are timed at some lengths of it, and the mean step is the
trapezoid through them. As in the paper a sequence has 64 tokens of its own when decoding begins, a KV head per query
head, pages (its chunks) of 64 tokens; on a CPU there are fewer heads. The elements that a plan moves are counted from
its work; Eq. 3 reads queries and writes partial results once per chunk, ours once per segment, so ours are fewer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from attention.arms import contiguous, ours
from attention.bench import DTYPES, Bench, NotRun, ran
from attention.equations import chunk_memory_ops, naive_memory_ops
from attention.optional_arms import contiguous_by_head, flashinfer_decode
from attention.scenes import Heads, Scene, prefix_scene
from harness import PartResult

from mneme.kernels.plan import Plan

_PAGE_SIZE = 64
_PROMPT_TAIL = 64  # private tokens before the first completion token
_FIG4_SHARED = 1024


class Point(NamedTuple):
    batch: int
    shared: int
    completion: int


def run(bench: Bench) -> PartResult:
    """Rows with completion 0 are the step of the first token (Fig. 5)."""
    lengths = bench.pick(cuda=(0, 64, 256, 512, 1024), cpu=(0, 64, 256), quick=(0, 64))
    shares = bench.pick(cuda=(256, 512, 1024, 2048, 4096, 8192), cpu=(256, 1024, 2048, 4096), quick=(256, 1024))
    batches = bench.pick(cuda=(8, 16, 48, 64, 96, 128), cpu=(8, 16, 64), quick=(8,))
    points = [Point(32, s, n) for s in shares for n in lengths]
    points += [Point(b, _FIG4_SHARED, n) for b in batches for n in lengths[:2]]
    rows = bench.sweep(points, lambda point: _measure(bench, point))
    _add_token_rates(rows)
    title = f"ChunkAttention Fig. 3-5, heads {_heads(bench)}, {_dtype(bench)}; ms per step, tokens/s of the kernel"
    return PartResult(name="chunk", title=title, rows=rows)


def _heads(bench: Bench) -> Heads:
    return Heads(32, 32, 128) if bench.is_cuda else Heads(8, 8, 128)


def _dtype(bench: Bench) -> str:
    return "float16" if bench.is_cuda else "bfloat16"


def _measure(bench: Bench, point: Point) -> dict[str, Any]:
    heads, private = _heads(bench), _PROMPT_TAIL + point.completion
    if not bench.may_read(point.batch * (point.shared + private) * 4 * heads.kv * heads.dim):
        raise NotRun("too long for this device")
    options = bench.options(heads, DTYPES[_dtype(bench)], _PAGE_SIZE)
    scene = prefix_scene(point.batch, point.shared, private, **options)
    arms, peers = [ours(scene), ours(scene, "never", "never")], [lambda: flashinfer_decode(scene)]
    if bench.may_copy(scene.bytes_apart):
        arms += contiguous(scene, bench.ceilings.cache_bytes)
        peers.append(lambda: contiguous_by_head(scene, bench.ceilings.cache_bytes))
    times = bench.time(scene, arms, peers)
    row = {name: times.ms(name) if name in times else None for name in ("auto", "never", "contiguous")}
    row["flashinfer"] = times.ms("flashinfer_decode") if "flashinfer_decode" in times else None
    return row | _memory_ops(scene, point)


def _memory_ops(scene: Scene, point: Point) -> dict[str, Any]:
    """Elements moved in one step, in millions: the equations and what the plans say."""
    heads, length = scene.heads, scene.lengths[0]
    eq3 = chunk_memory_ops(point.batch, heads.q, length, heads.dim, point.shared / length, _PAGE_SIZE)
    eq4 = naive_memory_ops(point.batch, heads.q, length, heads.dim)
    return {
        "eq3_M": eq3 / 1e6,
        "always_M": planned_memory_ops(scene.plan("always")) / 1e6,
        "eq4_M": eq4 / 1e6,
        "never_M": planned_memory_ops(scene.plan("never")) / 1e6,
    }


def planned_memory_ops(plan: Plan) -> int:
    """Elements that a plan moves: every piece of its work reads its pages once, its queries, and writes as much."""
    token, row = 2 * plan.num_kv_heads * plan.head_dim, 2 * plan.num_q_heads * plan.head_dim
    num_pages = int((plan.work.page_end - plan.work.page_begin).sum())
    return num_pages * plan.page_size * token + int(plan.work.row_begin[-1]) * row


def _add_token_rates(rows: list[dict[str, Any]]) -> None:
    """Tokens per second of a completion of each length, all sequences together."""
    measured = ran(rows)
    for row in measured:
        if not row["completion"]:
            continue
        curve = [r for r in measured if (r["batch"], r["shared"]) == (row["batch"], row["shared"])]
        curve = [r for r in curve if r["completion"] <= row["completion"]]
        for arm in ("auto", "never", "contiguous", "flashinfer"):
            if all(r[arm] is not None for r in curve) and len(curve) > 1:
                mean_ms = mean_step([(r["completion"], r[arm]) for r in curve])
                row[f"{arm}_tok/s"] = row["batch"] / mean_ms * 1e3


def mean_step(curve: list[tuple[int, float]]) -> float:
    """Mean of a step's time over a completion, from (completion tokens so far, time) in ascending order."""
    lengths, times = zip(*curve, strict=True)
    return float(np.trapezoid(times, lengths) / (lengths[-1] - lengths[0]))
