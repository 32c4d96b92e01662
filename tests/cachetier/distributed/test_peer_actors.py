"""Looking other nodes' actors up: at once, in bounded time, each once."""

from __future__ import annotations

import asyncio
import threading

from mneme.cachetier.distributed.peer_actors import PeerActors

WAIT_S = 30.0


class Names:
    """Finds an actor once `is_open`; of "nobody" there is none."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.asked: list[str] = []

    def find(self, node: str) -> str:
        self.asked.append(node)
        assert self.is_open.wait(WAIT_S)
        if node == "nobody":
            raise ValueError(node)
        return node.upper()


def test_all_are_looked_up_at_once_and_one_is_known_then() -> None:
    names = Names()
    peers = PeerActors(names.find)

    async def run() -> None:
        finding = asyncio.ensure_future(peers.of(("a", "b", "nobody"), WAIT_S))
        while len(names.asked) < 3:  # none of them waits for another
            await asyncio.sleep(0)
        names.is_open.set()
        assert await finding == {"a": "A", "b": "B", "nobody": None}
        assert await peers.of(("b", "a"), WAIT_S) == {"a": "A", "b": "B"}
        assert sorted(names.asked) == ["a", "b", "nobody"]
        peers.drop("a")
        assert await peers.of(("a", "nobody"), WAIT_S) == {"a": "A", "nobody": None}
        assert sorted(names.asked) == ["a", "a", "b", "nobody", "nobody"]

    asyncio.run(run())


def test_what_comes_too_late_is_there_for_the_next_who_asks() -> None:
    names = Names()
    peers = PeerActors(names.find)

    async def run() -> None:
        for _ in range(3):
            assert await peers.of(("a",), 0.0) == {"a": None}
        names.is_open.set()
        assert await peers.of(("a",), WAIT_S) == {"a": "A"}
        assert names.asked == ["a"]

    asyncio.run(run())
