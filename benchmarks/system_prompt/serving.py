"""Requests go into an engine as they arrive; when each of their tokens came.

Time is that of the engine's steps and submissions: while there is nothing to do, the clock goes on to the next arrival
at once, so that a low rate of arrivals costs no more than its work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mneme.replicas.engine.engine import Engine
from mneme.replicas.request import GenerationRequest

NowS = Callable[[], float]


class Served(NamedTuple):
    """One request, in seconds from the start of the run."""

    arrival_s: float
    token_s: list[float]

    @property
    def end_s(self) -> float:
        return self.token_s[-1]

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def normalized_s(self) -> float:
        """Latency per output token, as vLLM and RelayAttention (4.3) have it."""
        return (self.end_s - self.arrival_s) / len(self.token_s)


class TooSlow(Exception):
    """The mean normalized latency is over its limit, whatever is still to come."""


def serve(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    arrivals_s: Sequence[float] | None = None,
    *,
    now_s: NowS = time.perf_counter,
    limit_s: float | None = None,
    until_first: bool = False,
    watch: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Run all requests to their end, or to their first tokens.

    arrivals_s  ascending, one per request; None: all at once
    limit_s     of the mean normalized latency; raises `TooSlow` as soon as it must be passed
    watch       called after each step, off the clock
    """
    arrivals = [0.0] * len(requests) if arrivals_s is None else arrivals_s
    served = {request.request_id: Served(at, []) for request, at in zip(requests, arrivals, strict=True)}
    elapsed, num_submitted, num_first = 0.0, 0, 0
    while num_submitted < len(requests) or engine.has_work:
        if not engine.has_work:
            elapsed = max(elapsed, arrivals[num_submitted])
        started = now_s()
        while num_submitted < len(requests) and arrivals[num_submitted] <= elapsed:
            engine.submit(requests[num_submitted])
            num_submitted += 1
        events = engine.step()
        elapsed += now_s() - started
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"request {event.request_id} failed: {event.error}")
            num_first += bool(event.token_ids) and not served[event.request_id].token_s
            served[event.request_id].token_s.extend([elapsed] * len(event.token_ids))
        watch()
        if until_first and num_first == len(requests):
            break
        if limit_s is not None and least_mean_s(served.values(), requests, elapsed) > limit_s:
            raise TooSlow
    return list(served.values())


def least_mean_s(served: Iterable[Served], requests: Sequence[GenerationRequest], elapsed: float) -> float:
    """The mean normalized latency if every request that runs or waits ended now, and later ones at their arrival."""
    total = 0.0
    for each, request in zip(served, requests, strict=True):
        num_new = request.sampling.max_tokens or 1
        end_s = each.end_s if len(each.token_s) == num_new else max(elapsed, each.arrival_s)
        total += (end_s - each.arrival_s) / num_new
    return total / len(requests)


class Figures(NamedTuple):
    """What one closed batch came to."""

    tokens_per_s: float  # output tokens, over the time to the last one
    requests_per_s: float
    normalized_ms: float  # mean
    ttft_ms: float  # median
    decode_per_s: float | None  # output tokens once all have their first; None if there are none


def figures(served: Sequence[Served]) -> Figures:
    end_s, all_first_s = max(each.end_s for each in served), max(each.token_s[0] for each in served)
    later = sum(at > all_first_s for each in served for at in each.token_s)
    return Figures(
        sum(len(each.token_s) for each in served) / end_s,
        len(served) / end_s,
        statistics.mean(each.normalized_s for each in served) * 1e3,
        statistics.median(each.ttft_s for each in served) * 1e3,
        later / (end_s - all_first_s) if later else None,
    )
