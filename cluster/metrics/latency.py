"""Latencies as clients see them, measured where their requests enter; queue and prefill as the engine says them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import Histogram, Metric, disable_created_metrics

from mneme.replicas.choices import Choice

Clock = Callable[[], float]

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKETS_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be a gauge beside each histogram


class Latencies:
    """Holds the histograms of one ingress: `of` a model, those with its label.

    Their names are vLLM's. Three are exposed a second time under a `mneme_` name.
    """

    def __init__(self, ingress: str) -> None:
        self._ingress = ingress
        self._own_names: dict[str, str] = {}
        self._families: dict[str, Histogram] = {}
        self._add(
            "ttft",
            "time_to_first_token_seconds",
            "Seconds from the whole request to the first token of each choice, at this ingress.",
            own="mneme_time_to_first_token_seconds",
        )
        self._add(
            "itl",
            "inter_token_latency_seconds",
            "Seconds between two events of one choice, per token of the second, at this ingress.",
            own="mneme_inter_token_latency_seconds",
        )
        self._add(
            "e2e",
            "e2e_request_latency_seconds",
            "Seconds from the whole request to the end of its answer, at this ingress.",
            own="mneme_request_seconds",
        )
        add = self._add
        add(
            "tpot",
            "request_time_per_output_token_seconds",
            "Mean seconds per output token of a choice, after its first.",
        )
        add("queue", "request_queue_time_seconds", "Seconds from an engine's taking a choice to its first rows.")
        add("prefill", "request_prefill_time_seconds", "Seconds from a choice's first rows to its first token.")
        add("decode", "request_decode_time_seconds", "Seconds from a choice's first token to its last.")
        add("inference", "request_inference_time_seconds", "Seconds from a choice's first rows to its last token.")
        add("prompt_tokens", "request_prompt_tokens", "Prompt tokens of each choice.", buckets=_BUCKETS_TOKENS)
        add("generation_tokens", "request_generation_tokens", "Output tokens of each choice.", buckets=_BUCKETS_TOKENS)

    def of(self, model: str) -> ModelLatencies:
        return ModelLatencies(**{name: family.labels(self._ingress, model) for name, family in self._families.items()})

    def collect(self) -> Iterator[Metric]:
        for family in self._families.values():
            for metric in family.collect():
                yield metric
                if metric.name in self._own_names:
                    yield _renamed(metric, self._own_names[metric.name])

    def _add(
        self,
        attribute: str,
        name: str,
        description: str,
        *,
        own: str | None = None,
        buckets: tuple[float, ...] = _BUCKETS_S,
    ) -> None:
        labels = ("ingress", "model_name")
        family = Histogram(f"vllm:{name}", description, labels, registry=None, buckets=buckets)
        self._families[attribute] = family
        if own is not None:
            self._own_names[family._name] = own


class ModelLatencies(NamedTuple):
    """One model's histograms at one ingress; `Latencies` says what they measure."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    tpot: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram


class RequestLatency:
    """Measures one request from when its body was there, `started_s` of the same clock."""

    def __init__(self, latencies: ModelLatencies, clock: Clock, started_s: float) -> None:
        self._latencies = latencies
        self._clock = clock
        self._started_s = started_s

    def past_s(self) -> float:
        """Return the seconds since the body was there."""
        return self._clock() - self._started_s

    def event(self, choice: Choice, num_tokens: int) -> None:
        """The choice has taken an event with so many tokens."""
        if num_tokens:
            now = self._clock()
            if choice.first_s is None:
                self._latencies.ttft.observe(now - self._started_s)
                choice.first_s = now
            else:
                self._latencies.itl.observe((now - choice.last_s) / num_tokens)
            choice.last_s = now
            choice.add_time(now)
        if choice.finish_reason is not None:
            self._observe(choice)

    def end(self) -> None:
        self._latencies.e2e.observe(self.past_s())

    def _observe(self, choice: Choice) -> None:
        latencies, usage = self._latencies, choice.usage
        latencies.queue.observe(usage.queue_s)
        latencies.prefill.observe(usage.prefill_s)
        latencies.decode.observe(choice.decode_s)
        latencies.inference.observe(usage.prefill_s + choice.decode_s)
        latencies.prompt_tokens.observe(usage.prompt_tokens)
        latencies.generation_tokens.observe(choice.num_tokens)
        if choice.num_tokens > 1:
            latencies.tpot.observe(choice.decode_s / (choice.num_tokens - 1))


def _renamed(metric: Metric, name: str) -> Metric:
    """The same samples under a name of ours."""
    found = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        found.add_sample(name + sample.name.removeprefix(metric.name), sample.labels, sample.value)
    return found
