"""What `ray.address` is told of, before a Ray cluster is joined."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from ray._private import services

from mneme.cluster.config import ClusterConfig
from mneme.cluster.run import local_cluster
from mneme.cluster.run.local_cluster import LocalCluster, StartFailed
from tests.e2e.server_process import free_port

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own: no process of Ray is seen, and `RAY_ADDRESS` names another cluster."""
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    (tmp_path / "ray").mkdir()
    return tmp_path


def join_failure() -> str:
    with pytest.raises(StartFailed) as raised:
        LocalCluster(ClusterConfig()).join("auto")  # `start` would take this process's signals first
    return str(raised.value)


def test_auto_is_the_cluster_that_this_machine_joined(machine: Path) -> None:
    """It is gone here, which is said at once and not after Ray's minutes."""
    address = f"127.0.0.1:{free_port()}"
    (machine / "ray" / "ray_current_cluster").write_text(address)
    assert re.match(rf"ray.address: no Ray cluster can be joined at {address}: ConnectionRefused", join_failure())


def test_auto_where_something_else_listens(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, for which Ray's own client would try for minutes."""
    monkeypatch.setattr(local_cluster, "_CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (machine / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert "what listens there does not answer as Ray" in join_failure()


def test_auto_where_this_machine_is_part_of_none() -> None:
    assert re.match("ray.address: no Ray cluster can be joined at auto: ConnectionError", join_failure())
