"""One part of bench_sessions.py: its traffic, its engines, a table row for each run."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import replace
from typing import Any, NamedTuple

from conversations import SHAPES, Traffic, draw_requests, make_trace
from rate_search import Point
from session_engines import STATELESS, make_decoder, make_engine, make_runner
from session_load import Load, Window, counted, kv_per_turn, percentile, point_of
from workloads import VOCAB_SIZE

from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest, SamplingParams

NOMINAL_S_PER_TOKEN = 0.015  # of an answer under load: how far conversations have come when a trace begins


class Scale(NamedTuple):
    """How large a run is."""

    window: Window
    think_scale: float
    num_pages: int
    num_host_pages: int
    num_unloaded: int  # turns that are answered one at a time
    growth: float  # of the coarse rates
    closeness: float  # ratio of the rates around the bound that is narrow enough
    num_rounds: int


class Unloaded(NamedTuple):
    """The stateless system, one turn at a time."""

    p90_s: float  # normalized latency
    served_per_s: float


class Runs:
    """Measures systems on one kind of conversations."""

    def __init__(self, shape: str, context: int, scale: Scale, seed: int) -> None:
        self._scale = scale
        self._seed = seed
        self._traffic = Traffic(
            shape=SHAPES[shape],
            context=context,
            think_scale=scale.think_scale,
            nominal_s_per_token=NOMINAL_S_PER_TOKEN,
        )
        self._decoder = make_decoder(context, seed)
        self.rows: list[dict[str, Any]] = []

    def measure(self, system: str, offered_per_s: float, seed: int) -> Point:
        """One run on an engine of its own, which is warmed up first."""
        window = self._scale.window
        trace = make_trace(replace(self._traffic, seed=seed), offered_per_s, window.ends_s)
        engine = self._engine(system)
        load = Load(engine, trace, think_scale=self._scale.think_scale, keeps_sessions=system != STATELESS)
        load.warm_up()
        num_steps = engine.num_steps
        load.play(window.ends_s)
        point = point_of(load.served, window, offered_per_s)
        self.rows.append(
            {
                "system": system, "offered/s": offered_per_s, "seed": seed, "served/s": point.served_per_s,
                "p90 ms/token": point.p90_s * 1e3, **_per_turn(load, window), "busy": load.busy_s / window.ends_s,
                "steps/s": (engine.num_steps - num_steps) / window.ends_s,
                "suspended": engine.scheduler.num_suspensions,
            }
        )  # fmt: skip
        return point

    def unloaded(self) -> Unloaded:
        """Turns on an idle engine, drawn from whole conversations; the first warms up and does not count."""
        engine = self._engine(STATELESS)
        traffic = self._traffic
        turns = draw_requests(traffic.shape, traffic.context, self._scale.num_unloaded + 1, self._seed)
        took_s = [
            _answer_s(engine, str(number), num_prompt, num_out) for number, (num_prompt, num_out) in enumerate(turns)
        ][1:]
        normalized = [took / num_out for took, (_, num_out) in zip(took_s, turns[1:], strict=True)]
        return Unloaded(percentile(normalized, 90), len(took_s) / sum(took_s))

    def _engine(self, system: str) -> Engine:
        gc.collect()  # pools of engines that are gone
        scale = self._scale
        runner = make_runner(self._decoder, system, num_pages=scale.num_pages, num_host_pages=scale.num_host_pages)
        return make_engine(runner, system)


def _answer_s(engine: Engine, name: str, num_prompt: int, num_out: int) -> float:
    ids = tuple(random.Random(name).choices(range(16, VOCAB_SIZE), k=num_prompt))
    params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, seed=0)
    started = time.perf_counter()
    engine.submit(GenerationRequest(request_id=name, prompt_token_ids=ids, sampling=params))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def _per_turn(load: Load, window: Window) -> dict[str, float]:
    """Means over the turns that count: prompt and output tokens, where the prompts' KV came from."""
    turns = list(counted(load.served, window))
    if not turns:
        return {}
    kv = kv_per_turn(load.served, window)
    return {
        "turns": len(turns),
        "prompt": sum(turn.num_prompt for turn in turns) / len(turns),
        "out": sum(turn.num_out for turn in turns) / len(turns),
        "rows": kv.get("recomputed", 0.0) + kv.get("dropped", 0.0),
        "device": kv.get("device", 0.0),
        "host": kv.get("host", 0.0),
    }
