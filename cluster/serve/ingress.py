"""The ingress deployment: the HTTP API in one process, with a `RayEngineClient` behind it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from mneme.cluster.config import ClusterConfig
from mneme.cluster.logs import log_to_serve
from mneme.cluster.serve import http_protocol
from mneme.cluster.serve.engine_client import EngineClient
from mneme.cluster.serve.ray_client import RayEngineClient
from mneme.cluster.serve.ray_private import (
    HandleCalls,
    at_stop,
    keep_to_loopback,
    own_application,
    own_replica_id,
    read_condition,
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

BuildApi = Callable[[Sequence[EngineClient], ClusterConfig], Starlette]  # a client for each model


class Ingress:
    """Built by Serve in each ingress process; Serve asks it for the ASGI application."""

    def __init__(
        self,
        config: dict[str, Any],
        engines: Sequence[DeploymentHandle[Any]],
        wanted: Sequence[int | None],
        build_api: BuildApi,
    ) -> None:
        """`engines`: each model's; `wanted`: how many there should be, None: as the autoscaler says."""
        log_to_serve()
        keep_to_loopback()
        http_protocol.use_everywhere()  # of the server that Serve starts next
        self._config = parse(ClusterConfig, config)
        self._build_api = build_api
        self._api: Starlette | None = None
        at_stop(self._end_events)
        self._clients = [_client(*model) for model in zip(self._config.each_model(), engines, wanted, strict=True)]

    def __serve_build_asgi_app__(self) -> Starlette:
        self._api = self._build_api(self._clients, self._config)
        gc.collect()
        gc.freeze()  # what was imported and built stays: no request waits while a full collection looks at it
        return self._api

    async def end_answers(self) -> None:
        """Take no more requests, and let clients hear how their answers end."""
        await self._end_events()
        await asyncio.gather(*(client.stop(self._config.http.shutdown_grace_s) for client in self._clients))
        await asyncio.sleep(_LAST_EVENTS_S)

    async def _end_events(self) -> None:
        """End streams of events, which Serve would wait for as for any answer."""
        if self._api is not None:
            self._api.state.end_events()


def _client(config: ClusterConfig, engines: DeploymentHandle[Any], wanted: int | None) -> RayEngineClient:
    """Follow a model's replicas, on this event loop; `config` is of this model alone."""
    deployment, loop = engines.deployment_name, asyncio.get_running_loop()
    client = RayEngineClient(
        HandleCalls(engines),
        name=own_replica_id(),
        router=config.router,
        warm_up=_WARM_UP,
        num_wanted=partial(read_wanted, deployment) if wanted is None else lambda: wanted,
        read_condition=partial(read_condition, own_application(), deployment),
        starts_from_zero=config.autoscale is not None and not config.autoscale.min,
        has_session_logs=config.cache.enabled and config.cache.disk is not None,
    )

    def replicas_changed(replica_ids: frozenset[str]) -> None:
        """Called on the router's thread."""
        loop.call_soon_threadsafe(client.set_replicas, replica_ids)

    start_router(engines)
    replica_set.listen(deployment, replicas_changed)
    return client
