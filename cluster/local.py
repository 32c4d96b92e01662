"""The whole HTTP API over one engine in this process, without Ray: `mneme serve --local` and `LLM.serve`.

Two threads matter: the engine's, which steps it, and one with an event loop, which serves HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn

from mneme.cluster.backends import load_backend
from mneme.cluster.config import ClusterConfig
from mneme.cluster.http.api import build_api
from mneme.cluster.run.environment import bound_socket
from mneme.cluster.run.local_cluster import Foreground, check_files
from mneme.cluster.serve import http_protocol
from mneme.cluster.serve.gpu_health import GpuHealth, own_gpu
from mneme.cluster.serve.local_client import NAME, LocalEngineClient
from mneme.errors import ConfigError, ReplicaUnavailable
from mneme.primitives import Workers
from mneme.replicas.model.directory import Progress

if TYPE_CHECKING:
    from mneme.replicas.engine.loop import EngineLoop

# Keys of what only a cluster has; a default changes nothing, anything else is refused.
_OF_CLUSTERS = (
    *("models", "autoscale", "cpus_per_replica", "gpus_per_replica", "drain_grace_s", "router", "ingress", "ray"),
    "http.max_connections_per_address",
)
_LAST_EVENTS_S = 0.1  # what streams still say is written within that
_HTTP_S = 3  # for connections that are still open then


def check_local(config: ClusterConfig) -> None:
    """Raise `ConfigError` that names what only a cluster can do."""
    given, defaults = config.as_mapping(), ClusterConfig().as_mapping()
    changed = [key for name in _OF_CLUSTERS for key in _changed(name, _at(given, name), _at(defaults, name))]
    if config.replicas not in (None, 1):
        changed.insert(0, "replicas")
    disk = config.cache.disk if config.cache.enabled else None
    if disk is not None and "%n" in disk.folder:
        changed.append("cache.disk.folder: %n")
    if changed:
        raise ConfigError(f"{changed[0]}: needs a cluster; one engine in one process (--local) has none")


def _at(mapping: Mapping[str, Any], name: str) -> Any:
    for key in name.split("."):
        mapping = mapping[key]
    return mapping


def _changed(name: str, given: Any, default: Any) -> list[str]:
    if isinstance(given, dict) and isinstance(default, dict):
        return [f"{name}.{key}" for key in default if given[key] != default[key]]
    return [name] if given != default else []


@dataclass(slots=True)
class LocalServer(Foreground):
    """One engine and its HTTP API, from `start` or `serve` to `stop` or `close`."""

    _engine: EngineLoop | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _ready: Future[None] = field(default_factory=Future)
    _served: Future[None] = field(default_factory=Future)  # HTTP's thread has ended, or failed
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: str | None = None

    def start(self, on_progress: Progress, end_progress: Callable[[], object] = lambda: None) -> int:
        """Load the engine and serve it; returns how many there are: 1. Raises `ConfigError` or `CheckpointError`.

        `end_progress` is called, on any thread, before a signal ends the process.
        """
        self._end_progress = end_progress
        check_local(self.config)
        check_files(self.config, on_progress)
        with bound_socket(self.config) as bound:
            self.watch_signals()
            on_progress("importing", 0.0)
            from mneme.replicas.engine.build import build_engine_loop

            config = self.config
            engine = build_engine_loop(config.model, config.engine, on_progress=on_progress, cache=config.cache)
            self.serve(engine, bound)
        return 1

    def serve(self, engine: EngineLoop, bound: socket.socket) -> None:
        """Step the engine and answer HTTP on threads of theirs; returns when requests are answered."""
        self._engine = engine
        runner = asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory())
        self._loop = runner.get_loop()
        http_protocol.use_everywhere()
        self._served = Workers("http", 1).begin(lambda: self._run(runner, engine, bound.dup()))
        self._served.add_done_callback(lambda _: self._stop_requested.set())
        wait((self._ready, self._served), return_when=FIRST_COMPLETED)
        self._is_up = True
        if self._served.done():
            self._served.result()

    def wait(self) -> None:
        """Return when a signal asks to stop; raises `ReplicaUnavailable` if the engine cannot go on."""
        self._stop_requested.wait()
        if self._failure is not None:
            raise ReplicaUnavailable(self._failure)
        if self._served.done():
            self._served.result()

    def stop(self) -> None:
        """See `close`; a stop that takes too long is cut off, with the process."""
        with self._in_time():
            self.close()

    def close(self) -> None:
        """End answers as `http.shutdown_grace_s` says, write what is saved, end the engine."""
        if self._engine is None or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        wait((self._served,))
        self._engine.stop()

    def _run(self, runner: asyncio.Runner, engine: EngineLoop, bound: socket.socket) -> None:
        with runner:
            runner.run(self._serve(engine, bound))

    async def _serve(self, engine: EngineLoop, bound: socket.socket) -> None:
        client = LocalEngineClient(engine, gpu=_gpu_of(engine), on_failure=self._fail)
        api = build_api([load_backend(client, self.config)], self.config.http, ingress=NAME)
        engine.start()  # it freezes what collections of garbage need not look at, the API too
        await client.open()
        server = uvicorn.Server(
            uvicorn.Config(
                api,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="error",
                timeout_graceful_shutdown=_HTTP_S,
            )
        )
        serving = asyncio.create_task(server.serve([bound]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.001)
        self._ready.set_result(None)
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        api.state.end_events()
        await client.stop(self.config.http.shutdown_grace_s)
        await asyncio.sleep(_LAST_EVENTS_S)
        server.should_exit = True
        await serving

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._stop_requested.set()


def _gpu_of(engine: EngineLoop) -> GpuHealth | None:
    kind, _, index = engine.engine.runner.device.partition(":")
    return own_gpu(int(index or 0)) if kind == "cuda" else None
