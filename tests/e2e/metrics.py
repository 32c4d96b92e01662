"""/metrics, read back."""

from __future__ import annotations

import time
from typing import NamedTuple

import httpx

from tests.cluster.metric_samples import samples_of

IDLE_LIMIT_S = 180.0


class Metrics(NamedTuple):
    values: dict[str, float]  # as `samples_of` names them

    def __getitem__(self, name: str) -> float:  # type: ignore[override]
        return self.values[name]

    @property
    def busy(self) -> float:
        """Requests that run, and pages that are held but not pinned."""
        held = self['mneme_pages{state="in_use"}'] - self['mneme_pages{state="pinned"}']
        return held + self['mneme_requests{state="running"}']


def read_metrics(server: str) -> Metrics:
    page = httpx.get(f"{server}/metrics", timeout=240).raise_for_status().text
    return Metrics(samples_of(page))


def await_idle(server: str) -> Metrics:
    """The metrics once no request holds a page; pins do."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while True:
        metrics = read_metrics(server)
        if not metrics.busy and metrics['mneme_replicas{state="ready"}'] == metrics['mneme_replicas{state="wanted"}']:
            return metrics
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)


def await_metric(server: str, name: str, value: float, *, limit_s: float = IDLE_LIMIT_S) -> None:
    """Wait until a metric has this value; the page may be 1 s old."""
    deadline = time.monotonic() + limit_s
    while (metrics := read_metrics(server))[name] != value:
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)
