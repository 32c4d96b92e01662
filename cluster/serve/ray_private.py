"""Everything of Ray that is not public API, in one place; written for ray 2.60.

Public Ray calls stand where they are used. What is here: a replica's own id, the early start of a handle's
router, pinned handle calls over Serve's gRPC transport, and a note board in the GCS for load progress.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ray import serve
from ray._private import services
from ray._private.node import Node
from ray.experimental import internal_kv
from ray.serve._private import replica as serve_replica
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from mneme.cluster.serve.calls import CALLS, StreamItem

_PROGRESS_NAMESPACE = b"mneme-progress"


def own_replica_id() -> str:
    """The id of the Serve replica this process is; the router knows it by the same."""
    return str(serve.get_replica_context().replica_id.unique_id)


def own_application() -> str:
    """The Serve application that this process is part of."""
    return str(serve.get_replica_context().app_name)


def start_router(handle: DeploymentHandle[Any]) -> None:
    """Start the handle's router now: replicas become known before the first call."""
    if not handle.is_initialized:
        handle._init()


class HandleCalls:
    """`ReplicaCalls` over a Serve handle whose router is `MnemeRequestRouter`.

    Calls go by gRPC: a stream then ends at the replica when the process that reads it dies, which a stream of
    Ray objects does not.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        by_grpc = handle.options(_by_reference=False)
        self._events = by_grpc.options(method_name="events", stream=True)
        self._methods = {name: by_grpc.options(method_name=name) for name in CALLS}

    async def events(self, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        """See `ReplicaCalls`; closing the generator cancels the call at the replica."""
        stream = _outside_requests(self._events, replica_id=replica_id, subscriber=subscriber)
        try:
            async for item in stream:
                yield item
        finally:
            stream.cancel()

    async def call(self, replica_id: str, method: str, **arguments: Any) -> Any:
        """See `ReplicaCalls`."""
        return await _outside_requests(self._methods[method], replica_id=replica_id, **arguments)


def _outside_requests(method: DeploymentHandle[Any], **arguments: Any) -> Any:
    """Call a method as if no HTTP request were being served.

    Serve gives all calls made while serving one request the same internal id, and its router keeps pending
    calls by that id: of two calls at once, each pinned elsewhere, one goes astray and the other is never
    answered.
    """
    return contextvars.Context().run(method.remote, **arguments)


@contextlib.contextmanager
def single_node() -> Iterator[None]:
    """Around `ray.init`: an instance that nothing beyond this machine will ever join.

    It keeps 127.0.0.1 as its address, so that all of Ray's own ports are bound to it, and does without the
    processes that serve a cluster's operator (dashboard, autoscaler, log forwarder): a quarter of Ray's memory.
    """
    with contextlib.ExitStack() as patches:
        patches.enter_context(_patched(services, "resolve_ip_for_localhost", lambda host: host))
        for helper in ("start_api_server", "start_monitor", "start_log_monitor"):
            patches.enter_context(_patched(Node, helper, lambda self, **_: None))
        yield


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def keep_to_loopback() -> None:
    """Make the gRPC server that a replica starts next bind 127.0.0.1, if all of Ray does; for its constructor."""
    if get_node_ip_address() != "127.0.0.1":
        return
    add_port = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, address: add_port(
        server, address.replace("[::]", "127.0.0.1")
    )


def report_progress(replica_id: str, stage: str, fraction: float) -> None:
    """Note how far a replica has loaded, where the process that started the cluster can read it."""
    note = json.dumps({"stage": stage, "fraction": fraction}).encode()
    internal_kv._internal_kv_put(replica_id.encode(), note, overwrite=True, namespace=_PROGRESS_NAMESPACE)


def read_progress() -> dict[str, tuple[str, float]]:
    """The latest note of every replica: (stage, fraction done)."""
    notes = {}
    for key in internal_kv._internal_kv_list(b"", namespace=_PROGRESS_NAMESPACE):
        raw = internal_kv._internal_kv_get(key, namespace=_PROGRESS_NAMESPACE)
        if raw is not None:
            note = json.loads(raw)
            notes[key.decode()] = (note["stage"], float(note["fraction"]))
    return notes
