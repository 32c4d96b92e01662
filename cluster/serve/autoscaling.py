"""Serve's side of autoscaling: what a replica reports, and the policy in Serve's controller that goes by it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from mneme.cluster.serve.ray_private import stop_first, write_wanted
from mneme.router.autoscaler import AutoscaleConfig, Autoscaler, ReplicaLoad, ShareMeter

logger = logging.getLogger(__name__)

_METRICS = tuple(each.name for each in fields(ReplicaLoad))


class LoadMeter:
    """Makes a replica's report of what its engine counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: tuple[float, float, float] | None = None  # when, tokens that were computed, those found only here
        self._shares = ShareMeter()

    def read(self, stats: Mapping[str, Any]) -> ReplicaLoad:
        load, tokens, pages = stats["load"], stats["tokens"], stats["pages"]
        now_s, alone = self._clock(), tokens.get("alone", 0)
        computed = tokens.get("computed", 0)
        if self._before is not None and now_s > self._before[0]:
            token_s = load["prefill_token_s"]
            computed_s, saved_s = (computed - self._before[1]) * token_s, (alone - self._before[2]) * token_s
            self._shares.add_work(computed_s, saved_s, now_s - self._before[0])
        self._before = now_s, computed, alone
        return ReplicaLoad(
            backlog_s=load["backlog_s"],
            prefill_share=self._shares.prefill_share,
            kv_share=(pages["in_use"] - pages["pinned"]) / max(pages["total"], 1),
            step_s=load["step_s"],
            constant_s=load["constant_s"],
            num_requests=stats["requests"]["running"] + stats["requests"]["waiting"],
            saved_share=self._shares.saved_share,
        )


class AutoscalingPolicy:
    """Made and called by Serve's controller: says how many engine replicas there should be, and which go first."""

    def __init__(self, *, deployment: str, **config: Any) -> None:
        self._autoscaler = Autoscaler(AutoscaleConfig(**config))
        self._reported: dict[str, float] = {}  # when each replica made its last report, by its own clock
        self._deployment, self._noted = deployment, -1
        stop_first(deployment, self._autoscaler.cheapest_first)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's protocol: the context, to the wanted number and a state, which is kept here. Never raises."""
        target = int(context.target_num_replicas)
        try:
            return self._decide(context, target), {}
        except Exception:  # Serve's control loop must not stop over this: all stays as it is
            logger.exception("autoscaling failed")
            return target, {}

    def _decide(self, context: Any, target: int) -> int:
        wanted = self._autoscaler.decide(self._loads(context), target, context.current_time)
        if wanted != self._noted:
            write_wanted(self._deployment, wanted)
            self._noted = wanted
        if wanted != target:
            needed = self._autoscaler.needed()
            logger.info("wanted=%d target=%d needed=%.2f", wanted, target, needed)
        return wanted

    def _loads(self, context: Any) -> dict[str, ReplicaLoad | None]:
        series = context.raw_metrics or {}
        return {replica.unique_id: self._latest(replica, series) for replica in context.running_replicas}

    def _latest(self, replica: Any, series: Mapping[str, Mapping[Any, Any]]) -> ReplicaLoad | None:
        """Return what the replica has reported since the last time."""
        points = {name: series[name][replica][-1] for name in _METRICS if series.get(name, {}).get(replica)}
        at_s = max((point.timestamp for point in points.values()), default=math.nan)
        if not points or self._reported.get(replica.unique_id) == at_s:
            return None
        self._reported[replica.unique_id] = at_s
        return ReplicaLoad(**{name: float(point.value) for name, point in points.items()})


def serve_options(config: AutoscaleConfig, deployment: str) -> dict[str, Any]:
    """Serve's `autoscaling_config`; the delays are the policy's own."""
    return {
        "min_replicas": config.min,
        "max_replicas": config.max,
        "initial_replicas": max(config.min, 1),
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "look_back_period_s": 15.0,  # more than the interval that Serve assumes; only the latest is read
        "policy": {
            "policy_function": f"{__name__}:{AutoscalingPolicy.__name__}",
            "policy_kwargs": {"deployment": deployment, **asdict(config)},
        },
    }
