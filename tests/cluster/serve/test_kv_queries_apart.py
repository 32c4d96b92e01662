"""Questions to a slow cache tier: bounded in number, and no other call of a replica waits behind them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from mneme.cluster.serve import replica
from mneme.cluster.serve.replica import ReplicaServer
from mneme.errors import Overloaded
from mneme.replicas.engine.commands import COMMANDS, KvCommand, Query, get_pin, kv_stats
from mneme.replicas.engine.pins import PinKey


class SlowTier:
    """An engine whose tier answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def query(self, query: Query) -> Any:
        if isinstance(COMMANDS[query.name], KvCommand):
            assert self.may_answer.wait(30)
            return "figures"
        return "pin"


def test_a_slow_tier_holds_up_nobody_else() -> None:
    engine = SlowTier()

    async def scenario() -> None:
        server = ReplicaServer("r", engine)  # type: ignore[arg-type]
        asked = [server.query(replica_id="r", query=kv_stats("")) for _ in range(replica._MAX_KV_QUERIES)]
        waiting = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0)  # they have begun
        assert isinstance(await server.query(replica_id="r", query=kv_stats("")), Overloaded)
        async with asyncio.timeout(10):
            assert await server.query(replica_id="r", query=get_pin(PinKey("t", "p"))) == "pin"
            engine.may_answer.set()
            assert set(await asyncio.gather(*waiting)) == {"figures"}
            assert await server.query(replica_id="r", query=kv_stats("")) == "figures"

    asyncio.run(scenario())
