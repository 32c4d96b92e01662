"""The Serve application: ingress replicas in front of each model's engine replicas.

`mneme.cluster.app:build` builds it for a RayService's serveConfigV2; `args` is the `ClusterConfig` mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette

from mneme.cluster.backends import load_backend
from mneme.cluster.config import ClusterConfig, from_mapping
from mneme.cluster.serve.autoscaling import serve_options
from mneme.cluster.serve.engine_client import EngineClient
from mneme.cluster.serve.gpus import EnginePlacement, place_models
from mneme.cluster.serve.ingress import BuildApi, Ingress
from mneme.cluster.serve.ray_private import own_replica_id
from mneme.cluster.serve.replica import BuildEngine, EngineReplica

ENGINE_DEPLOYMENT = "engine"
INGRESS_DEPLOYMENT = "ingress"

# Admission is the engine's, and each token stream counts as one ongoing request: Serve must never be the
# limit.
_MAX_ONGOING = 100_000
# Behind `drain_grace_s`: for what is being saved, session logs, and the engine's end.
_END_S = 20.0
_SURGE_PERCENT = 25  # of the replicas, at least one, are started beside those that they replace

_ENCODINGS = {"text": "TEXT", "json": "JSON"}


def build(args: dict[str, Any]) -> Application:
    """The application of a RayService; raises `ConfigError` for a bad mapping."""
    config = from_mapping(args)
    num_gpus = int(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0
    return build_application(config, place_models(config, num_gpus, may_grow=True))


def build_application(
    config: ClusterConfig,
    placements: Sequence[EnginePlacement],
    *,
    build_engine: BuildEngine | None = None,
    build_api: BuildApi | None = None,
) -> Application:
    """Bind the ingress and a deployment for each model; the two functions run in the replicas' processes.

    placements  of each model; tests give functions of their own
    """
    each = list(zip(config.each_model(), placements, strict=True))
    engines = [_engines(i, *model, build_engine or _build_engine) for i, model in enumerate(each)]
    ingress = serve.deployment(
        name=INGRESS_DEPLOYMENT,
        num_replicas=config.ingress.replicas,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=config.ingress.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        max_surge_percent=0 if config.ingress.cpus else _SURGE_PERCENT,
        ray_actor_options={"num_cpus": config.ingress.cpus},
        logging_config=_logging(config),
    )(serve.ingress()(Ingress))
    wanted = [placement.replicas if model.autoscale is None else None for model, placement in each]
    return ingress.bind(config.as_mapping(), engines, wanted, build_api or _build_api)


def _engines(index: int, config: ClusterConfig, placement: EnginePlacement, build_engine: BuildEngine) -> Application:
    """Bind a model's replicas; `config` is of this model alone."""
    name = f"{ENGINE_DEPLOYMENT}-{index + 1}" if index else ENGINE_DEPLOYMENT
    return serve.deployment(
        name=name,
        **_number(config, placement, name),
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=config.drain_grace_s + _END_S,
        graceful_shutdown_wait_loop_s=0.1,
        # Three checks in vain, and it is replaced: an engine that hangs fails the third after `HUNG_S`.
        health_check_period_s=10.0,
        health_check_timeout_s=30.0,
        # Where a replica reserves nothing there is room for its successor beside it; else the old one goes first.
        max_surge_percent=0 if placement.gpus_per_replica or config.cpus_per_replica else _SURGE_PERCENT,
        request_router_config=RequestRouterConfig(request_router_class="mneme.router.serve_router.MnemeRequestRouter"),
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": placement.gpus_per_replica},
        logging_config=_logging(config),
    )(EngineReplica).bind(_of_engines(config), placement.device, placement.gpus_per_replica, build_engine)


def _logging(config: ClusterConfig) -> dict[str, Any]:
    """Serve's own access log would note every call on a replica."""
    return {"enable_access_log": False, "encoding": _ENCODINGS[config.log_format]}


def _of_engines(config: ClusterConfig) -> dict[str, Any]:
    """What engines are loaded with: where this changes Serve starts them anew, and not for a number or an API key."""
    return {name: value for name, value in config.as_mapping().items() if name in EngineReplica.READS}


def _number(config: ClusterConfig, placement: EnginePlacement, deployment: str) -> dict[str, Any]:
    if config.autoscale is None:
        return {"num_replicas": placement.replicas}
    return {"autoscaling_config": serve_options(config.autoscale, deployment)}


def _build_engine(*args: Any, **kwargs: Any) -> Any:
    from mneme.replicas.engine.build import build_engine_loop

    return build_engine_loop(*args, **kwargs)


def _build_api(clients: Sequence[EngineClient], config: ClusterConfig) -> Starlette:
    from mneme.cluster.http.api import build_api

    backends = list(map(load_backend, clients, config.each_model()))
    return build_api(backends, config.http, ingress=own_replica_id())
