"""Decides how many replicas there should be, from what each says of its load, and which one goes first.

Public: `Autoscaler`, `AutoscaleConfig`, `ReplicaLoad`, `ShareMeter`. No Ray, no clock of its own: whoever asks
says what time it is.

Every figure is turned into replicas that are needed: seconds of work that waits against the time to the first token
that is promised, the share of time that prefills take, pages that requests hold, and the time of a decode step. The
largest counts. More are asked for once that has held for `upscale_delay_s`; fewer, one at a time, once they would have
been enough, with a margin, for `downscale_delay_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from mneme.config import check_range
from mneme.errors import ConfigError

_FULL_SHARE = 0.75  # of a replica's time for prefills, or of its pages: above it queues grow
_DOWN_MARGIN = 0.7  # fewer replicas are enough if they are needed by no more than this part
_IDLE_SHARE = 1e-3  # of prefills lately: nobody asks; requests may all fall between two reports
_STALE_S = 30.0  # how long what a replica said last stands for it
_SHARE_HALF_LIFE_S, _SAVED_HALF_LIFE_S = 5.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """Bounds on the number of engine replicas, and what is promised."""

    min: int = 1  # 0: none while nobody asks; the first request then waits for one to load
    max: int = 1  # replicas
    target_ttft_s: float = 1.0  # first tokens: more are started when the work that waits at a replica takes longer
    target_itl_s: float = 0.1  # between tokens: likewise when a decode step takes longer
    upscale_delay_s: float = 5.0  # how long more must have been wanted
    downscale_delay_s: float = 120.0  # how long fewer must have been enough

    def __post_init__(self) -> None:
        check_range("autoscale.max", self.max, 1, 1024)
        check_range("autoscale.min", self.min, 0, self.max)
        for name in ("target_ttft_s", "target_itl_s"):
            check_range(f"autoscale.{name}", getattr(self, name), 0.001, 3600)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            check_range(f"autoscale.{name}", getattr(self, name), 0, 86_400)

    @staticmethod
    def of_range(text: str) -> dict[str, int]:
        """Read "1..3"; raises `ConfigError`."""
        low, dots, high = text.partition("..")
        if not (dots and low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"replicas: must be a number, or a range as 1..3 (got {text!r})")
        if int(low) > int(high):
            raise ConfigError(f"replicas: a range is MIN..MAX, with MIN at most MAX (got {text!r})")
        return {"min": int(low), "max": int(high)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """Says how busy a replica is; NaN: not known."""

    backlog_s: float = 0.0  # predicted, until all that waits has its first token
    prefill_share: float = 0.0  # of its time
    kv_share: float = 0.0  # of its pages, that requests hold
    step_s: float = 0.0  # of a decode step of all that runs
    constant_s: float = 0.0  # of it, that any step takes: more replicas make it no shorter
    num_requests: float = 0.0  # that run or wait
    saved_share: float = 0.0  # prefill that KV saves which it alone has, in seconds per second: what goes with it

    def known(self, before: ReplicaLoad | None) -> ReplicaLoad:
        """Put what was said before, or nothing, in the place of what is no figure."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        last = before or ReplicaLoad()
        return ReplicaLoad(
            **{
                name: float(value) if math.isfinite(value) and value >= 0 else getattr(last, name)
                for name, value in values.items()
            }
        )


class ShareMeter:
    """Smooths the shares of a replica's load over the last seconds, and over the last minutes what its KV saves."""

    def __init__(self) -> None:
        self.prefill_share = self.saved_share = 0.0

    def add_work(self, prefill_s: float, saved_s: float, elapsed_s: float) -> None:
        """Note seconds of prefill that were computed, and saved, within `elapsed_s`."""
        self.prefill_share = _smoothed(self.prefill_share, prefill_s / elapsed_s, elapsed_s, _SHARE_HALF_LIFE_S)
        self.saved_share = _smoothed(self.saved_share, saved_s / elapsed_s, elapsed_s, _SAVED_HALF_LIFE_S)


class Autoscaler:
    """Keeps what replicas said and since when more, or fewer, would be enough."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self.config = config
        self._loads: dict[str, tuple[float, ReplicaLoad]] = {}
        self._more_since_s: float | None = None
        self._fewer_since_s: float | None = None
        self._last_s = -math.inf

    def decide(self, loads: Mapping[str, ReplicaLoad | None], target: int, now_s: float) -> int:
        """Return how many replicas there should be.

        loads   of all replicas that run; None: it has said nothing since the last time
        target  how many there should be until now, those that start or stop too
        """
        if not 0 <= now_s - self._last_s <= _STALE_S:  # the clock was set: what it measured until now means nothing
            self._more_since_s = self._fewer_since_s = None
            self._loads = {replica_id: (now_s, load) for replica_id, (_, load) in self._loads.items()}
        self._last_s = now_s
        self._update_loads(loads, now_s)
        wanted = self._wanted(len(loads), target)
        delay_s = self.config.upscale_delay_s if wanted > target else self.config.downscale_delay_s
        since_s = self._since(wanted, target, now_s)
        if since_s is not None and now_s - since_s >= delay_s:
            self._more_since_s = self._fewer_since_s = None
            target = wanted if wanted > target else target - 1
        return min(max(target, self.config.min), self.config.max)

    def cheapest_first(self) -> list[str]:
        """Order replicas by what goes with them: the prefill that their own KV saves, then their requests."""
        known = {replica_id: load for replica_id, (_, load) in self._loads.items()}
        return sorted(known, key=lambda r: (round(known[r].saved_share, 3), known[r].num_requests, r))

    def needed(self) -> float:
        """Return the replicas that all the work there is would keep busy."""
        loads = [load for _, load in self._loads.values()]
        return max(
            sum(load.backlog_s for load in loads) / self.config.target_ttft_s,
            sum(load.prefill_share for load in loads) / _FULL_SHARE,
            sum(load.kv_share for load in loads) / _FULL_SHARE,
            sum(self._for_steps(load) for load in loads),
        )

    def _for_steps(self, load: ReplicaLoad) -> float:
        """Return the replicas that would decode what runs in time; none where no step is as short as promised."""
        room_s = self.config.target_itl_s - load.constant_s
        return max(load.step_s - load.constant_s, 0.0) / room_s if room_s > 0 else 0.0

    def _update_loads(self, loads: Mapping[str, ReplicaLoad | None], now_s: float) -> None:
        for replica_id, load in loads.items():
            before = self._loads.get(replica_id)
            if load is not None:
                self._loads[replica_id] = now_s, load.known(before and before[1])
        self._loads = {
            replica_id: (at_s, load)
            for replica_id, (at_s, load) in self._loads.items()
            if replica_id in loads and now_s - at_s <= _STALE_S
        }

    def _wanted(self, num_running: int, target: int) -> int:
        """Return how many would be right now, whatever was before; as many as there are where too little is known."""
        if not self._loads:
            return target
        needed = self.needed() * num_running / len(self._loads)  # who is silent has as much to do as the others
        if needed > target:
            return math.ceil(min(needed, self.config.max))
        if len(self._loads) < num_running:  # nobody goes while one is silent
            return target
        if target == 1:
            is_used = any(load.num_requests or load.prefill_share > _IDLE_SHARE for _, load in self._loads.values())
            return 1 if is_used else self.config.min
        return max(math.ceil(min(needed / _DOWN_MARGIN, target)), 1)

    def _since(self, wanted: int, target: int, now_s: float) -> float | None:
        """Note since when more, or fewer, are wanted without a break."""
        self._more_since_s = (
            (self._more_since_s if self._more_since_s is not None else now_s) if wanted > target else None
        )
        self._fewer_since_s = (
            (self._fewer_since_s if self._fewer_since_s is not None else now_s) if wanted < target else None
        )
        return self._more_since_s if wanted > target else self._fewer_since_s


def _smoothed(before: float, value: float, elapsed_s: float, half_life_s: float) -> float:
    kept = 0.5 ** (elapsed_s / half_life_s)
    return before * kept + max(value, 0.0) * (1 - kept) if math.isfinite(value) else before
