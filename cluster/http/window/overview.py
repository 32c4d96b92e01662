"""GET /v1/sessions, /v1/requests, /v1/kv/tree, /v1/kv/tiers, /v1/cluster, and /v1/events as server-sent events.

A caller sees what its own API key has, and sums of the rest; admins may ask for everybody's forest, without text.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mneme.cluster.http.api_state import ApiState, Service
from mneme.cluster.http.sessions import session_name, session_object
from mneme.cluster.http.window.requests import Listener
from mneme.cluster.metrics.exposition import SOURCES
from mneme.cluster.metrics.families import FAULTS, summed
from mneme.cluster.serve.engine_client import ask_tier, newest
from mneme.cluster.tenancy import kv_salt
from mneme.cluster.wire.overview import (
    Cluster,
    Event,
    KvMoves,
    KvTiers,
    KvTree,
    ModelState,
    ReplicaTree,
    RequestList,
    SessionList,
    ShownReplica,
    TierOccupancy,
)
from mneme.errors import InvalidRequest, MnemeError, PermissionDenied, ReplicaUnavailable
from mneme.replicas import queries
from mneme.replicas.request import SessionKey

R = TypeVar("R")

_PAUSE_S, _IDLE_PAUSES = 1.0, 15  # between two looks at the figures, while somebody listens
# How long a stream of events goes on: an ingress that is replaced waits for what it has open, for `ingress.drain_s`.
_MAX_EVENTS_S = 300.0


async def list_sessions(service: Service, request: Request) -> SessionList:
    """Return the sessions that were used last, and where their KV is on their replica."""
    limit = number_of(request, "limit", 20, 1, 100)
    question = queries.ListSessions(kv_salt(request.state.tenant, None), limit)
    known: dict[tuple[str, SessionKey], dict[str, queries.KnownSession | None]] = {}
    for api, replica_id, sessions in await _asked(service, question):
        for each in sessions:
            known.setdefault((api.model.id, each["key"]), {})[replica_id] = each
    found = [(key, where) for (_, key), answers in known.items() if (where := newest(answers)) is not None]
    found.sort(key=lambda each: each[1][1]["idle_s"])
    return {"object": "list", "data": [session_object(session_name(key[1]), *where) for key, where in found[:limit]]}


async def list_requests(service: Service, request: Request) -> RequestList:
    """Return the caller's last requests that ended at this ingress: tokens by source, times, replicas."""
    count = number_of(request, "last", 50, 1, 1_000)
    return {
        "object": "list",
        "ingress": service.metrics.ingress,
        "data": service.requests.last(request.state.tenant, count),
    }


async def kv_tree(service: Service, request: Request) -> KvTree:
    """Return the prefix forest of each replica as runs of pages: who uses them, where their KV is, how they begin."""
    depth = number_of(request, "depth", 12, 1, 1_000)
    min_tokens = number_of(request, "min_tokens", 0, 0, 10**9)
    max_runs = number_of(request, "max_runs", 500, 1, 10_000)
    is_of_all = request.query_params.get("all", "") in ("1", "true")
    if is_of_all and not request.state.is_admin:
        raise PermissionDenied
    salt = None if is_of_all else kv_salt(request.state.tenant, None)
    question = queries.GetTree(salt, depth, min_tokens, max_runs)
    replicas = [await _with_texts(*each) for each in await _asked(service, question)]
    return {"object": "kv.tree", "replicas": replicas}


async def _asked(service: Service, question: queries.Query[R]) -> list[tuple[ApiState, str, R]]:
    """Ask all replicas that there are: those that start or are late are left out, unless none answers."""
    asked = [(api, replica_id) for api in service.apis for replica_id in sorted(api.client.replica_ids())]
    queried = (api.client.query(question, replica_id=replica_id) for api, replica_id in asked)
    found = await asyncio.gather(*queried, return_exceptions=True)
    failures = [each for each in found if isinstance(each, BaseException)]
    others = [each for each in failures if not isinstance(each, ReplicaUnavailable)]
    if others or (failures and len(failures) == len(found)):
        raise (others or failures)[0]
    pairs = zip(asked, found, strict=True)
    return [(*place, each[place[1]]) for place, each in pairs if not isinstance(each, BaseException)]


async def _with_texts(api: ApiState, replica_id: str, tree: queries.Tree) -> ReplicaTree:
    def decode() -> list[str]:
        return [api.tokenizer.decode(run["first_ids"], skip_special_tokens=False) for run in tree["runs"]]

    size = sum(len(run["first_ids"]) for run in tree["runs"])
    texts = await api.off_loop(size, decode) if size else []
    return {"replica": replica_id, "texts": texts, **tree}


async def kv_tiers(service: Service, request: Request) -> KvTiers:
    """Return what is in each tier, what went from one to another, and where the KV of prompts came from.

    `since`, in seconds since 1970: from when on saved prefill is counted; a day at most.
    """
    since_s = number_of(request, "since", 0, 0, 10**11)
    tiers: list[TierOccupancy] = []
    sources, moved = Counter[str](), Counter[str]()
    for replica_id, figures in sorted((await service.stats()).items()):
        pages = figures.get("pages", {})
        page_tokens = figures.get("kv_tokens", 0) // max(pages.get("total", 0), 1)
        token_bytes = sum(figures.get("kv_bytes", {}).values()) / max(figures.get("kv_tokens", 0), 1)
        for tier, key in (("device", "pages"), ("host", "host_pages")):
            held = figures.get(key, {})
            if held.get("total"):
                tiers.append(_of_replica(replica_id, tier, held, page_tokens, token_bytes))
        tokens = {name: figures.get("tokens", {}).get(name, 0) for name in SOURCES}
        sources.update(tokens)
        saved_tokens = figures.get("moved_pages", {}).get("saved", 0) * page_tokens
        saved_bytes = (figures.get("cache") or {}).get("chunks", {}).get("bytes", 0)
        moved["device_to_host"] += round(saved_tokens * token_bytes) + saved_bytes
        moved["host_to_device"] += round((tokens["host"] + tokens["disk"] + tokens["peer"]) * token_bytes)
        moved["disk_to_host"] += round(tokens["disk"] * token_bytes)
        moved["peers_to_host"] += round(tokens["peer"] * token_bytes)
    for node in await _nodes(service):
        for tier, key in (("node memory", "host"), ("node disk", "disk")):
            if (held := node.get(key)) is not None:
                tiers.append(_of_node(node["node"], tier, held))
        moved["host_to_disk"] += (node.get("disk") or {}).get("written_bytes", 0)
    return {
        "object": "kv.tiers",
        "tiers": tiers,
        "moved_bytes": cast(KvMoves, {name: moved[name] for name in KvMoves.__annotations__}),
        "prompt_tokens": dict(sources),
        "saved": service.requests.saved(since_s),
    }


def _of_replica(
    replica_id: str, tier: Any, held: Mapping[str, int], page_tokens: int, token_bytes: float
) -> TierOccupancy:
    in_use, cached, total = (held.get(name, 0) * page_tokens for name in ("in_use", "cached", "total"))
    held_tokens = {"in_use": in_use, "cached": cached, "total": total, "token_bytes": token_bytes}
    return cast(TierOccupancy, {"replica": replica_id, "tier": tier, "unit": "tokens", **held_tokens})


def _of_node(node: str, tier: Any, held: Mapping[str, Any]) -> TierOccupancy:
    total = held.get("capacity_bytes")
    return {"node": node, "tier": tier, "unit": "bytes", "in_use": 0, "cached": held.get("bytes", 0), "total": total}


async def cluster(service: Service, request: Request) -> Cluster:
    """Return models, replicas and nodes: their states, loads and counters."""
    conditions = await service.conditions()
    models: list[ModelState] = [
        {
            "model": api.model.id,
            "state": conditions[api.model.id].state,
            "reason": conditions[api.model.id].reason,
            "ready": api.client.num_ready(),
            "wanted": api.client.num_wanted(),
        }
        for api in service.apis
    ]
    replicas = [
        _shown_replica(api.model.id, replica_id, figures)
        for api in service.apis
        for replica_id, figures in sorted((await api.client.stats()).items())
    ]
    of_tier = await _nodes(service) if request.state.is_admin else []  # their folders' problems, their processes
    nodes = [{key: value for key, value in node.items() if key != "owners"} for node in of_tier]
    return {
        "object": "cluster",
        "ingress": service.metrics.ingress,
        "models": models,
        "replicas": replicas,
        "nodes": nodes,
    }


def _shown_replica(model: str, replica_id: str, figures: Mapping[str, Any]) -> ShownReplica:
    pages, tokens, requests = (figures.get(name, {}) for name in ("pages", "tokens", "requests"))
    backlog_s = figures.get("load", {}).get("backlog_s")
    return {
        "replica": replica_id,
        "model": model,
        "device": figures.get("device"),
        "age_s": figures.get("age_s", 0.0),
        "running": requests.get("running", 0),
        "waiting": requests.get("waiting", 0),
        "backlog_s": backlog_s if backlog_s is not None and math.isfinite(backlog_s) else None,
        "kv_usage": pages.get("in_use", 0) / max(pages.get("total", 0), 1),
        "prompt_tokens": tokens.get("prompt", 0),
        "cached_tokens": tokens.get("cached", 0),
        "generated_tokens": tokens.get("generated", 0),
    }


async def _nodes(service: Service) -> list[dict[str, Any]]:
    """Return the cache tier's nodes; none where there is no tier, or no replica that could be asked."""
    try:
        found = await ask_tier(service.apis[0].client, queries.GetKvStats(None))
    except MnemeError:
        return []
    return [] if found is None else found["nodes"]


async def events(service: Service, request: Request) -> Response:
    """Tell, as server-sent events, of the caller's requests that end, of replicas' states, and of KV that moves."""
    return _EventStream(service, request.state.tenant, Figures(service, request.state.is_admin).changes)


class _EventStream(StreamingResponse):
    """Takes its place among the listeners before its status line, and leaves it with its client."""

    def __init__(self, service: Service, tenant: str, poll: Callable[[], Awaitable[list[Event]]]) -> None:
        super().__init__(iter(()), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._service, self._tenant, self._poll = service, tenant, poll

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.requests.listening(self._tenant) as listener:
            self.body_iterator = self._lines(listener)
            await super().__call__(scope, receive, send)

    async def _lines(self, listener: Listener) -> AsyncIterator[str]:
        clock = asyncio.get_running_loop().time
        end_s, num_idle = clock() + _MAX_EVENTS_S, 0
        for event in await self._poll():
            yield _line(event)
        async for news in self._service.requests.events(listener, self._poll, _PAUSE_S):
            num_idle = num_idle + 1 if news is None else 0
            if news is not None:
                yield _line(news)
            elif num_idle % _IDLE_PAUSES == 0:
                yield ": nothing happened\n\n"  # proxies end what is silent
            if clock() >= end_s:
                return


def _line(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


class Figures:
    """Finds what changed between two looks at the figures of all replicas."""

    def __init__(self, service: Service, has_sums: bool) -> None:
        self._service, self._has_sums = service, has_sums
        self._states: dict[str, dict[str, Any]] = {}
        self._replicas: dict[str, set[str]] = {}
        self._counts: dict[str, tuple[Counter[str], Counter[str]]] = {}  # by replica: what moved, and faults

    async def changes(self) -> list[Event]:
        at, found = self._service.requests.clock(), list[Event]()
        for api in self._service.apis:
            condition = await api.client.condition()
            state = {"state": condition.state, "reason": condition.reason, "ready": api.client.num_ready()}
            if self._states.get(api.model.id) != state:
                self._states[api.model.id] = state
                found.append({"type": "replica.state", "at": at, "data": {"model": api.model.id, **state}})
            found += self._moves(api, at)
        if self._has_sums:
            moved, failed = Counter[str](), Counter[str]()
            for replica_id, figures in (await self._service.stats()).items():
                counts = _moved(figures), _faults(figures)
                # A new one has nothing to compare with; one that was silent goes on where it was.
                before = self._counts.get(replica_id, counts)
                moved += counts[0] - before[0]
                failed += counts[1] - before[1]
                self._counts[replica_id] = counts
            if moved:
                found.append({"type": "kv.moved", "at": at, "data": dict(moved)})
            if failed:
                found.append({"type": "fault", "at": at, "data": dict(failed)})
        return found

    def _moves(self, api: ApiState, at: float) -> Iterator[Event]:
        """Tell which replicas came and went."""
        now, before = set(api.client.replica_ids()), self._replicas.get(api.model.id)
        self._replicas[api.model.id] = now
        for name in sorted(now ^ before) if before is not None else ():
            about = {"model": api.model.id, "replica": name}
            yield {"type": "replica.came" if name in now else "replica.left", "at": at, "data": about}


def _moved(figures: Mapping[str, Any]) -> Counter[str]:
    found = Counter({f"pages_{name}": count for name, count in figures.get("moved_pages", {}).items()})
    found.update({f"tokens_{name}": figures.get("tokens", {}).get(name, 0) for name in SOURCES})
    return found


def _faults(figures: Mapping[str, Any]) -> Counter[str]:
    """Count what went wrong, by the labels of its metric."""
    found = Counter[str]()
    for metric in summed(FAULTS, [{**figures, **(figures.get("cache") or {})}]):
        for sample in metric.samples:
            found[" ".join(sample.labels.values()) or "graph capture"] += int(sample.value)
    return found


def number_of(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a whole number of the query; raises `InvalidRequest`."""
    given = request.query_params.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdecimal() and len(given) <= 12
    if not is_number or not least <= int(given) <= most:
        raise InvalidRequest(name, given, f"must be from {least} to {most}")
    return int(given)
