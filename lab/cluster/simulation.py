"""Plays turns against a cluster, event by event, and says what became of them.

Clients send a session's turn when it is due and the one before has been answered; one who waits for the first token
longer than `timeout_s` gives up and asks again. Each of `ingresses` has a router of its own, which knows what passed
through it and what replicas tell.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mneme.cachetier.names import EvictionPolicyName
from mneme.cachetier.policy.cost_model import CostModel
from mneme.lab.cache.simulator import rank
from mneme.lab.cluster.policies import Router, World
from mneme.lab.cluster.routers import ROUTERS, Mneme
from mneme.lab.cluster.simulated_replica import EngineShape, Job, Replica, Status
from mneme.lab.cluster.workload import Turn, infinite_hit_ratio
from mneme.router.autoscaler import AutoscaleConfig, Autoscaler, ReplicaLoad

_LOOK_S = 1.0  # between two looks of the autoscaler
_REPORT_S = 0.05  # reports of one replica are at least so far apart, as its `Reporter`'s
TIERS = ("device", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """What is simulated."""

    replicas: int = 8
    engine: EngineShape = field(default_factory=EngineShape)
    policy: EvictionPolicyName = "lru"
    router: str = "mneme"
    ingresses: int = 1
    report_s: float = 1.0  # between two reports of load; replicas tell our router at the end of a step with news, too
    timeout_s: float | None = None
    max_retries: int = 3
    concurrency: int | None = None  # sessions at once: the next begins when one has ended; None: at their times
    restarts: tuple[tuple[float, int], ...] = ()  # when which replica loses all it has
    sizes: tuple[tuple[float, int], ...] = ()  # when the cluster gets how many replicas; the last ones go first
    autoscale: AutoscaleConfig | None = None  # `replicas` is where it begins then
    startup_s: float = 60.0  # of a replica that the autoscaler asks for
    seed: int = 0


class Simulation:
    """Plays one cluster once."""

    def __init__(self, shape: ClusterShape, turns: Sequence[Turn], costs: CostModel) -> None:
        self.shape, self.turns, self.now_s = shape, turns, 0.0
        self._costs = costs
        self._rng = random.Random(shape.seed)
        make = ROUTERS[shape.router]
        world = World(costs, lambda: self.now_s, turns[0].block_tokens if turns else 1, {})
        self._routers: list[Router] = [make(random.Random(f"{shape.seed}.{n}"), world) for n in range(shape.ingresses)]
        self._has_reports = isinstance(self._routers[0], Mneme)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._replicas: list[Replica] = []
        self._planned: list[float | None] = []  # when each replica's next event is
        self._told: dict[int, tuple[int, ...]] = {}  # what each has reported of its queue
        self._told_s: dict[int, float] = {}  # and when
        self._changed: set[int] = set()  # whose blocks are others since
        self._is_due: set[int] = set()  # who has news, for which it is not time yet
        self._in_flight: list[int] = []
        self._busy_before: list[float] = []  # until it was restarted
        self._active: list[int] = []  # that take requests
        self._history: list[tuple[float, int]] = []  # when how many of these there were
        self._autoscaler = None if shape.autoscale is None else Autoscaler(shape.autoscale)
        self._target = shape.replicas
        self._polls = self._looks = False  # whether the next is due
        self._looked_s = 0.0
        self._resize(shape.replicas)
        self._behind: dict[int, list[Turn]] = {}
        for turn in turns:
            for earlier in turn.after:
                self._behind.setdefault(id(earlier), []).append(turn)
        self._left = {id(turn): len(turn.after) for turn in turns if turn.after}  # of what each waits for
        known = {id(turn) for turn in turns}
        assert all(id(each) in known for turn in turns for each in turn.after), "a turn waits for one that never comes"
        self._jobs: dict[int, Job] = {}  # in flight, by turn
        self.done: list[Job] = []
        self.num_timeouts = self.num_failed = self.num_lost = 0
        self.num_requests = Counter[int]()
        self._skews: list[float] = []
        self._expected = self._ghosts = 0  # blocks

    def run(self, on_request: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Play all turns; `on_request` is called at each answer."""
        started = time.process_time()
        self._on_request = on_request
        self._begin_sessions()
        for at_s, replica in self.shape.restarts:
            self._at(at_s, self._restart, replica)
        for at_s, size in self.shape.sizes:
            self._at(at_s, self._resize, size)
        self._wake()
        while self._events:
            self.now_s, _, event, args = heapq.heappop(self._events)
            event(*args)
        return self._figures(time.process_time() - started)

    def _begin_sessions(self) -> None:
        firsts = [turn for turn in self.turns if not turn.after]
        if self.shape.concurrency is None:
            for turn in firsts:
                self._at(turn.at_s, self._ask, turn)
            return
        self._not_begun = iter(firsts)
        for turn in itertools.islice(self._not_begun, self.shape.concurrency):
            self._at(0.0, self._ask, turn)

    def _at(self, at_s: float, event: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (max(at_s, self.now_s), next(self._order), event, args))

    def _ask(self, turn: Turn, due_s: float | None = None, retries: int = 0) -> None:
        self._wake()
        router = self._router(turn)
        number = router.place(turn)
        job = Job(turn, self.now_s if due_s is None else due_s, number)
        self._jobs[id(turn)] = job
        self.num_requests[number] += 1
        self._in_flight[number] += 1
        self._sample_skew()
        if self.shape.timeout_s is not None:
            self._at(self.now_s + self.shape.timeout_s, self._give_up, job, retries)
        expected = router.expected(turn)
        job.expected = 0 if expected is None else expected
        job.elsewhere_tokens = router.elsewhere_tokens(turn)
        self._replicas[number].submit(job, self.now_s)
        self._schedule(number)

    def _schedule(self, number: int) -> None:
        replica = self._replicas[number]
        next_s = replica.next_s
        if next_s is not None and self._planned[number] != next_s:
            self._planned[number] = next_s
            self._at(next_s, self._advance, number, replica, next_s)

    def _advance(self, number: int, replica: Replica, planned_s: float) -> None:
        if self._replicas[number] is replica and replica.next_s == planned_s:
            replica.advance(self.now_s)
            self._report_news(number)
            self._planned[number] = None
            self._schedule(number)

    def _report_news(self, number: int) -> None:
        """Report what is new, as soon as it may be."""
        if not self._has_reports or number in self._is_due:
            return
        if number not in self._changed and _queue(self._replicas[number].status()) == self._told[number]:
            return
        self._is_due.add(number)
        self._at(self._told_s[number] + _REPORT_S, self._report, number)

    def _report(self, number: int) -> None:
        if not self._has_reports:
            return
        status = self._replicas[number].status()
        self._told[number], self._told_s[number] = _queue(status), self.now_s
        self._changed.discard(number)
        self._is_due.discard(number)
        for router in self._routers:
            router.reported(number, status)

    def _first(self, job: Job) -> None:
        self._expected += job.expected
        self._ghosts += max(job.expected - sum(job.found), 0)
        if not job.is_cancelled:
            self._router(job.turn).started(job.turn, sum(job.found))

    def _end(self, job: Job) -> None:
        self._in_flight[job.replica] -= 1
        if job.is_cancelled:
            return
        del self._jobs[id(job.turn)]
        self._router(job.turn).ended(job.turn)
        self.done.append(job)
        self._on_request()
        self._go_on(job.turn)

    def _go_on(self, turn: Turn) -> None:
        """A turn was answered, or its client has given up for good."""
        behind = self._behind.get(id(turn), ())
        for following in behind:
            self._left[id(following)] -= 1
            if self._left[id(following)]:
                continue
            due_s = self.now_s + following.delay_s
            if self.shape.concurrency is None:
                due_s = max(due_s, following.at_s)
            self._at(due_s, self._ask, following)
        if not behind and self.shape.concurrency is not None:
            for following in itertools.islice(self._not_begun, 1):
                self._ask(following)

    def _give_up(self, job: Job, retries: int) -> None:
        """Its first token did not come in time: the client asks again, which is one more request."""
        if job.is_cancelled or job.first_s or self._jobs.get(id(job.turn)) is not job:
            return
        self.num_timeouts += 1
        if self._replicas[job.replica].cancel(job):
            self._in_flight[job.replica] -= 1
        self._report_news(job.replica)
        self._withdraw(job, retries)

    def _withdraw(self, job: Job, retries: int) -> None:
        del self._jobs[id(job.turn)]
        self._router(job.turn).ended(job.turn)
        if retries < self.shape.max_retries:
            self._at(self.now_s + self._rng.uniform(0, 1), self._ask, job.turn, job.due_s, retries + 1)
        else:
            self.num_failed += 1
            self._on_request()
            self._go_on(job.turn)

    def _restart(self, number: int) -> None:
        """The process dies and comes back empty; who had no answer asks again at once, as the ingress resumes."""
        old = self._replicas[number]
        self._busy_before[number] += old.busy_s
        self._replicas[number] = self._make_replica(number)
        self._planned[number] = None
        self._in_flight[number] = 0
        for router in self._routers:
            router.restarted(number)
        self._report(number)
        for job in old.lose_all():
            job.is_cancelled = True
            self.num_lost += 1
            del self._jobs[id(job.turn)]
            self._router(job.turn).ended(job.turn)
            self._ask(job.turn, job.due_s)

    def _resize(self, size: int) -> None:
        """Those that go take nothing new and answer what they have; those that come are empty."""
        cheapest = () if self._autoscaler is None else map(int, self._autoscaler.cheapest_first())
        order = dict.fromkeys(number for number in (*cheapest, *reversed(self._active)) if number in self._active)
        leaving = set([*order][: max(len(self._active) - size, 0)])
        kept = [number for number in self._active if number not in leaving]
        coming = range(len(self._replicas), len(self._replicas) + size - len(kept))
        for number in coming:
            self._replicas.append(self._make_replica(number))
            self._planned.append(None)
            self._in_flight.append(0)
            self._busy_before.append(0.0)
        self._active = [*kept, *coming]
        self._history.append((self.now_s, size))
        for router in self._routers:
            router.set_replicas(self._active)
        for number in coming:
            self._report(number)

    def _look(self) -> None:
        """Ask the autoscaler, as the application does every second; who comes takes a while to start."""
        assert self._autoscaler is not None
        loads = self._loads()
        before, self._target = self._target, self._autoscaler.decide(loads, self._target, self.now_s)
        if self._target > before:
            self._at(self.now_s + self.shape.startup_s, self._start, self._target)
        elif self._target < len(self._active):
            self._resize(self._target)
        has_settled = self._target == len(self._active) == self._autoscaler.config.min
        has_settled &= self._is_idle and self._autoscaler.needed() <= self._target
        self._looks = not (self._is_over or has_settled)
        if self._looks:
            self._at(self.now_s + _LOOK_S, self._look)

    def _loads(self) -> dict[str, ReplicaLoad]:
        span_s, self._looked_s = self.now_s - self._looked_s, self.now_s
        return {str(number): self._replicas[number].load(span_s) for number in self._active}

    def _start(self, size: int) -> None:
        if len(self._active) < min(size, self._target):  # else it was called off meanwhile
            self._resize(min(size, self._target))

    @property
    def _is_idle(self) -> bool:
        return not self._jobs and not any(self._in_flight)

    @property
    def _is_over(self) -> bool:
        return len(self.done) + self.num_failed == len(self.turns)

    def _poll(self) -> None:
        for router in self._routers:
            router.polled()
        for number in self._active if self._has_reports else ():
            if self._replicas[number].next_s is not None:
                self._report(number)
        self._polls = not (self._is_over or self._is_idle)
        if self._polls:
            self._at(self.now_s + self.shape.report_s, self._poll)

    def _wake(self) -> None:
        """Poll and look again, at the times at which that would have been: it stops where nobody has anything to do."""
        if not self._polls:
            self._polls = True
            self._at(math.ceil(self.now_s / self.shape.report_s) * self.shape.report_s, self._poll)
        if self._autoscaler is not None and not self._looks:
            self._looks = True
            if self.now_s > self._looked_s:
                self._loads()  # what is smoothed knows that nothing was done until now
            self._at((math.floor(self.now_s / _LOOK_S) + 1) * _LOOK_S, self._look)

    def _router(self, turn: Turn) -> Router:
        return self._routers[turn.session % len(self._routers)]

    def _make_replica(self, number: int) -> Replica:
        """Make an empty engine, or one in the place of another."""
        shape, told = self.shape, functools.partial(self._stored, number)
        return Replica(shape.engine, shape.policy, self._costs, lambda: self.now_s, self._first, self._end, told)

    def _stored(self, number: int, block_id: int, tier: int | None) -> None:
        self._changed.add(number)
        for router in self._routers:
            router.placed(number, block_id, tier)

    def _sample_skew(self) -> None:
        loads = self._in_flight if self._autoscaler is None else [self._in_flight[n] for n in self._active]
        total = sum(loads)
        if total >= len(loads):  # below one each, load says nothing
            self._skews.append(max(loads) * len(loads) / total)

    def _figures(self, took_s: float) -> dict[str, Any]:
        jobs = self.done
        blocks = sum(len(job.turn.block_ids) for job in jobs) or 1
        found = [sum(counts) for counts in zip(*(job.found for job in jobs), strict=True)] or [0]
        ttft = sorted(job.first_s - job.due_s for job in jobs) or [0.0]
        e2e = sorted(job.ended_s - job.due_s for job in jobs) or [0.0]
        itl = sorted(
            (job.ended_s - job.first_s) / (job.turn.output_tokens - 1) for job in jobs if job.turn.output_tokens > 1
        ) or [0.0]
        busy = [before + each.busy_s for before, each in zip(self._busy_before, self._replicas, strict=True)]
        requests = [self.num_requests[number] for number in range(len(self._replicas))]
        skews = sorted(self._skews) or [1.0]
        sizes = [*self._history, (self.now_s, 0)]
        replica_s = sum(size * (until_s - from_s) for (from_s, size), (until_s, _) in itertools.pairwise(sizes))
        return {
            "router": self.shape.router,
            "replicas": self.shape.replicas,
            "num_requests": len(jobs),
            "hit_ratio": round(sum(found) / blocks, 6),
            "infinite_hit_ratio": round(infinite_hit_ratio(self.turns), 6),
            "tier_hit_ratio": {name: round(n / blocks, 6) for name, n in zip(TIERS, found, strict=False)},
            **{f"ttft_p{percent}_s": round(rank(ttft, percent), 6) for percent in (50, 90, 99)},
            "ttft_mean_s": round(statistics.fmean(ttft), 6),
            **{f"e2e_p{percent}_s": round(rank(e2e, percent), 6) for percent in (50, 99)},
            **{f"itl_p{percent}_s": round(rank(itl, percent), 6) for percent in (50, 99)},
            "load_skew": round(skew(busy), 4),
            "requests_skew": round(skew(requests), 4),
            "in_flight_skew_p99": round(rank(skews, 99), 4),
            "busy_share": round(sum(busy) / replica_s, 4) if replica_s else 0.0,
            "expected_minus_found": round(self._ghosts / self._expected, 6) if self._expected else 0.0,
            **{name: getattr(self, name) for name in ("num_timeouts", "num_failed", "num_lost")},
            "replica_s": round(replica_s, 3),
            "sizes": [(round(at_s, 3), size) for at_s, size in self._history],
            "span_s": round(self.now_s, 3),
            "took_s": round(took_s, 3),
            "simulated_requests_per_minute": round(60 * len(jobs) / took_s) if took_s else None,
        }


def _queue(status: Status) -> tuple[int, ...]:
    """Return what is news if it changes; streams that go on are none."""
    return status.queued_tokens, status.running, status.waiting


def skew(loads: Sequence[float]) -> float:
    """The largest over the mean."""
    mean = statistics.fmean(loads)
    return max(loads) / mean if mean else 1.0
