"""The page at /metrics: all replicas' statistics summed up, and the answers and latencies of this ingress.

Of several ingresses a scrape through the proxy meets one: what an ingress counts by itself has its `ingress` label.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mneme.cachetier.session_log_store import Appended
from mneme.cluster.cache_metrics import cache_lines
from mneme.cluster.engine_client import EngineClient, ReplicaStats
from mneme.cluster.kv_asking import ask_tier
from mneme.cluster.latency import Latencies
from mneme.cluster.metric_families import Family, alone, by, number_at, summed_lines
from mneme.cluster.prometheus import Labels, family
from mneme.errors import MnemeError
from mneme.replicas.kv_queries import KvStats

logger = logging.getLogger(__name__)

_NODES_TIMEOUT_S = 2.0  # more than the tier's administrator gives a node

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


_NOT_APPENDED = ("deleted", "dropped", "raised", "lost")  # of session logs' records
_STATES = ("free", "cached", "in_use", "total")
_SUMS = (
    Family(
        "mneme_pages",
        "gauge",
        "KV pages; pinned ones are in use too, reclaimable ones cached.",
        by("state", ("pages",), (*_STATES, "pinned", "reclaimable")),
    ),
    Family("mneme_host_pages", "gauge", "Pages of the host tier.", by("state", ("host_pages",), _STATES)),
    Family(
        "mneme_moved_pages_total",
        "counter",
        "KV pages saved to the host, loaded from it, dropped from the last tier.",
        by("move", ("moved_pages",), ("saved", "loaded", "dropped")),
    ),
    Family("mneme_requests", "gauge", "Requests in engines.", by("state", ("requests",), ("running", "waiting"))),
    Family("mneme_waiting_tokens", "gauge", "Prompt tokens of waiting requests.", alone("waiting_tokens")),
    Family(
        "mneme_refused_requests_total",
        "counter",
        "Requests that engines answered 429, by what was full.",
        by("reason", ("refused",), ("requests", "tokens", "session")),
    ),
    Family("mneme_missed_deadlines_total", "counter", "Requests whose deadline passed.", alone("missed_deadlines")),
    Family("mneme_prompt_tokens_total", "counter", "Tokens of admitted prompts.", alone("tokens", "prompt")),
    Family("mneme_cached_tokens_total", "counter", "Prompt tokens not computed.", alone("tokens", "cached")),
    Family("mneme_host_tokens_total", "counter", "Cached tokens that came from the host.", alone("tokens", "host")),
    Family("mneme_dropped_tokens_total", "counter", "Tokens computed again.", alone("tokens", "dropped")),
    Family("mneme_truncated_tokens_total", "counter", "Prompt tokens dropped to fit.", alone("tokens", "truncated")),
    Family("mneme_generated_tokens_total", "counter", "Output tokens.", alone("tokens", "generated")),
    Family(
        "mneme_finished_requests_total",
        "counter",
        "Ended requests; an abort is one whose client left.",
        by("reason", ("finished",), ("stop", "length", "abort", "error")),
    ),
    Family("mneme_engine_steps_total", "counter", "Engine steps.", alone("steps")),
    Family("mneme_sessions", "gauge", "Sessions whose token log is kept.", alone("sessions")),
    Family(
        "mneme_session_log_records_total",
        "counter",
        "What engines wrote to sessions' logs, by what became of it.",
        by("outcome", ("session_logs", "write"), (*(each.value for each in Appended), *_NOT_APPENDED)),
    ),
    Family(
        "mneme_session_log_waiting_records",
        "gauge",
        "What is still to be written to sessions' logs.",
        alone("session_logs", "write", "waiting"),
    ),
    Family(
        "mneme_session_log_failing_sessions",
        "gauge",
        "Sessions whose last record could not be written and is tried again.",
        alone("session_logs", "write", "later"),
    ),
    Family(
        "mneme_session_log_reads_total",
        "counter",
        "Sessions that engines took from their logs, and those that they could not.",
        by("outcome", ("session_logs", "read"), ("restored", "unusable", "failed")),
    ),
    Family(
        "mneme_shared_segments",
        "gauge",
        "Segments that two or more sequences read at once.",
        alone("shared_segments"),
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
                figures = await ask_tier(self._client, KvStats(None, in_tier=True))
        except (TimeoutError, MnemeError) as error:
            logger.warning("the cache tier did not say its figures: %s", type(error).__name__)
            return []
        return [] if figures is None else list(figures["nodes"])

    def _lines(self, stats: Sequence[ReplicaStats]) -> list[str]:
        lines = family("mneme_ready", "Whether every model has a replica.", "gauge", {(): self._client.is_ready()})
        lines += family("mneme_replicas", "Replicas that answered.", "gauge", {(): len(stats)})
        lines += summed_lines(_SUMS, [s.metrics for s in stats])
        rss: dict[Labels, float] = {(("replica", s.replica_id),): number_at(s.metrics, ("rss_bytes",)) for s in stats}
        lines += family("mneme_resident_memory_bytes", "Resident memory per replica.", "gauge", rss)
        lines += family("mneme_http_responses_total", "Answers of this ingress.", "counter", self._responses)
        return lines + self.latencies.lines()
