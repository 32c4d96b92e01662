"""Declares what an ingress may ask of one replica, whoever carries the call (Ray Serve, or a fake in tests)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple, Protocol

from mneme.errors import MnemeError
from mneme.replicas.engine.commands import Query
from mneme.replicas.request import GenerationRequest, StepMessage


class StreamOpened(NamedTuple):
    """The first item of a token stream: from here on no event of this subscriber is missed."""

    replica_id: str
    epoch: str  # of the engine's life


StreamItem = StreamOpened | tuple[StepMessage, ...]


class WrongReplica(MnemeError):
    """The call was pinned to a replica that is gone, or its subscriber has no stream here (any more)."""


class ReplicaCalls(Protocol):
    """Calls pinned to one replica; any of them raises when the replica is gone."""

    def events(self, replica_id: str, subscriber: str) -> AsyncGenerator[StreamItem, None]:
        """The token stream: `StreamOpened`, then what the engine's steps did; ends when it is closed."""
        ...

    async def submit_many(
        self, replica_id: str, subscriber: str, requests: Sequence[GenerationRequest]
    ) -> Sequence[MnemeError | None]:
        """One answer per request: None is accepted."""
        ...

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """Stop these; ids that are unknown are fine."""
        ...

    async def stats(self, replica_id: str) -> dict[str, Any]:
        """`EngineLoop.stats()` and what the replica's process adds."""
        ...

    async def query(self, replica_id: str, query: Query) -> Any:
        """What the engine answers to a question of `replicas/engine/commands.py`, which may be a `MnemeError`."""
        ...
