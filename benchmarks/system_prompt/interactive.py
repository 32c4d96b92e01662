"""The highest Poisson rate at a fixed normalized latency (RelayAttention 4.3, Fig. 7)."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

from harness import NOT_RUN, PartResult
from rate_search import Point, Steps, next_rate
from system_prompt.bench import ARMS, Arm, Bench, Shape, requests
from system_prompt.serving import TooSlow, serve
from workloads import Workload, make_prompts

LIMIT_MS = 20.0  # mean latency per output token; set before it was measured, at several times that of a request alone
_USER, _NEW = 64, 128
_DURATION_S = 30.0  # of arrivals; the fewer, the more a rate above what can be sustained passes
_TOLERANCE = 1.06
_STEPS = Steps(first_per_s=4.0, growth=1.5, closeness=_TOLERANCE)
_LOWEST = 0.01  # requests/s
Trial = tuple[float, bool]  # a rate, and whether the limit was met at it


def run_interactive(bench: Bench) -> PartResult:
    """Arrivals of so many seconds, served to the end; the system prompt was seen once before, in every arm."""
    part = PartResult(
        name="interactive",
        title=f"highest requests/s at {LIMIT_MS:g} ms per output token on average; ({_USER}, {_NEW}), "
        f"Poisson arrivals of {_DURATION_S:g} s, batch limit {bench.batch_limit}, found to {_TOLERANCE - 1:.0%}",
    )
    if bench.quick:  # in the seconds that it has no queue grows, and the rate that is found means nothing
        part.rows.append({"status": f"{NOT_RUN}: --quick"})
        return part
    for system in (64, 512, 2048):
        shape = Shape(system, _USER, _NEW)
        tried: dict[Arm, list[Trial]] = {arm: [] for arm in ARMS}
        while wanted := {arm: rate for arm in ARMS if (rate := next_trial(tried[arm])) is not None}:
            for arm, rate in wanted.items():
                tried[arm].append((rate, _is_met(bench, arm, shape, rate)))
        rates = {arm.name: highest_met(trials) for arm, trials in tried.items()}
        row = {"system": system} | {f"{name} req/s": rate for name, rate in rates.items()}
        for over in ("PS", "none"):
            relay, base = rates["relay"], rates[over]
            row[f"relay/{over}"] = None if relay is None or base is None else relay / base
        row["trials"] = sum(map(len, tried.values()))
        part.rows.append(row)
    return part


def next_trial(trials: Sequence[Trial]) -> float | None:
    """The rate to try next; None when the highest that is met is known, or lower than any of use."""
    points = [Point(rate, rate, 0.0 if is_met else math.inf, 1) for rate, is_met in trials]
    rate = next_rate(points, LIMIT_MS / 1e3, _STEPS)
    return None if rate is None or rate < _LOWEST else rate


def highest_met(trials: Sequence[Trial]) -> float | None:
    """None if none was met."""
    return max((rate for rate, is_met in trials if is_met), default=None)


def _is_met(bench: Bench, arm: Arm, shape: Shape, rate: float) -> bool:
    """Whether the mean over all requests that arrive in the time stays in the limit."""
    arrivals = poisson_arrivals(rate, _DURATION_S, bench.seed)
    prompts = make_prompts(Workload(1 + len(arrivals), shape.system, shape.user, shape.new), bench.seed)
    engine = bench.replica.engine(arm, max_running=bench.batch_limit)
    first, *rest = requests(prompts, shape.new)
    serve(engine, [first], now_s=bench.now_s)
    try:
        served = serve(engine, rest, arrivals, now_s=bench.now_s, limit_s=LIMIT_MS / 1e3)
    except TooSlow:
        return False
    return statistics.mean(each.normalized_s for each in served) <= LIMIT_MS / 1e3


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> list[float]:
    """Seconds of arrivals in [0, duration), at least one; a rate's gaps are another's, scaled."""
    generator = random.Random(seed)
    gaps = (generator.expovariate(1.0) / rate for _ in itertools.count())
    arrivals = list(itertools.takewhile(lambda at: at < duration_s, itertools.accumulate(gaps)))
    return arrivals or [0.0]
