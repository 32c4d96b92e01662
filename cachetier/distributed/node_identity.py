"""Which node a cache's actor is of, what of the node it may use, and how it is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mneme.cachetier.config import CacheConfig

NODE_PREFIX = "node-"  # of the names of nodes' actors


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Which node an actor is of, and what of it is the actor's."""

    node_id: str  # Ray's; another after a restart of Ray
    name: str  # in Ray
    namespace: str  # of the application's actors
    host_bytes: int  # of the host tier
    object_bytes: int  # that may ever be in the object store, with what is on its way
    session_ttl_s: float = 3600.0  # of session logs


class Ready(NamedTuple):
    """What a node's actor is, once it can be asked."""

    settings: tuple[CacheConfig, NodeIdentity]  # that it was made with
    problem: str  # why it goes without a disk, if it should have one
    is_refused: bool  # whether a start has to end for that; one that was made again goes on without


def node_actor_name(node_id: str) -> str:
    return NODE_PREFIX + node_id
