"""What a page of metrics says, by name and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def samples(metrics: Iterable[Metric], *, without: Collection[str] = ()) -> dict[str, float]:
    """Values by `name{label="value",...}`, the labels in order of their names; sums over those `without` which it is."""
    found = Counter[str]()
    for metric in metrics:
        for sample in metric.samples:
            kept = sorted((key, value) for key, value in sample.labels.items() if key not in without)
            labels = ",".join(f'{key}="{value}"' for key, value in kept)
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] += sample.value
    return dict(found)


def samples_of(page: str) -> dict[str, float]:
    return samples(text_string_to_metric_families(page))


def totals_of(page: str) -> dict[str, float]:
    """Sums over replicas."""
    return samples(text_string_to_metric_families(page), without=("replica", "engine"))
