"""Latencies as clients see them, measured where their requests enter."""

from __future__ import annotations

from collections.abc import Callable

from mneme.cluster.prometheus import Histogram, Labels

Clock = Callable[[], float]


class Latencies:
    """The histograms of one ingress, under its label."""

    def __init__(self, labels: Labels) -> None:
        self.ttft = Histogram(
            "mneme_time_to_first_token_seconds",
            "From the whole request to the first token of each choice, at this ingress.",
            labels=labels,
        )
        self.itl = Histogram(
            "mneme_inter_token_latency_seconds",
            "Between two events of one choice, per token of the second, at this ingress.",
            labels=labels,
        )
        self.e2e = Histogram(
            "mneme_request_seconds",
            "From the whole request to the end of its answer, at this ingress.",
            labels=labels,
        )

    def lines(self) -> list[str]:
        return [*self.ttft.lines(), *self.itl.lines(), *self.e2e.lines()]


class RequestLatency:
    """One request's clock, started when its body is there."""

    def __init__(self, latencies: Latencies, clock: Clock) -> None:
        self._latencies = latencies
        self._clock = clock
        self._started_s = clock()
        self._last_s: dict[int, float] = {}  # by choice

    def event(self, choice: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = self._clock()
        last = self._last_s.get(choice)
        if last is None:
            self._latencies.ttft.observe(now - self._started_s)
        else:
            self._latencies.itl.observe((now - last) / num_tokens)
        self._last_s[choice] = now

    def end(self) -> None:
        self._latencies.e2e.observe(self._clock() - self._started_s)
