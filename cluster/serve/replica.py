"""The engine replica: a thin Serve deployment around one engine.

Callers are the ingresses of this cluster, over Ray: arguments and answers are pickled Python objects, so the
cluster's network is a trust boundary, and nothing of a client's reaches these methods but parsed, validated
values. Serve never queues or rejects here: admission is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mneme.cachetier.chunk.fingerprint import ModelFingerprint
from mneme.cachetier.config import CacheConfig
from mneme.cachetier.sessions.store import SessionLogStore
from mneme.cachetier.store import ChunkStore
from mneme.cluster.config import ClusterConfig
from mneme.cluster.logs import log_to_serve
from mneme.cluster.serve.gpus import EnginePlacement, count_machine_gpus
from mneme.cluster.serve.ray_private import keep_to_loopback, own_application, own_replica_id, report_progress
from mneme.cluster.serve.replica_server import Engine, ReplicaServer
from mneme.cluster.tenancy import tenants
from mneme.config import parse

LoadEngine = Callable[..., Engine]  # called like `mneme.replicas.engine.load.load_engine_loop`


def _own_cache(config: CacheConfig) -> CacheConfig:
    """Of the node that the replica runs on."""
    from mneme.cachetier.distributed.lifecycle import of_this_node

    return of_this_node(config)


def _open_store(session_ttl_s: float, config: CacheConfig, fingerprint: ModelFingerprint) -> ChunkStore:
    """The cache tier that this application's replicas share."""
    from mneme.cachetier.distributed.lifecycle import start_cache_tier

    return start_cache_tier(config, own_application(), session_ttl_s=session_ttl_s)


def _open_session_logs(config: CacheConfig, session_ttl_s: float) -> SessionLogStore | None:
    """Likewise."""
    from mneme.cachetier.distributed.lifecycle import start_session_logs

    return start_session_logs(config, own_application(), session_ttl_s)


class EngineReplica(ReplicaServer):
    """Loads an engine in Serve's replica process and answers for it."""

    def __init__(self, config: dict[str, Any], placement: EnginePlacement, load_engine: LoadEngine) -> None:
        log_to_serve()
        keep_to_loopback()
        cluster = parse(ClusterConfig, config)
        replica_id = own_replica_id()
        engine = load_engine(
            cluster.model,
            replace(cluster.engine, device=placement.device),
            on_progress=lambda stage, fraction: report_progress(replica_id, stage, fraction),
            tenants=tenants(cluster.http.api_keys),
            device_share=placement.gpus_per_replica or 1.0,
            machine_share=placement.gpus_per_replica / max(1, count_machine_gpus()) or 1.0,
            cache=_own_cache(cluster.cache),
            open_store=partial(_open_store, cluster.engine.session_ttl_s),
            open_session_logs=_open_session_logs,
        )
        engine.start()
        super().__init__(replica_id, engine)
        report_progress(replica_id, "ready", 1.0)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()
