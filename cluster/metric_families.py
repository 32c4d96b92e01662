"""Families of metrics over reports: sums over replicas or engines, and each node's own of a cache tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mneme.cluster.prometheus import Labels, family

Sample = tuple[Labels, tuple[str, ...]]  # the path leads to a number in a report


class Family(NamedTuple):
    """Labels are bounded: they are said here, never by a report."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    samples: Sequence[Sample]


def alone(*path: str) -> list[Sample]:
    return [((), path)]


def by(label: str, path: tuple[str, ...], keys: Iterable[str]) -> list[Sample]:
    """A sample for each key below a path."""
    return [(((label, key),), (*path, key)) for key in keys]


def summed_lines(families: Iterable[Family], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for spec in families:
        sums = {labels: sum(number_at(each, path) for each in reports) for labels, path in spec.samples}
        lines += family(spec.name, spec.description, spec.kind, sums)
    return lines


def lines_by(label: str, families: Iterable[Family], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each report's own samples, under its name, which it has at `label`: no counter falls where one is missing."""
    lines: list[str] = []
    for spec in families if reports else ():
        sums: defaultdict[Labels, float] = defaultdict(float)
        for each in reports:
            for labels, path in spec.samples:
                sums[((label, str(each[label])), *labels)] += number_at(each, path)
        lines += family(spec.name, spec.description, spec.kind, sums)
    return lines


def number_at(report: Any, path: tuple[str, ...]) -> float:
    """0 for what a report does not have: a node without a disk, a replica of an older version."""
    for key in path:
        report = report.get(key) if isinstance(report, Mapping) else None
    return report if isinstance(report, int | float) else 0
