"""`make gpu-attention`: the kernels beside what memory and products allow, and beside other libraries' kernels."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from attention import relay
from attention.arms import check, contiguous, ours, own_buffers, reference_rows, virtual_queries
from attention.bench import Bench, NotRun
from attention.machine import Ceilings, measure_ceilings
from attention.optional_arms import contiguous_by_head, flashinfer_decode
from attention.scenes import (
    Block,
    Heads,
    Scene,
    Use,
    build_scene,
    contiguous_layers,
    documents_scene,
    int8_scene,
    prefix_scene,
    rotated_q,
)
from attention.timing import Arm, Timings, interleaved
from gpu import precompile
from gpu.model import Model, Prompts
from gpu.smoke import backend_of
from gpu.steps import Row, Run, Step
from gpu.tune import SCENES, config_arms, timed, tuning_scenes, wide_arms, wide_scenes
from harness import NOT_RUN
from torch.nn.attention import SDPBackend, sdpa_kernel

from mneme.kernels.attention import PageTable, Plan
from mneme.kernels.triton.configs import WIDE, candidates
from mneme.replicas.engine.calibration import measured_share_cost

_GQA, _MHA = Heads(32, 8, 128), Heads(32, 32, 128)
_POINT_S = 0.12
_POINT_WALL_S = 8.0  # of a large point: its scene, its check in float64, its captures
# A launch has a fixed cost, some microseconds, which no equation counts: it is a figure of its own (`_intercept`), and
# Eq. 10 is promised where the ideal time is long beside it.
_PROMISED_FROM_US = 40.0
_DOCUMENT_TOKENS = 512
_MOST_DELTA = 4096
# (batch, shared, private), the telling ones first: what is left when time is over is not run.
_RELAY_SHAPES = (
    (32, 2048, 128), (32, 8192, 128), (128, 8192, 128), (32, 16384, 128), (128, 8192, 768), (8, 8192, 128),
    (8, 16384, 768),
)  # fmt: skip
Point = TypeVar("Point")


def steps(is_dry: bool) -> list[Step]:
    """Tuning first: where the rule is far from the best, the rest is of the rule all the same, and known to be."""
    compiled = {} if is_dry else {name: job for name, job in precompile.jobs(is_dry).items() if "llama" not in name}
    return [
        *([Step("precompile", 60, compiled, precompile.NUM_JOBS)] if compiled else []),
        Step("tune", 110, {"tune": _tune}),
        Step("wide", 40, {"wide": _wide}),
        Step("bandwidth", 45, {"bandwidth": _bandwidth}),
        Step("int8 KV", 30, {"int8 KV": _int8_kv}),
        Step("Eq. 10", 130, {"Eq. 10": _relay}),
        Step("intercept", 20, {"intercept": _intercept}),
        Step("rotation", 30, {"rotation": _rotation}),
        Step("documents", 30, {"documents": _documents}),
        Step("share cost", 60, {"share cost": _share_cost}),
        Step("prefill", 30, {"prefill": _prefill}),
    ]


def _points(
    run: Run, points: Sequence[Point], name: Callable[[Point], str], measure: Callable[[Bench, Point], Iterator[Row]]
) -> Iterator[Row]:
    """All points that there is time for; dry: the first. One that has begun is finished."""
    dtypes = [torch.bfloat16]
    roofs = Ceilings(1e10, {torch.bfloat16: 1e11}, 0) if run.is_dry else measure_ceilings(run.device, dtypes)
    bench = Bench(device=run.device, quick=run.is_dry, ceilings=roofs, point_s=run.pick(_POINT_S, 0.0))
    for point in points[: run.pick(None, 1)]:
        if run.left_s < _POINT_WALL_S and not run.is_dry:
            yield Row(name(point), None, note=f"{NOT_RUN}: out of time")
            continue
        try:
            yield from measure(bench, point)
        except (NotRun, torch.OutOfMemoryError) as reason:
            yield Row(name(point), None, note=f"{NOT_RUN}: {str(reason)[:80]}")
        if not run.is_dry:
            gc.collect()
            torch.cuda.empty_cache()
    print(*bench.notes, sep="\n")


def _details(name: str, times: Timings) -> Iterator[Row]:
    for arm, launched in times.launched.items():
        yield Row(f"{name}, {arm}", times.ms(arm), "ms", note=launched, is_detail=True)


def _note(launched: str, **values: float | None) -> str:
    """How it was launched, unless as a graph, and other figures."""
    found = [f"{name} {value:.3g}" for name, value in values.items() if value is not None]
    return ", ".join([*([] if launched == "graph" else [f"LAUNCHED {launched}"]), *found])


def _bandwidth(run: Run) -> Iterator[Row]:
    """Sequence-first decode over private KV, in share of the copy bandwidth, and FlashInfer's decode.

    A copy reads and writes each byte; attention only reads, so its share may pass 1 where reading is cheaper.
    """
    shapes = [(32, 1024), (32, 4096), (64, 2048), (128, 1024), (128, 4096), (32, 16384), (1, 16384)]

    def name(point: tuple[int, int]) -> str:
        return f"bandwidth b{point[0]} x {point[1]}"

    def measure(bench: Bench, point: tuple[int, int]) -> Iterator[Row]:
        batch, tokens = run.pick(point, (8, 512))
        scene = prefix_scene(batch, 0, tokens, **bench.options(_GQA))
        arms = [ours(scene, "never", "never"), *contiguous(scene)]
        times = bench.time(scene, arms, [partial(flashinfer_decode, scene), partial(contiguous_by_head, scene)])
        peer = "flashinfer_decode" if "flashinfer_decode" in times else None
        of_copy = scene.bytes_apart / times.ms("never") * 1e3 / bench.ceilings.copy_bytes_per_s
        note = _note(
            times.launches("never", "flashinfer_decode"), ours=times.ms("never"), flashinfer=peer and times.ms(peer)
        )
        yield Row(name(point), of_copy, "of copy", of_copy, note)
        yield from _details(name(point), times)

    return _points(run, shapes, name, measure)


def _int8_kv(run: Run) -> Iterator[Row]:
    """How much faster decodes over private KV of 8 bits are than over bfloat16's; 1.94 by bytes alone."""
    shapes = [(128, 1024), (32, 4096), (1, 16384)]

    def name(point: tuple[int, int]) -> str:
        return f"int8 KV b{point[0]} x {point[1]}"

    def measure(bench: Bench, point: tuple[int, int]) -> Iterator[Row]:
        batch, tokens = run.pick(point, (2, 64))
        scene = prefix_scene(batch, 0, tokens, **bench.options(_GQA))
        small = int8_scene(scene, bench.ceilings.cache_bytes)
        arm = ours(small, "int8", "never")
        check(arm, reference_rows(small), torch.bfloat16)
        times = interleaved([ours(scene, "never", "never"), arm], run.device, budget_s=run.pick(1.0, 0.0))
        tb_s = small.bytes_apart / times.ms("int8") / 1e9
        note = _note(times.launches("never", "int8"), us=times.ms("int8") * 1e3, TB_s=tb_s)
        yield Row(name(point), times.ratio("never", "int8"), "x", note=note)

    return _points(run, shapes, name, measure)


def _relay(run: Run) -> Iterator[Row]:
    """Give shares of min(Eq. 10, compute roof); promised where the ideal time is 40 us or more."""
    points = [relay.Point(heads, *shape) for shape in _RELAY_SHAPES for heads in (_GQA, _MHA)]
    points = run.pick([*points, relay.Point(_GQA, 1, 8192, 128)], [relay.Point(_GQA, 1, 512, 128)])

    def name(point: relay.Point) -> str:
        return f"eq10 {point.heads} b{point.batch} s{point.shared} c{point.private}"

    def measure(bench: Bench, point: relay.Point) -> Iterator[Row]:
        found = relay.measure(bench, point)
        shown = ("auto", "ideal_us", "never/auto", "flashinfer_cascade/auto", "flashinfer_decode/auto")
        note = _note(found["launched"], **{key: found[key] for key in shown})
        note += ", promised >= 0.9" if found["ideal_us"] >= _PROMISED_FROM_US else ""
        yield Row(name(point), found["of_bound"], "of bound", found["of_bound"], note)
        for key, value in found.items():
            if key != "launched":
                yield Row(f"{name(point)}, {key}", value, is_detail=True)

    return _points(run, points, name, measure)


def _rotation(run: Run) -> Iterator[Row]:
    """What rotating queries by a delta costs: random deltas against deltas of zero, over the same pages and rows.

    Positions of the rows are the same in both, so that both see all keys. `pages` gives every page a delta of its own,
    the worst that a page table can hold; `documents` every 512 tokens; `shared` one document to all sequences, each
    with its own delta. 1.03 is promised of the first and the last.
    """
    batch, tokens = run.pick((64, 4096), (8, 1024))
    generator = np.random.default_rng(0)

    def name(kind: str) -> str:
        return f"rotation {kind}"

    def turned(table: PageTable, pages_per_run: int) -> PageTable:
        drawn = generator.integers(0, _MOST_DELTA, -(-len(table) // pages_per_run))
        deltas = np.repeat(drawn, pages_per_run)[: len(table)].astype(np.int32)
        return PageTable(table.page_ids, deltas, table.masks)

    def measure(bench: Bench, kind: str) -> Iterator[Row]:
        options = bench.options(_GQA, room=_MOST_DELTA)
        if kind == "shared":
            zero = build_scene([Block(tokens)], [[Use(0)]] * batch, **options)
        else:
            zero = prefix_scene(batch, 0, tokens, **options)
        size = {"pages": 1, "documents": _DOCUMENT_TOKENS // zero.page_size}.get(kind, tokens)
        random_deltas = replace(zero, tables=tuple(turned(table, size) for table in zero.tables))
        times = bench.time(zero, [ours(zero, "zero")], others=[(random_deltas, ours(random_deltas, "random"))])
        yield Row(name(kind), times.ratio("random", "zero"), "x", note=_note(times.launches("zero", "random")))
        yield from _details(name(kind), times)

    return _points(run, ["documents", "shared", "pages"], name, measure)


def _documents(run: Run) -> Iterator[Row]:
    """Shuffled documents: every sequence sees some of 32 documents of 512 tokens, in an order of its own.

    Beside sequence-first: a copy of each query per document (`virtual_queries`), and contiguous KV whose keys were
    turned to each sequence's positions, outside of the timing. First all see the same four, each in its own order,
    against one order.
    """
    batch, private = 32, 128

    def name(point: tuple[int, int]) -> str:
        return f"documents {point[0]} of {point[1]}, sequence-first over ours"

    def measure(bench: Bench, point: tuple[int, int]) -> Iterator[Row]:
        seen, of = point
        draw, options = random.Random(0), bench.options(_GQA)
        orders = [draw.sample(range(of), seen) for _ in range(batch)]
        scene = documents_scene(orders, of, _DOCUMENT_TOKENS, private, **options)
        arms = [ours(scene), ours(scene, "always", "always"), ours(scene, "never", "never"), virtual_queries(scene)]
        if bench.may_copy(scene.bytes_apart):
            arms += contiguous(scene, bench.ceilings.cache_bytes)
        others: list[tuple[Scene, Arm]] = []
        if seen == of:  # the same pages in the same memory, one order for all
            one_order = documents_scene([orders[0]] * batch, of, _DOCUMENT_TOKENS, private, **options)
            others = [(one_order, ours(one_order, "equal_positions"))]
        times = bench.time(scene, arms, others=others)
        note = _note(
            times.launches("auto", "never"), auto=times.ms("auto"), virtual_over=times.ratio("virtual", "auto"),
            over_equal_positions=times.ratio("auto", "equal_positions") if others else None,
        )  # fmt: skip
        yield Row(name(point), times.ratio("never", "auto"), "x", note=note)
        yield from _details(name(point), times)

    return _points(run, [(4, 4), (2, 32), (4, 32), (8, 32), (16, 32)], name, measure)


def _tune(run: Run) -> Iterator[Row]:
    """How much faster the best configuration is than the one that the rule chooses."""
    cache_bytes = 0 if run.is_dry else torch.cuda.get_device_properties(0).L2_cache_size
    scenes = tuning_scenes(_GQA.dim, cache_bytes, run.device, shrink=run.pick(1, 256))
    for index, (name, scene) in enumerate(scenes.items()):
        rule, *others = candidates(head_dim=_GQA.dim, element_bytes=2, num_groups=_GQA.group, kind=SCENES[name])
        if run.is_dry and backend_of(run) != "triton":
            yield Row(f"tune {name}", None)
            continue
        arms = config_arms(scene, [rule] if run.is_dry else [rule, *others])
        times = timed(arms, scene, run.left_s / (len(scenes) - index) / 2 if not run.is_dry else 0.0)
        for config, ms in sorted(times.items(), key=lambda item: item[1]):
            yield Row(f"tune {name} {config}", ms, "ms", is_detail=True)
        best = min(times, key=lambda config: times[config], default="none")
        gain = times[str(tuple(rule))] / times[best] if str(tuple(rule)) in times else None
        yield Row(f"tune {name}", gain, "x", note=f"rule {tuple(rule)} over best {best}")


def _wide(run: Run) -> Iterator[Row]:
    """Wide tiles by themselves over the same in the launch of the others; the best way over the one that is chosen."""
    cache_bytes = 0 if run.is_dry else torch.cuda.get_device_properties(0).L2_cache_size
    chosen = f"wide {'x'.join(map(str, WIDE))}"
    scenes = wide_scenes(cache_bytes, run.device, shrink=run.pick(1, 256))
    for index, (name, scene) in enumerate(scenes.items()):
        if run.is_dry and backend_of(run) != "triton":
            yield Row(f"wide {name}", None)
            continue
        times = timed(wide_arms(scene), scene, run.left_s / (len(scenes) - index) / 2 if not run.is_dry else 0.0)
        length, rows = scene.lengths[0], scene.q.shape[0]
        pairs = sum(range(length - rows + 1, length + 1)) if len(scene.tables) == 1 else rows * length
        flops = 4.0 * scene.heads.q * scene.heads.dim * pairs
        for how, ms in sorted(times.items(), key=lambda item: item[1]):
            yield Row(f"wide {name}, {how}", ms * 1e3, "us", note=f"{flops / ms / 1e9:.0f} TFLOP/s", is_detail=True)
        best = min(times, key=lambda how: times[how])
        gain = times["one launch"] / times[chosen] if {"one launch", chosen} <= set(times) else None
        yield Row(f"wide {name}, over one launch", gain, "x", note=f"best: {best}, {times[best] * 1e3:.1f} us")


def _intercept(run: Run) -> Iterator[Row]:
    """`a` of t = a + bytes / bandwidth, over shared prefixes of 0 to 2,048 tokens: the fixed cost of a layer's call."""
    lengths = run.pick((0, 128, 256, 512, 1024, 2048), (0, 32))
    options: dict[str, Any] = {"heads": _GQA, "dtype": torch.bfloat16, "device": run.device}
    options["cache_bytes"] = 0 if run.is_dry else torch.cuda.get_device_properties(0).L2_cache_size
    batch = run.pick(32, 2)
    for name, share in (("shared", "always"), ("sequence-first", "never")):
        points, launches = [], set()
        for length in lengths:
            scene = prefix_scene(
                batch, length if share == "always" else 0, 32 if share == "always" else length + 32, **options
            )
            times = interleaved([ours(scene, share, share)], run.device, budget_s=run.pick(0.3, 0.0))
            points.append((scene.bytes_once, times.ms(share) * 1e3))
            launched = _note(times.launches(share))
            launches.add(launched)
            note = ", ".join(filter(None, (launched, f"{points[-1][0]} bytes")))
            yield Row(f"{name} {length}", points[-1][1], "us", note=note, is_detail=True)
        fitted = points[1:] if share == "always" else points  # without a prefix nothing is merged
        slope, start_us = np.polyfit(*zip(*(fitted if len(fitted) > 1 else points), strict=True), 1)
        note = ", ".join(filter(None, (*sorted(launches), f"{1e-6 / slope:.2f} TB/s beyond")))
        yield Row(f"intercept {name}", float(start_us), "us", note=note)


def _share_cost(run: Run) -> Iterator[Row]:
    """The constants of kernels/share_cost.py for this device, as an engine measures them at its start; picoseconds."""
    prompts = Prompts("shared", 1536, 64)
    model = Model(
        run.pick("llama-3-8b", "llama-5m"), run.device, run.pick(torch.bfloat16, torch.float32), max_batch=32,
        prompts=(prompts,), num_steps=1,
    )  # fmt: skip

    def time_s(_plan: Plan, step: Callable[[], None]) -> float:
        with own_buffers(run.device):
            return interleaved([Arm("step", lambda _: step())], run.device, budget_s=0.0).ms("step") / 1e3

    with torch.inference_mode():
        constants = measured_share_cost(model.runner, time_s)
    note = "the times follow no such model" if constants is None else json.dumps(constants)
    yield Row("share cost", None, "ps", note="" if run.is_dry else note)


def _prefill(run: Run) -> Iterator[Row]:
    """Causal attention of a sequence's last rows, ours over pages, torch's over contiguous KV: cuDNN or flash.

    The faster of torch's counts: with fewer rows than keys cuDNN reads a mask from memory, flash does not.
    """
    for rows, length in run.pick(((2048, 2048), (8192, 8192), (2048, 32768)), ((64, 64),)):
        if run.is_late:
            yield Row(f"prefill {rows} rows of {length} over torch", None, note="not run: out of time")
            continue
        heads, dtype = (_GQA, torch.bfloat16) if not run.is_dry else (Heads(4, 1, 16), torch.float32)
        scene = prefix_scene(1, 0, length, rows_per_sequence=rows, heads=heads, dtype=dtype, device=run.device)
        arms = [ours(scene)]
        for backend, name in ((SDPBackend.CUDNN_ATTENTION, "torch/cudnn"), (SDPBackend.FLASH_ATTENTION, "torch/flash")):
            arm = _sdpa(scene, SDPBackend.MATH if run.is_dry else backend, name)
            try:
                arm.output()
            except Exception as error:  # a build of torch without it, in whatever way it says so
                if run.is_dry:
                    raise
                yield Row(f"prefill {name} {length}", None, note=f"not run: {str(error)[:80]}", is_detail=True)
            else:
                arms.append(arm)
        times = interleaved(arms, run.device, budget_s=run.pick(2.0, 0.0))
        flops = 4.0 * heads.q * heads.dim * sum(range(length - rows + 1, length + 1))
        rates = {arm.name: flops / times.ms(arm.name) / 1e9 for arm in arms}
        for name, rate in rates.items():
            note = _note(times.launches(name))
            yield Row(f"prefill {name} {rows} of {length}", rate, "TFLOP/s", note=note, is_detail=True)
        over = times.ratio("auto", "torch") if "torch" in times else None
        note = "TFLOP/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        note = ", ".join(filter(None, (_note(times.launches(*rates)), note)))
        yield Row(f"prefill {rows} rows of {length} over torch", over, "x", note=note)


def _sdpa(scene: Any, backend: SDPBackend, name: str) -> Arm:
    keys, values = contiguous_layers(scene)[0]
    rows, length = scene.rows_per_sequence, scene.lengths[0]
    q = rotated_q(scene).transpose(0, 1)[None].contiguous()
    keys, values = (part.repeat_interleave(scene.heads.group, dim=1) for part in (keys, values))

    def call(_layer: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            if rows == length:
                return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
            from torch.nn.attention.bias import causal_lower_right

            return F.scaled_dot_product_attention(q, keys, values, attn_mask=causal_lower_right(rows, length))

    return Arm(name, call)
