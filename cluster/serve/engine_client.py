"""The seam between HTTP and engines: what the ingress asks for, whoever answers (Ray replicas, or one engine here)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mneme.replicas.engine.commands import Query
from mneme.replicas.request import GenerationRequest, TokenEvent
from mneme.replicas.sessions.sessions import SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One replica's answer to `stats`, as the ingress merges it."""

    replica_id: str
    model: str
    metrics: dict[str, Any]  # EngineLoop.stats()


class EngineClient(Protocol):
    """Sends requests to engines and brings their tokens back."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[TokenEvent]:
        """Run the choices of one HTTP request on one replica; yields events until each choice has finished.

        Raises `Overloaded`, `InvalidRequest` (refused at admission, with its `request_id`) or `ReplicaUnavailable`
        before the first event.
        Closing the iterator, or cancelling its task, aborts what is still running.
        """
        ...

    async def stats(self) -> list[ReplicaStats]:
        """Ask every replica, at most 1 s old; replicas that do not answer in time are left out."""
        ...

    async def query(self, query: Query, *, replica_id: str | None = None) -> dict[str, Any]:
        """Ask every replica, or one; answers by replica id.

        Raises `ReplicaUnavailable` unless all that are asked answer in time, and what a replica answers with an error.
        """
        ...

    def replica_ids(self) -> list[str]:
        """Every replica that there is, those that can be reached first."""
        ...

    def place_fork(self, key: SessionKey, replica_id: str) -> None:
        """A new session begins on this replica: its first turn belongs there."""
        ...

    def note_prefix(self, token_ids: Sequence[int], replica_id: str, *, salt: str) -> None:
        """This replica holds the KV of a prompt now: requests that begin with it belong there."""
        ...

    def num_ready(self) -> int:
        """Replicas that requests may go to."""
        ...
