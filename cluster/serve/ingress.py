"""The ingress deployment: the HTTP API in one process, with a `RayEngineClient` behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from mneme.cluster.config import ClusterConfig
from mneme.cluster.logs import log_to_serve
from mneme.cluster.serve import http_protocol
from mneme.cluster.serve.client import RayEngineClient
from mneme.cluster.serve.engine_client import EngineClient
from mneme.cluster.serve.ray_private import (
    HandleCalls,
    keep_to_loopback,
    own_replica_id,
    read_wanted,
    start_router,
)
from mneme.config import parse
from mneme.replicas.request import WARM_UP_SALT, GenerationRequest, SamplingParams
from mneme.router import replica_set

_LAST_EVENTS_S = 0.1  # what streams still say is written within that

_WARM_UP = GenerationRequest(
    request_id="warm-up",
    prompt_token_ids=(0, 1) * 32,
    sampling=SamplingParams(max_tokens=4, temperature=0, seed=0),
    salt=WARM_UP_SALT,
)

BuildApi = Callable[[EngineClient, ClusterConfig], FastAPI]


class Ingress:
    """Built by Serve in each ingress process; Serve asks it for the ASGI application."""

    def __init__(self, config: dict[str, Any], engines: DeploymentHandle[Any], build_api: BuildApi) -> None:
        log_to_serve()
        keep_to_loopback()
        http_protocol.use_everywhere()  # of the server that Serve starts next
        self._config = parse(ClusterConfig, config)
        self._build_api = build_api
        self._loop = asyncio.get_running_loop()
        self._client = RayEngineClient(
            HandleCalls(engines),
            name=own_replica_id(),
            router=self._config.router,
            warm_up=_WARM_UP,
            num_wanted=read_wanted,
            starts_from_zero=self._config.autoscale is not None and not self._config.autoscale.min,
            has_session_logs=self._config.cache.enabled and self._config.cache.disk is not None,
        )
        start_router(engines)
        replica_set.listen(engines.deployment_name, self._replicas_changed)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._build_api(self._client, self._config)

    async def end_answers(self) -> None:
        """Take no more requests, and let clients hear how their answers end."""
        await self._client.stop(self._config.http.shutdown_grace_s)
        await asyncio.sleep(_LAST_EVENTS_S)

    def _replicas_changed(self, replica_ids: frozenset[str]) -> None:
        """Called on the router's thread."""
        self._loop.call_soon_threadsafe(self._client.set_replicas, replica_ids)
