"""Starting and stopping everything that `mneme serve` runs.

    check -> directory, janitor -> ray.init -> serve.run -> /ready is 200 -> wait -> ray.shutdown -> janitor

The Ray instance is this process's own: its ports, its directory, its token. Whatever ends this process, the
janitor ends the rest. With `ray.address` a cluster is joined instead: it keeps its own settings and Serve instance, and
only the application comes and goes with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mneme.cachetier.node.folder import check_usable
from mneme.cluster.config import FLUSH_S, ClusterConfig
from mneme.cluster.run import environment
from mneme.cluster.run.janitor import Janitor
from mneme.cluster.serve.gpus import EnginePlacement, count_gpus, place_models
from mneme.cluster.serve.start_failure import reason_of
from mneme.errors import CheckpointError, MnemeError
from mneme.replicas.card import read_json, sampling_defaults, shard_paths
from mneme.replicas.model.directory import Progress, load_model_config, model_directory, silent
from mneme.replicas.model.formats.gguf_file import GgufFile

logger = logging.getLogger(__name__)

APPLICATION = "mneme"
_CACHE_CLOSE_S = 3.0
# An orderly stop takes 1 to 2 s; on a machine that is busy it is cut off, so that all has stopped within 10 s.
GRACE_S = 8.5
_INGRESS_S = 0.5  # for the call that ends answers
_READY_POLL_S = 0.1
_CONNECT_S, _LOOPBACK = 5.0, "127.0.0.1"
_LEAVE_S = 3.0  # for the word that an application is to go

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Placements = Sequence[EnginePlacement]  # of each model
BuildApplication = Callable[[Placements], object]


class StartFailed(MnemeError):
    """The cluster did not come up; the message is one line."""


def check_files(config: ClusterConfig, on_progress: Progress = silent) -> None:
    """Check the models' files and the cache's folder before anything is started; tensors are for replicas to check.

    Raises `ConfigError` or `CheckpointError`.
    """
    for each in config.each_model():
        directory = model_directory(each.model, on_progress)
        load_model_config(directory)
        sampling_defaults(directory, each.engine.generation_config)
        _check_tokenizer_files(directory)
        _check_weight_files(directory)
    disk = config.cache.disk if config.cache.enabled else None
    if disk is not None and "%n" not in disk.folder:  # else a replica finds it, which knows its node's name
        check_usable(disk.folder)


def _check_tokenizer_files(directory: Path) -> None:
    """The tokenizer is there and is one; `tokenizer_config.json` may be missing, but not be broken."""
    import tokenizers

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{directory}: has no tokenizer.json (slow tokenizers are not supported)")
    try:
        tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises nothing narrower
        raise CheckpointError(f"{file}: is not a tokenizer: {_first_line(error)}") from error
    read_json(directory / "tokenizer_config.json")


def _check_weight_files(directory: Path) -> None:
    """Each file's header: offsets inside the file, no overlap, shapes that fit their bytes."""
    from safetensors import SafetensorError, safe_open

    for file in shard_paths(directory):
        if file.suffix == ".gguf":
            GgufFile(file)
            continue
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file}: {_first_line(error)}") from error


@dataclass(slots=True)
class Foreground:
    """Serves until a signal: the first one asks it to stop; a second one, or one while it starts, ends the process."""

    config: ClusterConfig
    _is_up: bool = False
    _stop_requested: threading.Event = field(default_factory=threading.Event)
    _end_progress: Callable[[], object] = lambda: None

    @property
    def url(self) -> str:
        """Return where the API answers; the wildcard address is reached by the loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.config.host, self.config.host)
        return f"http://{host}:{self.config.port}"

    def wait(self) -> None:
        """Return when a signal asks to stop."""
        self._stop_requested.wait()

    def watch_signals(self) -> None:
        """Let a thread answer SIGINT and SIGTERM: the first one asks, a second one does not, nor one while starting.

        Python runs signal handlers on the main thread between two bytecodes, which is too late when that thread sits
        in Ray's C++. The interpreter's wake-up descriptor is written at once, so who reads it is always in time.
        """
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        _handle_signals()

        def watch() -> None:
            while True:
                for number in os.read(read_end, 64):
                    if number in _SIGNALS:
                        if self._stop_requested.is_set() or not self._is_up:
                            self._stop_now()
                        self._stop_requested.set()

        threading.Thread(target=watch, name="stop-signals", daemon=True).start()

    def _stop_now(self) -> None:
        """End this process, from any thread; of a cluster the janitor ends the rest once it is gone.

        Not before: Ray in this process ends it, with a status of its own, as soon as it misses its raylet.
        """
        try:
            self._end_progress()
            terminal = os.dup(2)
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)  # Ray in this process tells at length how its others die
            self._leave_at_once()
            os.write(terminal, b"mneme serve: stopped\n")
        finally:  # the terminal may be gone
            os._exit(130)

    def _leave_at_once(self) -> None:
        """Tell those outside of this process, which ends now."""

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """End the process if the body, which stops what runs, takes too long."""
        deadline = threading.Timer(self.config.http.shutdown_grace_s + GRACE_S, self._stop_now)
        deadline.daemon = True
        deadline.start()
        yield
        deadline.cancel()


@dataclass(slots=True)
class LocalCluster(Foreground):
    """One cluster on this machine, or one application on a cluster that is joined, from `start` to `stop`."""

    _janitor: Janitor | None = None
    _is_joined: bool = False
    _ingress: Any = None  # a handle

    def start(
        self, application: BuildApplication, on_progress: Progress, end_progress: Callable[[], object] = lambda: None
    ) -> int:
        """Start Ray and the application (built only once Ray's knobs are set); returns how many engines it has.

        `end_progress` is called, on any thread, before a signal ends the process: the terminal is clean then.
        Raises `StartFailed`, `ConfigError` or `CheckpointError`.
        """
        self._end_progress = end_progress
        check_files(self.config, on_progress)
        if self.config.ray.address is None:
            placements = self._begin(on_progress)
        else:
            self.watch_signals()
            on_progress("joining Ray", 0.0)
            placements = self.join(self.config.ray.address)
        _handle_signals()  # again: `ray.init` sets its own handlers
        on_progress("starting replicas", 0.0)
        with _reading_progress(on_progress):
            self._run(lambda: application(placements))
            num_replicas = sum(placement.replicas for placement in placements)
            self._await_ready(num_replicas)
        self._is_up = True
        return num_replicas

    def _begin(self, on_progress: Progress) -> Placements:
        environment.check_port(self.config)
        placements = place_models(self.config, count_gpus())
        directory = environment.make_directory()
        marker = secrets.token_hex(16)
        self._janitor = Janitor(marker, directory)
        self.watch_signals()
        environment.apply(environment.cluster_environment(self.config, marker, directory))
        on_progress("starting Ray", 0.0)
        self._start_ray(directory, placements)
        return placements

    def stop(self) -> None:
        """Stop everything that was started; nothing is left behind."""
        if self._is_joined:
            self._leave()
        if self._janitor is None:
            return
        with self._in_time():
            if self._is_up:
                self._end_answers()
            if self._is_up and self.config.cache.enabled:
                _close_cache_tier()
            _shut_ray_down()
            self._janitor.clean()

    def join(self, address: str) -> Placements:
        import ray
        from ray import serve

        from mneme.cluster.serve.ray_private import address_of_this_machine, check_is_ray, single_node

        os.environ.pop("RAY_ADDRESS", None)
        options: dict[str, Any] = {"namespace": "serve", "log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address == "auto":
                address = address_of_this_machine()
            host, _, port = address.rpartition(":")
            is_local = host == _LOOPBACK  # Ray would look for this machine's other address
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            check_is_ray(address, _CONNECT_S)
            with single_node() if is_local else contextlib.nullcontext():
                ray.init(address=address, **options, **({"_node_ip_address": _LOOPBACK} if is_local else {}))
            if APPLICATION in serve.status().applications:
                raise StartFailed(f"ray.address: an application {APPLICATION!r} runs there already")
        except StartFailed:
            raise
        except Exception as error:
            raise StartFailed(
                f"ray.address: no Ray cluster can be joined at {address}: {_first_line(error)}"
            ) from error
        self._is_joined = True
        return place_models(self.config, int(ray.cluster_resources().get("GPU", 0)), may_grow=True)

    def _leave(self) -> None:
        """Take the application from the cluster; what streams ends with an error, what is on disks stays."""
        from ray import serve

        if self._is_up:
            self._end_answers()
        try:
            serve.delete(APPLICATION)
        except Exception as error:
            logger.warning("the application was not deleted: %s", _first_line(error))
        if self.config.cache.enabled:
            _close_cache_tier()
        _shut_ray_down()

    def _leave_at_once(self) -> None:
        if self._is_joined:
            from ray import serve

            ending = threading.Thread(target=lambda: serve.delete(APPLICATION, _blocking=False), daemon=True)
            ending.start()
            ending.join(_LEAVE_S)

    def _start_ray(self, directory: Path, placements: Placements) -> None:
        import ray

        from mneme.cluster.serve.ray_private import single_node

        try:
            with single_node():
                ray.init(
                    address="local",
                    num_cpus=self._reserved_cpus(placements),  # Ray starts one idle worker per CPU
                    object_store_memory=self.config.ray.store_bytes(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    namespace="serve",
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(directory / "r"),  # Ray opens its directory to everyone; ours around it stays shut
                )
        except Exception as error:
            raise StartFailed(f"Ray did not start: {_first_line(error)}") from error

    def _reserved_cpus(self, placements: Placements) -> int:
        reserved = self.config.ingress.replicas * self.config.ingress.cpus
        for model, placement in zip(self.config.each_model(), placements, strict=True):
            most = placement.replicas if model.autoscale is None else model.autoscale.max
            reserved += most * model.cpus_per_replica
        return max(1, math.ceil(reserved))

    def _run(self, application: Callable[[], object]) -> None:
        from ray import serve

        from mneme.cluster.serve.ray_private import serve_port

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        http = {"host": self.config.host, "port": self.config.port}
        try:
            serve.start(proxy_location="EveryNode" if self._is_joined else "HeadOnly", http_options=http)
            if (port := serve_port()) != self.config.port:
                raise StartFailed(f"port: Serve listens on {port} in this cluster already (got {self.config.port})")
            self._ingress = serve.run(application(), name=APPLICATION, route_prefix="/")
        except StartFailed:
            raise
        except Exception as error:
            raise StartFailed(_reason(error)) from error

    def _end_answers(self) -> None:
        """Streams that have not ended within `http.shutdown_grace_s` end with an error that says why."""
        timeout_s = self.config.http.shutdown_grace_s + FLUSH_S + _INGRESS_S

        async def stop() -> None:
            await self._ingress.broadcast("end_answers").results_async(timeout_s=timeout_s)

        try:
            asyncio.run(stop())
        except Exception as error:  # they are cut off then
            logger.warning("answers were not ended: %s", _first_line(error))

    def _await_ready(self, num_replicas: int) -> None:
        """Wait until every replica is warm."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while _num_ready(f"{self.url}/ready") < num_replicas:
            if time.monotonic() > deadline:
                raise StartFailed(f"start_timeout_s: not ready after {self.config.start_timeout_s:g} s")
            time.sleep(_READY_POLL_S)


def _handle_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)  # the thread that watches has noted it


@contextlib.contextmanager
def _reading_progress(on_progress: Progress) -> Iterator[None]:
    """While the replicas load, read their notes and pass the slowest one on."""
    from mneme.cluster.serve.ray_private import read_progress

    done = threading.Event()

    def read() -> None:
        while not done.wait(0.2):
            notes = read_progress().values()
            if notes:
                slowest = min(notes, key=lambda note: note.fraction)
                on_progress(slowest.stage, slowest.fraction)

    thread = threading.Thread(target=read, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(1.0)


def _close_cache_tier() -> None:
    """Let it write what waits: a restart is warm then."""
    from mneme.cachetier.distributed.lifecycle import shutdown_cache_tier

    try:
        shutdown_cache_tier(APPLICATION, timeout_s=_CACHE_CLOSE_S)
    except Exception:  # a cache may lose what was not written
        logger.exception("the cache tier was not closed")


def _shut_ray_down() -> None:
    import ray

    try:
        ray.shutdown()
    except Exception:  # the janitor ends what is left
        logger.exception("ray.shutdown failed")


def _num_ready(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return int(json.load(response)["replicas"])
    except (urllib.error.URLError, OSError):
        return 0


def _reason(error: Exception) -> str:
    """Say why a replica did not start, in one line."""
    from ray import serve

    from mneme.cluster.serve.ray_private import logs_directory, read_progress

    applications = serve.status().applications.values()
    messages = [deployment.message for each in applications for deployment in each.deployments.values()]
    return reason_of(messages, read_progress(), logs_directory()) or _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
