"""/metrics, read back."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import httpx

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
IDLE_LIMIT_S = 20.0


class Metrics(NamedTuple):
    values: dict[tuple[str, str], float]  # by name and label text

    def __getitem__(self, key: str) -> float:  # type: ignore[override]
        name, _, labels = key.partition("{")
        return self.values[name, labels.rstrip("}")]

    @property
    def busy(self) -> float:
        """Requests that run, and pages that are held but not pinned."""
        held = self['mneme_pages{state="in_use"}'] - self['mneme_pages{state="pinned"}']
        return held + self['mneme_requests{state="running"}']


def read_metrics(server: str) -> Metrics:
    page = httpx.get(f"{server}/metrics", timeout=10).raise_for_status().text
    matches = (_SAMPLE.match(line) for line in page.splitlines())
    return Metrics({(m[1], m[2] or ""): float(m[3]) for m in matches if m})


def await_idle(server: str) -> Metrics:
    """The metrics once no request holds a page; pins do."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while True:
        metrics = read_metrics(server)
        if not metrics.busy and metrics["mneme_replicas"] == 2:
            return metrics
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)


def await_metric(server: str, name: str, value: float, *, limit_s: float = IDLE_LIMIT_S) -> None:
    """Wait until a metric has this value; the page may be 1 s old."""
    deadline = time.monotonic() + limit_s
    while (metrics := read_metrics(server))[name] != value:
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)
