"""The page at /metrics: all replicas' statistics summed up, and the answers and latencies of this ingress.

Of several ingresses a scrape through the proxy meets one: what an ingress counts by itself has its `ingress` label.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from mneme.cluster.cache_metrics import cache_lines
from mneme.cluster.engine_client import EngineClient, ReplicaStats
from mneme.cluster.kv_asking import ask_tier
from mneme.cluster.latency import Latencies
from mneme.cluster.prometheus import Labels, family
from mneme.errors import MnemeError
from mneme.replicas.kv_queries import KvStats
from mneme.replicas.warm_prompts import PUBLIC

logger = logging.getLogger(__name__)

_NODES_TIMEOUT_S = 1.0

KNOWN_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/kv/warm",
        "/v1/kv/pins",
        "/v1/kv",
        "/v1/kv/lookup",
        "/v1/kv/pin",
        "/v1/kv/unpin",
        "/v1/kv/stats",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
    }
)


class _Family(NamedTuple):
    name: str
    kind: Literal["counter", "gauge"]
    description: str
    key: str  # of the replica's statistics
    parts: tuple[str, ...] = ()  # keys below, one sample each
    label: str = ""  # that tells the parts apart; without one there is one part


_STATES = ("free", "cached", "in_use", "total")
_SUMS = (
    _Family(
        "mneme_pages",
        "gauge",
        "KV pages; pinned ones are in use too, reclaimable ones cached.",
        "pages",
        (*_STATES, "pinned", "reclaimable"),
        "state",
    ),
    _Family("mneme_host_pages", "gauge", "Pages of the host tier.", "host_pages", _STATES, "state"),
    _Family(
        "mneme_moved_pages_total",
        "counter",
        "KV pages saved to the host, loaded from it, dropped from the last tier.",
        "moved_pages",
        ("saved", "loaded", "dropped"),
        "move",
    ),
    _Family("mneme_requests", "gauge", "Requests in engines.", "requests", ("running", "waiting"), "state"),
    _Family("mneme_waiting_tokens", "gauge", "Prompt tokens of waiting requests.", "waiting_tokens"),
    _Family(
        "mneme_refused_requests_total",
        "counter",
        "Requests that engines answered 429, by what was full.",
        "refused",
        ("requests", "tokens", "session"),
        "reason",
    ),
    _Family("mneme_missed_deadlines_total", "counter", "Requests whose deadline passed.", "missed_deadlines"),
    _Family("mneme_prompt_tokens_total", "counter", "Tokens of admitted prompts.", "tokens", ("prompt",)),
    _Family("mneme_cached_tokens_total", "counter", "Prompt tokens not computed.", "tokens", ("cached",)),
    _Family("mneme_host_tokens_total", "counter", "Cached tokens that came from the host.", "tokens", ("host",)),
    _Family("mneme_dropped_tokens_total", "counter", "Tokens computed again.", "tokens", ("dropped",)),
    _Family("mneme_truncated_tokens_total", "counter", "Prompt tokens dropped to fit.", "tokens", ("truncated",)),
    _Family("mneme_generated_tokens_total", "counter", "Output tokens.", "tokens", ("generated",)),
    _Family(
        "mneme_finished_requests_total",
        "counter",
        "Ended requests; an abort is one whose client left.",
        "finished",
        ("stop", "length", "abort", "error"),
        "reason",
    ),
    _Family("mneme_engine_steps_total", "counter", "Engine steps.", "steps"),
    _Family("mneme_sessions", "gauge", "Sessions whose token log is kept.", "sessions"),
    _Family(
        "mneme_shared_segments",
        "gauge",
        "Segments that two or more sequences read at once.",
        "shared_segments",
    ),
)


class MetricsPage:
    """As old as `EngineClient.stats()`, at most 1 s."""

    def __init__(self, client: EngineClient, ingress: str) -> None:
        self._client = client
        self._labels: Labels = (("ingress", ingress),)
        self.latencies = Latencies(self._labels)
        self._responses: Counter[Labels] = Counter()

    def count_response(self, path: str, status: int) -> None:
        label = path if path in KNOWN_PATHS else "other"
        self._responses[(*self._labels, ("path", label), ("status", str(status)))] += 1

    async def render(self) -> str:
        stats = await self._client.stats()
        engines = [each.metrics["cache"] for each in stats if isinstance(each.metrics.get("cache"), dict)]
        nodes = await self._cache_nodes() if engines else []
        return "\n".join(self._lines(stats) + cache_lines(nodes, engines)) + "\n"

    async def _cache_nodes(self) -> list[dict[str, Any]]:
        """What the nodes of the cache tier say, if they say it soon."""
        try:
            async with asyncio.timeout(_NODES_TIMEOUT_S):
                figures = await ask_tier(self._client, KvStats(PUBLIC.salt, in_tier=True))
        except (TimeoutError, MnemeError) as error:
            logger.warning("the cache tier did not say its figures: %s", type(error).__name__)
            return []
        return [] if figures is None else list(figures["nodes"])

    def _lines(self, stats: Sequence[ReplicaStats]) -> list[str]:
        lines = family("mneme_ready", "Whether every model has a replica.", "gauge", {(): self._client.is_ready()})
        lines += family("mneme_replicas", "Replicas that answered.", "gauge", {(): len(stats)})
        for spec in _SUMS:
            lines += family(spec.name, spec.description, spec.kind, _summed(spec, [s.metrics for s in stats]))
        rss: dict[Labels, float] = {(("replica", s.replica_id),): _number(s.metrics.get("rss_bytes")) for s in stats}
        lines += family("mneme_resident_memory_bytes", "Resident memory per replica.", "gauge", rss)
        lines += family("mneme_http_responses_total", "Answers of this ingress.", "counter", self._responses)
        return lines + self.latencies.lines()


def _summed(spec: _Family, metrics: Iterable[dict[str, Any]]) -> dict[Labels, float]:
    values = [replica.get(spec.key) for replica in metrics]
    if not spec.parts:
        return {(): sum(map(_number, values))}
    tables = [value for value in values if isinstance(value, dict)]
    return {
        (((spec.label, part),) if spec.label else ()): sum(_number(table.get(part)) for table in tables)
        for part in spec.parts
    }


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0
