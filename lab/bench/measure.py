"""What is kept of each answer, and what many answers come to: percentiles, rates, goodput, errors by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mneme.errors import ConfigError, shown

PERCENTS = (50, 90, 99)
SLO_NAMES = ("ttft", "tpot", "itl", "e2e")
UNSENT = "not sent: an earlier turn of its session failed"


@dataclass(slots=True, kw_only=True)
class Answer:
    """Holds one request as its client saw it; times are seconds of one monotonic clock.

    A chunk is an event with a choice, as `vllm bench serve` counts it, but for an opening one that has only a role.
    """

    session: str
    sent_s: float
    due_s: float = math.nan  # when it should have been sent
    first_s: float | None = None  # its first chunk
    last_s: float | None = None  # its last chunk
    itl_s: list[float] = field(default_factory=list)  # from chunk to chunk
    text: str = ""
    prompt_tokens: int | None = None  # these three as the server's usage says; None: it does not
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ended_s: float = math.nan
    error: str | None = None  # its kind
    detail: str = ""  # what the server or the network said

    def latencies_s(self) -> dict[str, float | None]:
        """TTFT, time per output token after the first, the longest ITL, and time to the last chunk."""
        if self.first_s is None or self.last_s is None:
            return dict.fromkeys(SLO_NAMES)
        more = (self.output_tokens or 1) - 1
        return {
            "ttft": self.first_s - self.sent_s,
            "tpot": (self.last_s - self.first_s) / more if more > 0 else None,
            "itl": max(self.itl_s, default=None),
            "e2e": self.last_s - self.sent_s,
        }

    def meets(self, slo_s: Mapping[str, float]) -> bool:
        """Whether it was answered, and no latency of those named is over its bound."""
        latencies_s = self.latencies_s()
        return self.error is None and all((latencies_s[name] or 0.0) <= bound_s for name, bound_s in slo_s.items())


def parse_slo(text: str) -> dict[str, float]:
    """Return seconds by name of `ttft=500,itl=50`, in ms. Raises `ConfigError`."""
    slo_s: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in SLO_NAMES or name in slo_s:
            raise ConfigError(f"slo: must be NAME=MS, each once, of {', '.join(SLO_NAMES)} (got {shown(part)})")
        try:
            slo_s[name] = float(value) / 1e3
        except ValueError:
            slo_s[name] = math.nan
        if not 0 < slo_s[name] < math.inf:
            raise ConfigError(f"slo: {name}: must be ms over 0 (got {shown(value)})")
    return slo_s


def summarize(answers: Sequence[Answer], slo_s: Mapping[str, float], num_unsent: int = 0) -> dict[str, Any]:
    """Return all figures of a run; one that nothing was measured of is None.

    Percentiles are of all samples, linear between two, as in `vllm bench serve`; rates are per second from the first
    request sent to the last that ended.
    """
    good = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    if num_unsent:
        errors[UNSENT] = num_unsent
    span_s = max((a.ended_s for a in answers), default=0.0) - min((a.sent_s for a in answers), default=0.0)
    prompt, output = (_total(good, name) for name in ("prompt_tokens", "output_tokens"))
    latencies = [answer.latencies_s() for answer in good]
    samples = {name: [each[name] for each in latencies if each[name] is not None] for name in ("ttft", "tpot", "e2e")}
    samples["itl"] = [gap for answer in good for gap in answer.itl_s]
    # A server may leave the details out of an answer of which nothing was cached: where any has them, none means 0.
    cached = _total(good, "cached_tokens")
    spreads = {name: spread_ms(samples[name]) for name in SLO_NAMES}
    ttft_ms, itl_ms = spreads["ttft"], spreads["itl"]
    return {
        "num_requests": len(answers) + num_unsent,
        "num_ok": len(good),
        "num_failed": len(answers) + num_unsent - len(good),
        "errors": dict(errors.most_common()),
        "first_error": next((f"{a.error}: {a.detail}" for a in answers if a.error is not None), None),
        "num_without_usage": sum(answer.output_tokens is None for answer in good),
        "duration_s": _rounded(span_s),
        "requests_per_s": _per_s(len(good), span_s),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": _rounded(cached / prompt) if cached is not None and prompt else None,
        "output_tokens": output,
        "output_tokens_per_s": _per_s(output, span_s),
        "total_tokens_per_s": _per_s(None if prompt is None or output is None else prompt + output, span_s),
        "ttft_p50_s": None if ttft_ms is None else ttft_ms["p50"] / 1e3,
        "ttft_p99_s": None if ttft_ms is None else ttft_ms["p99"] / 1e3,
        "itl_p99_s": None if itl_ms is None else itl_ms["p99"] / 1e3,
        **{f"{name}_ms": spread for name, spread in spreads.items()},
        "lag_ms": spread_ms([answer.sent_s - answer.due_s for answer in answers]),
        "slo_ms": {name: _rounded(bound_s * 1e3) for name, bound_s in slo_s.items()} or None,
        "goodput_per_s": _per_s(sum(answer.meets(slo_s) for answer in good), span_s) if slo_s else None,
    }


def spread_ms(samples_s: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in ms; None of no samples."""
    if not samples_s:
        return None
    values = np.asarray(samples_s, dtype=np.float64) * 1e3
    at = zip(PERCENTS, np.percentile(values, PERCENTS), strict=True)
    return {"mean": _rounded(values.mean()), **{f"p{percent}": _rounded(value) for percent, value in at}}


def _total(answers: Sequence[Answer], name: str) -> int | None:
    said = [getattr(answer, name) for answer in answers]
    return None if all(each is None for each in said) else sum(each or 0 for each in said)


def _per_s(count: int | None, span_s: float) -> float | None:
    return None if count is None or span_s <= 0 else _rounded(count / span_s)


def _rounded(value: float) -> float:
    return round(float(value), 4)
