"""`make gpu-engine`: where a decode step's time goes, draws, and first tokens.

A step is what lies between the ends of two calls of `Engine.step`: a step is launched before the tokens of the one
before are there, so the host's part, in CPU time, runs beside the GPU's, which lies between two events around the
forward pass. `replayed` is a step's graph alone, again and again: the floor of our kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from attention.machine import measure_ceilings
from attention.timing import Arm, interleaved
from gpu import precompile
from gpu.model import Model, Prompts, decode_bytes, weight_bytes
from gpu.predictions import DECODE_STEP
from gpu.steps import Row, Run, Step
from random_models import layer_weights

from mneme.kernels import ops
from mneme.replicas.engine.engine import Engine
from mneme.replicas.model.decoder import StepInputs

PRIVATE, SHARED = Prompts("private", 0, 512), Prompts("shared", 2048, 64)
_NUM_STEPS = 24
_TURN_TOKENS = 64  # of a prompt that joins decodes
_MOST_KERNELS = 16  # that are named of a step
_LENGTHS = (128, 1024, 3840)


def steps(is_dry: bool) -> list[Step]:
    """Each job has a model of its own, so that what one leaves on the device is no other's."""
    compiled = {} if is_dry else {name: job for name, job in precompile.jobs(is_dry).items() if "llama" in name}
    return [
        *([Step("precompile", 60, compiled, len(compiled))] if compiled else []),
        Step(
            "steady",
            130,
            {"decode, private": partial(_steady, prompts=PRIVATE), "decode, shared": partial(_steady, prompts=SHARED)},
        ),
        Step("int8 KV", 50, {"decode, int8 KV": _int8_kv}),
        Step("kernels", 30, {"kernels": _kernels}),
        Step("traffic", 100, {"decode, traffic": _traffic}),
        Step("draws", 20, {"draws": _draws}),
        Step("first token", 60, {"first token": _first_tokens}),
        Step("llama-2-7b", 60, {"llama-2-7b": _other_model}),
    ]


class Split(NamedTuple):
    """Medians over steps, in ms."""

    step: float
    gpu: float
    host: float  # CPU time of the engine's thread
    p99: float  # of steps
    num_replayed: int  # of the timed steps
    num_captured: int
    num_steps: int


class ForwardTimer:
    """Times a runner's forward passes on its device, in the place of `Runner.forward`; waits for none."""

    def __init__(self, model: Model) -> None:
        self._device, self._forward = model.decoder.device, model.runner.forward
        self._events: list[Any] = []
        self._wall_ms: list[float] = []
        self._runner = model.runner
        model.runner.forward = self  # type: ignore[method-assign]

    def __call__(self, inputs: StepInputs | None) -> torch.Tensor:
        if self._device.type != "cuda":
            started = time.perf_counter()
            logits = self._forward(inputs)
            self._wall_ms.append((time.perf_counter() - started) * 1e3)
            return logits
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        logits = self._forward(inputs)
        end.record()
        self._events.append((begin, end))
        return logits

    def stop(self) -> list[float]:
        """Return the ms of each pass, once all are done; times no more."""
        self._runner.forward = self._forward  # type: ignore[method-assign]
        if self._events:
            torch.cuda.synchronize()
        return self._wall_ms + [float(begin.elapsed_time(end)) for begin, end in self._events]


def split(model: Model, engine: Engine, num_steps: int, before: Callable[[int], None] = lambda _: None) -> Split:
    """Steps one by one; `before` each, within its time, requests may come and go."""
    timer, graphs = ForwardTimer(model), model.runner.graphs
    counts = (0, 0) if graphs is None else (graphs.num_replays, graphs.num_graphs)
    took, cpu = [], []
    ended = time.perf_counter()
    for number in range(num_steps):
        before(number)
        cpu_s = time.thread_time()
        engine.step()
        cpu.append((time.thread_time() - cpu_s) * 1e3)
        began, ended = ended, time.perf_counter()
        took.append((ended - began) * 1e3)
    gpu = timer.stop()
    now = (0, 0) if graphs is None else (graphs.num_replays, graphs.num_graphs)
    slow = sorted(took)[int(0.99 * len(took))]
    medians = (statistics.median(each) for each in (took, gpu, cpu))
    return Split(*medians, slow, now[0] - counts[0], now[1] - counts[1], num_steps)


def _model(
    run: Run, batches: tuple[int, ...], prompts: tuple[Prompts, ...], name: str = "llama-3-8b", **options: Any
) -> Model:
    return Model(
        run.pick(name, "llama-5m"), run.device, run.pick(torch.bfloat16, torch.float32),
        max_batch=max(batches), prompts=prompts, num_steps=4 * _NUM_STEPS, longest=run.pick(max(_LENGTHS), 64),
        **options,
    )  # fmt: skip


def _copy_per_s(run: Run) -> float:
    return 1e10 if run.is_dry else measure_ceilings(run.device, []).copy_bytes_per_s


def _dry(run: Run, prompts: Prompts) -> Prompts:
    return prompts if not run.is_dry else Prompts(prompts.name, min(prompts.shared, 64), 32)


def _rows(name: str, found: Split, floor_ms: float, key: tuple[int, int] | None = None) -> Iterator[Row]:
    """A line for the table, and both parts for the archive."""
    predicted = DECODE_STEP.get(key) if key is not None else None
    beside = ("", "") if predicted is None else (f" ({predicted[0]:g})", f" ({predicted[1]:g})")
    note = (
        f"GPU {found.gpu:.2f}{beside[0]}, host {found.host:.2f}{beside[1]}, p99 {found.p99:.2f}, "
        f"{found.num_replayed}/{found.num_steps} replayed"
    )
    note += f", {found.num_captured} captured" if found.num_captured else ""
    yield Row(f"{name}, step", found.step, "ms", floor_ms / found.step, note)
    yield Row(f"{name}, GPU", found.gpu, "ms", floor_ms / found.gpu, is_detail=True)
    yield Row(f"{name}, host", found.host, "ms", is_detail=True)


def _decodes(
    run: Run,
    model: Model,
    copy_per_s: float,
    name: str,
    batch: int,
    shape: Prompts,
    *,
    change: Callable[[Model, Engine, int], None] = lambda *_: None,
    num_steps: int = _NUM_STEPS,
    key: tuple[int, int] | None = None,
    **options: Any,
) -> Iterator[Row]:
    """Decode steps of so many requests, before each of which a change is made; `options` are `Model.decoding`'s."""
    if run.is_late:
        yield Row(f"{name}, step", None, note="not run: out of time")
        return
    num_steps = run.pick(num_steps, 2)
    engine = model.decoding(batch, shape, **options)
    found = split(model, engine, num_steps, partial(change, model, engine))
    floor_ms = decode_bytes(model, batch, shape, num_steps) / copy_per_s * 1e3
    yield from _rows(name, found, floor_ms, key)
    if key is not None and batch in (32, 128) and (replayed := _replayed_ms(model)) is not None:
        yield Row(f"{name}, replayed", replayed, "ms", floor_ms / replayed)


def _steady(run: Run, prompts: Prompts) -> Iterator[Row]:
    batches = run.pick((1, 32, 128, 256) if prompts is PRIVATE else (32, 128, 256), (1, 2))
    shape, kind = _dry(run, prompts), f"shared {prompts.shared}" if prompts.shared else "private"
    model, copy_per_s = _model(run, batches, (shape,)), _copy_per_s(run)
    for batch in batches:
        key = (batch, prompts.shared)
        yield from _decodes(run, model, copy_per_s, f"decode {kind} b{batch}", batch, shape, key=key)


def _int8_kv(run: Run) -> Iterator[Row]:
    """The private decodes of `_steady` over KV of 8 bits."""
    batches, shape = run.pick((32, 128), (2,)), _dry(run, PRIVATE)
    model, copy_per_s = _model(run, batches, (shape,), kv_dtype=torch.int8), _copy_per_s(run)
    for batch in batches:
        yield from _decodes(run, model, copy_per_s, f"decode int8 KV b{batch}", batch, shape)


def _kernels(run: Run) -> Iterator[Row]:
    """What the device does in a decode step, by kernel: what their sum leaves of the step's GPU time are gaps."""
    batches, num_steps = run.pick(((1, 32, 128), 8), ((2,), 1))
    shape = _dry(run, PRIVATE)
    model = _model(run, batches, (shape,))
    activity = torch.profiler.ProfilerActivity.CPU if run.is_dry else torch.profiler.ProfilerActivity.CUDA
    for batch in batches:
        engine = model.decoding(batch, shape)
        with torch.profiler.profile(activities=[activity]) as profile:
            for _ in range(num_steps):
                engine.step()
        found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        total_ms = sum(event.self_device_time_total for event in found) / num_steps / 1e3
        yield Row(f"kernels of a step b{batch}", total_ms, "ms")
        for event in found[:_MOST_KERNELS]:
            note = f"{event.count / num_steps:.1f} calls"
            name = f"kernel b{batch} {event.key[:100]}"
            yield Row(name, event.self_device_time_total / num_steps, "us", note=note, is_detail=True)


def _replayed_ms(model: Model) -> float | None:
    """The graph that was replayed last, by itself; it writes the KV of one step again and again."""
    graph = None if model.runner.graphs is None else model.runner.graphs.last_replayed
    if graph is None:
        return None
    arm = Arm("graph", lambda _: graph.replay(), is_capturable=False)
    return interleaved([arm], model.decoder.device, budget_s=0.0, max_rounds=3).ms("graph")


def _traffic(run: Run) -> Iterator[Row]:
    """One request leaves and one joins in each step; a turn in every fourth; drawn tokens."""
    batches, shape = run.pick((32, 128), (2,)), _dry(run, PRIVATE)
    model, copy_per_s = _model(run, tuple(2 * b for b in batches), (shape,)), _copy_per_s(run)
    changes: dict[str, dict[str, Any]] = {
        "churn": {"change": _churn}, "mixed": {"change": _mixed}, "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    }  # fmt: skip
    for batch in batches:
        for kind, options in changes.items():
            name = f"decode {kind} b{batch}"
            yield from _decodes(
                run, model, copy_per_s, name, batch, shape, num_steps=2 * _NUM_STEPS, spare=_SPARE, **options
            )


_SPARE = 32  # requests that may run beside those that decode


def _churn(model: Model, engine: Engine, number: int) -> None:
    oldest = next(iter(engine.in_flight))
    engine.abort(oldest)
    model.submit(engine, f"joins {number}", model.draw(_TURN_TOKENS), max_tokens=1024)


def _mixed(model: Model, engine: Engine, number: int) -> None:
    if number % 4 == 0:
        model.submit(engine, f"turn {number}", model.draw(_TURN_TOKENS), max_tokens=2)


def _first_tokens(run: Run) -> Iterator[Row]:
    """Alone, nothing cached; then a turn of 64 tokens on a history that is."""
    model = _model(run, (1,), (Prompts("private", 0, 64),))
    roofs = measure_ceilings(run.device, [model.dtype], num_runs=run.pick(5, 1))
    for length in run.pick(_LENGTHS, (64,)):
        model.ttft_ms(length)
        ms = statistics.median(model.ttft_ms(length) for _ in range(run.pick(3, 1)))
        flops_ms = 2e3 * layer_weights(model.config) * length / roofs.flops_per_s[model.dtype]
        floor_ms = max(flops_ms, weight_bytes(model) / roofs.copy_bytes_per_s * 1e3)
        yield Row(f"ttft {length}", ms, "ms", floor_ms / ms)
    history = model.draw(run.pick(3840, 64))
    engine, times = model.engine(max_running=16), []
    for turn in range(run.pick(12, 2)):  # the first computes the history, the second compiles what is new
        started, before = time.perf_counter(), engine.num_tokens["generated"]
        model.submit(engine, str(turn), history + model.draw(_TURN_TOKENS if turn else 1), max_tokens=1)
        while engine.num_tokens["generated"] == before:
            engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    print("turns on a cached history, ms:", [round(ms, 2) for ms in times])
    ms = statistics.median(times[2:] or times)
    read_ms = weight_bytes(model) / roofs.copy_bytes_per_s * 1e3
    yield Row(f"ttft {_TURN_TOKENS} on a cached {len(history)}", ms, "ms", read_ms / ms)


def _draws(run: Run) -> Iterator[Row]:
    """Tokens of 128 rows, from the host's call to its answer; the limit reads the logits once."""
    copy_per_s, batch = _copy_per_s(run), run.pick(128, 2)
    generator = torch.Generator(run.device).manual_seed(0)
    uniform = [(row + 0.5) / batch for row in range(batch)]
    for vocab in run.pick((128256, 262144), (300,)):
        flat = torch.empty(batch, vocab, device=run.device).normal_(generator=generator)
        for shape, logits in (("flat", flat), ("peaked", 8 * flat)):
            for kind, temperature, top_p in (("greedy", 0.0, 1.0), ("drawn", 1.0, 1.0), ("top-p 0.9", 1.0, 0.9)):
                times = []
                for _ in range(run.pick(12, 1)):
                    started = time.perf_counter()
                    ops.draw_tokens(
                        logits, temperature=[temperature] * batch, top_k=[0] * batch, top_p=[top_p] * batch,
                        min_p=[0.0] * batch, uniform=uniform,
                    )  # fmt: skip
                    times.append((time.perf_counter() - started) * 1e3)
                ms, floor_ms = statistics.median(times), logits.nbytes / copy_per_s * 1e3
                is_detail = kind != "top-p 0.9" or shape == "flat"
                yield Row(f"{kind} of {vocab}, {shape}", ms, "ms", floor_ms / ms, is_detail=is_detail)


def _other_model(run: Run) -> Iterator[Row]:
    """As many KV heads as query heads: attention takes a larger part of the step."""
    shapes = tuple(_dry(run, prompts) for prompts in (PRIVATE, SHARED))
    batches = run.pick((32, 128), (2,))
    model, copy_per_s = _model(run, batches, shapes, "llama-2-7b"), _copy_per_s(run)
    for shape in shapes:
        for batch in batches:
            name = f"llama-2-7b {shape.name} b{batch}"
            yield from _decodes(run, model, copy_per_s, name, batch, shape)
