"""What an engine replica gives its engine; without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from mneme.cachetier import ray_tier
from mneme.cluster import replica
from tests.fakes.fake_engine import FakeEngineLoop


def test_the_caches_folder_is_that_of_the_replicas_node_for_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration of the disk too, which knows nothing of nodes."""
    for name in ("log_to_serve", "keep_to_loopback", "report_progress"):
        monkeypatch.setattr(replica, name, lambda *_: None)
    monkeypatch.setattr(replica, "own_replica_id", lambda: "r")
    monkeypatch.setattr(ray_tier, "_own_node", lambda: {"NodeName": "machine"})
    given: dict[str, Any] = {}

    def load_engine(*args: Any, **options: Any) -> FakeEngineLoop:
        given.update(options)
        return FakeEngineLoop()

    cache = {"disk": {"folder": "/kv/%n", "capacity_bytes": 1}}
    replica.EngineReplica({"model": "m", "cache": cache}, load_engine)
    assert given["cache"].disk.folder == "/kv/machine"
