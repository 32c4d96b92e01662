"""Nodes that keep a session's log beside the one that writes it, in an order that all agree on, and asking them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util import list_named_actors

from mneme.cachetier.distributed.node_identity import NODE_PREFIX
from mneme.cachetier.sessions.store import LogKey

_logger = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.15  # how long who asks first waits for the list of nodes
_MEMBERS_S = 2.0  # how old the list may be
_BACK_S = 30.0  # how long a node that lives counts though its actor is gone: engines there make another


class LogPeers:
    """Actors of the other nodes of an application, in each session's own order."""

    def __init__(self, node_id: str, namespace: str) -> None:
        self._own, self._namespace = node_id, namespace
        self._actors: dict[str, Any] = {}
        self._dead: set[str] = set()  # nodes of these actors that are so for good
        self._listed_s: dict[str, float] = {}  # when each of them was
        self.counters: Counter[str] = Counter()
        self._next_look_s = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def of(self, key: LogKey) -> list[Any]:
        """The first is where the copy is; the order changes with a node for its own share of sessions only."""
        if time.monotonic() >= self._next_look_s and self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        if self._looking is not None and self._next_look_s == float("-inf"):
            await asyncio.wait({self._looking}, timeout=_FIRST_LOOK_S)
        return [self._actors[node] for node in rendezvous(key.name, self._actors)]

    def look_again(self, *, is_new: bool = False) -> None:
        """Who asks next waits for it if there is somebody new."""
        self._next_look_s = float("-inf") if is_new else min(self._next_look_s, time.monotonic())

    async def ask(self, peer: Any, method: str, *args: Any, timeout_s: float) -> Any:
        """None if it does not answer."""
        try:
            async with asyncio.timeout(timeout_s):  # unlike `wait_for`, lets whoever asks be cancelled at any time
                return await getattr(peer, method).remote(*args)
        except (TimeoutError, RayError) as error:
            self.counters["peer_failed"] += 1
            if isinstance(error, ActorDiedError):  # it is asked, in vain, until there is another
                self._dead |= {node for node, actor in self._actors.items() if actor is peer}
            self.look_again()
            _logger.debug("a peer did not answer %s: %s", method, type(error).__name__)
            return None

    async def _look(self) -> None:
        try:
            self._actors = await asyncio.to_thread(self._live)
            self._dead.clear()
        except Exception:  # whatever Ray raises for this: the nodes of before stay
            _logger.exception("the list of nodes is not to be had")
        finally:
            self._next_look_s, self._looking = time.monotonic() + _MEMBERS_S, None

    def _live(self) -> dict[str, Any]:
        """Blocks: Ray's calls for this have no timeout."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        now_s, actors = time.monotonic(), {}
        for each in list_named_actors(all_namespaces=True):
            node = each["name"].removeprefix(NODE_PREFIX)
            if each["namespace"] == self._namespace and node in alive and node != self._own:
                known = None if node in self._dead else self._actors.get(node)
                try:
                    actors[node] = known or ray.get_actor(each["name"], self._namespace)
                except ValueError:  # it went meanwhile
                    continue
                self._listed_s[node] = now_s
        gone = {node: actor for node, actor in self._actors.items() if node in alive and node not in actors}
        return actors | {node: actor for node, actor in gone.items() if now_s - self._listed_s[node] < _BACK_S}


def rendezvous(name: bytes, nodes: Iterable[str]) -> list[str]:
    """Nodes in the order of a session: highest random weight (Thaler and Ravishankar 1998)."""
    return sorted(nodes, key=lambda node: blake2b(node.encode(), digest_size=8, key=name).digest())
