"""The seam between HTTP and engines: what the ingress asks for, whoever answers (Ray replicas, or one engine here)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, get_args

from mneme.cluster.wire.answers import ExplainedRoute, State
from mneme.errors import ReplicaUnavailable
from mneme.replicas.queries import GetSession, GetTokens, KnownSession, Query, SessionTokens
from mneme.replicas.request import GenerationRequest, SessionKey, TokenEvent

R = TypeVar("R")

STATES: tuple[State, ...] = get_args(State)  # the later ones are worse; idle: none is wanted until somebody asks


STALLED = "the engine's step takes too long"


class Condition(NamedTuple):
    """Whether a model's replicas can be asked, or else why not."""

    state: State
    reason: str = ""


class EngineClient(Protocol):
    """Sends requests to engines and brings their tokens back."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[TokenEvent]:
        """Run the choices of one HTTP request on one replica; yields events until each choice has finished.

        Raises `Overloaded`, `InvalidRequest` (refused at admission, with its `request_id`) or `ReplicaUnavailable`
        before the first event.
        Closing the iterator, or cancelling its task, aborts what is still running.
        """
        ...

    async def stats(self) -> dict[str, dict[str, Any]]:
        """`EngineLoop.stats()` by replica id, at most 1 s old, or what a replica that is late or silent said last.

        "age_s" says how old; 0: it has just answered. One that Serve does not list any more is left out.
        """
        ...

    async def query(self, query: Query[R], *, replica_id: str | None = None) -> dict[str, R]:
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

    def home_of(self, key: SessionKey) -> str | None:
        """Where a session's last turn or fork was sent from here; it may be elsewhere by now. None: not known."""
        ...

    def record_prefix(self, token_ids: Sequence[int], replica_id: str, *, salt: str) -> None:
        """This replica holds the KV of a prompt now: requests that begin with it belong there."""
        ...

    def routes(self, salt: str, http_id: str) -> list[ExplainedRoute]:
        """Say how the replicas of a recent HTTP request were chosen, as far as that was here: `Route.as_json`."""
        ...

    def routing(self) -> Mapping[str, Any]:
        """Count choices of replicas: "decisions" by reason, and sums of their "accuracy"."""
        ...

    def num_ready(self) -> int:
        """Replicas that requests may go to."""
        ...

    async def condition(self) -> Condition:
        """Whether there is a replica that requests may go to, or what becomes of them."""
        ...

    def num_wanted(self) -> int | None:
        """Replicas that there should be; None: not known."""
        ...


async def ask_tier(client: EngineClient, query: Query[R]) -> R:
    """Ask the cache tier through the first replica that can, as all of them share it; None: there is no tier."""
    refusal = ReplicaUnavailable("no replica is ready")
    for replica_id in client.replica_ids():
        try:
            answers = await client.query(query, replica_id=replica_id)
        except ReplicaUnavailable as error:
            refusal = error
        else:
            return answers[replica_id]
    raise refusal


async def look_up_session(client: EngineClient, key: SessionKey) -> tuple[str, KnownSession] | None:
    """Find a session on a replica, or have one take it from its durable log.

    Returns the replica that has it and what that knows of it; None: there is no such session.
    """
    answers = await client.query(GetSession(key))
    found = newest(answers)
    if found is None and answers:
        replica_id = next(iter(answers))
        found = newest(await client.query(GetSession(key, restores=True), replica_id=replica_id))
    return found


async def session_tokens(client: EngineClient, key: SessionKey, *, visible: bool) -> SessionTokens | None:
    """List a session's token ids, as `GetTokens` does; None: there is no such session."""
    found = await look_up_session(client, key)
    if found is None:
        return None
    return (await client.query(GetTokens(key, visible=visible), replica_id=found[0]))[found[0]]


def newest(answers: Mapping[str, KnownSession | None]) -> tuple[str, KnownSession] | None:
    """Choose the newest of all replicas' answers to `GetSession`, with its replica; None: nobody knows it.

    Where there are durable logs, their versions tell; else the session is where it was used last.
    """
    known = [(replica_id, answer) for replica_id, answer in answers.items() if answer is not None]
    return max(known, key=lambda entry: (entry[1]["version"], -entry[1]["idle_s"]), default=None)
