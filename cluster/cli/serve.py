"""`mneme serve`: a cluster, or one engine, in the foreground, from the configuration to Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mneme.cachetier.config import CacheConfig
from mneme.cluster.config import ClusterConfig
from mneme.cluster.logs import log_to_stderr
from mneme.cluster.run.environment import bound_socket
from mneme.cluster.run.local_cluster import Foreground, LocalCluster, Placements
from mneme.errors import MnemeError, ReplicaUnavailable
from mneme.replicas.model.directory import Progress

if TYPE_CHECKING:
    from mneme.cluster.local import LocalServer
    from mneme.cluster.serve.ingress import BuildApi
    from mneme.cluster.serve.replica import BuildEngine
    from mneme.replicas.engine.loop import EngineLoop

Start = Callable[[Progress, Callable[[], object]], int]

_THROUGHPUT_S = 10.0
_TIMEOUT_S = 60.0  # of a machine that is busy with the first requests, too


def serve(config: ClusterConfig, *, build_engine: BuildEngine | None = None, build_api: BuildApi | None = None) -> int:
    """Run a cluster until a signal; returns the exit status. Tests pass an engine and an API of their own."""
    cluster = LocalCluster(config)

    def application(placements: Placements) -> object:
        from mneme.cluster.app import build_application  # imports Ray Serve, whose knobs are set by now

        return build_application(config, placements, build_engine=build_engine, build_api=build_api)

    return _run(cluster, lambda *progress: cluster.start(application, *progress))


def serve_local(config: ClusterConfig) -> int:
    """Run one engine in this process, without Ray, until a signal; returns the exit status."""
    from mneme.cluster.local import LocalServer

    log_to_stderr(config.log_format)  # a cluster's lines are in Serve's log
    server = LocalServer(config)
    return _run(server, server.start)


def _run(server: LocalCluster | LocalServer, start: Start) -> int:
    started_at = time.monotonic()
    try:
        num_replicas = _with_progress(start)
        _print_ready(server, num_replicas, time.monotonic() - started_at)
        server.wait()
        print("mneme serve: stopping; once more to stop at once", file=sys.stderr, flush=True)
    except MnemeError as error:
        print(f"mneme serve: {error}", file=sys.stderr)
        return 1 if isinstance(error, ReplicaUnavailable) else 2
    finally:
        server.stop()
    print("mneme serve: stopped", file=sys.stderr, flush=True)
    return 0


def serve_engine(take_engine: Callable[[], EngineLoop], config: ClusterConfig) -> None:
    """Serve an engine that somebody has loaded until Ctrl-C, or a notebook's interrupt, which ends the engine too.

    Raises `ConfigError` if it cannot be served like that; the engine is not taken then.
    """
    from mneme.cluster.local import LocalServer, check_local

    check_local(config)
    started_at = time.monotonic()
    with bound_socket(config) as bound:
        server = LocalServer(config)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                server.serve(take_engine(), bound)
                _print_ready(server, 1, time.monotonic() - started_at)
                server.wait()
        finally:
            server.close()


def _print_ready(server: Foreground, num_replicas: int, seconds: float) -> None:
    names = ",".join(each.model_name for each in server.config.each_model())
    print(f"ready: {server.url} model={names} replicas={num_replicas} seconds={seconds:.1f}", flush=True)
    service = _service(server.url)
    if service is not None:
        print(_summary(server.url, service, server.config.cache), flush=True)
        threading.Thread(target=_report_throughput, args=(server.url, service), daemon=True).start()


def _service(url: str) -> dict[str, Any] | None:
    """Ask `GET /`; None if there is no answer, or another API."""
    import httpx

    try:
        answer = httpx.get(url, timeout=_TIMEOUT_S).json()
    except (httpx.HTTPError, ValueError):
        return None
    return answer if isinstance(answer, dict) and answer.get("service") == "mneme" else None


def _summary(url: str, service: dict[str, Any], cache: CacheConfig) -> str:
    from mneme.cluster.http.api_docs import curl_line

    replicas = "1 replica" if service["replicas"] == 1 else f"{service['replicas']} replicas"
    formats = service["weights"] or [service["dtype"]]
    disk = cache.disk if cache.enabled else None
    kept = "in memory alone: the next start finds none of it"
    if disk is not None:
        kept = f"on {disk.folder}, up to {disk.capacity_bytes / 2**30:.1f} GiB, found by the next start"
    rounded = "" if formats == [service["dtype"]] else f" with weights in {' and '.join(formats)}"
    kept_as = "" if service["kv_dtype"] == service["dtype"] else f" in {service['kv_dtype']}"
    return f"""\
  {service["device"]}, {service["dtype"]}{rounded}, context {service["max_model_len"]:,} tokens, KV of \
{service["kv_capacity_tokens"]:,} tokens{kept_as} on {replicas}
  KV       {kept}
  API      {url}/v1 (OpenAI's), described at {url}/docs
  figures  {url}/metrics, and {url} in a browser
  chat     mneme chat --url {url}
  try      {curl_line(url, service)}"""


def _report_throughput(url: str, before: dict[str, Any]) -> None:
    """A line on stderr for every ten seconds in which there was something to do."""
    at_s = time.monotonic()
    while True:
        time.sleep(_THROUGHPUT_S)
        now, asked_s = _service(url), time.monotonic()
        if now is not None:
            line = throughput_line(before, now, asked_s - at_s)
            if line is not None:
                print(line, file=sys.stderr, flush=True)
            before, at_s = now, asked_s


def throughput_line(before: dict[str, Any], now: dict[str, Any], seconds: float) -> str | None:
    """Return what happened between two answers of `GET /`; None: nothing. A replica's end takes its counts away."""
    counts = ("prompt_tokens", "cached_tokens", "generated_tokens")
    prompt, cached, generated = (max(0, now[name] - before[name]) for name in counts)
    requests = now["requests"]
    if not (prompt or generated or requests["running"] or requests["waiting"]):
        return None
    return (
        f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
        f"running {requests['running']}, waiting {requests['waiting']}, KV usage {now['kv_usage']:.1%}, "
        f"prefix hits {cached / max(1, prompt):.1%}"
    )


def _with_progress(work: Start) -> int:
    """Run `work` behind a progress bar on stderr, or with a line for each stage where that is no terminal.

    It is given what shows a stage, and what ends the bar and gives the terminal its cursor back.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    stages: list[str] = []
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=1.0)

        def show(stage: str, fraction: float) -> None:
            bars.update(task, description=stage, completed=fraction)
            if not console.is_terminal and stage not in (*stages, "ready"):
                stages.append(stage)
                print(f"mneme serve: {stage}", file=sys.stderr, flush=True)

        return work(show, bars.live.stop)
