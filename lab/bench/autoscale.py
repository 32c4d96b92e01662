"""Makes load that rises and falls, and says how the replicas of a server followed it. No clock, no network."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mneme.lab.bench.html_report import chart
from mneme.lab.bench.measure import Answer, spread_ms
from mneme.lab.bench.workloads import Session, think

Profile = Sequence[tuple[float, float]]  # seconds since the run began, requests per second; linear in between

# Where the load is how far between rest and peak, by the share of the run that has gone.
PROFILES = {
    "step": ((0.0, 0), (1 / 6, 0), (1 / 6, 1), (1 / 2, 1), (1 / 2, 0), (1.0, 0)),
    "ramp": ((0.0, 0), (1 / 2, 1), (1.0, 0)),
}
_BIN_S = 10.0  # in which a trace's rates are counted
_AVERAGED_S = 10.0  # of the plotted hit rate


class Replicas(NamedTuple):
    """What the server said of its replicas; None: it did not."""

    at_s: float
    ready: int | None
    wanted: int | None


def made_profile(name: str, rate: float, peak: float, seconds: float) -> Profile:
    """Return one of `PROFILES` between two rates."""
    return [(share * seconds, rate + (peak - rate) * height) for share, height in PROFILES[name]]


def bursts(times_s: Sequence[float], peak: float, seconds: float) -> Profile:
    """Return the rates around a trace's busiest ten seconds, scaled so that those are `peak`."""
    counts = Counter(int(at_s // _BIN_S) for at_s in times_s)  # sparse: times may be years apart
    all_bins = math.ceil(max(times_s, default=0.0) / _BIN_S) + 1
    num_bins = min(max(round(seconds / _BIN_S), 1), all_bins)
    busiest = min(counts, key=lambda number: (-counts[number], number), default=0)
    first = min(max(busiest - num_bins // 2, 0), all_bins - num_bins)
    rates = [counts[first + number] * peak / max(counts[busiest], 1) for number in range(num_bins)]
    starts = [number * _BIN_S for number in range(num_bins)]
    return [point for at_s, rate in zip(starts, rates, strict=True) for point in ((at_s, rate), (at_s + _BIN_S, rate))]


def num_requests(profile: Profile) -> int:
    """Count the requests that a profile comes to."""
    times_s, rates = np.array(profile).T
    return max(round(float(np.trapezoid(rates, times_s))), 1)


def arrive_by(profile: Profile, sessions: Sequence[Session], think_s: float, seed: int) -> list[Session]:
    """Let all sessions begin as a Poisson process of the profile's rate would have so many begin."""
    rng = random.Random(f"{seed} arrivals")
    times_s, rates = np.array(profile).T
    grid_s = np.linspace(times_s[0], times_s[-1], 10_001)
    # Two points of one time are a step, which `interp` takes.
    done = np.concatenate(([0.0], np.cumsum(np.interp(grid_s[:-1], times_s, rates) * np.diff(grid_s))))
    begun = sorted(rng.uniform(0.0, done[-1]) for _ in sessions)
    arrived = []
    for session, at_s in zip(sessions, np.interp(begun, done, grid_s).tolist(), strict=True):
        thoughtful = think(session, think_s, rng, first=1)
        arrived.append(replace(thoughtful, turns=[replace(thoughtful.turns[0], at_s=at_s), *thoughtful.turns[1:]]))
    return arrived


def changes(seen: Sequence[Replicas]) -> list[tuple[float, int, int]]:
    """Return when the number of ready replicas changed, from what to what.

    One that a busy machine has answer late is ready again with the next look: a change is what two looks agree on.
    """
    known = [(each.at_s, each.ready) for each in seen if each.ready is not None]
    found: list[tuple[float, int, int]] = []
    before = known[0][1] if known else 0
    for (at_s, ready), (_, following) in itertools.pairwise(known):
        if ready != before and ready == following:
            found.append((at_s, before, ready))
            before = ready
    return found


def hit_rate(answers: Sequence[Answer], history: Mapping[int, int]) -> float | None:
    """Return which share was cached of what turns had before them.

    Not of their prompts: what a turn adds cannot be cached, and is more of a session's second turn than of its eighth.
    """
    had = [(answer, history.get(id(answer), 0)) for answer in answers if answer.error is None]
    found = sum(min(answer.cached_tokens or 0, tokens) for answer, tokens in had)
    total = sum(tokens for _, tokens in had)
    return round(found / total, 4) if total else None


def follow(answers: Sequence[Answer], seen: Sequence[Replicas], window_s: float) -> dict[str, Any]:
    """Return replicas over time, and what clients saw around each change of them; times since the run began."""
    began_s = min((answer.sent_s for answer in answers), default=0.0)
    history = history_of(answers)
    events: list[dict[str, Any]] = []
    counts = [each.ready for each in seen if each.ready is not None][:1]
    for at_s, before, after in changes(seen):
        counts.append(after)
        event: dict[str, Any] = {"at_s": round(at_s - began_s, 3), "from": before, "to": after}
        for name, start_s in (("before", at_s - window_s), ("after", at_s)):
            sent = [answer for answer in answers if start_s <= answer.sent_s < start_s + window_s]
            event[name] = {
                "num_requests": len(sent),
                "num_failed": sum(answer.error is not None for answer in sent),
                "hit_rate": hit_rate(sent, history),
                "ttft_ms": spread_ms([answer.latencies_s()["ttft"] for answer in sent if answer.error is None]),
            }
        events.append(event)
    kept = [
        event["after"]["hit_rate"] / event["before"]["hit_rate"]
        for event in events
        if event["to"] < event["from"] and event["before"]["hit_rate"] and event["after"]["hit_rate"] is not None
    ]
    return {
        "replicas_least": min(counts, default=None),
        "replicas_most": max(counts, default=None),
        "hit_rate": hit_rate(answers, history),
        "hit_rate_kept_at_scale_down": round(min(kept), 4) if kept else None,
        "events": events,
        "replicas": [[round(each.at_s - began_s, 2), each.ready, each.wanted] for each in seen],
    }


def history_of(answers: Sequence[Answer]) -> dict[int, int]:
    """Return the tokens of the turn before and its answer, but for the last, whose KV nobody has; by `id` of a turn."""
    before: dict[str, Answer] = {}
    history = {}
    for answer in sorted(answers, key=lambda each: each.sent_s):
        if (last := before.get(answer.session)) is not None and last.prompt_tokens and last.output_tokens:
            history[id(answer)] = last.prompt_tokens + last.output_tokens - 1
        before[answer.session] = answer
    return history


def plots(answers: Sequence[Answer], figures: Mapping[str, Any], profile: Profile) -> list[str]:
    """Draw load, replicas and hit rate over time."""
    began_s = min((answer.sent_s for answer in answers), default=0.0)
    history = history_of(answers)
    lines: dict[str, list[tuple[float, float]]] = {"ready": [], "wanted": []}
    for at_s, *counts in figures["replicas"]:
        for line, count in zip(lines.values(), counts, strict=True):
            line += [] if count is None else [*((at_s, line[-1][1]) for _ in line[-1:]), (at_s, count)]
    rates = []
    for index in range(int(max((answer.sent_s - began_s for answer in answers), default=0.0) / _AVERAGED_S) + 1):
        start_s = began_s + index * _AVERAGED_S
        share = hit_rate([a for a in answers if start_s <= a.sent_s < start_s + _AVERAGED_S], history)
        rates += [] if share is None else [((index + 0.5) * _AVERAGED_S, 100 * share)]
    return [
        chart("Replicas", "s", "replicas", lines),
        chart("Load", "s", "requests/s", {"offered": profile}),
        chart("Cached of what turns had before them", "s", "% of tokens", {"hit rate": rates}),
    ]
