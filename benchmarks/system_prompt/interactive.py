"""The highest Poisson rate at a fixed normalized latency (RelayAttention 4.3, Fig. 7)."""

from __future__ import annotations

import itertools
import random
import statistics

from attention.report import NOT_RUN, PartResult
from system_prompt.arms import ARMS, Arm, Limits, Shape, requests
from system_prompt.bench import Bench
from system_prompt.rate_search import RateSearch
from system_prompt.serving import TooSlow, serve
from workloads import Workload, make_prompts

LIMIT_MS = 20.0  # mean latency per output token; set before it was measured, at several times that of a request alone
_USER, _NEW = 64, 128
_START = 4.0  # requests/s
_DURATION_S = 30.0  # of arrivals; the fewer, the more a rate above what can be sustained passes
_TOLERANCE = 1.06


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
        searches = {arm: RateSearch(_START, tolerance=_TOLERANCE) for arm in ARMS}
        while any(not search.is_done for search in searches.values()):
            for arm, search in searches.items():
                if not search.is_done:
                    search.note(_is_met(bench, arm, shape, search.rate))
        rates = {arm.name: search.best for arm, search in searches.items()}
        row = {"system": system} | {f"{name} req/s": rate for name, rate in rates.items()}
        for over in ("PS", "none"):
            relay, base = rates["relay"], rates[over]
            row[f"relay/{over}"] = None if relay is None or base is None else relay / base
        row["trials"] = sum(len(search.tried) for search in searches.values())
        part.rows.append(row)
    return part


def _is_met(bench: Bench, arm: Arm, shape: Shape, rate: float) -> bool:
    """Whether the mean over all requests that arrive in the time stays in the limit."""
    arrivals = poisson_arrivals(rate, _DURATION_S, bench.seed)
    prompts = make_prompts(Workload(1 + len(arrivals), shape.system, shape.user, shape.new), bench.seed)
    engine = bench.replica.engine(arm, Limits(max_running=bench.batch_limit))
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
