"""Handles of other nodes' actors, looked up once: nobody waits for that longer than it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any


class PeerActors:
    """Of one event loop. `find` blocks, has no timeout, and raises ValueError where there is none."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find
        self._found: dict[str, Any] = {}
        self._finding: dict[str, asyncio.Task[None]] = {}

    async def of(self, nodes: Collection[str], timeout_s: float) -> dict[str, Any]:
        """By node; None where there is none, or not yet: it is there for who asks later."""
        tasks = [self._begun(node) for node in nodes if node not in self._found]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        return {node: self._found.get(node) for node in nodes}

    def drop(self, node: str) -> None:
        """It is dead: the next who asks finds another."""
        self._found.pop(node, None)

    def _begun(self, node: str) -> asyncio.Task[None]:
        if node not in self._finding:
            self._finding[node] = asyncio.ensure_future(self._look(node))
        return self._finding[node]

    async def _look(self, node: str) -> None:
        try:
            self._found[node] = await asyncio.to_thread(self._find, node)
        except ValueError:  # it went, or is just being made
            return
        finally:
            del self._finding[node]
