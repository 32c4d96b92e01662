"""Starting and ending the cache tier of an application: its actors are detached, so they outlive whoever made them."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mneme.cachetier.chunk.keys import KEY_BYTES, Lineage, LineageKind
from mneme.cachetier.config import WRITE_BUFFER_BYTES, CacheConfig, warn_of_few_chunks
from mneme.cachetier.distributed.actor import NodeActor
from mneme.cachetier.distributed.nodes import NodeIdentity, Nodes, Ready, find_actor, named_actors, node_actor_name
from mneme.cachetier.distributed.ray_store import RayChunkStore
from mneme.cachetier.distributed.session_logs import RaySessionLogs
from mneme.cachetier.names import TENANT_BYTES
from mneme.cachetier.store import ChainQuery
from mneme.errors import ConfigError

logger = logging.getLogger(__name__)

# Shares of a node's object store. Half of it is everyone else's: a store that is full writes to files without a word.
_HOST_SHARE = 2 / 5  # chunks, if `cache.host_bytes` does not say how many
_TOTAL_SHARE = 9 / 20  # chunks, and those on their way in
_PUT_SHARE = 1 / 20  # of one engine's process, on its way to the node's actor
_READY_TIMEOUT_S = 60.0  # a million files are listed in half of it
_CLOSE_TIMEOUT_S = 10.0
_FIRST_LOOKUP_S = 10.0  # the directory may still be starting
_MAX_TRIES, _PAUSE_S = 20, 0.1  # to reach an actor that is of this configuration


def start_cache_tier(
    config: CacheConfig,
    application: str,
    *,
    chunk_bytes: int = 0,
    session_ttl_s: float = 3600.0,
    timeout_s: float = _READY_TIMEOUT_S,
) -> RayChunkStore:
    """The store of this process, an engine's: its node's actor and the directory are made if there are none.

    Waits until the node has listed its files, so that a restart is warm; after `timeout_s` it goes on without.
    `config` is `of_this_node`; `chunk_bytes`: of a full chunk of the model, so that too little room is said;
    `session_ttl_s`: of session logs, which the node's actor keeps too (`start_session_logs`). Raises `ConfigError` if
    the disk cannot be used; one that fails later is gone without.
    """
    identity = own_identity(config, application, session_ttl_s)
    warn_of_few_chunks("cache.host_bytes", identity.host_bytes, chunk_bytes)
    _await_node(config, identity, timeout_s)
    put_bytes = min(WRITE_BUFFER_BYTES, int(_PUT_SHARE / _TOTAL_SHARE * identity.object_bytes))
    store = RayChunkStore(
        _nodes(config, identity), put_bytes=put_bytes, ttl_s=math.inf if config.ttl_s is None else config.ttl_s
    )
    store.locate(_nothing(), _FIRST_LOOKUP_S)  # connections and imports are not the first request's to wait for
    return store


def start_session_logs(config: CacheConfig, application: str, session_ttl_s: float) -> RaySessionLogs | None:
    """The logs that this application's nodes share, as an engine's process sees them; None without a disk."""
    if config.disk is None:
        return None
    identity = own_identity(config, application, session_ttl_s)
    return RaySessionLogs(_nodes(config, identity))


def shutdown_cache_tier(application: str, *, timeout_s: float = 10.0) -> int:
    """End all actors of an application, on all nodes, after what waits to be written; how many there were."""
    namespace = _namespace(application)
    names = named_actors(namespace)
    actors = [(name, actor) for name in names if (actor := find_actor(name, namespace)) is not None]
    nodes = [actor for name, actor in actors if name.startswith(node_actor_name(""))]
    _wait([actor.close.remote(timeout_s) for actor in nodes], timeout_s)
    for _, actor in actors:
        ray.kill(actor, no_restart=True)
    return len(actors)


def of_this_node(config: CacheConfig) -> CacheConfig:
    """Put the name of the node that this process runs on into the folder's."""
    if config.disk is None:
        return config
    folder = config.disk.folder.replace("%n", _own_node()["NodeName"])
    return replace(config, disk=replace(config.disk, folder=folder))


def own_identity(config: CacheConfig, application: str, session_ttl_s: float) -> NodeIdentity:
    """Identify the node that this process runs on."""
    node = _own_node()
    store_bytes = int(node["Resources"].get("object_store_memory", 0))
    host_bytes = int(_HOST_SHARE * store_bytes) if config.host_bytes is None else config.host_bytes
    object_bytes = int(_TOTAL_SHARE * store_bytes)
    if host_bytes > object_bytes:
        logger.warning("cache.host_bytes=%s is cut to %s: under half the object store", host_bytes, object_bytes)
    return NodeIdentity(
        node_id=node["NodeID"],
        name=node["NodeName"],
        namespace=_namespace(application),
        host_bytes=min(host_bytes, object_bytes),
        object_bytes=object_bytes,
        session_ttl_s=session_ttl_s,
    )


def node_actor(config: CacheConfig, identity: NodeIdentity, *, is_first: bool = False) -> Any:
    """The actor of a node, made if there is none; this returns before it is up. `is_first`: see `NodeActor`."""
    options = {
        "name": node_actor_name(identity.node_id),
        "namespace": identity.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(identity.node_id, soft=False),
    }
    actor = ray.remote(NodeActor).options(num_cpus=0, max_restarts=-1, **options)
    return actor.remote(config, identity, is_first=is_first)


def _nodes(config: CacheConfig, identity: NodeIdentity) -> Nodes:
    return Nodes(identity.node_id, identity.namespace, lambda: node_actor(config, identity))


def _await_node(config: CacheConfig, identity: NodeIdentity, timeout_s: float) -> None:
    """Until the node's actor is up and of this configuration.

    An actor outlives the engines that it was made for: one of another configuration is ended, and made again over its
    files. Engines that start at once may end the same one, but none that was made since: it has another handle.
    """
    deadline_s = time.monotonic() + timeout_s
    for _ in range(_MAX_TRIES):
        actor = node_actor(config, identity, is_first=True)
        try:
            ready: Ready = ray.get(actor.ready.remote(), timeout=max(0.0, deadline_s - time.monotonic()))
        except RayActorError:  # another engine has ended it, or it failed
            time.sleep(_PAUSE_S)
            continue
        except RayError:  # a timeout too
            logger.exception("cache tier: the actor of node=%s is not ready", identity.name)
            return
        is_ours = ready.settings == (config, identity)
        if is_ours and not ready.is_refused:
            if ready.problem:
                logger.warning("cache tier: node=%s has no disk tier: %s", identity.name, ready.problem)
            return
        _wait([actor.close.remote(_CLOSE_TIMEOUT_S)], _CLOSE_TIMEOUT_S)
        ray.kill(actor, no_restart=True)
        if is_ours:
            raise ConfigError(ready.problem)
        logger.info("cache tier: the actor of node=%s is made again: another configuration", identity.name)
    logger.error("cache tier: node=%s has no actor of this configuration", identity.name)


def _nothing() -> ChainQuery:
    """A chain that nobody has."""
    lineage = Lineage(LineageKind.PREFIX, os.urandom(KEY_BYTES), bytes(TENANT_BYTES), os.urandom(32))
    return ChainQuery.of(lineage, bytes(32), list(range(64)), 64)


def _own_node() -> dict[str, Any]:
    node_id = ray.get_runtime_context().get_node_id()
    return next(each for each in ray.nodes() if each["NodeID"] == node_id)


def _namespace(application: str) -> str:
    return f"mneme-cache-{application}"


def _wait(answers: Iterable[Any], timeout_s: float) -> None:
    """Wait for each of these to be answered or to fail."""
    deadline_s = time.monotonic() + timeout_s
    for answer in answers:
        try:
            ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic()))
        except RayError:
            logger.warning("cache tier: an actor did not close in time")
