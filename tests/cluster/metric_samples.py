"""What a page of metrics says, by name and labels."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def samples(metrics: Iterable[Metric]) -> dict[str, float]:
    """Values by `name{label="value",...}`, the labels in order of their names."""
    found = {}
    for metric in metrics:
        for sample in metric.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def samples_of(page: str) -> dict[str, float]:
    return samples(text_string_to_metric_families(page))
