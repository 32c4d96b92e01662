"""Declares what an ingress may ask of one replica, whoever carries the call (Ray Serve, or a fake in tests)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal, NamedTuple, Protocol

from mneme.errors import MnemeError
from mneme.replicas.request import StepMessage


class StreamOpened(NamedTuple):
    """The first item of a token stream: from here on no event of this subscriber is missed."""

    replica_id: str
    epoch: str  # of the engine's life


class StreamDraining(NamedTuple):
    """The replica stops: no more work; what runs ends, or as "abort" goes on elsewhere; then the stream ends."""

    replica_id: str


class StreamStalled(NamedTuple):
    """The engine's step takes longer than it may: no more requests, until a stream opens anew."""

    replica_id: str


# Of messages there are none where an item only says that the replica is alive, as it does every `ALIVE_S` at least.
StreamItem = StreamOpened | StreamDraining | StreamStalled | tuple[StepMessage, ...]
ALIVE_S = 1.0


class WrongReplica(MnemeError):
    """The call was pinned to a replica that is gone, or its subscriber has no stream here (any more)."""


Call = Literal["submit_many", "abort", "stats", "query"]


class ReplicaCalls(Protocol):
    """Calls `ReplicaServer`'s methods on one replica; any of these raises when the replica is gone."""

    def events(self, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        """The token stream: `StreamOpened`, then what the engine's steps did; ends when it is closed."""
        ...

    async def wake(self) -> None:
        """Ask for a replica where there is none; returns, or raises, once one has come: this call is for nobody."""
        ...

    async def call(self, replica_id: str, method: Call, **arguments: Any) -> Any:
        """Ask it."""
        ...
