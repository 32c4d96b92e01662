"""What an engine says of itself, for metrics and routing: counters since the start, and gauges."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from mneme.cachetier.policy.cost_model import CostModel
from mneme.replicas.engine.engine import Engine


class StartReport:
    """Measures the phases of an engine's start by what its progress says of them."""

    def __init__(self, used_bytes: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`used_bytes`: of the memory that phases take."""
        self.phases: dict[str, dict[str, float]] = {}  # seconds and bytes, in order
        self._used_bytes, self._clock = used_bytes, clock
        self._before = clock(), used_bytes()

    def end_phase(self, stage: str, num_bytes: int | None = None) -> None:
        """What was done since the last note was of this stage; `num_bytes`: of it, where used memory does not tell."""
        now = self._clock(), self._used_bytes()
        phase = self.phases.setdefault(stage.removeprefix("loading "), {"seconds": 0.0, "bytes": 0})
        phase["seconds"] += now[0] - self._before[0]
        phase["bytes"] += now[1] - self._before[1] if num_bytes is None else num_bytes
        self._before = now

    def __str__(self) -> str:
        took = [(name, each["seconds"], each["bytes"] / 2**20) for name, each in self.phases.items()]
        parts = ", ".join(f"{name} {seconds:.2f} s {mib:.0f} MiB" for name, seconds, mib in took)
        return f"{sum(seconds for _, seconds, _ in took):.1f} s: {parts}"


def engine_stats(engine: Engine) -> dict[str, Any]:
    """Gather counters and gauges as plain values."""
    scheduler, runner, limits = engine.scheduler, engine.runner, engine.limits
    stats = {
        **engine.forest.stats(),
        "requests": {
            "running": len(scheduler.running),
            "waiting": limits.num_requests,
            "suspended_total": scheduler.num_suspensions,
        },
        "waiting_tokens": limits.num_tokens,
        "refused": dict(limits.num_refused),
        "missed_deadlines": engine.num_missed_deadlines,
        "tokens": dict(engine.num_tokens),
        "blend": engine.blends.as_stats(),
        "finished": dict(engine.num_finished),
        "in_flight": engine.in_flight,
        "steps": engine.num_steps,
        "sessions": len(engine.sessions),
        "session_logs": None if engine.durable is None else engine.durable.stats(),
        "shared_segments": runner.num_shared_segments,
        "graphs": None if runner.graphs is None else runner.graphs.stats(),
        "load": _load(engine),
        "accuracy": {} if engine.costs is None else engine.costs.accuracy(),
        "capacity_tokens": engine.capacity,
        "kv_tokens": runner.num_pages * runner.page_size,
        "device": runner.device,
        "dtype": runner.dtype,
        "kernels": runner.kernels,
        "weight_bytes": dict(runner.weight_bytes),
        "documents": engine.gate.described(),
        "kv_bytes": {runner.kv_dtype: runner.kv_bytes},
        "start": engine.start_phases,
    }
    if engine.connector is not None:
        stats["cache"] = {**engine.connector.stats(), "retracted": scheduler.num_retracted}
    return stats


def beside_steps(engine: Engine, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Read anew what of `engine_stats` other threads change: an idle engine makes no step. From any thread."""
    found: dict[str, Any] = {} if engine.costs is None else {"accuracy": engine.costs.accuracy()}
    if engine.connector is not None and "cache" in stats:
        found["cache"] = {**stats["cache"], **engine.connector.stats()}
    if engine.durable is not None:
        found["session_logs"] = engine.durable.stats()
    return found


def _load(engine: Engine) -> dict[str, float]:
    """Predict seconds: until all that was taken has its first token, of a decode step, and of a token's prefill.

    NaN where there is no cost model, as in `LLM` without a cache; the backlog is then what the queue took until now.
    """
    running, costs, num_left = engine.scheduler.running, engine.costs, num_queued_tokens(engine)
    if costs is None:
        drain_s = engine.limits.drain_s() if num_left else 0.0
        return {"backlog_s": drain_s, "step_s": math.nan, "constant_s": math.nan, "prefill_token_s": math.nan}
    context_tokens = sum(len(each.context) for each in running)
    return {
        "backlog_s": backlog_s(costs, num_left, len(running), context_tokens),
        "step_s": costs.decode_s(len(running), context_tokens),
        "constant_s": costs.terms_of("decode")[0],
        "prefill_token_s": costs.prefill_s(costs.step_rows, 0) / costs.step_rows,
    }


def num_queued_tokens(engine: Engine) -> int:
    """Count the prompt tokens of what was taken, waiting or running, that are still to be computed."""
    begun = [len(each.context) - (each.path.num_tokens if each.path else 0) - 1 for each in engine.scheduler.running]
    return engine.limits.num_tokens + sum(max(num_rows, 0) for num_rows in begun)


def backlog_s(costs: CostModel, num_tokens: int, num_running: int, context_tokens: int) -> float:
    """Predict the seconds to prefill so many tokens beside what runs, whose rows come on top of each step."""
    num_steps = math.ceil(num_tokens / costs.step_rows)
    _, per_sequence, per_token = costs.terms_of("decode")
    return costs.prefill_s(num_tokens, 0) + num_steps * (per_sequence * num_running + per_token * context_tokens)


def rss_bytes() -> int:
    """Resident memory of this process; 0 where /proc is not there."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
