"""What an engine replica gives its engine; without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from mneme.cachetier.distributed import lifecycle as ray_tier
from mneme.cluster.serve import replica
from mneme.cluster.serve.gpus import EnginePlacement
from mneme.replicas.config import EngineConfig
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
    replica.EngineReplica({"model": "m", "cache": cache}, EnginePlacement(2, "cpu", 0.0), load_engine)
    assert given["cache"].disk.folder == "/kv/machine"


@pytest.mark.parametrize(
    ("gpus_per_replica", "machine_gpus", "shares"),
    [(1.0, 8, (1.0, 0.125)), (0.5, 1, (0.5, 0.5)), (0.5, 2, (0.5, 0.25)), (0.0, 0, (1.0, 1.0)), (0.0, 4, (1.0, 1.0))],
)
def test_an_engine_is_told_its_device_and_its_part_of_it(
    monkeypatch: pytest.MonkeyPatch, gpus_per_replica: float, machine_gpus: int, shares: tuple[float, float]
) -> None:
    for name in ("log_to_serve", "keep_to_loopback", "report_progress"):
        monkeypatch.setattr(replica, name, lambda *_: None)
    monkeypatch.setattr(replica, "own_replica_id", lambda: "r")
    monkeypatch.setattr(replica, "count_machine_gpus", lambda: machine_gpus)
    given: dict[str, Any] = {}

    def load_engine(model: str, engine: EngineConfig, **options: Any) -> FakeEngineLoop:
        given.update(options, device=engine.device)
        return FakeEngineLoop()

    device = "cuda" if gpus_per_replica else "cpu"
    placement = EnginePlacement(2, device, gpus_per_replica)
    replica.EngineReplica({"model": "m", "cache": {"enabled": False}}, placement, load_engine)
    assert (given["device"], (given["device_share"], given["machine_share"])) == (device, shares)
