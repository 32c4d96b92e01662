"""Nodes that keep each other's session logs, in this process: calls between them are those between their actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from mneme.cachetier.distributed import nodes as ray_nodes
from mneme.cachetier.distributed.nodes import Nodes
from mneme.cachetier.distributed.session_logs import LogCall, NodeSessionLogs
from mneme.cachetier.session_log.log import SessionLogs


class Handle:
    """Stands for a node's actor, as another node has it."""

    def __init__(self, node: LogNode) -> None:
        self._node, self._logs = node, node.logs

    @property
    def logs(self) -> Any:
        """See `NodeActor.logs`."""
        return SimpleNamespace(remote=self._call)

    async def _call(self, call: LogCall, *args: Any) -> Any:
        if self._logs is not self._node.logs:
            raise ActorDiedError
        if self._node.hangs:
            await asyncio.Event().wait()
        return await getattr(self._logs, call)(*args)


class LogNode:
    """`open_logs` is called in the place of opening `folder`."""

    def __init__(self, cluster: LogCluster, name: str, folder: Path) -> None:
        self.cluster, self.name, self.folder = cluster, name, folder
        self.hangs = False
        self.open_logs: Callable[[], SessionLogs | None] = lambda: SessionLogs(str(folder))
        self.logs: NodeSessionLogs

    async def start(self) -> None:
        """Its actor, or another in its place."""
        self.logs = NodeSessionLogs(lambda: self.open_logs(), Nodes(self.name, "test"))
        await self.logs.open()
        self.cluster.handles[self.name] = Handle(self)


class LogCluster:
    """Answers in the place of Ray: which nodes live, and their actors by name."""

    def __init__(self, folder: Path, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.handles: dict[str, Handle] = {}  # of actors that are there, by node
        self.nodes = {name: LogNode(self, name, folder / name) for name in names}
        monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": name, "Alive": True} for name in self.nodes])
        monkeypatch.setattr(ray, "get_actor", lambda name, _namespace: self.handles[name.removeprefix("node-")])
        monkeypatch.setattr(ray_nodes, "list_named_actors", lambda **_: self._named())

    async def start(self) -> None:
        for node in self.nodes.values():
            node.folder.mkdir()
            await node.start()
        for node in self.nodes.values():
            await node.logs.node_joined()

    async def add(self, name: str) -> LogNode:
        """A node that joins."""
        node = self.nodes[name] = LogNode(self, name, self.folder / name)
        node.folder.mkdir()
        await node.start()
        for each in self.nodes.values():
            await each.logs.node_joined()
        return node

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.logs.close()

    def _named(self) -> list[dict[str, str]]:
        return [{"name": f"node-{name}", "namespace": "test"} for name in self.handles]


async def eventually(holds: Callable[[], Awaitable[Any] | Any], limit_s: float = 20.0) -> Any:
    async with asyncio.timeout(limit_s):
        while True:
            found = holds()
            if answer := await found if asyncio.iscoroutine(found) else found:
                return answer
            await asyncio.sleep(0.01)
