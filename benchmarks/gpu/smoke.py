"""Attention and draws once at a model's sizes, with outputs that are NaN until they are written: is it right here?

Under `poisoned` torch fills what it allocates with NaN, and each attention is run a second time over partial results
that were set to NaN, so what a kernel forgot to write shows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from attention.arms import TOLERANCE
from attention.scenes import Heads, Scene, documents_scene, int8_scene, prefix_scene
from gpu.steps import Job, Row, Run

from mneme.kernels import ops
from mneme.kernels.arguments import dequantized
from mneme.kernels.attention import PageTable, attend

_FAR_BYTES = 100 << 30  # of the pool whose last pages are read
_INTERPRETED = ("shared", "documents", "prefill")  # without a device; the others differ in sizes that are not had there


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out within is NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # what switches the filling on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def backend_of(run: Run, is_interpreted: bool = True) -> str:
    """Triton natively; without a device interpreted, where that is asked for and Triton's interpreter works."""
    if not run.is_dry:
        return "triton"
    if not is_interpreted:
        return "auto"
    # Interpreters of Triton up to 3.7 take arrays of one element for scalars, which numpy refuses from 2.5 on.
    is_old = tuple(map(int, np.__version__.split(".")[:2])) < (2, 5)
    return "triton" if importlib.util.find_spec("triton") and is_old else "auto"


def _attention(make: Callable[[Run], Scene], run: Run, name: str, window: int | None = None) -> Iterator[Row]:
    scene, backend = make(run), backend_of(run, name in _INTERPRETED)
    wanted = _attended(scene, "reference", window)
    with poisoned():
        error = _error(_attended(scene, backend, window), wanted)
        if backend == "triton":
            from mneme.kernels.triton.step import step_of

            plan = scene.plan("always")
            _attended(scene, backend, window, plan)
            for partials in step_of(scene.q.device).partials:
                partials.fill_(torch.nan)
            error = max(error, _error(_attended(scene, backend, window, plan), wanted))
    yield _row(name, error, TOLERANCE[scene.q.dtype])


def _attended(scene: Scene, backend: str, window: int | None, plan: Any = None) -> torch.Tensor:
    q, keys, values = scene.q, *scene.layers[0]
    if backend == "reference":
        q, keys, values = q.float(), dequantized(keys).float(), dequantized(values).float()
    return attend(
        q, keys, values, scene.slot_position, scene.rope, plan or scene.plan("always"), softmax_scale=scene.scale,
        window=window, backend=backend,  # type: ignore[arg-type]
    )[0]  # fmt: skip


def _error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest relative error of a row and head; NaN if anything is."""
    out, wanted = out.double(), wanted.double()
    return float(((out - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)).max())


def _row(name: str, error: float, tolerance: float) -> Row:
    if not error <= tolerance:  # NaN, too
        raise SystemExit(f"relative error {error:.3g} against float64, allowed {tolerance:g}: do not trust a figure")
    return Row(f"smoke {name}", error, note=f"relative error, allowed {tolerance:g}")


def _options(run: Run, heads: Heads, dtype: torch.dtype = torch.bfloat16, page_size: int = 32) -> dict[str, Any]:
    if run.is_dry:
        heads, dtype = Heads(heads.group, 1, 16), torch.float32
    return {"heads": heads, "dtype": dtype, "device": run.device, "page_size": run.pick(page_size, 32)}


_GQA = Heads(32, 8, 128)


def _private(run: Run, heads: Heads = _GQA) -> Scene:
    return prefix_scene(run.pick(8, 1), 0, run.pick(1024, 32), **_options(run, heads))


def _shared(run: Run, heads: Heads = _GQA, dtype: torch.dtype = torch.bfloat16, page_size: int = 32) -> Scene:
    options = _options(run, heads, dtype, page_size)
    return prefix_scene(run.pick(32, 2), run.pick(2048, 32), run.pick(128, 32), **options)


def _documents(run: Run) -> Scene:
    orders = run.pick([[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]] * 4, [[0, 1], [1, 0]])
    return documents_scene(orders, len(orders[0]), run.pick(512, 32), 32, **_options(run, _GQA))


def _masked(run: Run) -> Scene:
    scene = _shared(run)
    rng = np.random.default_rng(0)

    def masked(table: PageTable) -> PageTable:
        masks = rng.integers(1, 2**31, len(table)).astype(np.int64)
        masks[-1] = -1  # each row sees something
        return PageTable(table.page_ids, table.deltas, masks)

    return replace(scene, tables=tuple(map(masked, scene.tables)))


def _prefill(run: Run, page_size: int = 32) -> Scene:
    options = _options(run, _GQA, page_size=page_size)
    return prefix_scene(1, 0, run.pick(1024, 64), rows_per_sequence=run.pick(512, 8), **options)


def _int8(run: Run, make: Callable[..., Scene], **options: Any) -> Scene:
    return int8_scene(make(run, **options))


def _far(run: Run) -> Scene:
    """The same pages at the end of a pool that is larger than 31 bits count elements of."""
    scene = _shared(run)
    heads, num_pages, page_size, dim = scene.layers[0][0].shape
    free = 1 << 20 if run.is_dry else int(min(_FAR_BYTES, 0.7 * torch.cuda.mem_get_info()[0]))
    total = max(2 * num_pages, free // (2 * heads * page_size * dim * scene.q.element_size()))
    first = total - num_pages
    far = tuple(torch.empty(heads, total, page_size, dim, dtype=scene.q.dtype, device=run.device) for _ in "kv")
    for target, source in zip(far, scene.layers[0], strict=True):
        target[:, first:] = source
    position = torch.full((total * page_size,), 2**30, dtype=torch.int32, device=run.device)
    position[first * page_size :] = scene.slot_position
    tables = tuple(PageTable(t.page_ids + np.int32(first), t.deltas, t.masks) for t in scene.tables)
    return replace(scene, tables=tables, layers=((far[0], far[1]),), slot_position=position)


def _far_attention(run: Run) -> Iterator[Row]:
    """Held against the same scene at the beginning of a small pool: 100 GB have no room in float64."""
    near, far, backend = _shared(run), _far(run), backend_of(run, False)
    wanted = _attended(near, "reference", None)
    with poisoned():
        error = _error(_attended(far, backend, None), wanted)
    yield _row("pages at the end of a large pool", error, TOLERANCE[near.q.dtype])


def _draws(run: Run) -> Iterator[Row]:
    """Among the largest vocabularies greedy rows take the best; a draw among the ten best is one of them."""
    generator, uniform = torch.Generator(run.device).manual_seed(0), [0.05 + 0.1 * row for row in range(8)]
    for num_tokens, scale in itertools.product(run.pick((128256, 262144), (300,)), (1.0, 8.0)):  # flat, and peaked
        logits = scale * torch.empty(8, num_tokens, device=run.device).normal_(generator=generator)
        for temperature, top_k in ((0.0, 0), (1.0, 10)):
            with poisoned():
                drawn = ops.draw_tokens(
                    logits, temperature=[temperature] * 8, top_k=[top_k] * 8, top_p=[1.0] * 8, min_p=[0.0] * 8,
                    uniform=uniform,
                )  # fmt: skip
            best = logits.topk(max(top_k, 1)).indices.tolist()
            is_drawn_here = drawn is not None or run.is_dry  # a CPU leaves draws to the sampler
            tokens = [] if drawn is None else drawn.tolist()
            if not is_drawn_here or any(token not in among for token, among in zip(tokens, best, strict=False)):
                raise SystemExit(f"drawn {drawn} are not among the {max(top_k, 1)} best of their rows")
    yield Row("smoke draws", 0.0, note="none is wrong")


def jobs() -> dict[str, Job]:
    """By name; each yields its error, or fails."""
    scenes: dict[str, Callable[[Run], Scene]] = {
        "private": _private, "shared": _shared, "documents": _documents, "masks": _masked, "prefill": _prefill,
        "one KV head per query head": partial(_shared, heads=Heads(32, 32, 128)),
        "7 query heads per KV head": partial(_shared, heads=Heads(28, 4, 128)),
        "8 query heads, 64 dimensions": partial(_shared, heads=Heads(32, 4, 64)),
        "shared, pages of 64": partial(_shared, page_size=64),  # with a launch of wide tiles
        "prefill, pages of 64": partial(_prefill, page_size=64),
        "float16": partial(_shared, dtype=torch.float16),
        "float32": partial(_shared, dtype=torch.float32),
        **{
            f"int8 KV, {name}": partial(_int8, make=make)
            for name, make in (("private", _private), ("shared", _shared), ("prefill", _prefill))
        },
        "int8 KV, float16": partial(_int8, make=_shared, dtype=torch.float16),
    }  # fmt: skip
    found: dict[str, Job] = {
        f"smoke {name}": partial(_attention, make, name=name) for name, make in scenes.items()
    }  # fmt: skip
    found["smoke window"] = partial(_attention, _shared, name="window", window=300)
    found["smoke large pool"] = _far_attention
    found["smoke draws"] = _draws
    return found
