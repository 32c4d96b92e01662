"""The page at /metrics: what each replica says, and the answers and latencies of this ingress.

Every replica has series of its own, which whoever reads them adds up. A sum made here would fall when a replica is
late, stops or is replaced, and Prometheus takes each fall of a counter for a restart from 0.
Of several ingresses a scrape through the proxy meets one: what an ingress counts by itself has its `ingress` label.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from mneme.cluster.metrics.families import (
    CACHE_ENGINES,
    CACHE_NODES,
    ENGINES,
    GPUS,
    ROUTING,
    STARTS,
    VLLM,
    Labels,
    metric,
    number_at,
    summed,
)
from mneme.cluster.metrics.latency import Latencies
from mneme.cluster.serve.engine_client import STATES, EngineClient, ask_tier
from mneme.errors import MnemeError
from mneme.replicas.queries import GetKvStats
from mneme.version import __version__, revision

logger = logging.getLogger(__name__)

SOURCES = ("device", "host", "disk", "peer", "recomputed", "dropped")  # of a prompt's KV
_WANTED_TIMEOUT_S = 1.0
_NODES_TIMEOUT_S = 2.0  # more than the tier's administrator gives a node


class MetricsPage:
    """Renders the page; its figures are as old as `EngineClient.stats()`, at most 1 s."""

    def __init__(self, clients: Mapping[str, EngineClient], ingress: str) -> None:
        """`clients`: each model's; its name is the label `model_name` of latencies and of vLLM's families."""
        self._clients = clients
        self.ingress = ingress
        self._labels: Labels = (("ingress", ingress),)
        self.latencies = Latencies(ingress)
        self._responses: Counter[Labels] = Counter()
        self._tenant_requests: Counter[Labels] = Counter()
        self._tenant_prompts: Counter[Labels] = Counter()
        self._tenant_generated: Counter[Labels] = Counter()
        self.known_paths: frozenset[str] = frozenset()  # labels of answers; the rest is "other"

    def count_answer(self, line: Mapping[str, Any]) -> None:
        """Count a request by what `cluster.logs.log_request` says of it."""
        if line["status"] is not None:
            path = line["path"].rstrip("/") or "/"
            label = path if path in self.known_paths else "other"
            self._responses[(*self._labels, ("path", label), ("status", str(line["status"])))] += 1
        if line["tenant"] is None:  # nobody was let in
            return
        labels = (*self._labels, ("tenant", line["tenant"]))
        if "kv_details" in line:
            self._tenant_requests[(*labels, ("outcome", line["outcome"]))] += 1
            self._tenant_generated[labels] += line["completion_tokens"]
            for source in SOURCES:
                self._tenant_prompts[(*labels, ("source", source))] += line["kv_details"][source]

    async def render(self, *, with_tenants: bool = False) -> bytes:
        """Write the page in Prometheus' text format, `CONTENT_TYPE_PLAIN_0_0_4`; tenants' figures are admins' alone."""
        answers = await asyncio.gather(*(client.stats() for client in self._clients.values()))
        stats = dict(zip(self._clients, answers, strict=True))
        engines = [
            {**each["cache"], "replica": name, "age_s": each.get("age_s", 0)}
            for replicas in answers
            for name, each in replicas.items()
            if isinstance(each.get("cache"), dict)
        ]
        nodes = await self._cache_nodes() if engines else []
        wanted = await self._num_wanted()
        found = await asyncio.gather(*(client.condition() for client in self._clients.values()))
        states: dict[Labels, float] = {
            (("model_name", model), ("state", state)): state == each.state
            for model, each in zip(self._clients, found, strict=True)
            for state in STATES
        }
        state = metric("mneme_state", "1 for the state that a model is in.", states)
        of_tenants = self._of_tenants() if with_tenants else ()
        metrics = [state, *self._metrics(stats, wanted), *of_tenants, *cache_metrics(nodes, engines)]
        return generate_latest(_Found(metrics))

    async def _num_wanted(self) -> int | None:
        """Ask in threads how many replicas there should be; None if that takes long, or is not known of a model."""
        asked = (asyncio.to_thread(client.num_wanted) for client in self._clients.values())
        try:
            async with asyncio.timeout(_WANTED_TIMEOUT_S):
                known = [each for each in await asyncio.gather(*asked) if each is not None]
            return sum(known) if len(known) == len(self._clients) else None
        except Exception as error:  # where it stands may be down
            logger.warning("the wanted number of replicas is not known: %s", type(error).__name__)
            return None

    async def _cache_nodes(self) -> list[dict[str, Any]]:
        """Ask the cache tier for its nodes' figures; none if it does not answer soon."""
        try:
            async with asyncio.timeout(_NODES_TIMEOUT_S):
                figures = await ask_tier(next(iter(self._clients.values())), GetKvStats(None))
        except (TimeoutError, MnemeError) as error:
            logger.warning("the cache tier did not say its figures: %s", type(error).__name__)
            return []
        return [] if figures is None else list(figures["nodes"])

    def _metrics(self, stats: Mapping[str, Mapping[str, Mapping[str, Any]]], wanted: int | None) -> Iterator[Metric]:
        """`stats`: of each model's replicas."""
        engines = [
            {**each, "replica": name, "engine": name, "model_name": model}
            for model, replicas in stats.items()
            for name, each in replicas.items()
        ]
        build: dict[Labels, float] = {(("version", __version__), ("revision", revision())): 1.0}
        yield metric("mneme_build_info", "The version that runs, and the commit that it was built from.", build)
        num_ready = [client.num_ready() for client in self._clients.values()]
        yield metric("mneme_ready", "Whether every model has a replica.", {(): all(num_ready)})
        replicas: dict[Labels, float] = {(("state", "ready"),): sum(num_ready)}
        replicas |= {} if wanted is None else {(("state", "wanted"),): wanted}
        yield metric("mneme_replicas", "Replicas that requests may go to, and those that there should be.", replicas)
        yield from summed(ENGINES, engines, by=("replica",))
        for name, description, unit in STARTS:
            took: dict[Labels, float] = {
                (("replica", each["replica"]), ("phase", phase)): number_at(figures, (unit,))
                for each in engines
                for phase, figures in each.get("start", {}).items()
            }
            yield metric(name, description, took)
        yield metric("mneme_http_responses_total", "Answers of this ingress.", self._responses)
        said = [{**each["gpu"], "age_s": each.get("age_s", 0)} for each in engines if each.get("gpu")]
        gpus = {gpu["gpu"]: gpu for gpu in said}  # replicas may share one
        yield from summed(GPUS if gpus else (), list(gpus.values()), by=("gpu",))
        unhealthy: dict[Labels, float] = {(("gpu", name),): gpu["problem"] is not None for name, gpu in gpus.items()}
        yield metric("mneme_gpu_unhealthy", "Whether a GPU cannot be trusted any more.", unhealthy)
        yield from summed(ROUTING, [client.routing() for client in self._clients.values()], self._labels)
        yield from summed(VLLM, engines, by=("model_name", "engine"))
        usage: dict[Labels, float] = {
            (("model_name", each["model_name"]), ("engine", each["engine"])): _kv_usage(each) for each in engines
        }
        yield metric("vllm:kv_cache_usage_perc", "Share of pages in use; 1 is all.", usage)
        yield from self.latencies.collect()

    def _of_tenants(self) -> Iterator[Metric]:
        text = "Requests of API keys that were let in, by how they ended (a finish reason, or an error's code)."
        yield metric("mneme_tenant_requests_total", text, self._tenant_requests)
        text = "Tokens of prompts of an API key's requests, by where their KV came from."
        yield metric("mneme_tenant_prompt_tokens_total", text, self._tenant_prompts)
        yield metric(
            "mneme_tenant_generated_tokens_total", "Tokens of answers to an API key's requests.", self._tenant_generated
        )


def _kv_usage(engine: Mapping[str, Any]) -> float:
    return number_at(engine, ("pages", "in_use")) / max(number_at(engine, ("pages", "total")), 1)


def cache_metrics(nodes: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """`nodes`: what `CacheAdmin.stats` says; `engines`: what each engine's statistics have under "cache", and whose."""
    if not nodes and not engines:
        return
    yield metric("mneme_cache_nodes", "Nodes of the cache tier that answered.", {(): len(nodes)})
    num_without = sum(bool(node.get("disk_problem")) for node in nodes)
    text = "Nodes that go without the disk they should have; /v1/kv/stats says why."
    yield metric("mneme_cache_nodes_without_disk", text, {(): num_without})
    yield from summed(CACHE_NODES if nodes else (), nodes, by=("node",))
    yield from summed(CACHE_ENGINES, engines, by=("replica",))
    written = sum(number_at(node, ("disk", "written_bytes")) for node in nodes)
    lasting = written - sum(number_at(node, ("disk", "superseded_bytes")) for node in nodes)
    if lasting > 0:
        text = "Bytes of files for each byte that no longer tail has replaced."
        yield metric("mneme_cache_write_amplification_ratio", text, {(): written / lasting})


class _Found(Collector):
    """Hands one page's families to the client library, which collects without waiting."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
