"""`make gpu-attention`: the kernels beside what memory and products allow, and beside other libraries' kernels."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import fit_share_cost
import numpy as np
import torch
import torch.nn.functional as F
from attention import bandwidth, documents, relay, rotation
from attention.arms import check, ours, reference_rows
from attention.bench import Bench
from attention.machine import Ceilings, measure_ceilings
from attention.scenes import Heads, contiguous_layers, int8_scene, prefix_scene, rotated_q
from attention.timing import Arm, interleaved
from gpu import precompile
from gpu.smoke import backend_of
from gpu.steps import Row, Run, Step
from gpu.tune import SCENES, timed, timed_wide, tuning_scenes, wide_scenes
from harness import PartResult
from torch.nn.attention import SDPBackend, sdpa_kernel

from mneme.kernels.triton.configs import WIDE, candidates

_GQA = Heads(32, 8, 128)
_POINT_S = 0.12
_DRY_POINT_S = 0.0
_POINT_WALL_S = 8.0  # of a large point: its scene, its check in float64, its captures


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


def _bench(run: Run) -> Bench:
    dtypes = [torch.bfloat16]
    roofs = Ceilings(1e10, {torch.bfloat16: 1e11}, 0) if run.is_dry else measure_ceilings(run.device, dtypes)
    bench = Bench(
        device=run.device, quick=run.is_dry, num_threads=1, ceilings=roofs, point_s=run.pick(_POINT_S, _DRY_POINT_S)
    )
    # A point that has begun is finished, so none begins in the last seconds; dry: the first point of each part.
    bench.begin_part(run.pick(max(run.left_s - _POINT_WALL_S, 1.0), 0.1))
    return bench


def _part(run: Run, part: Callable[[Bench], PartResult], shown: Callable[[dict[str, Any]], Row]) -> Iterator[Row]:
    """The rows of a part of `attention/`; everything that it found goes to a file of its name."""
    bench = _bench(run)
    found = part(bench)
    text = json.dumps(
        {"rows": found.rows, "notes": bench.notes, "checks": [c.name for c in found.checks if c.ok is False]}
    )
    (run.folder / f"part-{found.name}.json").write_text("" if run.is_dry else text)
    for row in found.rows:
        if "status" not in row:
            yield shown(row)
        elif not run.is_dry:
            yield shown(row)._replace(note=str(row["status"]))


def _note(row: dict[str, Any], *columns: str) -> str:
    """How it was launched, unless as a graph, and other columns."""
    found = [f"{column} {row[column]:.3g}" for column in columns if row.get(column) is not None]
    launched = row.get("launched", "graph")
    return ", ".join([*([] if launched == "graph" else [f"LAUNCHED {launched}"]), *found])


def _bandwidth(run: Run) -> Iterator[Row]:
    def shown(row: dict[str, Any]) -> Row:
        name = f"bandwidth b{row['batch']} x {row['tokens']}"
        note = _note(row, "ours", "flashinfer", "flashinfer/ours")
        return Row(name, row.get("of_copy"), "of copy", row.get("of_copy"), note)

    return _part(run, bandwidth.run, shown)


def _int8_kv(run: Run) -> Iterator[Row]:
    """How much faster decodes over private KV of 8 bits are than over bfloat16's; 1.94 by bytes alone."""
    options: dict[str, Any] = {"heads": _GQA, "dtype": torch.bfloat16, "device": run.device}
    cache_bytes = 0 if run.is_dry else torch.cuda.get_device_properties(0).L2_cache_size
    for batch, tokens in ((128, 1024), (32, 4096), (1, 16384)):
        if run.is_late:
            yield Row(f"int8 KV b{batch} x {tokens}", None, note="not run: out of time")
            continue
        sizes = run.pick((batch, 0, tokens), (2, 0, 64))
        scene = prefix_scene(*sizes, **options, cache_bytes=cache_bytes)
        small = int8_scene(scene, cache_bytes)
        arm = ours(small, "int8", "never")
        check(arm, reference_rows(small), torch.bfloat16)
        times = interleaved([ours(scene, "never", "never"), arm], run.device, budget_s=run.pick(1.0, 0.0))
        tb_s = small.bytes_apart / times.ms("int8") / 1e9
        note = _note({"launched": times.launches("never", "int8")})
        note = ", ".join(filter(None, (note, f"{times.ms('int8') * 1e3:.1f} us, {tb_s:.2f} TB/s")))
        yield Row(f"int8 KV b{batch} x {tokens}", times.ratio("never", "int8"), "x", note=note)


def _relay(run: Run) -> Iterator[Row]:
    """Give shares of min(Eq. 10, compute roof); promised where the ideal time is 40 us or more."""

    def shown(row: dict[str, Any]) -> Row:
        name = f"eq10 {row['heads']} b{row['batch']} s{row['shared']} c{row['private']}"
        is_promised = row.get("ideal_us", 0) >= relay.PROMISED_FROM_US
        note = _note(row, "auto", "ideal_us", "never/auto", "flashinfer_cascade/auto", "flashinfer_decode/auto")
        value = row.get("of_bound")
        return Row(name, value, "of bound", value, f"{note}{', promised >= 0.9' if is_promised else ''}")

    return _part(run, relay.run, shown)


def _rotation(run: Run) -> Iterator[Row]:
    return _part(
        run, rotation.run, lambda row: Row(f"rotation {row['deltas']}", row.get("overhead"), "x", note=_note(row))
    )


def _documents(run: Run) -> Iterator[Row]:
    def shown(row: dict[str, Any]) -> Row:
        name = f"documents {row['documents']} of {row['of']}, sequence-first over ours"
        return Row(name, row.get("never/auto"), "x", note=_note(row, "auto", "virtual/auto", "auto/equal_positions"))

    return _part(run, documents.run, shown)


def _tune(run: Run) -> Iterator[Row]:
    """How much faster the best configuration is than the one that the rule chooses."""
    cache_bytes = 0 if run.is_dry else torch.cuda.get_device_properties(0).L2_cache_size
    scenes = tuning_scenes(_GQA.dim, cache_bytes, run.device, shrink=run.pick(1, 256))
    for index, (name, scene) in enumerate(scenes.items()):
        rule, *others = candidates(head_dim=_GQA.dim, element_bytes=2, num_groups=_GQA.group, kind=SCENES[name])
        if run.is_dry and backend_of(run) != "triton":
            yield Row(f"tune {name}", None)
            continue
        configs = [rule] if run.is_dry else [rule, *others]
        times = timed(scene, configs, run.left_s / (len(scenes) - index) / 2 if not run.is_dry else 0.0)
        for config, ms in sorted(times.items(), key=lambda item: item[1]):
            yield Row(f"tune {name} {tuple(config)}", ms, "ms", is_detail=True)
        best = min(times, key=lambda config: times[config], default=rule)
        gain = times[rule] / times[best] if rule in times else None
        yield Row(f"tune {name}", gain, "x", note=f"rule {tuple(rule)} over best {tuple(best)}")


def _wide(run: Run) -> Iterator[Row]:
    """Wide tiles by themselves over the same in the launch of the others; the best way over the one that is chosen."""
    cache_bytes = 0 if run.is_dry else torch.cuda.get_device_properties(0).L2_cache_size
    chosen = f"wide {'x'.join(map(str, WIDE))}"
    scenes = wide_scenes(cache_bytes, run.device, shrink=run.pick(1, 256))
    for index, (name, scene) in enumerate(scenes.items()):
        if run.is_dry and backend_of(run) != "triton":
            yield Row(f"wide {name}", None)
            continue
        times = timed_wide(scene, run.left_s / (len(scenes) - index) / 2 if not run.is_dry else 0.0)
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
            launched = _note({"launched": times.launches(share)})
            launches.add(launched)
            note = ", ".join(filter(None, (launched, f"{points[-1][0]} bytes")))
            yield Row(f"{name} {length}", points[-1][1], "us", note=note, is_detail=True)
        fitted = points[1:] if share == "always" else points  # without a prefix nothing is merged
        slope, start_us = np.polyfit(*zip(*(fitted if len(fitted) > 1 else points), strict=True), 1)
        note = ", ".join(filter(None, (*sorted(launches), f"{1e-6 / slope:.2f} TB/s beyond")))
        yield Row(f"intercept {name}", float(start_us), "us", note=note)


def _share_cost(run: Run) -> Iterator[Row]:
    """The constants of kernels/share_cost.py for this device, in picoseconds."""
    until_s = time.monotonic() + run.pick(run.left_s * 0.9, 0.3)
    found = fit_share_cost.fit(
        run.device, torch.bfloat16, is_late=lambda: time.monotonic() > until_s, point_s=run.pick(0.2, 0.0)
    )
    for name, picoseconds in found["constants_ps"].items():
        yield Row(f"share cost {name}", picoseconds, "ps", is_detail=True)
    constants = json.dumps(found["constants_ps"])
    yield Row(
        "share cost, median error",
        found["median_error"],
        note="" if run.is_dry else f"{found['points']} points {constants}",
    )


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
            note = _note({"launched": times.launches(name)})
            yield Row(f"prefill {name} {rows} of {length}", rate, "TFLOP/s", note=note, is_detail=True)
        over = times.ratio("auto", "torch") if "torch" in times else None
        note = "TFLOP/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        note = ", ".join(filter(None, (_note({"launched": times.launches(*rates)}), note)))
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
