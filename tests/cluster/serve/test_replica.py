"""What an engine replica gives its engine, and how it keeps questions to a slow cache tier apart; without Ray."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mneme.cachetier.distributed import lifecycle as ray_tier
from mneme.cachetier.pin_book import PinName
from mneme.cluster.serve import ray_private, replica
from mneme.cluster.serve.calls import WrongReplica
from mneme.cluster.serve.replica import ReplicaServer
from mneme.errors import Overloaded
from mneme.replicas.config import EngineConfig
from mneme.replicas.queries import GetKvStats, GetPin, Query
from tests.fakes.fake_engine import FakeEngineLoop

pytestmark = pytest.mark.engine


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine is loaded with."""
    monkeypatch.setattr(replica, "log_to_serve", lambda: None)
    for name in ("keep_to_loopback", "report_progress", "at_stop"):
        monkeypatch.setattr(ray_private, name, lambda *_: None)
    monkeypatch.setattr(ray_private, "own_replica_id", lambda: "r")
    return {}


def load(loaded: dict[str, Any], device: str, gpus: float, cache: dict[str, Any]) -> None:
    def build_engine(model: str, engine: EngineConfig, **options: Any) -> FakeEngineLoop:
        loaded.update(options, device=engine.device)
        return FakeEngineLoop()

    replica.EngineReplica({"model": "m", "cache": cache}, device, gpus, build_engine)


def test_the_caches_folder_is_that_of_the_replicas_node_for_whoever_reads_it(
    loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calibration of the disk too, which knows nothing of nodes."""
    monkeypatch.setattr(ray_tier, "_own_node", lambda: {"NodeName": "machine"})
    load(loaded, "cpu", 0.0, {"disk": {"folder": "/kv/%n", "capacity_bytes": 1}})
    assert loaded["cache"].disk.folder == "/kv/machine"


@pytest.mark.parametrize(
    ("gpus_per_replica", "machine_gpus", "shares"),
    [(1.0, 8, (1.0, 0.125)), (0.5, 1, (0.5, 0.5)), (0.5, 2, (0.5, 0.25)), (0.0, 0, (1.0, 1.0)), (0.0, 4, (1.0, 1.0))],
)
def test_an_engine_is_told_its_device_and_its_part_of_it(
    loaded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    gpus_per_replica: float,
    machine_gpus: int,
    shares: tuple[float, float],
) -> None:
    monkeypatch.setattr(replica, "count_machine_gpus", lambda: machine_gpus)
    device = "cuda" if gpus_per_replica else "cpu"
    load(loaded, device, gpus_per_replica, {"enabled": False})
    assert (loaded["device"], (loaded["device_share"], loaded["machine_share"])) == (device, shares)


class SlowTier:
    """An engine whose tier answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def query(self, query: Query[Any]) -> Any:
        if query.lane is not None:
            assert self.may_answer.wait(30)
            return "figures"
        return "pin"


def test_a_slow_tier_holds_up_nobody_else() -> None:
    engine = SlowTier()

    async def scenario() -> None:
        server = ReplicaServer("r", engine)  # type: ignore[arg-type]
        asked = [server.query(replica_id="r", query=GetKvStats("")) for _ in range(replica.LANES["kv"][1])]
        waiting = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0)  # they have begun
        assert isinstance(await server.query(replica_id="r", query=GetKvStats("")), Overloaded)
        async with asyncio.timeout(10):
            assert await server.query(replica_id="r", query=GetPin(PinName(b"t", "p"))) == "pin"
            engine.may_answer.set()
            assert set(await asyncio.gather(*waiting)) == {"figures"}
            assert await server.query(replica_id="r", query=GetKvStats("")) == "figures"

    asyncio.run(scenario())


def test_who_goes_leaves_the_place_of_its_question_taken_while_a_thread_is_at_it() -> None:
    engine = SlowTier()

    async def scenario() -> None:
        server = ReplicaServer("r", engine)  # type: ignore[arg-type]
        threads, most = replica.LANES["kv"]
        waiting = [asyncio.create_task(server.query(replica_id="r", query=GetKvStats(""))) for _ in range(most)]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        others = [asyncio.create_task(server.query(replica_id="r", query=GetKvStats(""))) for _ in range(most)]
        async with asyncio.timeout(10):
            refused = await asyncio.gather(*others[-threads:])
            assert {type(each) for each in refused} == {Overloaded}
            engine.may_answer.set()
            assert set(await asyncio.gather(*others[:-threads])) == {"figures"}

    asyncio.run(scenario())


def test_a_call_for_another_replica_is_answered_so_and_raised_where_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve would log what a replica raises with its traceback; this is normal while replicas come and go."""
    server = replica.EngineReplica.__new__(replica.EngineReplica)
    ReplicaServer.__init__(server, "r", FakeEngineLoop())  # type: ignore[arg-type]

    async def scenario() -> None:
        calls = ray_private.HandleCalls.__new__(ray_private.HandleCalls)
        calls._call = server.call  # type: ignore[assignment]
        assert (await calls.call("r", "stats"))["requests"] == {"running": 0, "waiting": 0}
        assert isinstance(await server.call(method="stats", replica_id="other"), WrongReplica)
        with pytest.raises(WrongReplica):
            await calls.call("other", "abort", request_ids=["a"])
        await calls.wake()
        assert [item async for item in server.events(replica_id="other", subscriber="s")] == []

    monkeypatch.setattr(ray_private, "_outside_requests", lambda called, **arguments: called(**arguments))
    asyncio.run(scenario())
