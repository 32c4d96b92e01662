"""Latencies as clients see them, measured where their requests enter; queue and prefill as the engine says them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Histogram, Metric, disable_created_metrics

Clock = Callable[[], float]

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKETS_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be a gauge beside each histogram


class Latencies:
    """Holds the histograms of one ingress, labelled with it and the model.

    Their names are vLLM's. Three are exposed a second time under a `mneme_` name, without the model's label.
    """

    def __init__(self, ingress: str, model: str) -> None:
        self._families: list[Histogram] = []
        self._own_names: dict[str, str] = {}

        def histogram(
            name: str, description: str, *, own: str | None = None, buckets: tuple[float, ...] = _BUCKETS_S
        ) -> Histogram:
            labels = ("ingress", "model_name")
            family = Histogram(f"vllm:{name}", description, labels, registry=None, buckets=buckets)
            self._families.append(family)
            if own is not None:
                self._own_names[family._name] = own
            return family.labels(ingress, model)

        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From the whole request to the first token of each choice, at this ingress.",
            own="mneme_time_to_first_token_seconds",
        )
        self.itl = histogram(
            "inter_token_latency_seconds",
            "Between two events of one choice, per token of the second, at this ingress.",
            own="mneme_inter_token_latency_seconds",
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds",
            "From the whole request to the end of its answer, at this ingress.",
            own="mneme_request_seconds",
        )
        self.tpot = histogram("request_time_per_output_token_seconds", "Mean of a choice, after its first token.")
        self.queue = histogram("request_queue_time_seconds", "From an engine's taking a choice to its first rows.")
        self.prefill = histogram("request_prefill_time_seconds", "From a choice's first rows to its first token.")
        self.decode = histogram("request_decode_time_seconds", "From a choice's first token to its last.")
        self.inference = histogram("request_inference_time_seconds", "From a choice's first rows to its last token.")
        self.prompt_tokens = histogram("request_prompt_tokens", "Of each choice.", buckets=_BUCKETS_TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "Of each choice.", buckets=_BUCKETS_TOKENS)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            for metric in family.collect():
                yield metric
                if metric.name in self._own_names:
                    yield _renamed(metric, self._own_names[metric.name])


def _renamed(metric: Metric, name: str) -> Metric:
    """The same samples under a name of ours, which have no label of the model's."""
    found = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
        found.add_sample(name + sample.name.removeprefix(metric.name), labels, sample.value)
    return found
