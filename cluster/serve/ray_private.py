"""Everything of Ray that is not public API, in one place; written for ray 2.60.

Public Ray calls stand where they are used. What is here: a replica's own id, the early start of a handle's
router, pinned handle calls over Serve's gRPC transport, and a note board in the GCS for load progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import services
from ray._private.node import Node
from ray.experimental import internal_kv
from ray.serve._private import deployment_scheduler
from ray.serve._private import replica as serve_replica
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from mneme.cluster.serve.calls import Call, StreamItem, WrongReplica
from mneme.cluster.serve.engine_client import Condition
from mneme.cluster.serve.start_failure import StartNote, reason_of

logger = logging.getLogger(__name__)

_PROGRESS_NAMESPACE = b"mneme-progress"
_WANTED_NAMESPACE = b"mneme-wanted"
_NODE_START_S = 180.0
_STOP_ORDERS: dict[str, Callable[[], Sequence[str]]] = {}  # by deployment


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
        self._call = by_grpc.options(method_name="call")

    async def events(self, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        """See `ReplicaCalls`; closing the generator cancels the call at the replica."""
        stream = _outside_requests(self._events, replica_id=replica_id, subscriber=subscriber)
        try:
            async for item in stream:
                yield item
        finally:
            stream.cancel()

    async def wake(self) -> None:
        """See `ReplicaCalls`: Serve's autoscaler sees a call that waits."""
        await _outside_requests(self._call, method="stats", replica_id="")

    async def call(self, replica_id: str, method: Call, **arguments: Any) -> Any:
        """See `ReplicaCalls`."""
        answer = await _outside_requests(self._call, method=method, replica_id=replica_id, **arguments)
        if isinstance(answer, WrongReplica):
            raise answer
        return answer


def _outside_requests(called: DeploymentHandle[Any], /, **arguments: Any) -> Any:
    """Call a method as if no HTTP request were being served.

    Serve gives all calls made while serving one request the same internal id, and its router keeps pending
    calls by that id: of two calls at once, each pinned elsewhere, one goes astray and the other is never
    answered.
    """
    return contextvars.Context().run(called.remote, **arguments)


@contextlib.contextmanager
def single_node() -> Iterator[None]:
    """Around `ray.init`: an instance that nothing beyond this machine will ever join.

    It keeps 127.0.0.1 as its address, so that all of Ray's own ports are bound to it, and does without the
    processes that serve a cluster's operator (dashboard, autoscaler, log forwarder): a quarter of Ray's memory.
    On a busy machine its node may take longer to start than the 30 s that Ray gives it.
    """
    get_node, begun_s = services.get_node, time.monotonic()

    def patient(*args: Any) -> Any:
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # it is not there yet
                if time.monotonic() - begun_s > _NODE_START_S:
                    raise
                time.sleep(0.1)

    with contextlib.ExitStack() as patches:
        patches.enter_context(_patched(services, "get_node", patient))
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


def address_of_this_machine() -> str:
    """Return HOST:PORT of the cluster that this machine is part of, as Ray reads `auto`. Raises `ConnectionError`."""
    return str(services.get_ray_address_from_environment("auto", None))


def check_is_ray(address: str, timeout_s: float) -> None:
    """Raise `ConnectionError` where HOST:PORT is no Ray cluster's: `ray.init` would try for minutes.

    A cluster that refuses who asks is one. With TLS only Ray itself can ask.
    """
    import grpc
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise ConnectionError(f"what listens there does not answer as Ray ({error.code().name})") from error


def serve_port() -> int:
    """Return the port that Serve's proxies listen on: that of whoever started Serve in this cluster."""
    return int(_get_global_client().http_config.port)


def keep_to_loopback() -> None:
    """Make the gRPC server that a replica starts next bind 127.0.0.1, if all of Ray does; for its constructor."""
    if get_node_ip_address() != "127.0.0.1":
        return
    add_port = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, address: add_port(
        server, address.replace("[::]", "127.0.0.1")
    )


def at_stop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin `work`, on the loop of this replica's code, once Serve tells it to stop; for its constructor.

    Serve itself tells the code only when all its calls have ended, and a token stream is one.
    """
    stop = serve_replica.Replica.perform_graceful_shutdown

    async def begin_and_stop(replica: Any) -> None:
        asyncio.run_coroutine_threadsafe(work(), replica._user_callable_wrapper.event_loop)
        await stop(replica)

    serve_replica.Replica.perform_graceful_shutdown = begin_and_stop


def stop_first(deployment: str, order: Callable[[], Sequence[str]]) -> None:
    """Make Serve's controller, which this process is, stop replicas in this order where it has to stop some.

    Those that have not started yet go before them, as ever; whom `order` does not name goes by Serve's own rules.
    """
    if not _STOP_ORDERS:
        scheduler = deployment_scheduler.DeploymentScheduler
        choose = scheduler._get_replicas_to_stop

        def chosen(self: Any, deployment_id: Any, max_num_to_stop: int, **options: Any) -> set[Any]:
            found: set[Any] = choose(self, deployment_id, max_num_to_stop, **options)
            order = _STOP_ORDERS.get(deployment_id.name)
            try:
                return found if order is None else _in_order(found, self._running_replicas[deployment_id], order())
            except Exception:
                logger.exception("replicas to stop are chosen by Serve's own rules")
                return found

        scheduler._get_replicas_to_stop = chosen
    _STOP_ORDERS[deployment] = order


def _in_order(found: set[Any], running: Iterable[Any], order: Sequence[str]) -> set[Any]:
    """Choose as many of those that run as Serve has, by `order`."""
    by_name = {replica.unique_id: replica for replica in running}
    ours = [by_name[name] for name in order if name in by_name]
    others = [replica for replica in found if replica.unique_id in by_name and replica not in ours]
    num_running = sum(replica.unique_id in by_name for replica in found)
    return {replica for replica in found if replica.unique_id not in by_name} | set((ours + others)[:num_running])


def report_progress(replica_id: str, stage: str, fraction: float) -> None:
    """Note how far a replica has loaded, where the process that started the cluster can read it."""
    note = json.dumps(StartNote(stage, fraction, os.getpid())).encode()
    internal_kv._internal_kv_put(replica_id.encode(), note, overwrite=True, namespace=_PROGRESS_NAMESPACE)


def write_wanted(deployment: str, num_replicas: int) -> None:
    """Note how many replicas a deployment should have, for metrics."""
    number = b"%d" % num_replicas
    internal_kv._internal_kv_put(deployment.encode(), number, overwrite=True, namespace=_WANTED_NAMESPACE)


def read_wanted(deployment: str) -> int | None:
    """Return what was noted last; None: nothing."""
    raw = internal_kv._internal_kv_get(deployment.encode(), namespace=_WANTED_NAMESPACE)
    return None if raw is None else int(raw)


def read_progress() -> dict[str, StartNote]:
    """The latest note of every replica."""
    notes: dict[str, StartNote] = {}
    for key in internal_kv._internal_kv_list(b"", namespace=_PROGRESS_NAMESPACE):
        raw = internal_kv._internal_kv_get(key, namespace=_PROGRESS_NAMESPACE)
        if raw is not None:
            notes[key.decode()] = StartNote(*json.loads(raw))
    return notes


def logs_directory() -> Path:
    """Where Ray's processes on this node write their logs."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def read_condition(application: str, deployment: str) -> Condition:
    """Say what becomes of a deployment of which no replica can be asked; from any thread."""
    overview = serve.status().applications[application].deployments[deployment]
    reason = reason_of([overview.message], read_progress(), logs_directory()) or ""
    if overview.status == "DEPLOY_FAILED":
        return Condition("failed", reason)
    if read_wanted(deployment) == 0:
        return Condition("idle")
    is_coming = any(overview.replica_states.get(state) for state in ("STARTING", "UPDATING", "RECOVERING", "RUNNING"))
    return Condition("loading" if is_coming or not overview.replica_states else "failed", reason)
