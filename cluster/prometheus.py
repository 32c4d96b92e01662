"""Prometheus's text format: families of samples, and histograms kept in this process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts by upper bound; not thread-safe."""

    def __init__(
        self, name: str, description: str, *, labels: Labels = (), bounds: Sequence[float] = LATENCY_BUCKETS_S
    ) -> None:
        self._name = name
        self._description = description
        self._labels = labels
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> list[str]:
        lines = _head(self._name, self._description, "histogram")
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f"{self._name}_bucket{_braces((*self._labels, ('le', bound)))} {total}")
        braces = _braces(self._labels)
        return [*lines, f"{self._name}_sum{braces} {self._sum}", f"{self._name}_count{braces} {total}"]


def family(
    name: str, description: str, kind: Literal["counter", "gauge"], samples: Mapping[Labels, float]
) -> list[str]:
    """The lines of one family; counters are named `..._total`."""
    assert (kind == "counter") == name.endswith("_total"), name
    return [
        *_head(name, description, kind),
        *(f"{name}{_braces(k)} {_number(v)}" for k, v in samples.items()),
    ]


def _head(name: str, description: str, kind: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
