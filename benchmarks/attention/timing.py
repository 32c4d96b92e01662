"""Timing of arms that take turns: medians, and ratios of pairs from one round.

An arm's call works on one of its layers: copies of the KV in different memory, so many that together they do not fit
the last cache, as the layers of a model do not. A sample is one pass over all layers; its time is given per layer.
On CUDA a sample is a replay of a CUDA graph of that pass, between two events; a pass that cannot be captured (it waits
for the host) is launched call by call, and its table row says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mneme.replicas.model.graphs import CudaCapture, Graph

_SAMPLE_MS = 0.5  # short CUDA passes are repeated up to this
_MAX_REPLAYS = 64
_MIN_ROUNDS = 3


class Arm(NamedTuple):
    """One way to compute a scene. Arms named `family/variant` are ways to call one thing; the fastest counts."""

    name: str
    call: Callable[[int], Any]  # layer -> result
    num_layers: int = 1
    unpack: Callable[[Any], torch.Tensor] | None = None  # result -> [T, Hq, D]; None: it is that already
    is_capturable: bool = True  # False: it is known to wait for the host

    def output(self) -> torch.Tensor:
        """[T, Hq, D] of the first layer."""
        result = self.call(0)
        return result if self.unpack is None else self.unpack(result)


class Timings:
    """Milliseconds per layer of each arm; index i of all arms was taken in round i."""

    def __init__(self, samples: dict[str, list[float]], launched: dict[str, str]) -> None:
        self.samples = samples
        self.launched = launched  # "direct", "graph" or "eager", by arm

    def __contains__(self, family: str) -> bool:
        return any(_in_family(name, family) for name in self.samples)

    def best(self, family: str) -> str:
        """The fastest arm of a family."""
        names = [name for name in self.samples if _in_family(name, family)]
        return min(names, key=lambda name: statistics.median(self.samples[name]))

    def ms(self, family: str) -> float:
        """Median of the family's fastest arm."""
        return statistics.median(self.samples[self.best(family)])

    def ratio(self, slower: str, faster: str) -> float | None:
        """How many times the time of `faster` the other takes: the median of the rounds' ratios.

        None where one was captured and the other launched call by call: that would compare launches, not kernels.
        """
        names = self.best(slower), self.best(faster)
        if len({self.launched[name] for name in names}) > 1:
            return None
        return statistics.median(a / b for a, b in zip(*(self.samples[name] for name in names), strict=True))

    def launches(self, *families: str) -> str:
        """How these were launched, as far as they were timed: one word where all were alike, else one for each."""
        best = {family: self.launched[self.best(family)] for family in families if family in self}
        kinds = set(best.values())
        return kinds.pop() if len(kinds) == 1 else " ".join(f"{family}:{kind}" for family, kind in best.items())


def _in_family(name: str, family: str) -> bool:
    return name == family or name.startswith(f"{family}/")


def interleaved(
    arms: Sequence[Arm],
    device: torch.device,
    *,
    budget_s: float,
    now_s: Callable[[], float] = time.perf_counter,
    max_rounds: int = 25,
) -> Timings:
    """Rounds in which every arm has a turn, forwards and backwards in alternation, until time or rounds are used up.

    The first round warms up and is not counted. `now_s` is the clock of a CPU's arms.
    """
    clocks = {arm.name: _CudaClock(arm) if device.type == "cuda" else _CpuClock(arm, now_s) for arm in arms}
    for clock in clocks.values():
        clock.sample_ms()
    samples: dict[str, list[float]] = {name: [] for name in clocks}
    ends_s = time.perf_counter() + budget_s
    for number in range(max_rounds):
        if number >= _MIN_ROUNDS and time.perf_counter() > ends_s:
            break
        order = list(clocks) if number % 2 else list(reversed(clocks))
        for name in order:
            samples[name].append(clocks[name].sample_ms())
    return Timings(samples, {name: clock.launched for name, clock in clocks.items()})


class _CpuClock:
    launched = "direct"

    def __init__(self, arm: Arm, now_s: Callable[[], float]) -> None:
        self._arm = arm
        self._now_s = now_s

    def sample_ms(self) -> float:
        started = self._now_s()
        for layer in range(self._arm.num_layers):
            self._arm.call(layer)
        return (self._now_s() - started) * 1e3 / self._arm.num_layers


class _CudaClock:
    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._warm_up()
        graph = self._capture() if arm.is_capturable else None
        self.launched = "eager" if graph is None else "graph"
        self._pass: Callable[[], Any] = self._all_layers if graph is None else graph.replay
        self._replays = 1
        self._replays = max(1, min(_MAX_REPLAYS, int(_SAMPLE_MS / max(self.sample_ms() * arm.num_layers, 1e-3))))

    def sample_ms(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(self._replays):
            self._pass()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / (self._replays * self._arm.num_layers)

    def _all_layers(self) -> None:
        for layer in range(self._arm.num_layers):
            self._arm.call(layer)

    def _warm_up(self) -> None:
        """Compile, tune and prepare what a first call does, on a stream of its own, as capturing wants it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._all_layers()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def _capture(self) -> Graph | None:
        try:
            return CudaCapture(torch.device("cuda"))(self._all_layers)
        except Exception:  # any library's; what fails without a capture too has failed in `_warm_up`
            torch.cuda.synchronize()
            return None
